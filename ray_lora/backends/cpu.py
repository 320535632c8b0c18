"""CPUs: oneDNN's packed matmuls, and the native kernels of `kernels/cpu` for everything around them."""

import ctypes

import torch
from torch import Tensor

from ray_lora.backends.base import Backend, Linear
from ray_lora.backends.cpu_kernels import CPUKernels, load_cpu_kernels
from ray_lora.ops.attention import AttentionTables
from ray_lora.ops.lora import Segments


class CPUBackend(Backend):
    """Where the kernels are not built, the references serve; `load_cpu_kernels` has then said so."""

    name = "cpu"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self._kernels: CPUKernels | Backend = load_cpu_kernels() or Backend(device)

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if not _onednn_takes(weight.dtype):
            return super().linear(weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 16)

        def apply(x: Tensor) -> Tensor:
            num_rows = x.shape[0]
            spare = row_bucket(num_rows) - num_rows
            if spare:
                x = torch.nn.functional.pad(x, (0, 0, 0, spare))
            y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
            return y[:num_rows] if spare else y

        return apply

    def release_unused_memory(self) -> None:
        """glibc keeps what packing the weights has freed, unless told otherwise."""
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._kernels.rms_norm(x, weight, eps)

    def add_rms_norm_(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._kernels.add_rms_norm_(residual, x, weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._kernels.silu_and_mul(gate_up)

    def rotary_and_cache_(
        self,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        tables: AttentionTables,
    ) -> None:
        self._kernels.rotary_and_cache_(qkv, q_norm, k_norm, eps, cos, sin, k_cache, v_cache, tables)

    def paged_attention(
        self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, tables: AttentionTables, scale: float, window: int | None
    ) -> Tensor:
        return self._kernels.paged_attention(qkv, k_cache, v_cache, tables, scale, window)

    def add_lora_(
        self, y: Tensor, x: Tensor, pool_a: Tensor, pool_b: Tensor, slices: tuple[int, ...], segments: Segments
    ) -> None:
        self._kernels.add_lora_(y, x, pool_a, pool_b, slices, segments)


def row_bucket(num_rows: int) -> int:
    """The number of rows that is computed: four sizes in each power of two, so at most a quarter is waste.

    oneDNN compiles code for every number of rows that it meets and keeps it, about 0.6 MB for each weight's shape.
    """
    step = 1 << max(0, (num_rows - 1).bit_length() - 3)
    return -(-num_rows // step) * step


def _onednn_takes(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this type on this processor; its half types need instructions that not all have."""
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return bool(torch.backends.mkldnn.is_available())
