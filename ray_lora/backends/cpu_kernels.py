"""The native CPU kernels of `kernels/cpu`, called through ctypes with plain pointers, strides and sizes.

A launch must cost little beside its arithmetic, so checks are split by price: types and shapes here, once for tensors
that outlive a step (a layer's adapter pages, its KV cache) and for a step's tables, both found again by identity;
every index in C, before anything is written.
"""

import ctypes
import functools
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ray_lora.ops.attention import AttentionTables
from ray_lora.ops.lora import Segments, check_add_lora

LEVELS = ("portable", "avx2", "avx512")
"""Instruction sets in rising order, as `kernels/cpu/api.cpp` numbers them."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_ERRORS = {
    1: "segments: row_starts and page_starts must rise from 0 to the end of rows and pages",
    2: "segments.rows names a row outside x and y",
    3: "segments.pages names a page outside the pool",
    4: "tables: query_starts must rise from 0 to the number of tokens, and context_lens hold a sequence's queries "
    "within its block table",
    5: "tables.block_tables names a block outside the cache",
    6: "tables.positions names a position outside cos and sin",
    7: "tables.slot_mapping names a slot outside the cache",
}

_pointer, _int, _float, _size = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_int64

_SIGNATURES = {
    "rl_add_lora": [_pointer, _size, _pointer, _size, _size, _int, _pointer, _pointer, _int],
    "rl_paged_attention": [_pointer, _pointer, _size, _size, _pointer, _pointer, _float, _size, _int, _int],
    "rl_rotary_and_cache": [
        *(_pointer, _size, _size, _pointer, _pointer, _float),
        *(_pointer, _pointer, _size, _pointer, _pointer, _int, _int),
    ],
    "rl_rms_norm": [_pointer, _pointer, _size, _pointer, _size, _pointer, _size, _size, _float, _int, _int],
    "rl_silu_and_mul": [_pointer, _pointer, _size, _size, _size, _int, _int],
    "rl_best_level": [],
    "rl_set_level": [_int],
}


class _LoraPool(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("a", "b", "slices")),
        *((name, _size) for name in ("num_slices", "num_pages", "in_features", "out_features", "dtype")),
    )


class _LoraSegments(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("rows", "row_starts", "pages", "page_starts")),
        *((name, _size) for name in ("num_rows", "num_page_entries", "num_segments")),
    )


class _KVCache(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("k", "v")),
        *((name, _size) for name in ("num_blocks", "num_kv_heads", "block_size", "head_dim", "dtype")),
    )


class _AttentionTables(ctypes.Structure):
    _fields_ = (
        *((name, _pointer) for name in ("query_starts", "context_lens", "block_tables", "positions", "slot_mapping")),
        *((name, _size) for name in ("num_sequences", "max_blocks", "num_tokens")),
    )


Struct = TypeVar("Struct", bound=ctypes.Structure)
Table = TypeVar("Table", Segments, AttentionTables)


class _PairStructs(Generic[Struct]):
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


class _TableStructs(Generic[Table, Struct]):
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


class CPUKernels:
    """Native versions of the operators of `ops/`, with their names, arguments and semantics.

    Raises, from every operator and before anything is written:
        ValueError: a type, shape, stride or index that breaks the operator's contract.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _SIGNATURES.items():
            getattr(library, name).argtypes = arguments
        library.rl_rms_norm.restype = library.rl_silu_and_mul.restype = None
        self._library = library
        self._add_lora = library.rl_add_lora
        self._paged_attention = library.rl_paged_attention
        self._rotary_and_cache = library.rl_rotary_and_cache
        self._rms_norm = library.rl_rms_norm
        self._silu_and_mul = library.rl_silu_and_mul
        self._pools: _PairStructs[_LoraPool] = _PairStructs(_describe_pool)
        self._caches: _PairStructs[_KVCache] = _PairStructs(_describe_cache)
        self._segments: _TableStructs[Segments, _LoraSegments] = _TableStructs(_describe_segments)
        self._tables: _TableStructs[AttentionTables, _AttentionTables] = _TableStructs(_describe_tables)

    @property
    def levels(self) -> tuple[str, ...]:
        """Instruction sets that this machine has; the last is the one in use unless `set_level` chose another."""
        return LEVELS[: self._library.rl_best_level() + 1]

    def set_level(self, level: str) -> None:
        """Use another instruction set, in the whole process: for tests and benchmarks."""
        if not self._library.rl_set_level(LEVELS.index(level)):
            raise ValueError(f"this machine has {self.levels}, not {level!r}")

    def add_lora_(
        self, y: Tensor, x: Tensor, pool_a: Tensor, pool_b: Tensor, slices: tuple[int, ...], segments: Segments
    ) -> None:
        pool = self._pools.find(pool_a, pool_b, slices)
        num_tokens, out_features = y.shape
        y_stride, y_step = y.stride()
        x_stride, x_step = x.stride()
        dtype = y.dtype
        if (
            x.dtype is not dtype
            or x.shape != (num_tokens, pool.in_features)
            or out_features != pool.out_features
            or y_step != 1
            or x_step != 1
        ):
            check_add_lora(y, x, pool_a, pool_b, slices, segments)
            raise ValueError(f"rows of x and y must be contiguous: strides are {x.stride()} and {y.stride()}")
        error = self._add_lora(
            y.data_ptr(),
            y_stride,
            x.data_ptr(),
            x_stride,
            num_tokens,
            _dtype_code(dtype),
            ctypes.addressof(pool),
            ctypes.addressof(self._segments.find(segments)),
            torch.get_num_threads(),
        )
        if error:
            raise ValueError(_ERRORS[error])

    def paged_attention(
        self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, tables: AttentionTables, scale: float, window: int | None
    ) -> Tensor:
        cache = self._caches.find(k_cache, v_cache, ())
        described = self._tables.find(tables)
        num_heads, stride = _check_qkv(qkv, cache, described)
        if window is not None and window < 1:
            raise ValueError(f"window must be positive, not {window}")
        out = torch.empty((described.num_tokens, num_heads * cache.head_dim), dtype=qkv.dtype)
        error = self._paged_attention(
            out.data_ptr(),
            qkv.data_ptr(),
            stride,
            num_heads,
            ctypes.addressof(cache),
            ctypes.addressof(described),
            scale,
            window or 0,
            _dtype_code(qkv.dtype),
            torch.get_num_threads(),
        )
        if error:
            raise ValueError(_ERRORS[error])
        return out

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
        cache = self._caches.find(k_cache, v_cache, ())
        described = self._tables.find(tables)
        num_heads, stride = _check_qkv(qkv, cache, described)
        head_dim = cache.head_dim
        for table in (cos, sin):
            if table.dtype is not torch.float32 or table.shape[1:] != (head_dim // 2,) or not table.is_contiguous():
                raise ValueError(f"cos and sin must be float32, contiguous, [positions, {head_dim // 2}]")
        has_norm = q_norm is not None and k_norm is not None
        if q_norm is not None and k_norm is not None:
            _check_weight(q_norm, head_dim, qkv.dtype)
            _check_weight(k_norm, head_dim, qkv.dtype)
        error = self._rotary_and_cache(
            qkv.data_ptr(),
            stride,
            num_heads,
            q_norm.data_ptr() if has_norm and q_norm is not None else None,
            k_norm.data_ptr() if has_norm and k_norm is not None else None,
            eps,
            cos.data_ptr(),
            sin.data_ptr(),
            min(cos.shape[0], sin.shape[0]),
            ctypes.addressof(cache),
            ctypes.addressof(described),
            _dtype_code(qkv.dtype),
            torch.get_num_threads(),
        )
        if error:
            raise ValueError(_ERRORS[error])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        num_rows, size = rows.shape
        stride, step = rows.stride()
        dtype = rows.dtype
        _check_weight(weight, size, dtype)
        if step != 1:
            raise ValueError(f"rows of x must be contiguous: strides are {rows.stride()}")
        out = torch.empty((num_rows, size), dtype=dtype)
        self._rms_norm(
            *(out.data_ptr(), None, 0, rows.data_ptr(), stride, weight.data_ptr(), num_rows, size, eps),
            *(_dtype_code(dtype), torch.get_num_threads()),
        )
        return out if rows is x else out.view(x.shape)

    def add_rms_norm_(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        num_rows, size = x.shape
        residual_stride, residual_step = residual.stride()
        stride, step = x.stride()
        dtype = x.dtype
        _check_weight(weight, size, dtype)
        if residual.shape != x.shape or residual.dtype is not dtype:
            raise ValueError(f"residual {_shape(residual)} does not fit x {_shape(x)}")
        if step != 1 or residual_step != 1:
            raise ValueError(f"rows must be contiguous: strides are {residual.stride()} and {x.stride()}")
        out = torch.empty((num_rows, size), dtype=dtype)
        self._rms_norm(
            *(out.data_ptr(), residual.data_ptr(), residual_stride, x.data_ptr(), stride, weight.data_ptr()),
            *(num_rows, size, eps, _dtype_code(dtype), torch.get_num_threads()),
        )
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        num_rows, width = gate_up.shape
        stride, step = gate_up.stride()
        dtype = gate_up.dtype
        if width % 2 or step != 1:
            raise ValueError(f"gate_up must be [num_tokens, 2 * size] with contiguous rows, not {_shape(gate_up)}")
        out = torch.empty((num_rows, width // 2), dtype=dtype)
        self._silu_and_mul(
            *(out.data_ptr(), gate_up.data_ptr(), stride, num_rows, width // 2),
            *(_dtype_code(dtype), torch.get_num_threads()),
        )
        return out


@functools.cache
def load_cpu_kernels() -> CPUKernels | None:
    """The kernels that were built beside this file; None, and one warning, where they were not."""
    built = sorted(Path(__file__).parent.glob("_cpu_kernels*.so"), key=lambda path: path.stat().st_mtime)
    reason = "they are not built"
    if built:
        try:
            return CPUKernels(_open_library(built[-1]))
        except (OSError, AttributeError) as error:
            reason = f"they cannot be loaded ({error})"
    warnings.warn(
        f"ray_lora's CPU kernels are not in use, {reason}; the slow references serve instead. "
        "Install g++ and run `pip install .` again, or `python setup.py build_ext --inplace` in a checkout.",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _open_library(path: Path) -> ctypes.CDLL:
    """Load the library; its OpenMP symbols are those of the runtime that torch uses."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        # A torch that keeps its OpenMP runtime to itself: make that same runtime's symbols visible, and try again.
        bundled = sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*"))
        ctypes.CDLL(str(bundled[0]) if bundled else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))


def _describe_pool(pool_a: Tensor, pool_b: Tensor, slices: tuple[int, ...]) -> _LoraPool:
    in_features, out_features = pool_a.shape[-1], pool_b.shape[-1]
    x, y = (torch.empty(0, size, dtype=pool_a.dtype) for size in (in_features, out_features))
    nothing = torch.empty(0, dtype=torch.int32)
    check_add_lora(y, x, pool_a, pool_b, slices, Segments(nothing, nothing, nothing, nothing))
    offsets = (ctypes.c_int64 * len(slices))(*slices)
    struct = _LoraPool(
        *(pool_a.data_ptr(), pool_b.data_ptr(), ctypes.addressof(offsets)),
        *(len(slices) - 1, pool_a.shape[0], in_features, out_features, _dtype_code(pool_a.dtype)),
    )
    struct.offsets = offsets  # the struct points into it
    return struct


def _describe_cache(k_cache: Tensor, v_cache: Tensor, _: tuple[int, ...]) -> _KVCache:
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype is not v_cache.dtype:
        raise ValueError(f"k_cache {_shape(k_cache)} and v_cache {_shape(v_cache)} are not two equal caches")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous")
    if k_cache.shape[3] % 2:
        raise ValueError(f"head_dim must be even, not {k_cache.shape[3]}")
    return _KVCache(k_cache.data_ptr(), v_cache.data_ptr(), *k_cache.shape, _dtype_code(k_cache.dtype))


def _describe_segments(segments: Segments) -> _LoraSegments:
    parts = (segments.rows, segments.row_starts, segments.pages, segments.page_starts)
    _check_tables(*parts)
    if not 1 <= segments.row_starts.numel() == segments.page_starts.numel():
        raise ValueError("segments: row_starts and page_starts must have num_segments + 1 entries each")
    sizes = (segments.rows.numel(), segments.pages.numel(), segments.row_starts.numel() - 1)
    return _LoraSegments(*(part.data_ptr() for part in parts), *sizes)


def _describe_tables(tables: AttentionTables) -> _AttentionTables:
    parts = (tables.query_starts, tables.context_lens, tables.block_tables, tables.positions, tables.slot_mapping)
    _check_tables(*parts)
    num_sequences, num_tokens = tables.context_lens.numel(), tables.positions.numel()
    if tables.query_starts.numel() != num_sequences + 1 or tables.slot_mapping.numel() != num_tokens:
        raise ValueError("tables: query_starts needs num_sequences + 1 entries, slot_mapping one for each position")
    if tables.block_tables.dim() != 2 or tables.block_tables.shape[0] != num_sequences:
        raise ValueError(f"tables.block_tables must be [{num_sequences}, n], not {_shape(tables.block_tables)}")
    sizes = (num_sequences, tables.block_tables.shape[1], num_tokens)
    return _AttentionTables(*(part.data_ptr() for part in parts), *sizes)


def _check_tables(*tables: Tensor) -> None:
    for table in tables:
        if table.dtype is not torch.int32 or not table.is_contiguous():
            raise ValueError(f"step tables must be contiguous and int32, not {_shape(table)}")


def _check_qkv(qkv: Tensor, cache: _KVCache, tables: _AttentionTables) -> tuple[int, int]:
    """Query heads and the row stride of a qkv that fits."""
    num_tokens, width = qkv.shape
    stride, step = qkv.stride()
    num_heads = width // cache.head_dim - 2 * cache.num_kv_heads
    if width % cache.head_dim or num_heads < 1 or num_heads % cache.num_kv_heads or step != 1:
        heads = f"(num_heads + 2 * {cache.num_kv_heads}) * {cache.head_dim}"
        raise ValueError(f"qkv {_shape(qkv)} is not [num_tokens, {heads}] with contiguous rows")
    if _DTYPES.get(qkv.dtype) != cache.dtype:
        raise ValueError(f"qkv is {qkv.dtype}, the cache is not")
    if num_tokens != tables.num_tokens:
        raise ValueError(f"qkv has {num_tokens} rows, tables {tables.num_tokens}")
    return num_heads, stride


def _check_weight(weight: Tensor, size: int, dtype: torch.dtype) -> None:
    if weight.dtype is not dtype or weight.shape != (size,) or not weight.is_contiguous():
        raise ValueError(f"a norm's weight must be [{size}] {dtype}, contiguous, not {_shape(weight)}")


def _dtype_code(dtype: torch.dtype) -> int:
    code = _DTYPES.get(dtype)
    if code is None:
        raise ValueError(f"the CPU kernels take {', '.join(map(str, _DTYPES))}, not {dtype}")
    return code


def _shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
