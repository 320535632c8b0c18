"""What the Ascend backend's operators compute is what `ops/` says, and their calls fit torch_npu's real schemas."""

import ast
import inspect
from dataclasses import replace
from typing import Any

import npu_references
import pytest
import torch
import torch_npu
from npu_references import NPUOnCPU
from torch import Tensor

from ray_lora.backends import npu
from ray_lora.backends.npu import NPUBackend
from ray_lora.errors import ConfigError
from ray_lora.ops.attention import AttentionTables
from ray_lora.ops.lora import Segments
from ray_lora.ops.step_tables import StepLimits, StepTables
from tests.kernels.test_attention_ops import (
    CHUNKS,
    make_tables,
    test_attention_equals_the_reference_and_reads_no_stale_slot,
    test_heads_of_every_size_and_group,
    test_norms_and_activation_equal_the_reference,
    test_rotary_and_cache_equal_the_reference,
)

__all__ = [
    "test_attention_equals_the_reference_and_reads_no_stale_slot",
    "test_heads_of_every_size_and_group",
    "test_norms_and_activation_equal_the_reference",
    "test_rotary_and_cache_equal_the_reference",
]

LIMITS = StepLimits(
    max_tokens=512,
    max_sequences=16,
    max_blocks=64,
    max_pages=8,
    max_adapter_pages=0,
    linears=("a", "b", "c"),
    head_dim=16,
)
NONE = torch.zeros(0)


def placed(backend: NPUBackend, tables: AttentionTables, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> StepTables:
    backend.reserve(replace(LIMITS, head_dim=2 * cos.shape[1]), dtype)
    token_ids = torch.zeros(len(tables.positions), dtype=torch.int64)
    return backend.place(StepTables(token_ids, tables, cos, sin, {}, {}))


class InReferenceLayout:
    """The backend as the tests of every `ops/` want it: caches as the references have them, operands left alone."""

    def __init__(self) -> None:
        self._backend = NPUOnCPU()
        self.rms_norm, self.silu_and_mul = self._backend.rms_norm, self._backend.silu_and_mul

    def add_rms_norm_(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._backend.add_rms_norm_(residual, x.clone(), weight, eps)

    def rotary_and_cache_(
        self, qkv: Tensor, q_norm: Any, k_norm: Any, eps: float, cos: Tensor, sin: Tensor,
        k_cache: Tensor, v_cache: Tensor, tables: AttentionTables,
    ) -> None:  # fmt: skip
        caches = [cache.transpose(1, 2).contiguous() for cache in (k_cache, v_cache)]
        step = placed(self._backend, tables, cos, sin, qkv.dtype)
        self._backend.rotary_and_cache_(qkv, q_norm, k_norm, eps, cos, sin, *caches, step.tables)
        for given, written in zip((k_cache, v_cache), caches, strict=True):
            given.copy_(written.transpose(1, 2))

    def paged_attention(
        self, qkv: Tensor, k_cache: Tensor, v_cache: Tensor, tables: AttentionTables, scale: float, window: int | None
    ) -> Tensor:
        caches = [cache.transpose(1, 2).contiguous() for cache in (k_cache, v_cache)]
        angles = torch.zeros(512, k_cache.shape[3] // 2)
        step = placed(self._backend, tables, angles, angles, qkv.dtype)
        return self._backend.paged_attention(qkv, *caches, step.tables, scale, window)


@pytest.fixture
def ops() -> InReferenceLayout:
    return InReferenceLayout()


def operators_in_the_source() -> set[str]:
    """Every `torch_npu.npu_...` that the backend names."""
    nodes = ast.walk(ast.parse(inspect.getsource(npu)))
    return {node.attr for node in nodes if isinstance(node, ast.Attribute) and node.attr.startswith("npu_")}


def test_every_operator_that_the_backend_names_has_a_schema_and_a_reference() -> None:
    named = operators_in_the_source()
    assert "npu_fused_infer_attention_score" in named
    registered = {name for name, value in vars(npu_references).items() if name.startswith("npu_") and callable(value)}
    assert named == registered
    for name in named:
        assert torch._C._jit_get_schemas_for_operator(f"npu::{name}"), name


def test_what_the_backend_asks_of_a_device_is_there_to_be_asked() -> None:
    nodes = [node for node in ast.walk(ast.parse(inspect.getsource(npu))) if isinstance(node, ast.Attribute)]
    asked = {node.attr for node in nodes if ast.unparse(node.value) == "torch_npu.npu"}
    graphs = {"NPUGraph", "graph", "graph_pool_handle"}
    streams = {"Event", "Stream", "default_stream", "stream"}
    assert asked == {"config", "get_device_limit", "mem_get_info", "set_device"} | graphs | streams
    assert all(hasattr(torch_npu.npu, name) for name in asked)


class NPUOnMeta(NPUOnCPU):
    """Shapes and types alone, by torch_npu's own meta kernels."""

    def __init__(self) -> None:
        super().__init__("meta")


@pytest.mark.parametrize("dtype", NPUBackend.dtypes, ids=str)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "size"), [(4, 1, 128), (8, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("window", [None, 48])
def test_shapes_and_types_by_torch_npus_own_meta_kernels(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, size: int, with_norm: bool, window: int | None
) -> None:
    backend = NPUOnMeta()
    tables = make_tables(CHUNKS["mixed"])
    num_rows, hidden_size = len(tables.positions), num_heads * size

    def meta(*shape: int, type: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=type, device="meta")

    angles = meta(512, size // 2, type=torch.float32)
    step = placed(backend, tables, angles, angles, dtype)
    assert {getattr(step.tables, name).device.type for name in ("cos", "block_tables", "slot_mapping")} == {"meta"}
    caches = backend.allocate_kv_cache(60, num_kv_heads, 16, size, dtype)
    norm = meta(size) if with_norm else None
    qkv = meta(num_rows, (num_heads + 2 * num_kv_heads) * size)
    backend.rotary_and_cache_(qkv, norm, norm, 1e-5, angles, angles, *caches, step.tables)
    attended = backend.paged_attention(qkv, *caches, step.tables, 0.125, window)
    rows, weight = meta(num_rows, hidden_size), meta(hidden_size)
    produced = {
        "attention": (attended, hidden_size),
        "rms_norm": (backend.rms_norm(rows, weight, 1e-5), hidden_size),
        "add_rms_norm": (backend.add_rms_norm_(meta(num_rows, hidden_size), rows, weight, 1e-5), hidden_size),
        "silu_and_mul": (backend.silu_and_mul(meta(num_rows, 96)), 48),
    }
    for name, (tensor, width) in produced.items():
        assert (tensor.shape, tensor.dtype, tensor.device.type) == ((num_rows, width), dtype, "meta"), name


@pytest.mark.parametrize(
    ("dtype", "shape", "tied", "is_cast"),
    [
        (torch.bfloat16, (48, 32), False, True),
        (torch.float16, (16, 16), False, True),
        (torch.bfloat16, (48, 32), True, False),
        (torch.bfloat16, (50, 32), False, False),
        (torch.float32, (48, 32), False, False),
    ],
)
def test_weights_of_a_half_type_are_stored_in_blocks(
    dtype: torch.dtype, shape: tuple[int, int], tied: bool, is_cast: bool
) -> None:
    npu_references.CALLED.clear()
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    x = torch.randn(3, shape[1]).to(dtype)
    linear = NPUOnCPU().linear(weight, bias, tied)
    assert ("npu_format_cast" in npu_references.CALLED) == is_cast
    assert torch.equal(linear(x), torch.nn.functional.linear(x, weight, bias))


def test_what_attention_does_not_take_is_refused_by_name() -> None:
    backend = NPUOnCPU()
    backend.dtypes = NPUBackend.dtypes
    for heads in ((32, 32, 64), (32, 32, 128), (8, 2, 80), (8, 1, 256), (256, 8, 256)):
        backend.check_model(*heads, 128, torch.bfloat16)
    refused = {
        (8, 2, 128, 24, torch.bfloat16): "block_size 24: an NPU needs a multiple of 16",
        (8, 2, 128, 256, torch.bfloat16): "block_size 256",
        (8, 2, 128, 16, torch.float32): "dtype float32 is not served on an NPU; give bfloat16 or float16",
        (32, 32, 80, 128, torch.float16): "head_dim 80 in config.json",
        (32, 32, 192, 128, torch.float16): "head_dim 192 in config.json",
        (32, 8, 100, 128, torch.float16): "head_dim 100 in config.json",
        (32, 8, 512, 128, torch.float16): "head_dim 512 in config.json",
        (257, 1, 128, 128, torch.float16): "257 heads .* raise tensor_parallel_size",
    }
    for arguments, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            backend.check_model(*arguments)
    with pytest.raises(ConfigError, match="max_num_seqs 4097"):
        backend.reserve(replace(LIMITS, max_sequences=4097), torch.bfloat16)


def test_lora_tables_of_several_linears_do_not_share_places() -> None:
    backend = NPUOnCPU()
    backend.reserve(LIMITS, torch.float32)
    tables = make_tables([(1, 3), (20, 0), (1, 8)])

    def segments(rows: list[int], pages: list[int]) -> Segments:
        values = (rows, [0, len(rows)], pages, [0, len(pages)])
        return Segments(*(torch.tensor(entries, dtype=torch.int32) for entries in values))

    one, other = segments([0, 21], [3]), segments([*range(1, 21)], [5, 1])
    angles = torch.zeros(64, 8)
    token_ids = torch.arange(22)
    step = backend.place(StepTables(token_ids, tables, angles, angles, {"a": one, "b": other, "c": one}, {}))
    plans = [getattr(step.segments[name], "plan") for name in ("a", "b", "c")]  # noqa: B009
    assert [plan.rows.tolist() for plan in plans] == [[0, 21], [], [0, 21]]
    assert [plan.pages.tolist() for plan in plans] == [[3], [5, 1], [3]]
    assert [tile[:2] for tile in plans[1].prefill_tiles.tolist()] == [[1, 21]]
    assert step.token_ids.tolist() == list(range(22))
