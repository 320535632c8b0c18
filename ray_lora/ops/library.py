"""`add_lora_` as a torch operator, `torch.ops.ray_lora.add_lora_`: for torch.compile, export and profilers.

The engine calls a backend's method directly, which costs less. Here the reference serves every device; a backend that
has a kernel registers it for its own (`backends/cpu_library.py` does).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ray_lora.ops.lora import Segments, add_lora_reference_


@torch.library.custom_op("ray_lora::add_lora_", mutates_args=("y",))
def add_lora_(
    y: Tensor,
    x: Tensor,
    pool_a: Tensor,
    pool_b: Tensor,
    slices: Sequence[int],
    rows: Tensor,
    row_starts: Tensor,
    pages: Tensor,
    page_starts: Tensor,
) -> None:
    """`add_lora_reference_` with its segments spelled out."""
    add_lora_reference_(y, x, pool_a, pool_b, tuple(slices), Segments(rows, row_starts, pages, page_starts))


@add_lora_.register_fake
def _add_lora_shapes(
    y: Tensor,
    x: Tensor,
    pool_a: Tensor,
    pool_b: Tensor,
    slices: Sequence[int],
    rows: Tensor,
    row_starts: Tensor,
    pages: Tensor,
    page_starts: Tensor,
) -> None:
    """Nothing is returned, and what changes keeps its shape."""
