"""What the native CPU kernels take besides plain numbers: descriptions of tensors, as C structs that refer to them.

Each mirrors a struct of `kernels/cpu/kernels.h`. Building one checks types, shapes and strides, and is done once for
what many launches share: a layer's adapter pages, its KV cache, a step's tables.
"""

import ctypes
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ray_lora.ops.attention import AttentionTables
from ray_lora.ops.lora import Segments, check_add_lora

_pointer, _size = ctypes.c_void_p, ctypes.c_int64

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class LoraPool(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("a", "b", "slices")),
        *((name, _size) for name in ("num_slices", "num_pages", "in_features", "out_features", "dtype")),
    )


class LoraSegments(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("rows", "row_starts", "pages", "page_starts")),
        *((name, _size) for name in ("num_rows", "num_page_entries", "num_segments")),
    )


class KVCacheStruct(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("k", "v")),
        *((name, _size) for name in ("num_blocks", "num_kv_heads", "block_size", "head_dim", "dtype")),
    )


class TablesStruct(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("query_starts", "context_lens", "block_tables", "positions", "slot_mapping")),
        *((name, _size) for name in ("num_sequences", "max_blocks", "num_tokens")),
    )


Struct = TypeVar("Struct", bound=ctypes.Structure)
Table = TypeVar("Table", Segments, AttentionTables)


class PairStructs(Generic[Struct]):
    """Structs for pairs of tensors that outlive a step, found by identity; one goes when its first tensor does."""

    def __init__(self, build: Callable[[Tensor, Tensor, tuple[int, ...]], Struct]) -> None:
        self._build: Callable[[Tensor, Tensor, tuple[int, ...]], Struct] = build
        self._found: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor], int, int, tuple[int, ...], Struct]] = {}

    def find(self, first: Tensor, second: Tensor, extra: tuple[int, ...]) -> Struct:
        key = id(first)
        entry = self._found.get(key)
        if entry is not None:
            first_ref, second_ref, first_ptr, second_ptr, known, struct = entry
            if (
                first_ref() is first
                and second_ref() is second
                and first_ptr == first.data_ptr()
                and second_ptr == second.data_ptr()
                and known == extra
            ):
                return struct
        struct = self._build(first, second, extra)
        forget = weakref.ref(first, lambda _: self._found.pop(key, None))
        self._found[key] = (forget, weakref.ref(second), first.data_ptr(), second.data_ptr(), extra, struct)
        return struct


class TableStructs(Generic[Table, Struct]):
    """Structs for the tables of the last few steps, found by identity; holding a table keeps its memory alive."""

    def __init__(self, build: Callable[[Table], Struct]) -> None:
        self._build: Callable[[Table], Struct] = build
        self._found: dict[int, tuple[Table, Struct]] = {}

    def find(self, table: Table) -> Struct:
        entry = self._found.get(id(table))
        if entry is not None:
            return entry[1]
        struct = self._build(table)
        if len(self._found) >= 8:
            self._found.clear()
        self._found[id(table)] = (table, struct)
        return struct


def describe_pool(pool_a: Tensor, pool_b: Tensor, slices: tuple[int, ...]) -> LoraPool:
    in_features, out_features = pool_a.shape[-1], pool_b.shape[-1]
    x, y = (torch.empty(0, size, dtype=pool_a.dtype) for size in (in_features, out_features))
    nothing = torch.empty(0, dtype=torch.int32)
    check_add_lora(y, x, pool_a, pool_b, slices, Segments(nothing, nothing, nothing, nothing))
    offsets = (ctypes.c_int64 * len(slices))(*slices)
    struct = LoraPool(
        *(pool_a.data_ptr(), pool_b.data_ptr(), ctypes.addressof(offsets)),
        *(len(slices) - 1, pool_a.shape[0], in_features, out_features, dtype_code(pool_a.dtype)),
    )
    struct.offsets = offsets  # the struct points into it
    return struct


def describe_cache(k_cache: Tensor, v_cache: Tensor, _: tuple[int, ...]) -> KVCacheStruct:
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype is not v_cache.dtype:
        raise ValueError(f"k_cache {shape_text(k_cache)} and v_cache {shape_text(v_cache)} are not two equal caches")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous")
    if k_cache.shape[3] % 2:
        raise ValueError(f"head_dim must be even, not {k_cache.shape[3]}")
    return KVCacheStruct(k_cache.data_ptr(), v_cache.data_ptr(), *k_cache.shape, dtype_code(k_cache.dtype))


def describe_segments(segments: Segments) -> LoraSegments:
    parts = (segments.rows, segments.row_starts, segments.pages, segments.page_starts)
    _check_tables(*parts)
    if not 1 <= segments.row_starts.numel() == segments.page_starts.numel():
        raise ValueError("segments: row_starts and page_starts must have num_segments + 1 entries each")
    sizes = (segments.rows.numel(), segments.pages.numel(), segments.row_starts.numel() - 1)
    return LoraSegments(*(part.data_ptr() for part in parts), *sizes)


def describe_tables(tables: AttentionTables) -> TablesStruct:
    parts = (tables.query_starts, tables.context_lens, tables.block_tables, tables.positions, tables.slot_mapping)
    _check_tables(*parts)
    num_sequences, num_tokens = tables.context_lens.numel(), tables.positions.numel()
    if tables.query_starts.numel() != num_sequences + 1 or tables.slot_mapping.numel() != num_tokens:
        raise ValueError("tables: query_starts needs num_sequences + 1 entries, slot_mapping one for each position")
    if tables.block_tables.dim() != 2 or tables.block_tables.shape[0] != num_sequences:
        raise ValueError(f"tables.block_tables must be [{num_sequences}, n], not {shape_text(tables.block_tables)}")
    sizes = (num_sequences, tables.block_tables.shape[1], num_tokens)
    return TablesStruct(*(part.data_ptr() for part in parts), *sizes)


def _check_tables(*tables: Tensor) -> None:
    for table in tables:
        if table.dtype is not torch.int32 or not table.is_contiguous():
            raise ValueError(f"step tables must be contiguous and int32, not {shape_text(table)}")


def dtype_code(dtype: torch.dtype) -> int:
    code = DTYPES.get(dtype)
    if code is None:
        raise ValueError(f"the CPU kernels take {', '.join(map(str, DTYPES))}, not {dtype}")
    return code


def shape_text(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
