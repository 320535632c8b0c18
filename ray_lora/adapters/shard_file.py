"""A shard as a file, so that an adapter that comes up from disk is read in one piece, as its pages take it.

The file is named by the shard's digest, and whoever reads it knows the digest: what was damaged, or was cut by others
in another way, is as good as none.

    8 bytes   length of the header, little-endian
    header    `ShardHeader.encode`
    payload   `AdapterShard.payload`
"""

import os
from pathlib import Path

import torch

from ray_lora.adapters.shard import AdapterShard, ShardHeader, shard_digest

SUFFIX = ".shard"
_LENGTH_BYTES = 8
_PART_BYTES = 1 << 18
"""Read or written at once. A system call keeps its core to the end: for one of 20 MB, a step waits 30 ms."""


def write_shard(directory: Path, shard: AdapterShard) -> str:
    """Write a shard, or nothing if the disk is full; its digest."""
    header = shard.header.encode()
    digest = shard_digest(header, shard.payload)
    path = directory / f"{digest}{SUFFIX}"
    try:
        with path.open("wb") as file:
            file.write(len(header).to_bytes(_LENGTH_BYTES, "little"))
            file.write(header)
            for part in shard.payload.split(_PART_BYTES):
                file.write(part.numpy().data)
    except OSError:
        path.unlink(missing_ok=True)
    return digest


def read_shard(directory: Path, digest: str) -> AdapterShard | None:
    """The shard of this digest; None if there is no such file, or if it holds anything else."""
    try:
        with (directory / f"{digest}{SUFFIX}").open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            num_bytes = os.fstat(file.fileno()).st_size - _LENGTH_BYTES - length
            if num_bytes < 0:
                return None
            header = file.read(length)
            payload = torch.empty(num_bytes, dtype=torch.uint8)
            for part in payload.split(_PART_BYTES):
                file.readinto(part.numpy().data)
    except OSError:
        return None
    if shard_digest(header, payload) != digest:
        return None
    return AdapterShard(ShardHeader.decode(header), payload)
