"""CPUs: the native kernels of `kernels/cpu`, and oneDNN where the processor multiplies a half type by itself."""

import ctypes
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ray_lora.backends.base import Backend, Linear
from ray_lora.backends.cpu_library import load_cpu_kernels
from ray_lora.backends.cpu_linear import OneDNNLinear, PanelLinear, onednn_multiplies
from ray_lora.backends.shared_reduce import join_shared_reduce
from ray_lora.ops.lora import Segments


class CPUBackend(Backend):
    """Where the kernels are not built, the references serve; `load_cpu_kernels` has then said so."""

    name = "cpu"
    _NATIVE = ("rms_norm", "add_rms_norm_", "silu_and_mul", "rotary_and_cache_", "paged_attention", "add_lora_")

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self._kernels = load_cpu_kernels()
        if self._kernels is not None:
            for operator in self._NATIVE:
                setattr(self, operator, getattr(self._kernels, operator))

    def join_reduce(
        self, group: dist.ProcessGroup, rank: int, size: int, timeout_s: float
    ) -> Callable[[Tensor], None] | None:
        return join_shared_reduce(group, rank, size, timeout_s)

    def linear(self, weight: Tensor, bias: Tensor | None, tied: bool = False) -> Linear:
        if weight.dtype is not torch.float32 and onednn_multiplies(weight.dtype):
            return OneDNNLinear(weight, bias, tied)
        if self._kernels is not None:
            return PanelLinear(self._kernels, weight, bias)
        return super().linear(weight, bias, tied)

    def linear_lora(
        self,
        linear: Linear,
        x: Tensor,
        pool_a: Tensor,
        pool_b: Tensor,
        slices: tuple[int, ...],
        segments: Segments,
    ) -> Tensor:
        if isinstance(linear, PanelLinear):
            return linear.with_lora(x, pool_a, pool_b, slices, segments)
        return super().linear_lora(linear, x, pool_a, pool_b, slices, segments)

    def release_unused_memory(self) -> None:
        """glibc keeps what packing the weights has freed, unless told otherwise."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
