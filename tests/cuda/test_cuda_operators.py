"""What the CUDA backend's operators compute is what `ops/` says."""

from typing import Any

import pytest
import torch
from cuda_references import CUDAOnCPU
from hypothesis import given
from hypothesis import strategies as st
from step_check import LIMITS, check_step, placed
from torch import Tensor

from ray_lora.backends.cuda import CUDABackend
from ray_lora.errors import ConfigError
from ray_lora.ops.attention import AttentionTables
from ray_lora.ops.lora import Segments
from ray_lora.ops.step_tables import StepTables
from tests.kernels.test_attention_ops import (
    TOLERANCE,
    test_norms_and_activation_equal_the_reference,
    test_rotary_and_cache_equal_the_reference,
)

__all__ = ["test_norms_and_activation_equal_the_reference", "test_rotary_and_cache_equal_the_reference"]


class InReferenceLayout(CUDAOnCPU):
    """The backend as the tests of every `ops/` want it: caches as the references have them."""

    def rotary_and_cache_(
        self, qkv: Tensor, q_norm: Any, k_norm: Any, eps: float, cos: Tensor, sin: Tensor,
        k_cache: Tensor, v_cache: Tensor, tables: AttentionTables,
    ) -> None:  # fmt: skip
        caches = [cache.transpose(1, 2).contiguous() for cache in (k_cache, v_cache)]
        super().rotary_and_cache_(qkv, q_norm, k_norm, eps, cos, sin, *caches, placed(self, tables, cos, sin))
        for given_cache, written in zip((k_cache, v_cache), caches, strict=True):
            given_cache.copy_(written.transpose(1, 2))


@pytest.fixture
def ops() -> InReferenceLayout:
    return InReferenceLayout()


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 600)), min_size=1, max_size=5),
    st.sampled_from([(1, 1), (3, 1), (2, 4), (8, 1)]),
    st.sampled_from([8, 24, 64, 72, 128]),
    st.one_of(st.none(), st.integers(1, 700)),
    st.sampled_from(sorted(TOLERANCE, key=str)),
)
def test_a_step_of_any_sizes_writes_and_attends_as_the_references_do(
    chunks: list[tuple[int, int]], heads: tuple[int, int], size: int, window: int | None, dtype: torch.dtype
) -> None:
    check_step(CUDAOnCPU(), chunks, *heads, size, window, dtype)


def test_a_step_is_placed_with_the_tiles_of_every_linear() -> None:
    backend = CUDAOnCPU()
    backend.reserve(LIMITS, torch.float32)
    int32 = [torch.tensor(values, dtype=torch.int32) for values in ([0, 1, 21], [3, 20], [[1], [2]])]
    rows = torch.arange(21, dtype=torch.int32)
    tables = AttentionTables(*int32, rows, rows + 256)

    def segments(members: list[int], pages: list[int]) -> Segments:
        values = (members, [0, len(members)], pages, [0, len(pages)])
        return Segments(*(torch.tensor(entries, dtype=torch.int32) for entries in values))

    one, other = segments([0, 20], [3]), segments([*range(1, 21)], [5, 1])
    angles = torch.zeros(64, 8)
    step = backend.place(StepTables(torch.arange(21), tables, angles, angles, {"a": one, "b": other, "c": one}, {}))
    plans = [getattr(step.segments[name], "plan") for name in ("a", "b", "c")]  # noqa: B009
    assert [plan.pages.tolist() for plan in plans] == [[3], [5, 1], [3]]
    assert [tile[:2] for tile in plans[1].prefill_tiles.tolist()] == [[1, 21]]
    assert step.token_ids.tolist() == list(range(21))


@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype", "message"),
    [
        (64, 16, torch.bfloat16, "block_size 16: on a GPU it must be 256"),
        (20, 256, torch.bfloat16, "head_dim 20 in config.json is not served on a GPU"),
        (264, 256, torch.float16, "head_dim 264 in config.json is not served on a GPU"),
        (64, 256, torch.float32, "dtype float32 is not served on a GPU; give bfloat16 or float16"),
    ],
)
def test_what_attention_does_not_take_is_refused_by_name(
    head_dim: int, block_size: int, dtype: torch.dtype, message: str
) -> None:
    backend = CUDAOnCPU()
    backend.dtypes = CUDABackend.dtypes
    backend.check_model(8, 2, 72, 256, torch.float16)
    with pytest.raises(ConfigError, match=message):
        backend.check_model(8, 2, head_dim, block_size, dtype)


def test_a_machine_without_a_gpu_is_told_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"compute capability 8\.0 or later; `ray-lora doctor cuda`"):
        CUDABackend()
