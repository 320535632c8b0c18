"""The operators of torch_npu that the backend calls, on CPU tensors: written after their manuals, with what these ask.

Registered for the real schemas, so that `ray_lora/backends/npu.py` runs as it is. A wrong argument fails here: in the
dispatcher, which binds it to the schema, or at an assertion. Defaults are the schemas', for the dispatcher leaves out
an argument that equals its default.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch_npu
from recorded_graphs import Recorder, install, update_recorded
from torch import Tensor

from ray_lora.backends.npu import NPUBackend
from tests.lora_launches import Kernel, LaunchedLora

install()
LIBRARY = torch.library.Library("npu", "IMPL", "CPU")
CALLED: set[str] = set()
"""Names of the operators that have run."""
TRIANGLE = torch.ones(2048, 2048, dtype=torch.int8).triu(1)


class RecordedKernel(Kernel):
    """A capture keeps what it was launched with."""

    def run(self, *passed: Any) -> None:
        if Recorder.current is not None:
            Recorder.current.launch(super().run, *passed)
        super().run(*passed)


class RecordedLora(LaunchedLora):
    decode_kernel, prefill_kernel = RecordedKernel(has_rows=True), RecordedKernel(has_rows=False)


class NPUOnCPU(NPUBackend):
    """The backend with what it asks a device for answered here; everything that computes is unchanged.

    With `is_interpreted` the Triton kernels too, by Triton's interpreter.
    """

    collective = "gloo"
    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def __init__(self, device: str = "cpu", is_interpreted: bool = False) -> None:
        super().__init__(device)
        if not is_interpreted:
            self._lora = RecordedLora("npu", decode_programs=1, prefill_programs=1)

    def open_device(self) -> tuple[int, int]:
        return 5, 3

    def enter_thread(self) -> None:
        pass

    def device_memory(self) -> None:  # type: ignore[override]
        return None

    def copy_event(self) -> None:
        return None

    def streams(self) -> None:
        return None

    def pinned(self, x: Tensor) -> Tensor:
        return x


def reference(function: Any) -> Any:
    """Register a function for the operator of its name."""
    name = function.__name__

    def run(*args: Any, **kwargs: Any) -> Any:
        CALLED.add(name)
        return function(*args, **kwargs)

    LIBRARY.impl(name, run)
    return function


@reference
def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    assert x.is_contiguous()
    rstd = (x.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


@reference
def npu_add_rms_norm_v2(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> Tensor:
    """x2 becomes the sum, and x1 the sum's norm."""
    assert x1.is_contiguous()
    assert x2.is_contiguous()
    assert x1.dtype == x2.dtype == gamma.dtype
    x2.add_(x1)
    normed, rstd = npu_rms_norm(x2, gamma, epsilon)
    x1.copy_(normed)
    return rstd


@reference
def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.float().chunk(2, dim)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


@reference
def npu_rotary_mul(x: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
    """BSND, each half of a head rotated into the other."""
    batch, length, num_heads, size = x.shape
    assert x.dtype == r1.dtype == r2.dtype
    assert r1.shape == r2.shape == (batch, length, 1, size)
    assert num_heads < 1000
    first, second = x.float().chunk(2, -1)
    return (r1.float() * x.float() + r2.float() * torch.cat((-second, first), -1)).to(x.dtype)


@reference
def npu_scatter_pa_kv_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cache_mode: str = "PA_NZ",
) -> None:
    assert cache_mode == "Norm"
    num_blocks, block_size, num_heads, size = key_cache.shape
    assert key.shape == value.shape == (len(slot_mapping), num_heads, size)
    assert key.dtype == value.dtype == key_cache.dtype == value_cache.dtype
    assert all(tensor.is_contiguous() for tensor in (key, value, key_cache, value_cache))
    slots = slot_mapping.long()
    assert int(slots.min()) >= 0
    assert int(slots.max()) < num_blocks * block_size
    assert len(slots.unique()) == len(slots)
    key_cache.view(-1, num_heads, size)[slots] = key
    value_cache.view(-1, num_heads, size)[slots] = value


@reference
def npu_format_cast(x: Tensor, acl_format: int) -> Tensor:
    """Where bytes lie is the device's affair."""
    assert acl_format == 29
    return x


@reference
def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    atten_mask: Tensor,
    actual_seq_lengths: Sequence[int],
    actual_seq_lengths_kv: Sequence[int],
    block_table: Tensor,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2**31 - 1,
    next_tokens: int = 2**31 - 1,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    block_size: int = 0,
) -> tuple[Tensor, Tensor]:
    """Layout TND over paged keys and values [blocks, block_size, heads * size], in modes 3 (causal) and 4 (band)."""
    assert input_layout == "TND"
    num_rows, heads, size = query.shape
    assert heads == num_heads
    assert key.shape == value.shape == (key.shape[0], block_size, num_key_value_heads * size)
    assert key.shape[2] < 1 << 16
    assert all(tensor.is_contiguous() for tensor in (query, key, value, block_table))
    assert query.dtype == key.dtype == value.dtype
    assert block_size % 16 == 0
    assert torch.equal(atten_mask, TRIANGLE)
    assert block_table.dtype == torch.int32
    assert len(block_table) == len(actual_seq_lengths) == len(actual_seq_lengths_kv)
    assert actual_seq_lengths[-1] == num_rows
    out = torch.empty_like(query)
    start = 0
    for stop, length, blocks in zip(actual_seq_lengths, actual_seq_lengths_kv, block_table.tolist(), strict=True):
        assert start < stop
        assert stop - start <= length
        held = torch.tensor(blocks[: -(-length // block_size)])
        assert int(held.min()) >= 0
        assert int(held.max()) < len(key)
        keys, values = (
            cache[held].view(-1, num_key_value_heads, size)[:length].repeat_interleave(heads // num_key_value_heads, 1)
            for cache in (key, value)
        )
        distance = torch.arange(length - (stop - start), length).unsqueeze(1) - torch.arange(length)
        hidden = distance < 0
        if sparse_mode == 4:
            hidden = (distance > pre_tokens) | (distance < -next_tokens)
        else:
            assert sparse_mode == 3
        scores = torch.einsum("qhd,khd->hqk", query[start:stop].float(), keys.float()) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values.float()).to(out.dtype)
        start = stop
    return out, torch.zeros(1)


def _npu_fused_infer_attention_score_get_max_workspace(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    return query.new_empty(1, dtype=torch.uint8)


def _npu_fused_infer_attention_score_infer_output(query: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(1, dtype=torch.float32)


def _npu_fused_infer_attention_score_out(*args: Any, out: list[Tensor], workspace: Tensor, **kwargs: Any) -> Any:
    """What torch_npu captures in place of the operator above."""
    if not update_recorded(torch.ops.npu.npu_fused_infer_attention_score.out, kwargs):
        for place, tensor in zip(out, npu_fused_infer_attention_score(*args, **kwargs), strict=True):
            place.copy_(tensor)
    return tuple(out)


LIBRARY.impl("_npu_fused_infer_attention_score_get_max_workspace", _npu_fused_infer_attention_score_get_max_workspace)
LIBRARY.impl("_npu_fused_infer_attention_score_infer_output", _npu_fused_infer_attention_score_infer_output)
LIBRARY.impl("npu_fused_infer_attention_score.out", _npu_fused_infer_attention_score_out)

assert torch_npu.__version__.startswith("2.13.")
