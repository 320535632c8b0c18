"""How a step's `Segments` are cut into tiles for the Triton kernels: on the host, once per step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ray_lora.backends.lora_blocks import TargetBlocks
from ray_lora.ops.lora import Segments

MIN_CHUNK = 16
"""Rows of one sequence in one step from which the prefill kernel takes them: the side of a cube tile."""


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """One step's tables for both kernels, on the device; `num_*_tiles` is 0 where there is nothing to launch."""

    rows: Tensor
    """[num_decode_rows] int32"""
    decode_tiles: Tensor
    prefill_tiles: Tensor
    """[num_tiles, 4] int32, as the kernels read them"""
    pages: Tensor
    max_pages: int
    """Pages of the largest adapter, rounded up to a power of two."""
    num_decode_tiles: int
    num_prefill_tiles: int


def plan_lora(segments: Segments, target: TargetBlocks, query_starts: Sequence[int] | None = None) -> LoraPlan:
    """Tiles of a step, those with most pages first, so that the last to finish are short.

    Args:
        query_starts: the rows of sequence i are `query_starts[i]` to `query_starts[i + 1]`. A row's own sequence, never
            its neighbours, decides which kernel takes it: prefill with at least MIN_CHUNK rows, else decode. Without
            it, all rows take the decode kernel.
    """
    rows = segments.rows.cpu().numpy()
    row_starts, page_starts = segments.row_starts.tolist(), segments.page_starts.tolist()
    largest = max((stop - start for start, stop in pairwise(page_starts)), default=1)
    max_pages = 1 << max(0, largest - 1).bit_length()
    is_prefill = _prefill_rows(query_starts or (), int(rows.max(initial=-1)) + 1)
    decode_rows: list[int] = []
    decode_tiles: list[tuple[int, int, int, int]] = []
    prefill_tiles: list[tuple[int, int, int, int]] = []
    for segment, (start, stop) in enumerate(pairwise(row_starts)):
        held = page_starts[segment], page_starts[segment + 1]
        members = rows[start:stop]
        chosen = is_prefill[members]
        first = len(decode_rows)
        decode_rows += members[~chosen].tolist()
        decode_tiles += ((*tile, *held) for tile in _cut(first, len(decode_rows), target.decode[max_pages].max_rows))
        for run in _runs(members[chosen]):
            prefill_tiles += ((*tile, *held) for tile in _cut(*run, target.prefill[max_pages].max_rows))

    def int32(values: Sequence[int] | Sequence[tuple[int, ...]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(segments.rows.device)

    for tiles in (decode_tiles, prefill_tiles):
        tiles.sort(key=lambda tile: tile[2] - tile[3])
    return LoraPlan(
        int32(decode_rows), int32(decode_tiles), int32(prefill_tiles), segments.pages,
        max_pages, len(decode_tiles), len(prefill_tiles),
    )  # fmt: skip


def padded_plan(plan: LoraPlan, num_rows: int, max_pages: int) -> LoraPlan:
    """A decode step's plan in the one shape that fits all steps of `num_rows` rows: a captured launch keeps its sizes.

    Tiles without rows come last, and no table is empty, for one without entries has no address.

    Args:
        max_pages: of the largest adapter that any step may have, a power of two.
    """
    tiles = plan.decode_tiles.new_zeros(num_rows, 4)
    tiles[: plan.num_decode_tiles] = plan.decode_tiles.view(-1, 4)
    rows = plan.rows.new_zeros(num_rows)
    rows[: len(plan.rows)] = plan.rows
    pages = plan.pages if len(plan.pages) else plan.pages.new_zeros(1)
    return replace(plan, rows=rows, decode_tiles=tiles, pages=pages, max_pages=max_pages, num_decode_tiles=num_rows)


def _prefill_rows(query_starts: Sequence[int], num_rows: int) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    chosen = np.zeros(max(num_rows, query_starts[-1] if query_starts else 0), dtype=np.bool_)
    for start, stop in pairwise(query_starts):
        chosen[start:stop] = stop - start >= MIN_CHUNK
    return chosen


def _runs(rows: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> Iterator[tuple[int, int]]:
    """Ranges of adjacent rows: 4 5 6 9 gives (4, 7), (9, 10)."""
    if rows.size:
        for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
            yield int(run[0]), int(run[-1]) + 1


def _cut(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + size, stop)) for first in range(start, stop, size))
