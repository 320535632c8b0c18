"""`add_lora_`: add every row's adapter to a linear layer's output, in place."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ray_lora.adapter import PAGE_RANK


@dataclass(frozen=True, slots=True)
class Segments:
    """Which rows belong to which adapter, built once per step. All tensors are int32, contiguous, on the device.

    Example: rows 0, 3 use an adapter of pages (5, 9), row 2 one of page (1,), row 1 none:
    `rows=[0, 3, 2]`, `row_starts=[0, 2, 3]`, `pages=[5, 9, 1]`, `page_starts=[0, 2, 3]`.
    """

    rows: Tensor
    """[num_rows]: row indices of x and y, those of one adapter adjacent. A row without an adapter is not here."""
    row_starts: Tensor
    """[num_segments + 1]: segment `s` is `rows[row_starts[s]:row_starts[s + 1]]`."""
    pages: Tensor
    """[num_page_entries]: page ids."""
    page_starts: Tensor
    """[num_segments + 1]: the pages of segment `s` are `pages[page_starts[s]:page_starts[s + 1]]`."""


def add_lora_reference_(
    y: Tensor, x: Tensor, pool_a: Tensor, pool_b: Tensor, slices: tuple[int, ...], segments: Segments
) -> None:
    """Add each row's adapter to `y`, in place. The definition that every kernel is tested against.

    Semantics:
        for each segment, for each slice i of the output, columns n0:n1 = slices[i]:slices[i + 1]:
            delta = 0
            for page in the segment's pages:                             # always in this order
                s = x[rows] @ pool_a[page, i].T                          # [rows, 16], float32
                delta += s @ pool_b[page, :, n0:n1]                      # float32
            y[rows, n0:n1] = round(y[rows, n0:n1] + delta)               # rounded once

    Shapes:
        y       [num_tokens, N]     any float type, changed in place; rows may be strided
        x       [num_tokens, K]     the type of y; rows may be strided
        pool_a  [num_pages, num_slices, 16, K]    contiguous
        pool_b  [num_pages, 16, N]                contiguous, the scale folded in
        slices  num_slices + 1 column offsets, from 0 to N

    A row's result depends on its own adapter's pages and on nothing else in the batch.
    """
    rows, row_starts = segments.rows.long(), segments.row_starts.tolist()
    pages, page_starts = segments.pages.tolist(), segments.page_starts.tolist()
    for segment in range(len(row_starts) - 1):
        members = rows[row_starts[segment] : row_starts[segment + 1]]
        inputs = x[members].float()
        outputs = y[members].float()
        for page in pages[page_starts[segment] : page_starts[segment + 1]]:
            for i, (start, stop) in enumerate(pairwise(slices)):
                s = inputs @ pool_a[page, i].float().T
                outputs[:, start:stop] += s @ pool_b[page, :, start:stop].float()
        y[members] = outputs.to(y.dtype)


def check_add_lora(
    y: Tensor, x: Tensor, pool_a: Tensor, pool_b: Tensor, slices: tuple[int, ...], segments: Segments
) -> None:
    """Raise ValueError on arguments that break the contract; costs no device synchronisation on a CPU."""
    num_tokens, out_features = y.shape
    if x.shape[0] != num_tokens or x.dtype != y.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit y {tuple(y.shape)} {y.dtype}")
    if pool_a.shape[1:] != (len(slices) - 1, PAGE_RANK, x.shape[1]):
        raise ValueError(f"pool_a {tuple(pool_a.shape)} does not fit x {tuple(x.shape)} and {len(slices) - 1} slices")
    if pool_b.shape[1:] != (PAGE_RANK, out_features) or pool_b.shape[0] != pool_a.shape[0]:
        shapes = f"y {tuple(y.shape)} and pool_a {tuple(pool_a.shape)}"
        raise ValueError(f"pool_b {tuple(pool_b.shape)} does not fit {shapes}")
    if pool_a.dtype != pool_b.dtype or not (pool_a.is_contiguous() and pool_b.is_contiguous()):
        raise ValueError("pool_a and pool_b must be contiguous and of one dtype")
    if slices[0] != 0 or slices[-1] != out_features or any(a >= b for a, b in pairwise(slices)):
        raise ValueError(f"slices {slices} do not cut 0..{out_features}")
    for index, limit in ((segments.rows, num_tokens), (segments.pages, pool_a.shape[0])):
        if index.dtype != torch.int32:
            raise ValueError(f"segment tables must be int32, not {index.dtype}")
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= limit):
            raise ValueError(f"segment table names an index outside 0..{limit - 1}")
