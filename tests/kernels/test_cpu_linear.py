"""Linear layers on CPUs: equal to a float64 product, and a row is the same whatever is beside it."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ray_lora.backends.base import Linear
from ray_lora.backends.cpu import CPUBackend
from ray_lora.backends.cpu_kernels import CPUKernels
from ray_lora.backends.cpu_linear import OneDNNLinear, PanelLinear, onednn_multiplies, pack_panels, row_bucket

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def make(rows: int, size: int, outputs: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=generator)
    weight = torch.randn(outputs, size, generator=generator) * size**-0.5
    return x.to(dtype), weight.to(dtype), torch.randn(outputs, generator=generator).to(dtype)


def assert_is_product(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    tolerance = TOLERANCES[x.dtype] * (1 + x.shape[1] ** 0.5 / 10)
    assert y.dtype is x.dtype
    assert y.shape == expected.shape
    assert (y.double() - expected).abs().le(tolerance * (1 + expected.abs())).all()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.one_of(st.integers(1, 24), st.integers(25, 300)),
    size=st.integers(1, 700),
    outputs=st.one_of(st.integers(1, 100), st.integers(101, 700)),
    dtype=st.sampled_from(list(TOLERANCES)),
    has_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_size_equals_a_float64_product(
    native: CPUKernels, rows: int, size: int, outputs: int, dtype: torch.dtype, has_bias: bool, seed: int
) -> None:
    x, weight, bias = make(rows, size, outputs, dtype, seed)
    wide = torch.full((rows, size + 5), float("nan"), dtype=dtype)
    wide[:, :size] = x
    linear = PanelLinear(native, weight, bias if has_bias else None)
    assert_is_product(linear(wide[:, :size]), x, weight, bias if has_bias else None)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_a_row_is_bit_equal_alone_and_among_any_number(native: CPUKernels, dtype: torch.dtype) -> None:
    x, weight, bias = make(200, 333, 500, dtype)
    linear = PanelLinear(native, weight, bias)
    every = linear(x)
    for first, last in ((0, 1), (5, 9), (0, 16), (10, 33), (90, 200)):
        assert torch.equal(linear(x[first:last]), every[first:last])


@pytest.mark.parametrize("outputs", [1, 48, 100])
def test_rows_are_the_weight(native: CPUKernels, outputs: int) -> None:
    _, weight, _ = make(1, 40, outputs, torch.float32)
    ids = torch.tensor([0, outputs - 1, outputs // 2, 0])
    assert torch.equal(PanelLinear(native, weight, None).rows(ids), weight[ids])
    assert torch.equal(Linear(weight, None).rows(ids), weight[ids])


def test_what_does_not_fit_is_refused(native: CPUKernels) -> None:
    x, weight, bias = make(3, 40, 100, torch.float32)
    panels = pack_panels(weight, native.panel_size)
    refused: list[tuple[Any, ...]] = [
        (x[:, :39], panels, None, 100),
        (x, panels, None, 200),
        (x, panels[:, :, :16], None, 100),
        (x, panels.bfloat16(), None, 100),
        (x, panels, bias[:99], 100),
        (x, panels, bias.half(), 100),
        (x.T.contiguous().T, panels, None, 100),
    ]
    for arguments in refused:
        with pytest.raises(ValueError, match=r"must be|do not fit"):
            native.linear(*arguments)


@pytest.mark.parametrize("dtype", [dtype for dtype in (torch.bfloat16, torch.float16) if onednn_multiplies(dtype)])
def test_onednn_equals_a_float64_product_at_any_number_of_rows(dtype: torch.dtype) -> None:
    for rows in (1, 7, 9, 65):
        x, weight, bias = make(rows, 300, 200, dtype)
        linear = OneDNNLinear(weight, bias, tied=True)
        assert_is_product(linear(x), x, weight, bias)
        assert torch.equal(linear.rows(torch.tensor([3, 199])), weight[[3, 199]])


def test_a_bucket_holds_its_rows_and_wastes_at_most_a_quarter() -> None:
    for rows in range(1, 3000):
        bucket = row_bucket(rows)
        assert rows <= bucket <= rows * 1.25
        assert row_bucket(bucket) == bucket


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_the_backend_serves_every_type(dtype: torch.dtype) -> None:
    x, weight, bias = make(5, 64, 96, dtype)
    assert_is_product(CPUBackend().linear(weight, bias)(x), x, weight, bias)
