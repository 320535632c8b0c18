"""One layer's part of a step, on the backend's device, against the references of `ops/` on the CPU."""

import torch
from torch import Tensor

from ray_lora.backends.base import Backend
from ray_lora.backends.cuda import BLOCK_SIZE, CUDABackend
from ray_lora.ops.attention import AttentionTables
from ray_lora.ops.step_tables import StepLimits, StepTables
from tests.kernels.test_attention_ops import make_cache, make_tables, near

LIMITS = StepLimits(
    max_tokens=2048,
    max_sequences=8,
    max_blocks=64,
    max_pages=8,
    max_adapter_pages=0,
    linears=("a", "b", "c"),
    head_dim=16,
)
REFERENCE = Backend()


def placed(backend: CUDABackend, tables: AttentionTables, cos: Tensor, sin: Tensor) -> AttentionTables:
    backend.reserve(LIMITS, torch.float32)
    token_ids = torch.zeros(len(tables.positions), dtype=torch.int64)
    return backend.place(StepTables(token_ids, tables, cos, sin, {}, {})).tables


def check_step(
    backend: CUDABackend,
    chunks: list[tuple[int, int]],
    group: int,
    num_kv_heads: int,
    size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    """Rotate and cache, then attend; slots without a token hold NaN, which no result may.

    Args:
        chunks: new tokens and tokens before, of each sequence.
        group: query heads for each KV head.
    """
    tables = make_tables(chunks, block_size=BLOCK_SIZE)
    caches = make_cache(tables, num_kv_heads, size, dtype, BLOCK_SIZE)
    generator = torch.Generator().manual_seed(3)
    qkv = torch.randn(len(tables.positions), (group + 2) * num_kv_heads * size, generator=generator).to(dtype)
    angles = torch.rand(1024, size // 2, generator=generator)
    norm = torch.rand(size, generator=generator).to(dtype)

    ours = [cache.transpose(1, 2).clone(memory_format=torch.contiguous_format).to(backend.device) for cache in caches]
    rows, cos, sin, weight = (tensor.clone().to(backend.device) for tensor in (qkv, angles.cos(), angles.sin(), norm))
    sent = placed(backend, tables, cos, sin)
    backend.rotary_and_cache_(rows, weight, weight, 1e-5, cos, sin, *ours, sent)
    attended = backend.paged_attention(rows, *ours, sent, size**-0.5, window).cpu()

    REFERENCE.rotary_and_cache_(qkv, norm, norm, 1e-5, angles.cos(), angles.sin(), *caches, tables)
    assert near(rows.cpu(), qkv)
    for written, expected in zip(ours, caches, strict=True):
        assert near(written.transpose(1, 2).cpu().nan_to_num(9), expected.nan_to_num(9))
    keys, values = (cache.float() for cache in caches)
    assert near(attended, REFERENCE.paged_attention(qkv.float(), keys, values, tables, size**-0.5, window))
