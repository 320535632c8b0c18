"""Would dense products over the union of the batch's pages beat the segments of `add_lora_`, on a CPU?

Two such ways, each counted by its matrix products alone, without the masking and the additions that it needs too: all
ranks of all adapters for every row, with S masked; and A packed under the base weight, so that one product gives
`x @ W.T` and every S. One layer of the demo model's shapes, rank-16 adapters, float32, pages rotated out of the caches.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from benchmarks.harness import Row, report, seconds
from benchmarks.lora_kernel import DEMO_LAYER, columns, even_segments, pages
from ray_lora.adapter import PAGE_RANK
from ray_lora.backends.cpu_kernels import CPUKernels
from ray_lora.backends.cpu_library import load_cpu_kernels
from ray_lora.backends.cpu_linear import pack_panels

LAYERS = 12
LOADS = ((16, 16), (16, 4), (16, 1), (64, 16), (256, 16))
"""Rows and adapters."""


def microseconds(run: Callable[[int], object]) -> float:
    """Of one layer, the best of some passes over all layers."""

    def every_layer() -> None:
        for layer in range(LAYERS):
            run(layer)

    every_layer()
    return seconds(every_layer, 15) / LAYERS * 1e6


def measure(kernels: CPUKernels, num_rows: int, num_adapters: int) -> tuple[float, float, float]:
    """Microseconds of a layer: segments, dense over the union, A under the base weight."""
    segments = even_segments(num_rows, num_adapters)
    size = kernels.panel_size
    by_segments = dense = under = 0.0
    for in_features, slices in DEMO_LAYER:
        out_features, num_slices = slices[-1], len(slices) - 1
        num_ranks = num_adapters * PAGE_RANK
        x, y = torch.randn(num_rows, in_features), torch.zeros(num_rows, out_features)
        s = torch.randn(num_rows, num_ranks)
        pools = [
            (
                pages(num_adapters, num_slices, in_features, torch.float32),
                columns(num_adapters, out_features, torch.float32),
            )
            for _ in range(LAYERS)
        ]
        by_segments += microseconds(lambda i: kernels.add_lora_(y, x, *pools[i], slices, segments))  # noqa: B023
        all_a = [a.transpose(0, 1).reshape(-1, in_features) for a, _ in pools]
        shrink = microseconds(partial(product, kernels, x, [pack_panels(a, size) for a in all_a], len(all_a[0])))
        expand = 0.0
        for first, last in pairwise(slices):
            parts = [pack_panels(b[:, :, first:last].reshape(num_ranks, -1).T.contiguous(), size) for _, b in pools]
            expand += microseconds(partial(product, kernels, s, parts, last - first))
        base = [torch.randn(out_features, in_features) for _ in range(LAYERS)]
        alone = microseconds(partial(product, kernels, x, [pack_panels(w, size) for w in base], out_features))
        joined = [pack_panels(torch.cat(pair), size) for pair in zip(base, all_a, strict=True)]
        both = microseconds(partial(product, kernels, x, joined, out_features + len(all_a[0])))
        dense += shrink + expand
        under += both - alone + expand
    return by_segments, dense, under


def product(kernels: CPUKernels, x: Tensor, panels: list[Tensor], out_features: int, layer: int) -> Tensor:
    return kernels.linear(x, panels[layer], None, out_features)


def main() -> None:
    kernels = load_cpu_kernels()
    if kernels is None:
        raise SystemExit("the CPU kernels are not built")
    rows = []
    for num_rows, num_adapters in LOADS:
        by_segments, dense, under = measure(kernels, num_rows, num_adapters)
        load = f"{num_rows} rows, {num_adapters} adapters"
        rows += [
            Row(f"{load}: segments", by_segments, "us a layer"),
            Row(f"{load}: dense / segments", dense / by_segments, "x"),
            Row(f"{load}: A under the base weight / segments", under / by_segments, "x"),
        ]
    report("lora_dense", rows)


if __name__ == "__main__":
    main()
