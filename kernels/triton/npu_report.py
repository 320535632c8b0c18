"""`make npu-report`: what the compiled kernels move and compute for every served layer, and the least time it takes.

Bytes are those between global memory and on-chip buffers, exact for the workloads named. Times are floors, a model made
of published peak rates (`chips.py`) and not a measurement; all bytes count as HBM's, though some stay in L2. Columns:
bytes moved, ideal bytes (each page, input and output once) and their ratio; the part of the bytes read that is not
double-buffered; the busiest core's bytes over an even share; cube work over useful work; LoRA's floor, which takes the
shares as even, the base layer's, and their ratio.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from ascend_compile import TARGETS, compile_for_ascend
from chips import CHIPS, Chip
from hivm_counts import Counts, buffer_bytes, count_launch
from launch import specialize
from served_layers import LLAMA_7B, Layer, fused_linears, served_layers

from ray_lora.backends.lora_blocks import BLOCKS
from ray_lora.backends.lora_plan import plan_lora
from ray_lora.ops.lora import Segments

MAX_DECODE_BYTES = 1.15
"""Goal: bytes moved in decode, over the ideal."""
MAX_DECODE_TIME = 0.08
"""Goal: the floor of LoRA over the base layers' own, 32 rows over 20 rank-16 adapters on a 7B Llama."""
HALF = 2


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows of equal adapters: row i uses adapter `i % num_adapters`, and no two adapters share a page."""

    form: str
    num_rows: int
    num_adapters: int
    num_pages: int = 1

    def __str__(self) -> str:
        adapters = f"{self.num_adapters} rank-{16 * self.num_pages} adapter{'s' * (self.num_adapters > 1)}"
        return f"{self.form}, {self.num_rows} rows over {adapters}"

    @property
    def segments(self) -> Segments:
        rows = [range(first, self.num_rows, self.num_adapters) for first in range(self.num_adapters)]
        row_starts = [sum(map(len, rows[:index])) for index in range(len(rows) + 1)]
        page_starts = range(0, self.num_adapters * self.num_pages + 1, self.num_pages)
        tables = [row for held in rows for row in held], row_starts, range(page_starts[-1]), page_starts
        return Segments(*(torch.tensor(list(table), dtype=torch.int32) for table in tables))

    def ideal_bytes(self, layer: Layer) -> int:
        """Each page and each row of x read once, each row of y read and written once."""
        page = 16 * (len(layer.widths) * layer.in_features + layer.out_features)
        row = layer.in_features + 2 * layer.out_features
        return HALF * (self.num_adapters * self.num_pages * page + self.num_rows * row)

    def useful_macs(self, layer: Layer) -> int:
        row = 16 * self.num_pages * (len(layer.widths) * layer.in_features + layer.out_features)
        return self.num_rows * row


DECODE = Workload("decode", 32, 20)
WORKLOADS = (DECODE, Workload("decode", 32, 20, 4), Workload("prefill", 512, 1), Workload("prefill", 512, 1, 4))


def count(ir: str, layer: Layer, workload: Workload, chip: Chip) -> Counts:
    """Run a launch of the kernel, with the tables that the host makes for the workload."""
    query_starts = [0, workload.num_rows] if workload.form == "prefill" else None
    plan = plan_lora(workload.segments, BLOCKS["npu"], query_starts)
    is_decode = workload.form == "decode"
    tiles = plan.decode_tiles if is_decode else plan.prefill_tiles
    work = len(tiles) * len(layer.widths)
    arguments: dict[str, Any] = dict.fromkeys(("y", "x", "pool_a", "pool_b"))
    arguments["slices"] = list(layer.slices)
    if is_decode:
        arguments["rows"] = plan.rows.tolist()
    arguments |= {"tiles": tiles.flatten().tolist(), "pages": plan.pages.tolist()}
    arguments |= {"stride_y": layer.out_features, "stride_x": layer.in_features}
    arguments |= {"K": layer.in_features, "N": layer.out_features, "num_slices": len(layer.widths), "num_work": work}
    return count_launch(ir, arguments, min(work, chip.vector_cores if is_decode else chip.cube_cores))


def floor(counts: Counts, chip: Chip) -> float:
    """Seconds below which no launch can be: the slowest of memory, vector cores and cube cores, each at its peak."""
    memory = counts.num_bytes / chip.bandwidth
    return max(memory, counts.vector_elements / chip.vector_rate, counts.cube_macs / chip.cube_rate)


def base_floor(layer: Layer, num_rows: int, chip: Chip) -> float:
    """The same for `x @ W.T`, which reads W, x and writes y once."""
    sizes = layer.in_features * layer.out_features, num_rows * (layer.in_features + layer.out_features)
    return max(HALF * sum(sizes) / chip.bandwidth, num_rows * sizes[0] / chip.cube_rate)


def print_workload(workload: Workload, target: str) -> float:
    """A table with a line per served layer. Returns the worst ratio of bytes to the ideal."""
    chip = CHIPS[target]
    spec = specialize(workload.form, "npu", "bf16", workload.num_pages)
    ir = compile_for_ascend(spec, TARGETS[target]).ir
    filled = ", ".join(f"{name} {size / 1024:.0f} KiB" for name, size in buffer_bytes(ir).items())
    print(f"\n## {workload}\n\n{spec} on {chip.name}: {filled}\n")
    print("| layer | K -> N | MB | ideal | ratio | single-buffered | busiest | cube/useful | us | base us | share |")
    print("| --- " * 11 + "|")
    cores = chip.vector_cores if workload.form == "decode" else chip.cube_cores
    worst = 0.0
    for label, layer in served_layers():
        counts, ideal = count(ir, layer, workload, chip), workload.ideal_bytes(layer)
        ratio, took, base = counts.num_bytes / ideal, floor(counts, chip), base_floor(layer, workload.num_rows, chip)
        single = counts.single_buffered.total() / counts.read.total()
        cube = f"{counts.cube_macs / workload.useful_macs(layer):.2f}" if counts.cube_macs else "-"
        print(
            f"| {label} | {layer.in_features} -> {'+'.join(map(str, layer.widths))} "
            f"| {counts.num_bytes / 1e6:.2f} | {ideal / 1e6:.2f} | {ratio:.3f} | {single:.0%} "
            f"| {counts.busiest_bytes * cores / counts.num_bytes:.2f} | {cube} "
            f"| {1e6 * took:.1f} | {1e6 * base:.1f} | {took / base:.1%} |"
        )
        worst = max(worst, ratio)
    return worst


def print_goals(worst: float, target: str) -> None:
    chip = CHIPS[target]
    ir = compile_for_ascend(specialize("decode", "npu", "bf16", 1), TARGETS[target]).ir
    layers = fused_linears(LLAMA_7B)
    lora = [floor(count(ir, layer, DECODE, chip), chip) for layer in layers]
    base = [base_floor(layer, DECODE.num_rows, chip) for layer in layers]
    ideal = [DECODE.ideal_bytes(layer) / chip.bandwidth for layer in layers]
    print(f"\n## Goals, {DECODE}\n")
    print(
        f"- {_verdict(worst, MAX_DECODE_BYTES)}: decode moves at most {worst:.3f} of the ideal, goal {MAX_DECODE_BYTES}"
    )
    for name, chosen in (("all linears", slice(0, 4)), ("attention's alone", slice(0, 2))):
        share, least = sum(lora[chosen]) / sum(base), sum(ideal[chosen]) / sum(base)
        print(
            f"- {_verdict(share, MAX_DECODE_TIME)}: {LLAMA_7B.name}, adapters on {name}: {share:.1%} of the base "
            f"layers' floor, goal {MAX_DECODE_TIME:.0%}; the ideal bytes alone take {least:.1%}"
        )


def _verdict(value: float, goal: float) -> str:
    return "met" if value <= goal else "MISSED"


def main(targets: list[str]) -> None:
    for target in targets:
        print(f"\n# {target}: {CHIPS[target]}\n\n{__doc__}")
        ratios = [print_workload(workload, target) for workload in WORKLOADS]
        print_goals(max(ratios[:2]), target)


if __name__ == "__main__":
    main(sys.argv[1:] or list(CHIPS))
