"""What the native kernels promise beyond the operators' contract: threads, chunks, and being absent."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ray_lora.backends import cpu_library
from ray_lora.backends.base import Backend
from ray_lora.backends.cpu import CPUBackend
from ray_lora.ops.attention import AttentionTables
from tests.kernels.test_add_lora import make_case, run
from tests.kernels.test_attention_ops import make_cache, make_tables, near


@pytest.mark.parametrize("workload", ["identical", "distinct", "skewed"])
@pytest.mark.parametrize("num_rows", [16, 200])
def test_the_number_of_threads_changes_no_bit(native: Any, workload: str, num_rows: int) -> None:
    case = make_case(workload, num_rows, ranks=(16, 17, 100), in_features=1100, widths=(576, 192))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = run(native, case)
        torch.set_num_threads(3)
        assert torch.equal(run(native, case), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("window", [None, 30])
def test_a_prompt_in_chunks_is_bit_equal_to_it_at_once(native: Any, window: int | None) -> None:
    whole = make_tables([(200, 0)])
    k_cache, v_cache = make_cache(whole, 2, 64, torch.float32)
    qkv = torch.randn(200, 10 * 64, generator=torch.Generator().manual_seed(6))
    at_once = native.paged_attention(qkv, k_cache, v_cache, whole, 0.125, window)
    for first, last in ((0, 37), (37, 150), (150, 200)):
        chunk = AttentionTables(
            torch.tensor([0, last - first], dtype=torch.int32),
            torch.tensor([last], dtype=torch.int32),
            whole.block_tables,
            whole.positions[first:last].contiguous(),
            whole.slot_mapping[first:last].contiguous(),
        )
        assert torch.equal(
            native.paged_attention(qkv[first:last], k_cache, v_cache, chunk, 0.125, window), at_once[first:last]
        )


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_attention_of_any_batch_equals_the_reference(native: Any, data: st.DataObject) -> None:
    chunk = st.tuples(st.one_of(st.just(1), st.integers(1, 80)), st.integers(0, 90))
    tables = make_tables(data.draw(st.lists(chunk, min_size=1, max_size=4)), data.draw(st.integers(0, 99)))
    group, kv_heads = data.draw(st.sampled_from([1, 3, 5])), data.draw(st.integers(1, 3))
    size, window = data.draw(st.sampled_from([8, 22, 64])), data.draw(st.sampled_from([None, 1, 17, 64]))
    k_cache, v_cache = make_cache(tables, kv_heads, size, torch.float32)
    generator = torch.Generator().manual_seed(7)
    qkv = torch.randn(tables.positions.numel(), (group + 2) * kv_heads * size, generator=generator)
    arguments = (qkv, k_cache, v_cache, tables, size**-0.5, window)
    assert near(native.paged_attention(*arguments), Backend().paged_attention(*arguments))


def test_a_row_of_the_small_operators_is_bit_equal_alone(native: Any) -> None:
    x, weight = torch.randn(64, 577), torch.rand(577)
    gate_up = torch.randn(64, 2 * 577)
    together = native.rms_norm(x, weight, 1e-5), native.silu_and_mul(gate_up)
    for row in (slice(0, 1), slice(41, 42), slice(63, 64)):
        assert torch.equal(native.rms_norm(x[row], weight, 1e-5), together[0][row])
        assert torch.equal(native.silu_and_mul(gate_up[row]), together[1][row])


def test_a_query_that_is_not_a_number_harms_only_its_own_row(native: Any) -> None:
    tables = make_tables([(40, 10), (1, 20)])
    k_cache, v_cache = make_cache(tables, 2, 64, torch.float32)
    qkv = torch.randn(41, 10 * 64)
    clean = native.paged_attention(qkv, k_cache, v_cache, tables, 0.125, None)
    qkv[7] = float("nan")
    harmed = native.paged_attention(qkv, k_cache, v_cache, tables, 0.125, None)
    assert harmed[7].isnan().all()
    others = [row for row in range(41) if row != 7]
    assert torch.equal(harmed[others], clean[others])


@pytest.mark.parametrize("gate", [-1e4, -100.0, -88.0, -20.0, 0.0, 20.0, 88.0, 100.0, 1e4])
def test_the_activation_holds_at_its_extremes(native: Any, gate: float) -> None:
    gate_up = torch.tensor([[gate] * 19 + [1.0] * 19])
    expected = torch.nn.functional.silu(torch.full((1, 19), gate, dtype=torch.float64))
    assert torch.allclose(native.silu_and_mul(gate_up).double(), expected, rtol=1e-6, atol=1e-36)


def test_types_that_do_not_fit_are_refused(native: Any) -> None:
    with pytest.raises(ValueError, match="float64"):
        native.silu_and_mul(torch.zeros(2, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="weight"):
        native.rms_norm(torch.zeros(2, 8), torch.zeros(8, dtype=torch.bfloat16), 1e-5)
    tables = make_tables([(1, 4)])
    k_cache, v_cache = make_cache(tables, 2, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="the cache is not"):
        native.paged_attention(torch.zeros(1, 10 * 64), k_cache, v_cache, tables, 0.125, None)


def test_without_the_library_the_references_serve_and_one_warning_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_library, "__file__", str(tmp_path / "cpu_library.py"))
    cpu_library.load_cpu_kernels.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="pip install"):
            backend = CPUBackend()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            CPUBackend()
        x = torch.randn(3, 8)
        assert torch.equal(backend.rms_norm(x, torch.ones(8), 1e-5), Backend().rms_norm(x, torch.ones(8), 1e-5))
    finally:
        cpu_library.load_cpu_kernels.cache_clear()
