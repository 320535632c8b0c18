"""One rank's part of an adapter, laid out as the device's pages take it; `shard_cut.py` makes it.

For each module the flat tensor holds A `[rank, in]` and then B transposed `[rank, out]`, so a page of 16 ranks is 16
adjacent rows of each. The scale is in B, rounded once from float32. Changes of outputs stay float32.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ray_lora.adapters.peft_weights import OutputChange
from ray_lora.architecture import Architecture

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNPAGED_DTYPES = {**DTYPES, "int64": torch.int64}


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


class ShardRun(NamedTuple):
    """A and B of one module in adjacent layers, all of one rank; views of the flat tensor."""

    projection: str
    first_layer: int
    lora_a: torch.Tensor
    """[num_layers, rank, in_features]"""
    lora_b_t: torch.Tensor
    """[num_layers, rank, out_features], the scale multiplied in."""

    @property
    def num_layers(self) -> int:
        return self.lora_a.shape[0]

    @property
    def rank(self) -> int:
        return self.lora_a.shape[1]


class OutputEntry(NamedTuple):
    """One changed output's place in the flat float32 tensor: the scale from `offset` on, then the shift."""

    layer: int
    projection: str
    out_features: int
    """Of this shard."""
    offset: int

    @property
    def end(self) -> int:
        return self.offset + 2 * self.out_features


class UnpagedEntry(NamedTuple):
    """One tensor that is no page and no vector over a linear layer's outputs; see `unpaged_cut.py`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    """In bytes of the payload."""

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * UNPAGED_DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """All of a shard but its numbers: small, and safe to pickle."""

    version: str
    dtype: str
    """`float32`, `bfloat16` or `float16`."""
    entries: tuple[ShardEntry, ...]
    """In the order the modules run, as are `outputs`."""
    outputs: tuple[OutputEntry, ...] = ()
    unpaged: tuple[UnpagedEntry, ...] = ()

    @property
    def data_bytes(self) -> int:
        return self.entries[-1].end * DTYPES[self.dtype].itemsize if self.entries else 0

    @property
    def outputs_start(self) -> int:
        """Where the changes of outputs begin, in bytes: after A and B."""
        return aligned(self.data_bytes)

    @property
    def outputs_end(self) -> int:
        return self.outputs_start + 4 * (self.outputs[-1].end if self.outputs else 0)

    @property
    def num_bytes(self) -> int:
        """Length of the flat uint8 tensor that goes with this header."""
        if self.unpaged:
            return self.unpaged[-1].end
        return self.outputs_end if self.outputs else self.data_bytes

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps([self.version, self.dtype, self.entries, self.outputs, self.unpaged]).encode()

    @classmethod
    def decode(cls, encoded: bytes) -> "ShardHeader":
        """The header that `encode` was called on."""
        version, dtype, entries, outputs, unpaged = json.loads(encoded)
        return cls(
            version,
            dtype,
            tuple(ShardEntry(*entry) for entry in entries),
            tuple(OutputEntry(*entry) for entry in outputs),
            tuple(UnpagedEntry(name, tuple(shape), *rest) for name, shape, *rest in unpaged),
        )


@dataclass(frozen=True, slots=True, eq=False)
class AdapterShard:
    """What one rank holds of one version of an adapter, in host memory.

    Raises:
        ValueError: the payload is not the one of this header.
    """

    header: ShardHeader
    payload: torch.Tensor
    """Flat uint8, contiguous, on the CPU until it is paged in: all numbers, as they are sent."""

    def __post_init__(self) -> None:
        payload, num_bytes = self.payload, self.header.num_bytes
        if payload.dtype != torch.uint8 or tuple(payload.shape) != (num_bytes,):
            raise ValueError(f"payload is {payload.dtype} {list(payload.shape)}, not uint8 [{num_bytes}]")

    @property
    def version(self) -> str:
        return self.header.version

    @property
    def entries(self) -> tuple[ShardEntry, ...]:
        return self.header.entries

    @property
    def outputs(self) -> tuple[OutputEntry, ...]:
        return self.header.outputs

    @property
    def data(self) -> torch.Tensor:
        """A and B of all modules, flat, in the pool's dtype; a view."""
        return self.payload[: self.header.data_bytes].view(DTYPES[self.header.dtype])

    def lora_a(self, entry: ShardEntry) -> torch.Tensor:
        """A, `[rank, in_features]`; a view."""
        return self.data[entry.offset : entry.b_offset].view(entry.rank, entry.in_features)

    def lora_b_t(self, entry: ShardEntry) -> torch.Tensor:
        """B transposed, `[rank, out_features]`, the scale multiplied in; a view."""
        return self.data[entry.b_offset : entry.end].view(entry.rank, entry.out_features)

    def runs(self) -> list[ShardRun]:
        """All modules, in as few pieces as there can be: most adapters have one for each projection."""
        by_projection: dict[str, list[ShardEntry]] = {}
        for entry in self.entries:
            by_projection.setdefault(entry.projection, []).append(entry)
        return [self._run(run) for entries in by_projection.values() for run in _even_runs(entries)]

    def _run(self, entries: list[ShardEntry]) -> ShardRun:
        first, number = entries[0], len(entries)
        stride = entries[1].offset - first.offset if number > 1 else 0
        data, start = self.data, self.data.storage_offset()
        sizes_a, sizes_b = (number, first.rank, first.in_features), (number, first.rank, first.out_features)
        return ShardRun(
            first.projection,
            first.layer,
            data.as_strided(sizes_a, (stride, first.in_features, 1), start + first.offset),
            data.as_strided(sizes_b, (stride, first.out_features, 1), start + first.b_offset),
        )

    def output_change(self, entry: OutputEntry) -> OutputChange:
        """Scale and shift, each `[out_features]`, float32; views."""
        floats = self.payload[self.header.outputs_start : self.header.outputs_end].view(torch.float32)
        middle = entry.offset + entry.out_features
        return OutputChange(floats[entry.offset : middle], floats[middle : entry.end])

    def unpaged_tensors(self) -> dict[str, torch.Tensor]:
        """By name; views."""
        return {
            entry.name: self.payload[entry.offset : entry.end].view(UNPAGED_DTYPES[entry.dtype]).view(entry.shape)
            for entry in self.header.unpaged
        }

    def digest(self) -> str:
        """See `shard_digest`."""
        return shard_digest(self.header.encode(), self.payload)

    def fused_modules(self, arch: Architecture) -> frozenset[str]:
        """Names of the fused linears that change in at least one layer; the others need no LoRA launch."""
        return _fused({entry.projection for entry in self.entries}, arch)

    def output_modules(self, arch: Architecture) -> frozenset[str]:
        """Names of the fused linears whose outputs change, beyond the delta, in at least one layer."""
        return _fused({entry.projection for entry in self.outputs}, arch)


def _even_runs(entries: list[ShardEntry]) -> Iterator[list[ShardEntry]]:
    """Entries of one projection, cut where a layer is left out, the rank changes or the distance does."""
    run: list[ShardEntry] = []
    for entry in entries:
        is_next = run and entry.layer == run[-1].layer + 1 and entry.rank == run[-1].rank
        if is_next and (len(run) == 1 or entry.offset - run[-1].offset == run[1].offset - run[0].offset):
            run.append(entry)
            continue
        if run:
            yield run
        run = [entry]
    yield run


def shard_digest(header: bytes, payload: torch.Tensor) -> str:
    """SHA-256, in hex, over an encoded header and every byte of the payload: equal digests mean equal shards."""
    digest = hashlib.sha256(b"%d\n" % len(header) + header)
    digest.update(payload.numpy().data)
    return digest.hexdigest()


def aligned(num_bytes: int) -> int:
    """Where a number of any type may lie."""
    return -(-num_bytes // 8) * 8


def _fused(projections: set[str], arch: Architecture) -> frozenset[str]:
    return frozenset(
        fused.name for fused in arch.fused_linears if any(part.name in projections for part in fused.slices)
    )
