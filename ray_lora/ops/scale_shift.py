"""`scale_shift_`: what DoRA and trained biases do to a linear layer's output after `add_lora_`, in place."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotRows:
    """Which rows belong to adapters that have something in their slots, built once per step; int64, on the device.

    Example: rows 0 and 3 use the adapter in slot 5, row 2 the one in slot 1: `rows=[0, 3, 2]`, `slots=[5, 5, 1]`.
    """

    rows: Tensor
    """[num_rows], without duplicates"""
    slots: Tensor
    """[num_rows]"""


def scale_shift_reference_(y: Tensor, scale: Tensor, shift: Tensor, members: SlotRows) -> None:
    """Bring rows of `y` to their adapters' magnitudes and biases, in place.

    Semantics:
        for row, slot in members:
            y[row] = round(scale[slot] * y[row] + shift[slot])           # float32, rounded once

    Shapes:
        y      [num_tokens, N]     any float type, changed in place
        scale  [num_slots, N]      float32
        shift  [num_slots, N]      float32

    A row's result depends on its own adapter's slot and on nothing else in the batch.
    """
    changed = y[members.rows].float() * scale[members.slots] + shift[members.slots]
    y[members.rows] = changed.to(y.dtype)
