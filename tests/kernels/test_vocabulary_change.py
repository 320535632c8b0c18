"""The references against their own definitions, row by row."""

import pytest
import torch
from torch import Tensor

from ray_lora.ops.vocabulary_change import (
    VocabularyChange,
    change_embedding_reference_,
    change_logits_reference_,
)

WIDTH, HIDDEN, RANK = 11, 6, 3
PARTS = [{"weight"}, {"lora"}, {"rows"}, {"lora", "rows"}, {"weight", "lora", "scale", "rows"}]


def make_change(parts: set[str], is_head: bool) -> VocabularyChange:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    lora_a = draw(RANK, HIDDEN) if is_head else draw(WIDTH, RANK)
    return VocabularyChange(
        weight=draw(WIDTH, HIDDEN) if "weight" in parts else None,
        lora_a=lora_a if "lora" in parts else None,
        lora_b=draw(RANK, WIDTH if is_head else HIDDEN) if "lora" in parts else None,
        scale=draw(WIDTH if is_head else HIDDEN) if "scale" in parts else None,
        shift=draw(WIDTH) if is_head and "scale" in parts else None,
        row_ids=torch.tensor([4, 0, 9]) if "rows" in parts else None,
        rows=draw(3, HIDDEN) if "rows" in parts else None,
    )


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_an_embedding_is_the_adapters_own_for_its_rows_alone(parts: set[str]) -> None:
    change = make_change(parts, is_head=False)
    ids = torch.tensor([4, 9, 1, -1, 0, 4])
    hidden = torch.randn(6, HIDDEN)
    expected = hidden.clone()
    for row in (5, 0, 3, 2):
        own = int(ids[row])
        if own < 0:
            continue
        if change.weight is not None:
            expected[row] = change.weight[own]
        if change.lora_a is not None and change.lora_b is not None:
            expected[row] += change.lora_a[own] @ change.lora_b
        if change.scale is not None:
            expected[row] *= change.scale
        if change.row_ids is not None and change.rows is not None and own in change.row_ids:
            expected[row] = change.rows[change.row_ids.tolist().index(own)]
    change_embedding_reference_(hidden, torch.tensor([5, 0, 3, 2]), ids, change)
    torch.testing.assert_close(hidden, expected)
    assert torch.equal(hidden[[1, 4]], expected[[1, 4]])


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_logits_are_the_adapters_own_for_its_rows_alone(parts: set[str]) -> None:
    change = make_change(parts, is_head=True)
    hidden, logits = torch.randn(4, HIDDEN), torch.randn(4, WIDTH)
    expected = logits.clone()
    for row in (3, 1):
        if change.weight is not None:
            expected[row] = change.weight @ hidden[row]
        if change.lora_a is not None and change.lora_b is not None:
            expected[row] += (change.lora_a @ hidden[row]) @ change.lora_b
        if change.scale is not None and change.shift is not None:
            expected[row] = change.scale * expected[row] + change.shift
        if change.row_ids is not None and change.rows is not None:
            expected[row, change.row_ids] = change.rows @ hidden[row]
    change_logits_reference_(logits, hidden, torch.tensor([3, 1]), change)
    torch.testing.assert_close(logits, expected)
    assert torch.equal(logits[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_rounded_once(dtype: torch.dtype) -> None:
    change = make_change({"lora", "scale"}, is_head=True)
    assert change.lora_a is not None
    assert change.lora_b is not None
    assert change.scale is not None
    hidden, logits = torch.randn(1, HIDDEN).to(dtype), torch.randn(1, WIDTH).to(dtype)
    exact = (logits.float() + hidden.float() @ change.lora_a.T @ change.lora_b) * change.scale + change.shift
    change_logits_reference_(logits, hidden, torch.tensor([0]), change)
    assert torch.equal(logits, exact.to(dtype))
