"""This rank's place among the ranks, and the collectives of a step."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """`group` joins the ranks for steps alone; adapter loads have a group of their own."""

    rank: int = 0
    size: int = 1
    group: "dist.ProcessGroup | None" = None
    shared_reduce: Callable[[Tensor], None] | None = None
    """Sums float32 tensors among ranks of one host, faster than the group does."""
    gathers_to_all: bool = False
    """Whether `gather_columns` sends to every rank, as a group needs that cannot gather on one."""

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.shared_reduce is not None and x.dtype is torch.float32 and x.is_contiguous():
            self.shared_reduce(x)
        elif self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def smallest(self, value: int, device: torch.device) -> int:
        """The least of the ranks' values; every rank must call it."""
        values = torch.tensor([value], device=device)
        if self.size > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self.group)
        return int(values)

    def gather_columns(self, x: Tensor, total: int) -> Tensor | None:
        """On rank 0, the ranks' columns side by side, cut to `total`; None elsewhere. All parts have one shape."""
        if self.size == 1:
            return x
        is_here = self.rank == 0 or self.gathers_to_all
        parts = [torch.empty_like(x) for _ in range(self.size)] if is_here else None
        if self.gathers_to_all:
            dist.all_gather(parts, x, group=self.group)
        else:
            dist.gather(x, parts, dst=0, group=self.group)
        return torch.cat(parts, dim=1)[:, :total] if parts is not None and self.rank == 0 else None
