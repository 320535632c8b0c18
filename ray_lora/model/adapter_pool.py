"""The device's adapter pages, 16 ranks each, a slot of vectors for each adapter, and what few adapters have besides.

Holds tensors, decides nothing; `AdapterManager` hands out the ids.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ray_lora.adapter import PAGE_RANK
from ray_lora.adapters.shard import AdapterShard, ShardRun
from ray_lora.architecture import Architecture, Projection
from ray_lora.model.unpaged_part import UnpagedPart
from ray_lora.step import AdapterPlan


@dataclass(frozen=True, slots=True)
class FusedPages:
    """The pages and slots of one fused linear, for all layers of this rank."""

    a: Tensor
    """[num_layers, num_pages, num_slices, 16, in_features]"""
    b: Tensor
    """[num_layers, num_pages, 16, out_features], the scale folded in"""
    slices: tuple[int, ...]
    """Column offsets of the slices in `out_features`, from 0 to the end."""
    scale: Tensor
    shift: Tensor
    """[num_layers, num_slots, out_features] float32; a slot holds nothing until an adapter changes this output."""


class AdapterPool:
    """Pages and slots of every fused linear, allocated once; ranks past an adapter's own are zero.

    Only `unpaged`, of the adapters that change the embedding, the head or a norm, takes memory as they come.
    """

    def __init__(
        self,
        arch: Architecture,
        rank: int,
        tp_size: int,
        num_pages: int,
        num_slots: int,
        dtype: torch.dtype,
        served_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._served_dtype, self._device = served_dtype, device
        self.fused: dict[str, FusedPages] = {}
        self.unpaged: dict[str, UnpagedPart] = {}
        """By version."""
        self._unpaged_slots: dict[str, int] = {}
        """The slots of these versions."""
        self._places: dict[str, tuple[str, int]] = {}
        for fused in arch.fused_linears:
            offsets = [0]
            for index, projection in enumerate(fused.slices):
                in_features, out_features = _local_sizes(projection, rank, tp_size)
                offsets.append(offsets[-1] + out_features)
                self._places[projection.name] = (fused.name, index)
            shape_a = (arch.num_layers, num_pages, len(fused.slices), PAGE_RANK, in_features)
            shape_b = (arch.num_layers, num_pages, PAGE_RANK, offsets[-1])
            shape_outputs = (arch.num_layers, num_slots, offsets[-1])
            self.fused[fused.name] = FusedPages(
                torch.zeros(shape_a, dtype=dtype, device=device),
                torch.zeros(shape_b, dtype=dtype, device=device),
                tuple(offsets),
                torch.empty(shape_outputs, device=device),
                torch.empty(shape_outputs, device=device),
            )

    def write(self, adapter: AdapterPlan, shard: AdapterShard) -> None:
        """Put an adapter into its pages and its slot; whatever they held before is gone.

        It crosses to the device in one piece. See `AdapterCopies` for when.
        """
        for version, slot in list(self._unpaged_slots.items()):
            if slot == adapter.slot:
                self.forget(version)
        if shard.header.unpaged:
            self.unpaged[adapter.version] = UnpagedPart.of(shard, self._served_dtype, self._device)
            self._unpaged_slots[adapter.version] = adapter.slot
        shard = replace(shard, payload=shard.payload.to(self._device, non_blocking=True))
        self._write_outputs(adapter.slot, shard)
        pages = adapter.pages
        runs = shard.runs()
        for page in pages[self._num_filled(runs) :]:
            for fused in self.fused.values():
                fused.a[:, page].zero_()
                fused.b[:, page].zero_()
        for run in runs:
            name, index = self._places[run.projection]
            fused, layers = self.fused[name], slice(run.first_layer, run.first_layer + run.num_layers)
            columns = slice(fused.slices[index], fused.slices[index + 1])
            for page, first in zip(pages, range(0, run.rank, PAGE_RANK), strict=False):
                num_ranks = min(PAGE_RANK, run.rank - first)
                fused.a[layers, page, index, :num_ranks] = run.lora_a[:, first : first + num_ranks]
                fused.b[layers, page, :num_ranks, columns] = run.lora_b_t[:, first : first + num_ranks]

    def forget(self, version: str) -> None:
        """Free what an adapter has outside its pages and its slot."""
        self.unpaged.pop(version, None)
        self._unpaged_slots.pop(version, None)

    def _num_filled(self, runs: list[ShardRun]) -> int:
        """How many of an adapter's pages it fills wholly, in every module of every layer."""
        num_layers = next(iter(self.fused.values())).a.shape[0]
        if sum(run.num_layers for run in runs) < num_layers * len(self._places):
            return 0
        return min(run.rank for run in runs) // PAGE_RANK

    def _write_outputs(self, slot: int, shard: AdapterShard) -> None:
        for name in {self._places[entry.projection][0] for entry in shard.outputs}:
            self.fused[name].scale[:, slot].fill_(1)
            self.fused[name].shift[:, slot].zero_()
        for entry in shard.outputs:
            name, index = self._places[entry.projection]
            fused, change = self.fused[name], shard.output_change(entry)
            columns = slice(fused.slices[index], fused.slices[index + 1])
            fused.scale[entry.layer, slot, columns] = change.scale
            fused.shift[entry.layer, slot, columns] = change.shift


def page_bytes(arch: Architecture, tp_size: int, dtype: torch.dtype) -> int:
    """Size of one page over all layers of one rank; ranks do not differ."""
    sizes = [_local_sizes(projection, 0, tp_size) for fused in arch.fused_linears for projection in fused.slices]
    return arch.num_layers * PAGE_RANK * sum(map(sum, sizes)) * dtype.itemsize


def _local_sizes(projection: Projection, rank: int, tp_size: int) -> tuple[int, int]:
    """Inputs and outputs of this rank's part."""
    part = projection.shard(rank, tp_size)
    width = part.stop - part.start
    if projection.style == "column":
        return projection.in_features, width
    return width, projection.out_features
