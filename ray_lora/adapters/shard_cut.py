"""From a whole adapter to one rank's part of it.

Column-parallel projections: A whole, B cut with the outputs. Row-parallel: A cut with the inputs, B whole. Changes of
outputs are cut with the outputs. Ranks of a row-parallel module add up their parts, so all of them scale theirs, and
rank 0 alone shifts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from ray_lora.adapters.finite import all_finite
from ray_lora.adapters.peft_config import reject
from ray_lora.adapters.peft_targets import NO_LAYER
from ray_lora.adapters.peft_weights import AdapterWeights, OutputChange
from ray_lora.adapters.shard import AdapterShard, OutputEntry, ShardEntry, ShardHeader, UnpagedEntry, aligned
from ray_lora.adapters.unpaged_cut import cut_unpaged
from ray_lora.architecture import Architecture


def shard_weights(
    weights: AdapterWeights, arch: Architecture, version: str, rank: int, tp_size: int, dtype: torch.dtype
) -> AdapterShard:
    """What tensor-parallel `rank` of `tp_size` holds of an adapter, in `dtype`.

    Raises:
        AdapterRejectedError: a value is beyond the range of `dtype`; `param` is its module.
    """
    modules = _cut_modules(weights, arch, rank, tp_size)
    changes = _cut_outputs(weights, arch, rank, tp_size)
    unpaged = cut_unpaged(weights, arch, rank, tp_size, dtype)
    header = ShardHeader(version, _name(dtype), tuple(modules), tuple(changes))
    header = replace(header, unpaged=tuple(_place(unpaged, header.num_bytes)))
    shard = AdapterShard(header, torch.zeros(header.num_bytes, dtype=torch.uint8))
    for entry, (lora_a, lora_b) in modules.items():
        shard.lora_a(entry).copy_(lora_a)
        shard.lora_b_t(entry).copy_(lora_b.T)
    if not all_finite(shard.data):
        _reject_range(shard, dtype)
    for output, change in changes.items():
        for target, source in zip(shard.output_change(output), change, strict=True):
            target.copy_(source)
    for name, target in shard.unpaged_tensors().items():
        target.copy_(unpaged[name])
    return shard


def _cut_modules(
    weights: AdapterWeights, arch: Architecture, rank: int, tp_size: int
) -> dict[ShardEntry, tuple[Tensor, Tensor]]:
    """A and B of every module, views, and where they go."""
    projections = {projection.name: projection for projection in arch.projections}
    cuts = {name: projection.shard(rank, tp_size) for name, projection in projections.items()}
    cut: dict[ShardEntry, tuple[Tensor, Tensor]] = {}
    offset = 0
    for (layer, name), weight in weights.modules.items():
        lora_a, lora_b = weight.lora_a, weight.lora_b
        if projections[name].style == "column":
            lora_b = lora_b[cuts[name]]
        else:
            lora_a = lora_a[:, cuts[name]]
        entry = ShardEntry(layer, name, weight.rank, lora_a.shape[1], lora_b.shape[0], offset)
        cut[entry] = lora_a, lora_b
        offset = entry.end
    return cut


def _cut_outputs(
    weights: AdapterWeights, arch: Architecture, rank: int, tp_size: int
) -> dict[OutputEntry, OutputChange]:
    """Every change of outputs of a layer, and where it goes."""
    projections = {projection.name: projection for projection in arch.projections}
    cut: dict[OutputEntry, OutputChange] = {}
    offset = 0
    for (layer, name), (scale, shift) in weights.outputs.items():
        if layer == NO_LAYER:
            continue
        if projections[name].style == "column":
            part = projections[name].shard(rank, tp_size)
            scale, shift = scale[part], shift[part]
        elif rank != 0:
            shift = torch.zeros_like(shift)
        entry = OutputEntry(layer, name, scale.shape[0], offset)
        cut[entry] = OutputChange(scale, shift)
        offset = entry.end
    return cut


def _reject_range(shard: AdapterShard, dtype: torch.dtype) -> NoReturn:
    entry = next(entry for entry in shard.entries if not all_finite(shard.data[entry.offset : entry.end]))
    module = f"model.layers.{entry.layer}.{entry.projection}"
    reject(module, f"{module} has values beyond the range of {dtype}; set lora_dtype to bfloat16 or float32")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _place(tensors: Mapping[str, Tensor], end: int) -> Iterator[UnpagedEntry]:
    """One after another, from `end` on."""
    for name, tensor in tensors.items():
        entry = UnpagedEntry(name, tuple(tensor.shape), _name(tensor.dtype), aligned(end))
        yield entry
        end = entry.end
