"""How a step is cut into tiles."""

import random
from itertools import chain

import pytest
import torch

from ray_lora.backends.lora_blocks import BLOCKS, PAGE_BOUNDS, Blocks, TargetBlocks
from ray_lora.backends.lora_plan import LoraPlan, padded_plan, plan_lora
from ray_lora.ops.lora import Segments

TARGET = TargetBlocks(dict.fromkeys(PAGE_BOUNDS, Blocks(2, 16, 16)), dict.fromkeys(PAGE_BOUNDS, Blocks(16, 16, 16)))


def plan(
    rows: list[list[int]], pages: list[list[int]], query_starts: list[int] | None = None, target: TargetBlocks = TARGET
) -> LoraPlan:
    tables = [*chain(*rows)], starts(rows), [*chain(*pages)], starts(pages)
    segments = Segments(*(torch.tensor(table, dtype=torch.int32) for table in tables))
    return plan_lora(segments, target, query_starts)


def starts(lists: list[list[int]]) -> list[int]:
    return [sum(map(len, lists[:index])) for index in range(len(lists) + 1)]


def test_a_segment_is_cut_into_tiles_of_its_own_rows() -> None:
    made = plan([[4, 0, 7], [2]], [[5], [9]])
    assert made.rows.tolist() == [4, 0, 7, 2]
    assert made.decode_tiles.tolist() == [[0, 2, 0, 1], [2, 3, 0, 1], [3, 4, 1, 2]]
    assert (made.num_decode_tiles, made.num_prefill_tiles, made.max_pages) == (3, 0, 1)


def test_rows_of_a_long_sequence_become_runs_for_prefill() -> None:
    made = plan([[0, *range(3, 23)], [1, 2]], [[5], [9]], [0, 1, 2, 3, 23])
    assert made.prefill_tiles.tolist() == [[3, 19, 0, 1], [19, 23, 0, 1]]
    assert made.rows.tolist() == [0, 1, 2]
    assert made.decode_tiles.tolist() == [[0, 1, 0, 1], [1, 3, 1, 2]]


def test_tiles_with_most_pages_come_first() -> None:
    made = plan([[0], [1], [2]], [[1], [2, 3, 4], [5, 6]])
    assert [row[3] - row[2] for row in made.decode_tiles.tolist()] == [3, 2, 1]
    assert made.max_pages == 4


def test_no_adapters_need_no_launch() -> None:
    made = plan([], [])
    assert (made.num_decode_tiles, made.num_prefill_tiles) == (0, 0)


@pytest.mark.parametrize("rows", [[], [[4, 0, 7], [2]]])
def test_padded_plans_of_steps_with_as_many_rows_have_one_shape(rows: list[list[int]]) -> None:
    made = plan(rows, [[5], [9]][: len(rows)])
    padded = padded_plan(made, 8, 4)
    assert (padded.rows.shape, padded.decode_tiles.shape) == ((8,), (8, 4))
    assert (padded.num_decode_tiles, padded.num_prefill_tiles, padded.max_pages) == (8, 0, 4)
    assert padded.decode_tiles[: len(made.decode_tiles)].tolist() == made.decode_tiles.tolist()
    assert not padded.decode_tiles[len(made.decode_tiles) :].any(), "tiles without rows"
    assert padded.rows[: len(made.rows)].tolist() == made.rows.tolist()
    assert len(padded.pages) > 0


@pytest.mark.parametrize("target", BLOCKS)
def test_every_row_is_in_one_tile_with_its_own_pages(target: str) -> None:
    rng = random.Random(0)
    for _ in range(30):
        lengths = [rng.choice((1, 1, 1, 5, 40, 90)) for _ in range(rng.randint(1, 12))]
        query_starts = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
        owners = [rng.randrange(4) for _ in lengths]
        rows: list[list[int]] = [[] for _ in range(3)]
        for owner, start, stop in zip(owners, query_starts, query_starts[1:], strict=False):
            if owner < 3:
                rows[owner].extend(range(start, stop))
        used = [index for index in range(3) if rows[index]]
        held = [[10 * index + page for page in range(rng.randint(1, 3))] for index in used]
        made = plan([rows[index] for index in used], held, query_starts, BLOCKS[target])
        pages, decode_rows = made.pages.tolist(), made.rows.tolist()
        seen = {}
        for first, last, page_start, page_stop in made.decode_tiles.tolist():
            seen |= dict.fromkeys(decode_rows[first:last], pages[page_start:page_stop])
        for first, last, page_start, page_stop in made.prefill_tiles.tolist():
            seen |= dict.fromkeys(range(first, last), pages[page_start:page_stop])
        expected = {row: held[place] for place, index in enumerate(used) for row in rows[index]}
        assert seen == expected
        tiles = made.decode_tiles.tolist() + made.prefill_tiles.tolist()
        assert sum(last - first for first, last, *_ in tiles) == len(expected)


@pytest.mark.parametrize("target", BLOCKS)
def test_a_kernel_has_one_order_of_summation_whatever_the_pages(target: str) -> None:
    assert len(set(BLOCKS[target].decode.values())) == 1
    assert len({blocks.block_k for blocks in BLOCKS[target].prefill.values()}) == 1
