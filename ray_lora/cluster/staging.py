"""How an adapter reaches every rank: one reader, a transfer of its own, and a barrier at which all must agree.

Every rank goes through the same four exchanges whatever fails, so that a failure leaves the group ready for the next
load: the reader's offer, the ranks' readiness, the transfer, and the digests. The last is the barrier: a rank returns
the shard only if every rank holds exactly what was cut for it when the adapter was inspected.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ray_lora.adapter import AdapterManifest, StagingTimes
from ray_lora.adapters.reader import AdapterReader, Shards
from ray_lora.adapters.shard import AdapterShard, ShardHeader
from ray_lora.errors import AdapterStagingError, EngineDeadError, RayLoraError


@dataclass(frozen=True, slots=True)
class Offer:
    """What rank 0 tells the others before it sends anything."""

    headers: tuple[ShardHeader, ...] = ()
    """By rank."""
    error: RayLoraError | None = None


@contextmanager
def reading() -> Iterator[None]:
    """Whatever goes wrong while rank 0 reads an adapter is an error of that load, and of nothing else."""
    try:
        yield
    except RayLoraError:
        raise
    except Exception as error:
        raise AdapterStagingError(f"rank 0 could not read the adapter: {type(error).__name__}: {error}") from None


class AdapterStaging:
    """One rank's side of the protocol. Rank 0 has the `reader`."""

    def __init__(self, rank: int, size: int, group: "dist.ProcessGroup | None", reader: AdapterReader | None) -> None:
        self._rank = rank
        self._size = size
        self._group = group
        self._reader = reader

    def receive(self, manifest: AdapterManifest) -> tuple[AdapterShard, StagingTimes]:
        """This rank's part of an adapter, once all ranks agree, and how long that took.

        Raises:
            RayLoraError: the reader's reason, or AdapterStagingError from any rank; the same on every rank.
            EngineDeadError: a rank is gone or did not answer in time.
        """
        try:
            return self._receive(manifest)
        except RuntimeError as error:
            raise EngineDeadError(
                f"a rank was lost while adapter {manifest.version[:12]} was staged: {error}"
            ) from None

    def _receive(self, manifest: AdapterManifest) -> tuple[AdapterShard, StagingTimes]:
        begin = time.monotonic()
        shards = self._read(manifest) if self._reader is not None else None
        offer = self._broadcast(None if shards is None else _offer(shards))
        if offer.error is not None:
            raise offer.error
        header = offer.headers[self._rank]
        buffer, failure = self._allocate(header)
        self._agree(failure)
        if isinstance(shards, tuple):
            shard, failure = shards[0], None  # the reader knows that it is right
            for other in range(1, self._size):
                dist.send(shards[other].payload, dst=other, group=self._group)
        else:
            assert buffer is not None, "agreed without a buffer"
            dist.recv(buffer, src=0, group=self._group)
            shard = AdapterShard(header, buffer)
            failure = self._verify(shard, manifest.shard_digests[self._rank])
        staged = time.monotonic()
        self._agree(failure)
        return shard, StagingTimes(staged - begin, time.monotonic() - staged)

    def _read(self, manifest: AdapterManifest) -> Shards | RayLoraError:
        assert self._reader is not None
        try:
            with reading():
                return self._reader.read(manifest)
        except RayLoraError as error:
            return error

    def _allocate(self, header: ShardHeader) -> tuple[torch.Tensor | None, str | None]:
        if self._rank == 0:
            return None, None
        try:
            return torch.empty(header.num_bytes, dtype=torch.uint8), None
        except (RuntimeError, MemoryError) as error:
            return None, f"cannot hold {header.num_bytes} bytes: {error}"

    def _verify(self, shard: AdapterShard, expected: str) -> str | None:
        try:
            digest = shard.digest()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None if digest == expected else f"holds {digest[:12]} where {expected[:12]} was sent"

    def _broadcast(self, offer: Offer | None) -> Offer:
        if self._size == 1:
            assert offer is not None
            return offer
        box: list[Offer | None] = [offer]
        dist.broadcast_object_list(box, src=0, group=self._group)
        assert box[0] is not None
        return box[0]

    def _agree(self, failure: str | None) -> None:
        """Meet the other ranks; raise on all of them if one reports a failure."""
        failures: list[str | None] = [failure]
        if self._size > 1:
            failures = [None] * self._size
            dist.all_gather_object(failures, failure, group=self._group)
        reasons = [f"rank {rank} {reason}" for rank, reason in enumerate(failures) if reason is not None]
        if reasons:
            raise AdapterStagingError("the adapter was not loaded: " + "; ".join(reasons))


def _offer(shards: Shards | RayLoraError) -> Offer:
    if isinstance(shards, RayLoraError):
        return Offer(error=shards)
    return Offer(tuple(shard.header for shard in shards))
