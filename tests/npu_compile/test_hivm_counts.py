"""The counts of a launch against sums by hand."""

from typing import Any

import pytest
from ascend_compile import TARGETS, compile_for_ascend
from chips import CHIPS
from hivm_counts import Counts, count_launch
from hivm_python import translate
from launch import specialize
from npu_report import DECODE, MAX_DECODE_BYTES, Workload, count
from served_layers import Layer, served_layers

LAYER = Layer("qkv", 4096, (4096, 1024, 1024))
HALF = 2


def counts_of(form: str, num_rows: int, num_adapters: int, num_pages: int, layer: Layer = LAYER) -> Counts:
    ir = compile_for_ascend(specialize(form, "npu", "bf16", num_pages), TARGETS["A2"]).ir
    return count(ir, layer, Workload(form, num_rows, num_adapters, num_pages), CHIPS["A2"])


@pytest.mark.parametrize("num_pages", [1, 4])
def test_decode_reads_a_page_once_for_the_rows_of_a_tile(num_pages: int) -> None:
    counts = counts_of("decode", 8, 4, num_pages)
    assert counts.read["pool_a"] == HALF * 4 * num_pages * 3 * 16 * 4096
    assert counts.read["pool_b"] == HALF * 4 * num_pages * 16 * 6144
    assert counts.read["x"] == HALF * 8 * num_pages * 3 * 4096
    assert counts.read["y"] == counts.written["y"] == HALF * 8 * 6144
    assert set(counts.read) == {"pool_a", "pool_b", "x", "y"}, "S stays in the vector cores' buffer"
    assert not counts.single_buffered
    assert counts.cube_macs == 0


def test_decode_of_every_served_layer_stays_near_the_ideal_bytes() -> None:
    ir = compile_for_ascend(specialize("decode", "npu", "bf16", 1), TARGETS["A2"]).ir
    for label, layer in served_layers():
        counts = count(ir, layer, DECODE, CHIPS["A2"])
        assert counts.num_bytes <= MAX_DECODE_BYTES * DECODE.ideal_bytes(layer), label


def test_sizes_that_no_block_divides_are_counted_to_the_last_element() -> None:
    counts = counts_of("decode", 3, 3, 1, Layer("down", 1376, (1008,)))
    assert counts.read["pool_a"] == HALF * 3 * 16 * 1376
    assert counts.written["y"] == HALF * 3 * 1008


def test_prefill_multiplies_on_the_cube_cores() -> None:
    counts = counts_of("prefill", 100, 1, 1)
    assert counts.read["pool_a"] == HALF * 2 * 3 * 16 * 4096, "two tiles, of 64 and 36 rows"
    assert counts.read["x"] == HALF * 100 * 3 * 4096
    assert counts.written["y"] == HALF * 100 * 6144
    shrink = (64 + 48) * 3 * 16 * 4096
    expand = 3 * (64 + 64) * 16 * 6144
    assert counts.cube_macs == shrink + expand, "S in three parts, of all rows of a tile"
    assert not {"pool_a", "x"} & set(counts.single_buffered)


def test_an_operation_that_cannot_be_followed_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot follow"):
        translate(["func.func @f(%arg0: i32) {", "%0 = math.sqrt %arg0 : i32"])


@pytest.mark.parametrize("num_tiles", [0, 3])
@pytest.mark.parametrize("num_pages", [1, 4])
def test_no_tiles_and_tiles_without_rows_move_nothing(num_tiles: int, num_pages: int) -> None:
    ir = compile_for_ascend(specialize("decode", "npu", "bf16", num_pages), TARGETS["A2"]).ir
    empty: dict[str, Any] = {"slices": [0, 16], "rows": [0], "tiles": [0] * 4 * num_tiles, "pages": [0]}
    sizes = dict.fromkeys(("stride_y", "stride_x", "K", "N"), 16) | {"num_slices": 1, "num_work": num_tiles}
    counts = count_launch(ir, {**dict.fromkeys(("y", "x", "pool_a", "pool_b")), **empty, **sizes}, 40)
    assert counts.num_bytes == 0
