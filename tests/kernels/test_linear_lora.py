"""`linear_lora`: to the bit what the linear layer and `add_lora_` make in turn, on any number of threads."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ray_lora.backends.base import Backend, Linear
from ray_lora.backends.cpu import CPUBackend
from ray_lora.backends.cpu_kernels import CPUKernels
from ray_lora.backends.cpu_linear import PanelLinear
from ray_lora.ops.lora import Segments
from tests.kernels.test_add_lora import TOLERANCE, WORKLOADS, Case, make_case


@pytest.fixture(params=[1, 2, 5])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make_linear(kernels: CPUKernels, case: Case, has_bias: bool = True) -> PanelLinear:
    generator = torch.Generator().manual_seed(1)
    outputs, size = case.y.shape[1], case.x.shape[1]
    weight = torch.randn(outputs, size, generator=generator) * size**-0.5
    bias = torch.randn(outputs, generator=generator).to(case.x.dtype) if has_bias else None
    return PanelLinear(kernels, weight.to(case.x.dtype), bias)


def one_after_the_other(kernels: CPUKernels, linear: Linear, case: Case) -> Tensor:
    y = linear(case.x)
    kernels.add_lora_(y, case.x, case.pool_a, case.pool_b, case.slices, case.segments)
    return y


def together(linear: PanelLinear, case: Case) -> Tensor:
    return linear.with_lora(case.x, case.pool_a, case.pool_b, case.slices, case.segments)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_rows", [1, 16, 70])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_is_the_two_kernels_to_the_bit(
    native: CPUKernels, num_threads: int, workload: str, num_rows: int, dtype: torch.dtype
) -> None:
    case = make_case(workload, num_rows, in_features=576, widths=(576, 192, 192), dtype=dtype)
    linear = make_linear(native, case)
    assert torch.equal(together(linear, case), one_after_the_other(native, linear, case))


def test_a_rank_that_outweighs_the_weight_is_the_two_kernels_to_the_bit(native: CPUKernels, num_threads: int) -> None:
    case = make_case("identical", 8, ranks=(512,), in_features=300, widths=(200, 56))
    linear = make_linear(native, case)
    assert torch.equal(together(linear, case), one_after_the_other(native, linear, case))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_case_is_the_two_kernels_to_the_bit(native: CPUKernels, data: st.DataObject) -> None:
    case = make_case(
        data.draw(st.sampled_from(WORKLOADS[:7])),
        data.draw(st.integers(1, 70)),
        tuple(data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=5))),
        data.draw(st.one_of(st.integers(1, 90), st.integers(1000, 1100))),
        tuple(data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=3))),
        data.draw(st.sampled_from(list(TOLERANCE))),
        data.draw(st.sampled_from(list(TOLERANCE))),
        data.draw(st.integers(0, 1000)),
    )
    linear = make_linear(native, case, data.draw(st.booleans()))
    assert torch.equal(together(linear, case), one_after_the_other(native, linear, case))


def test_misuse_is_refused(native: CPUKernels) -> None:
    case = make_case()
    linear, other = make_linear(native, case), make_linear(native, make_case(widths=(40, 24)))
    good = case.segments
    outside = Segments(good.rows + 99, good.row_starts, good.pages, good.page_starts)
    beyond = Segments(good.rows, good.row_starts, good.pages + 99, good.page_starts)
    refused: list[tuple[PanelLinear, tuple[Any, ...]]] = [
        (other, (case.x, case.pool_a, case.pool_b, case.slices, good)),
        (linear, (case.x[:, :-1], case.pool_a, case.pool_b, case.slices, good)),
        (linear, (case.x.half(), case.pool_a, case.pool_b, case.slices, good)),
        (linear, (case.x, case.pool_a, case.pool_b, case.slices[:-1], good)),
        (linear, (case.x, case.pool_a, case.pool_b, case.slices, outside)),
        (linear, (case.x, case.pool_a, case.pool_b, case.slices, beyond)),
    ]
    for layer, arguments in refused:
        with pytest.raises(ValueError, match=r"fit|names|must|cut"):
            layer.with_lora(*arguments)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("backend", [Backend, CPUBackend])
def test_every_backend_equals_the_oracle_on_top_of_its_linear_layer(backend: type[Backend], dtype: torch.dtype) -> None:
    case = make_case(num_rows=12, dtype=dtype)
    made = backend()
    linear = made.linear(torch.randn(case.y.shape[1], case.x.shape[1]).to(dtype) / 9, None)
    base = linear(case.x)
    produced = made.linear_lora(linear, case.x, case.pool_a, case.pool_b, case.slices, case.segments)
    expected = Case(base, case.x, case.pool_a, case.pool_b, case.slices, case.adapters, case.pages).oracle()
    assert (produced.double() - expected).abs().max() / expected.abs().max() < TOLERANCE[dtype]
