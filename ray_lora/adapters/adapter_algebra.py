"""Sums and truncations of low-rank deltas, computed on their factors: nothing of the size of a base weight is built.

The singular values of `B @ A` are those of `R_b @ R_a.T`, where `B = Q_b @ R_b` and `A.T = Q_a @ R_a` are QR
decompositions: a matrix of `[rank, rank]`. Frobenius norms follow from them. All in float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ROUNDING_ENERGY = 1e-26
"""Share of a delta's energy that float64 cannot tell from zero."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRankDelta:
    """A change of a base weight: `lora_b @ lora_a`, `[out_features, in_features]`, any scale multiplied in."""

    lora_a: torch.Tensor
    """`[rank, in_features]`, float64."""
    lora_b: torch.Tensor
    """`[out_features, rank]`, float64."""

    @property
    def rank(self) -> int:
        return self.lora_a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        return self.lora_b.shape[0], self.lora_a.shape[1]

    def __mul__(self, weight: float) -> "LowRankDelta":
        return LowRankDelta(self.lora_a, self.lora_b * weight)

    def __sub__(self, other: "LowRankDelta") -> "LowRankDelta":
        return add_deltas([self, other * -1.0])

    def to_dtype(self, dtype: torch.dtype) -> "LowRankDelta":
        """The factors rounded to `dtype`, in float64 again."""
        return LowRankDelta(self.lora_a.to(dtype).double(), self.lora_b.to(dtype).double())


def add_deltas(deltas: Sequence[LowRankDelta]) -> LowRankDelta:
    """The exact sum, by joining the ranks; all must have one shape."""
    return LowRankDelta(
        torch.cat([delta.lora_a for delta in deltas], dim=0), torch.cat([delta.lora_b for delta in deltas], dim=1)
    )


def singular_values(delta: LowRankDelta) -> torch.Tensor:
    """`[min(rank, in_features, out_features)]`, in descending order."""
    r_b = torch.linalg.qr(delta.lora_b, mode="r").R
    r_a = torch.linalg.qr(delta.lora_a.T, mode="r").R
    values: torch.Tensor = torch.linalg.svdvals(r_b @ r_a.T)
    return values


def frobenius_norm(delta: LowRankDelta) -> float:
    return float(singular_values(delta).norm())


def rank_for_energy(values: torch.Tensor, energy: float) -> int:
    """How many of the singular values, at least one, hold this share of the sum of their squares."""
    lost_from = values.square().flip(0).cumsum(0).flip(0)  # energy of this value and all that follow
    return max(1, int((lost_from > max(1 - energy, ROUNDING_ENERGY) * lost_from[0]).sum()))


class TruncatedSVD:
    """The best approximations of a delta, by rank. Computed once; each rank is a cut."""

    def __init__(self, delta: LowRankDelta) -> None:
        q_b, r_b = torch.linalg.qr(delta.lora_b)
        q_a, r_a = torch.linalg.qr(delta.lora_a.T)
        u, self.values, v_t = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
        root = self.values.sqrt()
        self._lora_b = (q_b @ u) * root
        self._lora_a = root[:, None] * (v_t @ q_a.T)

    @property
    def max_rank(self) -> int:
        return len(self.values)

    def at_rank(self, rank: int) -> LowRankDelta:
        """The nearest delta of this rank; each singular value is shared evenly between A and B."""
        return LowRankDelta(self._lora_a[:rank], self._lora_b[:, :rank])
