"""One rank's part of an adapter, cut and laid out as the device's pages take it.

Column-parallel projections: A whole, B cut with the outputs. Row-parallel: A cut with the inputs, B whole. For each
module the flat tensor holds A `[rank, in]` and then B transposed `[rank, out]`, so a page of 16 ranks is 16 adjacent
rows of each. The scale is in B, rounded once from float32.
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ray_lora.adapters.peft_config import reject
from ray_lora.adapters.peft_weights import AdapterWeights
from ray_lora.architecture import Architecture

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ShardEntry(NamedTuple):
    """One module's place in the flat tensor; sizes and offsets count elements."""

    layer: int
    projection: str
    """E.g. `self_attn.q_proj`."""
    rank: int
    in_features: int
    """Of this shard, as is `out_features`."""
    out_features: int
    offset: int
    """Where A begins; B transposed follows it."""

    @property
    def b_offset(self) -> int:
        return self.offset + self.rank * self.in_features

    @property
    def end(self) -> int:
        return self.b_offset + self.rank * self.out_features


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """All of a shard but its numbers: small, and safe to pickle."""

    version: str
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    entries: tuple[ShardEntry, ...]

    @property
    def num_elements(self) -> int:
        return self.entries[-1].end

    @property
    def num_bytes(self) -> int:
        """Length of the flat uint8 tensor that goes with this header."""
        return self.num_elements * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True, eq=False)
class AdapterShard:
    """What one rank holds of one version of an adapter, in host memory."""

    version: str
    entries: tuple[ShardEntry, ...]
    """In the order the modules run."""
    data: torch.Tensor
    """Flat, contiguous, on the CPU, in the pool's dtype."""

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes

    @property
    def payload(self) -> torch.Tensor:
        """`data` as flat uint8, for sending; a view."""
        return self.data.view(torch.uint8)

    def header(self) -> ShardHeader:
        return ShardHeader(self.version, str(self.data.dtype).removeprefix("torch."), self.entries)

    @classmethod
    def from_header(cls, header: ShardHeader, payload: torch.Tensor) -> "AdapterShard":
        """Put a shard together from what was sent; it keeps `payload` (flat uint8) as its memory.

        Raises:
            ValueError: the payload is not the one of this header.
        """
        if payload.dtype != torch.uint8 or tuple(payload.shape) != (header.num_bytes,):
            raise ValueError(f"payload is {payload.dtype} {list(payload.shape)}, not uint8 [{header.num_bytes}]")
        return cls(header.version, header.entries, payload.view(DTYPES[header.dtype]))

    def lora_a(self, entry: ShardEntry) -> torch.Tensor:
        """A, `[rank, in_features]`; a view."""
        return self.data[entry.offset : entry.b_offset].view(entry.rank, entry.in_features)

    def lora_b_t(self, entry: ShardEntry) -> torch.Tensor:
        """B transposed, `[rank, out_features]`, the scale multiplied in; a view."""
        return self.data[entry.b_offset : entry.end].view(entry.rank, entry.out_features)

    def digest(self) -> str:
        """SHA-256, in hex, over the header and every byte: equal digests mean equal shards."""
        digest = hashlib.sha256(repr(self.header()).encode())
        digest.update(self.payload.numpy().data)
        return digest.hexdigest()

    def fused_modules(self, arch: Architecture) -> frozenset[str]:
        """Names of the fused linears that change in at least one layer; the others need no LoRA launch."""
        touched = {entry.projection for entry in self.entries}
        return frozenset(
            fused.name for fused in arch.fused_linears if any(part.name in touched for part in fused.slices)
        )


def shard_weights(
    weights: AdapterWeights, arch: Architecture, version: str, rank: int, tp_size: int, dtype: torch.dtype
) -> AdapterShard:
    """Cut an adapter for tensor-parallel `rank` of `tp_size` and convert it to `dtype`.

    Raises:
        AdapterRejectedError: a value is beyond the range of `dtype`; `param` is its module.
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
    shard = AdapterShard(version, tuple(entries), torch.empty(offset, dtype=dtype))
    for entry, (lora_a, lora_b) in zip(entries, parts, strict=True):
        shard.lora_a(entry).copy_(lora_a)
        shard.lora_b_t(entry).copy_(lora_b.T)
        if not torch.isfinite(shard.data[entry.offset : entry.end]).all():
            module = f"model.layers.{entry.layer}.{entry.projection}"
            reject(module, f"{module} has values beyond the range of {dtype}; set lora_dtype to bfloat16 or float32")
    return shard
