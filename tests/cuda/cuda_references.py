"""The operator of torch that has no CPU kernel, on CPU tensors: written after its documentation, with what it asks.

Registered for the real schema, so that `ray_lora/backends/cuda.py` and `torch.nn.attention.varlen` run as they are.
"""

import torch
from torch import Tensor

from ray_lora.backends.cuda import CUDABackend
from tests.lora_launches import LaunchedLora

LIBRARY = torch.library.Library("aten", "IMPL", "CPU")


class CUDAOnCPU(CUDABackend):
    """The backend with what it asks a device for answered here; everything that computes is unchanged.

    With `is_interpreted` the Triton kernels too, by Triton's interpreter.
    """

    collective = "gloo"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(self, is_interpreted: bool = False) -> None:
        super().__init__("cpu")
        if not is_interpreted:
            self._lora = LaunchedLora("cuda", decode_programs=1, prefill_programs=1)

    def open_device(self) -> tuple[int, int]:
        return 3, 5

    def device_memory(self) -> None:
        return None

    def copy_event(self) -> None:
        return None


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
    seqused_k: Tensor,
    block_table: Tensor,
) -> tuple[Tensor, ...]:
    """`_flash_attention_forward` over blocks [num_blocks, block_size, num_kv_heads, head_dim]; windows of -1 are open.

    Rows are aligned with the end of their sequence's keys.
    """
    heads, kv_heads = query.shape[1], key.shape[2]
    assert key.shape == value.shape == (key.shape[0], key.shape[1], kv_heads, query.shape[2])
    assert key.shape[1] % 256 == 0
    assert query.shape[2] % 8 == 0
    assert heads % kv_heads == 0
    assert query.dtype == key.dtype == value.dtype
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value, block_table))
    tables = (cum_seq_q, cum_seq_k, seqused_k, block_table)
    assert all(table.dtype is torch.int32 and table.is_contiguous() for table in tables)
    assert len(cum_seq_q) - 1 == len(cum_seq_k) - 1 == len(seqused_k) == len(block_table)
    assert torch.equal(cum_seq_k.diff(), seqused_k)
    assert (max_q, max_k) == (int(cum_seq_q.diff().max()), int(seqused_k.max()))
    assert (dropout_p, return_debug_mask) == (0.0, False)
    assert is_causal == ((window_size_left, window_size_right) == (-1, 0))
    out = torch.empty_like(query)
    starts = cum_seq_q.tolist()
    assert starts[-1] == len(query)
    for index, length in enumerate(seqused_k.tolist()):
        start, stop = starts[index], starts[index + 1]
        held = block_table[index, : -(-length // key.shape[1])].long()
        context = (cache[held].flatten(0, 1)[:length] for cache in (key, value))
        keys, values = (part.repeat_interleave(heads // kv_heads, dim=1) for part in context)
        ahead = torch.arange(length) - torch.arange(length - (stop - start), length).unsqueeze(1)
        hidden = torch.zeros_like(ahead, dtype=torch.bool)
        if window_size_left >= 0:
            hidden |= ahead < -window_size_left
        if window_size_right >= 0:
            hidden |= ahead > window_size_right
        scores = torch.einsum("qhd,khd->hqk", query[start:stop].float(), keys.float()) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values.float()).to(out.dtype)
    return out, torch.zeros(heads, len(query)), *(torch.zeros(0) for _ in range(3))


LIBRARY.impl("_flash_attention_forward", flash_attention)


def cuda_on_cpu() -> CUDAOnCPU:
    """For ranks that are processes."""
    return CUDAOnCPU()
