import pytest
import torch

from ray_lora.adapters.finite import all_finite

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_one_value_at_any_place_is_found(value: float, dtype: torch.dtype) -> None:
    """Also past the last whole vector, and where the rows are not adjacent."""
    for size in (1, 7, 16, 67, 133):
        tensor = torch.randn(size, 3, generator=torch.Generator().manual_seed(size)).to(dtype)
        for row in range(size):
            spoilt = tensor.clone()
            spoilt[row, row % 3] = value
            assert not all_finite(spoilt)
            assert not all_finite(spoilt.T)
        assert all_finite(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_numbers_and_nothing_at_all_are_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    assert all_finite(torch.tensor([largest, -largest] * 40, dtype=dtype))
    assert all_finite(torch.empty(0, 4, dtype=dtype))
