"""Linear layers on CPUs: the weight packed once, for the panels of `kernels/cpu/linear.h` or for oneDNN."""

import torch
from torch import Tensor

from ray_lora.backends.base import Linear
from ray_lora.backends.cpu_kernels import CPUKernels
from ray_lora.ops.lora import Segments


class PanelLinear(Linear):
    """The project's own product. A row's result does not depend on the rows beside it.

    At 16 rows of float32 it takes about 0.7 of oneDNN's time, for it fetches the weight while it multiplies; and it
    holds no code for each number of rows, and only one copy of a weight that is an embedding as well.
    """

    def __init__(self, kernels: CPUKernels, weight: Tensor, bias: Tensor | None) -> None:
        self._kernels = kernels
        self._panels = pack_panels(weight, kernels.panel_size)
        self._out_features = weight.shape[0]
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self._panels, self._bias, self._out_features)

    def with_lora(
        self, x: Tensor, pool_a: Tensor, pool_b: Tensor, slices: tuple[int, ...], segments: Segments
    ) -> Tensor:
        return self._kernels.linear_lora(x, self._panels, self._bias, pool_a, pool_b, slices, segments)

    def rows(self, ids: Tensor) -> Tensor:
        size = self._panels.shape[2]
        return self._panels[ids // size, :, ids % size]


class OneDNNLinear(Linear):
    """oneDNN's product, which uses a processor's instructions for bfloat16 and float16.

    The packed weight is opaque, so a tied one is held twice.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, tied: bool) -> None:
        super().__init__(weight if tied else weight.new_empty(0), bias)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        spare = row_bucket(num_rows) - num_rows
        if spare:
            x = torch.nn.functional.pad(x, (0, 0, 0, spare))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y[:num_rows] if spare else y


def pack_panels(weight: Tensor, panel_size: int) -> Tensor:
    """[out_features, in_features] as [panels, in_features, panel_size], the last panel filled up with zeros."""
    out_features, in_features = weight.shape
    num_panels = -(-out_features // panel_size)
    panels = weight.new_zeros(num_panels, in_features, panel_size)
    whole = out_features // panel_size
    panels[:whole] = weight[: whole * panel_size].view(whole, panel_size, in_features).transpose(1, 2)
    if whole < num_panels:
        rest = weight[whole * panel_size :]
        panels[whole, :, : rest.shape[0]] = rest.T
    return panels


def row_bucket(num_rows: int) -> int:
    """The number of rows that oneDNN computes: four sizes in each power of two, so at most a quarter is waste.

    It compiles code for every number of rows that it meets and keeps it, about 0.6 MB for each weight's shape.
    """
    step = 1 << max(0, (num_rows - 1).bit_length() - 3)
    return -(-num_rows // step) * step


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has this processor's own instructions for a half type."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
