import pytest
import torch

from ray_lora.ops.scale_shift import SlotRows, scale_shift_reference_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_docstring_example_of_the_slots(dtype: torch.dtype) -> None:
    """Rows 0 and 3 use slot 5, row 2 slot 1, row 1 none; rounded once, row by row."""
    y = torch.randn(4, 7).to(dtype)
    scale, shift = torch.randn(6, 7), torch.randn(6, 7)
    before = y.clone()
    scale_shift_reference_(y, scale, shift, SlotRows(torch.tensor([0, 3, 2]), torch.tensor([5, 5, 1])))
    assert torch.equal(y[1], before[1])
    for row, slot in ((0, 5), (3, 5), (2, 1)):
        assert torch.equal(y[row], (before[row].float() * scale[slot] + shift[slot]).to(dtype))
