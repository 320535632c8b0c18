"""What bounds the CPU LoRA kernel, and how near to the bound is it?

Decode is bound by reading pages, so it is compared with a loop that only reads; prefill by arithmetic, so it is
compared with torch's matmuls of the same products; a launch by what surrounds its arithmetic. Each comparison
alternates its sides in one run and takes each side's 90th percentile of speed: a shared machine only adds delays.
"""

import argparse
import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import RESULTS, Row, report
from ray_lora.backends.cpu_kernels import CPUKernels
from ray_lora.backends.cpu_library import load_cpu_kernels
from ray_lora.ops.lora import Segments

READ_LOOP = """
#include <omp.h>
#include <stddef.h>
float read_all(const float* p, size_t n, int threads) {
  float total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total) schedule(static)
  for (size_t i = 0; i < n; i += 4096) {
    float sum = 0;
    for (size_t j = 0; j < 4096; j++) sum += p[i + j];
    total += sum;
  }
  return total;
}
"""
PAGE_RANK = 16

DEMO_LAYER = ((576, (0, 576, 768, 960)), (576, (0, 576)), (576, (0, 1536, 3072)), (1536, (0, 576)))
"""Inputs and slices of the demo model's qkv, o, gate_up and down."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    kernels = load_cpu_kernels()
    if kernels is None:
        raise SystemExit("the CPU kernels are not built")
    rows = [*decode(kernels), *prefill(kernels), *overhead(kernels)]
    report("lora_kernel", rows, instruction_set=kernels.levels[-1], threads=torch.get_num_threads())
    if options.json:
        shutil.copy(RESULTS / "lora_kernel.json", options.json)


def decode(kernels: CPUKernels) -> list[Row]:
    """16 rows, each with a rank-16 adapter of its own, K = N = 4096, bfloat16 pages; pools rotate past every cache."""
    num_rows, size, num_pools = 16, 4096, 32
    pools = [
        (pages(num_rows, 1, size, torch.bfloat16), columns(num_rows, size, torch.bfloat16)) for _ in range(num_pools)
    ]
    x, y = torch.randn(num_rows, size), torch.randn(num_rows, size)
    segments = even_segments(num_rows, num_rows)
    page_bytes = sum(part.nbytes for part in pools[0])
    row_bytes = x.nbytes + 2 * y.nbytes
    read_all = compiled_read_loop()
    buffer = torch.ones(1 << 26)
    chunk = page_bytes // 4
    rows = []
    for threads in sorted({1, torch.get_num_threads()}):
        with_threads(threads)
        read, launched = list[float](), list[float]()
        for turn in range(8):
            for index, (pool_a, pool_b) in enumerate(pools):
                start = (turn * num_pools + index) * chunk % (buffer.numel() - chunk)
                read.append(page_bytes / timed(read_all, buffer.data_ptr() + 4 * start, chunk, threads))
                launch = (y, x, pool_a, pool_b, (0, size), segments)
                launched.append(page_bytes / timed(kernels.add_lora_, *launch))
        bound, reached = best(read) / 1e9, best(launched) / 1e9
        name = f"decode, {threads} thread{'s' * (threads > 1)}"
        note = (
            f"{reached:.1f} of {bound:.1f} GB/s; {reached * (1 + row_bytes / page_bytes):.1f} with the rows of x and y"
        )
        rows.append(Row(f"{name}: share of read bandwidth", reached / bound, "", 0.7, note=note))
    return rows


def prefill(kernels: CPUKernels) -> list[Row]:
    """1024 rows, 4 adapters of rank 64, K = N = 4096; against matmuls with dense weights, adapter by adapter."""
    num_rows, num_adapters, rank, size = 1024, 4, 64, 4096
    num_pages = rank // PAGE_RANK
    per_adapter = num_rows // num_adapters
    x, y = torch.randn(num_rows, size), torch.randn(num_rows, size)
    segments = even_segments(num_rows, num_adapters, num_pages)
    dense = [(torch.randn(rank, size), torch.randn(size, rank)) for _ in range(num_adapters)]
    packed = [tuple(torch.ops.mkldnn._reorder_linear_weight(weight, per_adapter) for weight in pair) for pair in dense]
    parts = [x[first : first + per_adapter] for first in range(0, num_rows, per_adapter)]

    def torch_matmuls() -> None:
        for part, (down, up) in zip(parts, dense, strict=True):
            torch.nn.functional.linear(torch.nn.functional.linear(part, down), up)

    def onednn_matmuls() -> None:
        for part, pair in zip(parts, packed, strict=True):
            for weight in pair:
                part = torch.ops.mkldnn._linear_pointwise(part, weight, None, "none", [], "")

    operations = 4 * num_rows * rank * size
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        pool_a, pool_b = (make(num_adapters * num_pages, size, dtype) for make in (single_pages, columns))
        sides: dict[str, Callable[[], None]] = {
            "ours": lambda a=pool_a, b=pool_b: kernels.add_lora_(y, x, a, b, (0, size), segments),
            "torch": torch_matmuls,
            "oneDNN": onednn_matmuls,
        }
        for threads in sorted({1, torch.get_num_threads()}):
            with_threads(threads)
            speeds: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(15):
                for name, side in sides.items():
                    speeds[name].append(operations / timed(side) / 1e9)
            rate = {name: best(values) for name, values in speeds.items()}
            name = f"prefill, {str(dtype).removeprefix('torch.')} pages, {threads} thread{'s' * (threads > 1)}"
            for other, bar in (("torch", 0.6), ("oneDNN", None)):
                note = f"{rate['ours']:.0f} of {rate[other]:.0f} GFLOP/s"
                rows.append(Row(f"{name}: share of {other}'s rate", rate["ours"] / rate[other], "", bar, note=note))
    return rows


def overhead(kernels: CPUKernels) -> list[Row]:
    """A launch with next to no arithmetic; and all launches of one decode step of the demo model."""
    with_threads(DEFAULT_THREADS)
    x, y = torch.randn(1, PAGE_RANK), torch.randn(1, PAGE_RANK)
    pool_a, pool_b = single_pages(1, PAGE_RANK, torch.float32), columns(1, PAGE_RANK, torch.float32)
    segments = even_segments(1, 1)

    launches: list[tuple[Any, ...]] = [(y, x, pool_a, pool_b, (0, PAGE_RANK), segments)] * 1000
    tiny = min(timed(launch_all, kernels, launches) for _ in range(30)) / 1000 * 1e6
    rows = [Row("overhead of a launch", tiny, "us", 3.0, at_least=False, note="one row, one 16 x 16 page")]
    for num_rows in (1, 16):
        step = []
        for _ in range(30):
            for in_features, slices in DEMO_LAYER:
                a = pages(num_rows, len(slices) - 1, in_features, torch.bfloat16)
                step.append((a, columns(num_rows, slices[-1], torch.bfloat16), slices))
        x, y = torch.randn(num_rows, 1536), torch.randn(num_rows, 3072)
        segments = even_segments(num_rows, num_rows)

        launches = [(y[:, : slices[-1]], x[:, : a.shape[-1]], a, b, slices, segments) for a, b, slices in step]
        cost = min(timed(launch_all, kernels, launches) for _ in range(50))
        read = sum(a.nbytes + b.nbytes for a, b, _ in step)
        note = f"{cost / len(step) * 1e6:.1f} us a launch; {read / cost / 1e9:.1f} GB/s of pages"
        rows.append(Row(f"demo model, one step, {num_rows} rank-16 adapters", cost * 1e3, "ms", note=note))
    return rows


def pages(num_pages: int, num_slices: int, in_features: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(num_pages, num_slices, PAGE_RANK, in_features) / in_features**0.5).to(dtype)


def single_pages(num_pages: int, in_features: int, dtype: torch.dtype) -> Tensor:
    return pages(num_pages, 1, in_features, dtype)


def columns(num_pages: int, out_features: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_pages, PAGE_RANK, out_features).to(dtype)


def even_segments(num_rows: int, num_adapters: int, num_pages: int = 1) -> Segments:
    """Adjacent rows in equal shares to adapters of `num_pages` pages each."""

    def count_to(last: int, step: int = 1) -> Tensor:
        return torch.arange(0, last, step, dtype=torch.int32)

    total = num_adapters * num_pages
    return Segments(
        count_to(num_rows), count_to(num_rows + 1, num_rows // num_adapters),
        count_to(total), count_to(total + 1, num_pages),
    )  # fmt: skip


def compiled_read_loop() -> Callable[[int, int, int], float]:
    """The plain loop that decode is compared with, built for exactly this processor."""
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "read.c"), Path(folder, "read.so")
        source.write_text(READ_LOOP)
        flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC", "-c"]
        subprocess.run(["gcc", *flags, source, "-o", source.with_suffix(".o")], check=True)
        # Linked without an OpenMP runtime: torch's serves.
        subprocess.run(["gcc", "-shared", source.with_suffix(".o"), "-o", built], check=True)
        function = ctypes.CDLL(str(built)).read_all
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_float
    return function


DEFAULT_THREADS = torch.get_num_threads()


def with_threads(threads: int) -> None:
    torch.set_num_threads(threads)


def launch_all(kernels: CPUKernels, launches: list[tuple[Any, ...]]) -> None:
    for launch in launches:
        kernels.add_lora_(*launch)


def timed(function: Callable[..., object], *arguments: object) -> float:
    begin = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin


def best(speeds: list[float]) -> float:
    """The 90th percentile."""
    return sorted(speeds)[len(speeds) * 9 // 10]


if __name__ == "__main__":
    main()
