"""The native CPU kernels of `kernels/cpu`, called through ctypes with plain pointers, strides and sizes.

A launch must cost little beside its arithmetic, so checks are split by price: types and shapes here, once for tensors
that outlive a step (a layer's adapter pages, its KV cache) and for a step's tables, both found again by identity;
every index in C, before anything is written.
"""

import ctypes

import torch
from torch import Tensor

from ray_lora.backends.cpu_interface import ERRORS, LEVELS, declare
from ray_lora.backends.cpu_structs import (
    DTYPES,
    KVCacheStruct,
    LoraPool,
    LoraSegments,
    PairStructs,
    TablesStruct,
    TableStructs,
    describe_cache,
    describe_pool,
    describe_segments,
    describe_tables,
    dtype_code,
    shape_text,
)
from ray_lora.ops.attention import AttentionTables
from ray_lora.ops.lora import Segments, check_add_lora


class CPUKernels:
    """Native versions of the operators of `ops/`, with their names, arguments and semantics.

    Raises, from every operator and before anything is written:
        ValueError: a type, shape, stride or index that breaks the operator's contract.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        declare(library)
        self._library = library
        self.panel_size: int = library.rl_panel_size()
        """Outputs side by side in a panel of `linear`'s weight."""
        self._all_reduce = library.rl_all_reduce
        self._add_lora = library.rl_add_lora
        self._paged_attention = library.rl_paged_attention
        self._rotary_and_cache = library.rl_rotary_and_cache
        self._linear = library.rl_linear
        self._linear_lora = library.rl_linear_lora
        self._rms_norm = library.rl_rms_norm
        self._silu_and_mul = library.rl_silu_and_mul
        self._pools: PairStructs[LoraPool] = PairStructs(describe_pool)
        self._caches: PairStructs[KVCacheStruct] = PairStructs(describe_cache)
        self._segments: TableStructs[Segments, LoraSegments] = TableStructs(describe_segments)
        self._tables: TableStructs[AttentionTables, TablesStruct] = TableStructs(describe_tables)

    @property
    def levels(self) -> tuple[str, ...]:
        """Instruction sets that this machine has; the last is the one in use unless `set_level` chose another."""
        return LEVELS[: self._library.rl_best_level() + 1]

    def all_reduce_bytes(self, size: int, slot: int) -> int:
        """Shared memory, zero at first, for `size` ranks and exchanges of `slot` floats."""
        return int(self._library.rl_all_reduce_bytes(size, slot))

    def all_reduce(
        self, region: int, x: int, count: int, rank: int, size: int, slot: int, round_: int, timeout_s: float
    ) -> None:
        """Sum over the ranks of one host; see `kernels/cpu/all_reduce.cpp`. Addresses are plain numbers.

        Raises:
            RuntimeError: a rank did not come in time.
        """
        if self._all_reduce(region, x, count, rank, size, slot, round_, timeout_s):
            raise RuntimeError(f"all-reduce: a rank did not come within {timeout_s} s")

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
            dtype_code(dtype),
            ctypes.addressof(pool),
            ctypes.addressof(self._segments.find(segments)),
            torch.get_num_threads(),
        )
        if error:
            raise ValueError(ERRORS[error])

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
            dtype_code(qkv.dtype),
            torch.get_num_threads(),
        )
        if error:
            raise ValueError(ERRORS[error])
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
            dtype_code(qkv.dtype),
            torch.get_num_threads(),
        )
        if error:
            raise ValueError(ERRORS[error])

    def linear(self, x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        """x [num_rows, in_features] @ weight.T + bias; panels [ceil(out_features / n), in_features, n], contiguous."""
        out, arguments = self._linear_arguments(x, panels, bias, out_features)
        self._linear(*arguments, torch.get_num_threads())
        return out

    def linear_lora(
        self,
        x: Tensor,
        panels: Tensor,
        bias: Tensor | None,
        pool_a: Tensor,
        pool_b: Tensor,
        slices: tuple[int, ...],
        segments: Segments,
    ) -> Tensor:
        """`linear`, then `add_lora_` to its result: the same to the bit, and faster where rows are few."""
        pool = self._pools.find(pool_a, pool_b, slices)
        if x.shape[1] != pool.in_features:
            raise ValueError(f"pool_a {shape_text(pool_a)} does not fit x {shape_text(x)}")
        out, arguments = self._linear_arguments(x, panels, bias, pool.out_features)
        tables = ctypes.addressof(self._segments.find(segments))
        error = self._linear_lora(*arguments, ctypes.addressof(pool), tables, torch.get_num_threads())
        if error:
            raise ValueError(ERRORS[error])
        return out

    def _linear_arguments(
        self, x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int
    ) -> tuple[Tensor, tuple[int | None, ...]]:
        """Memory for the result, and what the C functions take before the number of threads."""
        num_rows, in_features = x.shape
        stride, step = x.stride()
        dtype = x.dtype
        if panels.shape != (-(-out_features // self.panel_size), in_features, self.panel_size):
            raise ValueError(f"panels {shape_text(panels)} do not fit x {shape_text(x)} and {out_features} outputs")
        if panels.dtype is not dtype or not panels.is_contiguous():
            raise ValueError(f"panels must be contiguous and of x's type, not {shape_text(panels)}")
        if bias is not None and (bias.shape != (out_features,) or bias.dtype is not dtype or bias.stride() != (1,)):
            raise ValueError(f"a bias must be [{out_features}] {dtype}, contiguous, not {shape_text(bias)}")
        if step != 1 and in_features != 1:
            raise ValueError(f"rows of x must be contiguous: strides are {x.stride()}")
        out = torch.empty((num_rows, out_features), dtype=dtype)
        return out, (
            *(out.data_ptr(), x.data_ptr(), stride, num_rows, panels.data_ptr()),
            *(None if bias is None else bias.data_ptr(), in_features, out_features, dtype_code(dtype)),
        )

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
            *(dtype_code(dtype), torch.get_num_threads()),
        )
        return out if rows is x else out.view(x.shape)

    def add_rms_norm_(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        num_rows, size = x.shape
        residual_stride, residual_step = residual.stride()
        stride, step = x.stride()
        dtype = x.dtype
        _check_weight(weight, size, dtype)
        if residual.shape != x.shape or residual.dtype is not dtype:
            raise ValueError(f"residual {shape_text(residual)} does not fit x {shape_text(x)}")
        if step != 1 or residual_step != 1:
            raise ValueError(f"rows must be contiguous: strides are {residual.stride()} and {x.stride()}")
        out = torch.empty((num_rows, size), dtype=dtype)
        self._rms_norm(
            *(out.data_ptr(), residual.data_ptr(), residual_stride, x.data_ptr(), stride, weight.data_ptr()),
            *(num_rows, size, eps, dtype_code(dtype), torch.get_num_threads()),
        )
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        num_rows, width = gate_up.shape
        stride, step = gate_up.stride()
        dtype = gate_up.dtype
        if width % 2 or step != 1:
            raise ValueError(f"gate_up must be [num_tokens, 2 * size] with contiguous rows, not {shape_text(gate_up)}")
        out = torch.empty((num_rows, width // 2), dtype=dtype)
        self._silu_and_mul(
            *(out.data_ptr(), gate_up.data_ptr(), stride, num_rows, width // 2),
            *(dtype_code(dtype), torch.get_num_threads()),
        )
        return out


def _check_qkv(qkv: Tensor, cache: KVCacheStruct, tables: TablesStruct) -> tuple[int, int]:
    """Query heads and the row stride of a qkv that fits."""
    num_tokens, width = qkv.shape
    stride, step = qkv.stride()
    num_heads = width // cache.head_dim - 2 * cache.num_kv_heads
    if width % cache.head_dim or num_heads < 1 or num_heads % cache.num_kv_heads or step != 1:
        heads = f"(num_heads + 2 * {cache.num_kv_heads}) * {cache.head_dim}"
        raise ValueError(f"qkv {shape_text(qkv)} is not [num_tokens, {heads}] with contiguous rows")
    if DTYPES.get(qkv.dtype) != cache.dtype:
        raise ValueError(f"qkv is {qkv.dtype}, the cache is not")
    if num_tokens != tables.num_tokens:
        raise ValueError(f"qkv has {num_tokens} rows, tables {tables.num_tokens}")
    return num_heads, stride


def _check_weight(weight: Tensor, size: int, dtype: torch.dtype) -> None:
    if weight.dtype is not dtype or weight.shape != (size,) or not weight.is_contiguous():
        raise ValueError(f"a norm's weight must be [{size}] {dtype}, contiguous, not {shape_text(weight)}")
