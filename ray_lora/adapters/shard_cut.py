"""From a whole adapter to one rank's part of it.

Column-parallel projections: A whole, B cut with the outputs. Row-parallel: A cut with the inputs, B whole. Changes of
outputs are cut with the outputs. Ranks of a row-parallel module add up their parts, so all of them scale theirs, and
rank 0 alone shifts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from ray_lora.adapters.peft_config import reject
from ray_lora.adapters.peft_targets import NO_LAYER
from ray_lora.adapters.peft_weights import AdapterWeights, OutputChange
from ray_lora.adapters.shard import AdapterShard, OutputEntry, ShardEntry, ShardHeader, UnpagedEntry, aligned
from ray_lora.adapters.unpaged_cut import cut_unpaged
from ray_lora.architecture import Architecture


@dataclass(frozen=True, slots=True, eq=False)
class ShardCut:
    """A rank's part before it is written into one buffer: where everything goes, and what."""

    header: ShardHeader
    parts: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    """Views of A and B, as `header.entries`."""
    changes: tuple[OutputChange, ...]
    """As `header.outputs`."""
    unpaged: Mapping[str, torch.Tensor]

    def fill(self, dtype: torch.dtype) -> AdapterShard:
        """Write it, converted to `dtype`.

        Raises:
            AdapterRejectedError: a value is beyond the range of `dtype`; `param` is its module.
        """
        shard = AdapterShard(self.header, torch.zeros(self.header.num_bytes, dtype=torch.uint8))
        for entry, (lora_a, lora_b) in zip(shard.entries, self.parts, strict=True):
            shard.lora_a(entry).copy_(lora_a)
            shard.lora_b_t(entry).copy_(lora_b.T)
            if not torch.isfinite(shard.data[entry.offset : entry.end]).all():
                module = f"model.layers.{entry.layer}.{entry.projection}"
                reject(
                    module, f"{module} has values beyond the range of {dtype}; set lora_dtype to bfloat16 or float32"
                )
        for output, change in zip(shard.outputs, self.changes, strict=True):
            for target, source in zip(shard.output_change(output), change, strict=True):
                target.copy_(source)
        for name, target in shard.unpaged_tensors().items():
            target.copy_(self.unpaged[name])
        return shard


def cut_shard(
    weights: AdapterWeights, arch: Architecture, version: str, rank: int, tp_size: int, dtype: torch.dtype
) -> ShardCut:
    """Cut an adapter for tensor-parallel `rank` of `tp_size`, to be held in `dtype`; copies only what is not paged.

    Raises:
        AdapterRejectedError: a value that is not paged is beyond the range of `dtype`; `param` is its module.
    """
    cuts = {projection.name: projection.shard(rank, tp_size) for projection in arch.projections}
    styles = {projection.name: projection.style for projection in arch.projections}
    parts, entries, offset = [], [], 0
    for (layer, projection), weight in weights.modules.items():
        lora_a, lora_b = weight.lora_a, weight.lora_b
        if styles[projection] == "column":
            lora_b = lora_b[cuts[projection]]
        else:
            lora_a = lora_a[:, cuts[projection]]
        entries.append(ShardEntry(layer, projection, weight.rank, lora_a.shape[1], lora_b.shape[0], offset))
        parts.append((lora_a, lora_b))
        offset = entries[-1].end
    outputs: list[OutputEntry] = []
    changes: list[OutputChange] = []
    for (layer, projection), (scale, shift) in weights.outputs.items():
        if layer == NO_LAYER:
            continue
        if styles[projection] == "column":
            scale, shift = scale[cuts[projection]], shift[cuts[projection]]
        elif rank != 0:
            shift = torch.zeros_like(shift)
        outputs.append(OutputEntry(layer, projection, scale.shape[0], outputs[-1].end if outputs else 0))
        changes.append(OutputChange(scale, shift))
    header = ShardHeader(version, _name(dtype), tuple(entries), tuple(outputs))
    unpaged = cut_unpaged(weights, arch, rank, tp_size, dtype)
    header = replace(header, unpaged=tuple(_place(unpaged, header.num_bytes)))
    return ShardCut(header, tuple(parts), tuple(changes), unpaged)


def shard_weights(
    weights: AdapterWeights, arch: Architecture, version: str, rank: int, tp_size: int, dtype: torch.dtype
) -> AdapterShard:
    """What tensor-parallel `rank` of `tp_size` holds of an adapter, in `dtype`.

    Raises:
        AdapterRejectedError: a value is beyond the range of `dtype`; `param` is its module.
    """
    return cut_shard(weights, arch, version, rank, tp_size, dtype).fill(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _place(tensors: Mapping[str, torch.Tensor], end: int) -> Iterator[UnpagedEntry]:
    """One after another, from `end` on."""
    for name, tensor in tensors.items():
        entry = UnpagedEntry(name, tuple(tensor.shape), _name(tensor.dtype), aligned(end))
        yield entry
        end = entry.end
