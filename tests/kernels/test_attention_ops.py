"""Attention, rotary, norms and activation against the references, on tables as the scheduler makes them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from ray_lora.backends.base import Backend
from ray_lora.ops.attention import AttentionTables

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
REFERENCE = Backend()
BLOCK_SIZE = 16


def make_tables(chunks: list[tuple[int, int]], seed: int = 0, block_size: int = BLOCK_SIZE) -> AttentionTables:
    """`(new tokens, tokens before)` of each sequence; blocks are drawn at random, and a few stay unused."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [new + before for new, before in chunks]
    needed = [-(-length // block_size) for length in lengths]
    free = torch.randperm(sum(needed) + 4, generator=generator).tolist()
    tables = torch.zeros(len(chunks), max(needed), dtype=torch.int32)
    starts, positions, slots = [0], list[int](), list[int]()
    for index, (new, before) in enumerate(chunks):
        blocks = [free.pop() for _ in range(needed[index])]
        tables[index, : len(blocks)] = torch.tensor(blocks)
        starts.append(starts[-1] + new)
        for position in range(before, before + new):
            positions.append(position)
            slots.append(blocks[position // block_size] * block_size + position % block_size)
    int32 = [torch.tensor(values, dtype=torch.int32) for values in (starts, lengths, positions, slots)]
    return AttentionTables(int32[0], int32[1], tables, int32[2], int32[3])


def make_cache(
    tables: AttentionTables, heads: int, size: int, dtype: torch.dtype, block_size: int = BLOCK_SIZE
) -> tuple[Tensor, Tensor]:
    """Random where a sequence's tokens lie, NaN everywhere else."""
    num_blocks = int(tables.block_tables.max()) + 5
    caches = []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        cache = torch.full((num_blocks, heads, block_size, size), float("nan"))
        for sequence, length in enumerate(tables.context_lens.tolist()):
            for position in range(length):
                block = int(tables.block_tables[sequence, position // block_size])
                cache[block, :, position % block_size] = torch.randn(heads, size, generator=generator)
        caches.append(cache.to(dtype))
    return caches[0], caches[1]


CHUNKS = {
    "decode": [(1, 0), (1, 15), (1, 16), (1, 100), (1, 333)],
    "prefill": [(70, 0), (3, 0)],
    "mixed": [(1, 40), (33, 64), (1, 7), (17, 0), (130, 20)],
}


def near(produced: Tensor, expected: Tensor) -> bool:
    difference = (produced.double() - expected.double()).abs().max()
    return bool(difference <= TOLERANCE[produced.dtype] * expected.double().abs().max().clamp(min=1))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 1, 5, 48])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_attention_equals_the_reference_and_reads_no_stale_slot(
    ops: Any, chunks: str, window: int | None, dtype: torch.dtype
) -> None:
    tables = make_tables(CHUNKS[chunks])
    k_cache, v_cache = make_cache(tables, 2, 64, dtype)
    qkv = torch.randn(tables.positions.numel(), (6 + 4) * 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    produced = ops.paged_attention(qkv, k_cache, v_cache, tables, 0.125, window)
    assert produced.isfinite().all()
    expected = REFERENCE.paged_attention(qkv.float(), k_cache.float(), v_cache.float(), tables, 0.125, window)
    assert near(produced, expected)


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("size", [16, 32, 64, 80, 96, 128])
def test_heads_of_every_size_and_group(ops: Any, group: int, size: int) -> None:
    tables = make_tables(CHUNKS["mixed"])
    k_cache, v_cache = make_cache(tables, 2, size, torch.float32)
    qkv = torch.randn(tables.positions.numel(), (2 * group + 4) * size, generator=torch.Generator().manual_seed(3))
    produced = ops.paged_attention(qkv, k_cache, v_cache, tables, size**-0.5, None)
    assert near(produced, REFERENCE.paged_attention(qkv, k_cache, v_cache, tables, size**-0.5, None))


def test_a_sequence_alone_is_bit_equal_to_itself_among_others(native: Any) -> None:
    tables = make_tables(CHUNKS["mixed"])
    k_cache, v_cache = make_cache(tables, 2, 64, torch.float32)
    qkv = torch.randn(tables.positions.numel(), 10 * 64, generator=torch.Generator().manual_seed(3))
    together = native.paged_attention(qkv, k_cache, v_cache, tables, 0.125, None)
    starts = tables.query_starts.tolist()
    for index in range(len(CHUNKS["mixed"])):
        rows = slice(starts[index], starts[index + 1])
        single = AttentionTables(
            torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
            tables.context_lens[index : index + 1].contiguous(),
            tables.block_tables[index : index + 1].contiguous(),
            tables.positions[rows].contiguous(),
            tables.slot_mapping[rows].contiguous(),
        )
        assert torch.equal(native.paged_attention(qkv[rows], k_cache, v_cache, single, 0.125, None), together[rows])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("size", [16, 64, 80])
def test_rotary_and_cache_equal_the_reference(ops: Any, size: int, with_norm: bool, dtype: torch.dtype) -> None:
    tables = make_tables(CHUNKS["mixed"])
    generator = torch.Generator().manual_seed(4)
    qkv = torch.randn(tables.positions.numel(), (6 + 4) * size, generator=generator).to(dtype)
    angles = torch.rand(400, size // 2, generator=generator)
    norms = [torch.rand(size, generator=generator).to(dtype) if with_norm else None for _ in range(2)]
    results = []
    for implementation in (ops, REFERENCE):
        k_cache, v_cache = (torch.zeros(60, 2, BLOCK_SIZE, size, dtype=dtype) for _ in range(2))
        rows = qkv.clone()
        implementation.rotary_and_cache_(rows, *norms, 1e-6, angles.cos(), angles.sin(), k_cache, v_cache, tables)
        results.append((rows[:, : 6 * size], k_cache, v_cache))
    for produced, expected in zip(*results, strict=True):
        assert near(produced, expected)
    assert torch.equal(results[0][2], results[1][2])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (16, 576), (7, 33), (300, 96), (2, 8192)])
def test_norms_and_activation_equal_the_reference(ops: Any, rows: int, size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    x, residual = (torch.randn(rows, size, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(size, generator=generator).to(dtype)
    assert near(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x.float(), weight.float(), 1e-5))
    ours, theirs = residual.clone(), residual.clone()
    assert near(ops.add_rms_norm_(ours, x, weight, 1e-5), REFERENCE.add_rms_norm_(theirs, x, weight, 1e-5))
    assert torch.equal(ours, theirs)
    gate_up = 4 * torch.randn(rows, 2 * size, generator=generator).to(dtype)
    assert near(ops.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up.float()))


def test_indices_outside_the_cache_are_refused_before_anything_is_written(native: Any) -> None:
    tables = make_tables(CHUNKS["decode"])
    k_cache, v_cache = make_cache(tables, 2, 64, torch.float32)
    qkv = torch.randn(tables.positions.numel(), 10 * 64)
    for name, value in (("block_tables", 99), ("block_tables", -1), ("context_lens", 9999)):
        bad = getattr(tables, name).clone()
        bad[0] = value
        broken = AttentionTables(**{**{f: getattr(tables, f) for f in tables.__slots__}, name: bad})
        with pytest.raises(ValueError, match="tables"):
            native.paged_attention(qkv, k_cache, v_cache, broken, 0.125, None)
