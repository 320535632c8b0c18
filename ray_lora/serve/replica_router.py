"""Which replica a call goes to."""

import asyncio
import random
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any, TypedDict, cast

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ray_lora.request import GenerateRequest
from ray_lora.serve.replica_score import Candidate, Place, cost

MAX_HOMES = 1 << 12
MAX_PREFIXES = 1 << 14
FOR_ONE_REPLICA = ("outbox", "adapter_files")
"""Methods whose first argument is the id of the replica that is called."""
PREFIX_LEN = 32
"""Tokens at the start of a prompt by which prompts are taken for alike; a shorter prompt is computed anywhere."""


class RoutingStats(TypedDict, total=False):
    """What a replica tells of itself, about once a second; nothing at first."""

    max_num_seqs: int
    kv_cache_usage: float
    device: list[str]
    """Names of adapters."""
    host: list[str]
    loading: list[str]


class ReplicaRouter(RequestRouter):
    """A request goes where it costs least, see `replica_score`, and to no replica that the ingress knows to be dead.
    Some other calls name their replica.

    Where an adapter goes is remembered from its first request on, so that a burst for one that is nowhere yet is loaded
    once, whatever the replicas have told so far.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._homes: OrderedDict[str, ReplicaID] = OrderedDict()
        self._prefixes: OrderedDict[int, ReplicaID] = OrderedDict()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each, the best first. Without any, Serve asks again, up to twice a second."""
        await asyncio.sleep(0)  # who was given a replica a moment ago is counted there before the next one chooses
        args: Sequence[Any] = () if pending_request is None else pending_request.args
        if pending_request is not None and pending_request.metadata.call_method in FOR_ONE_REPLICA:
            named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == args[0]]
            return [named or candidate_replicas[:1]]  # another one has nothing to tell, and says so
        request = args[0] if args and isinstance(args[0], GenerateRequest) else None
        if request is None:
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        dead = args[3]
        alive = [replica for replica in candidate_replicas if replica.replica_id.unique_id not in dead]
        return [[replica] for replica in self._ranked(alive, request)] if alive else []

    def _ranked(self, replicas: list[RunningReplica], request: GenerateRequest) -> list[RunningReplica]:
        home = None if request.adapter is None else self._homes.get(request.adapter)
        if home not in {replica.replica_id for replica in replicas}:
            home = None
        places = {replica.replica_id: _place(replica, request.adapter) for replica in replicas}
        if home is not None and places[home] == "disk":
            places[home] = "loading"  # whatever it has told so far: it was sent there
        is_new = home is None and set(places.values()) == {"disk"}
        num_homes = Counter(self._homes.values()) if is_new else Counter()
        key = _prefix_key(request)
        prefix = None if key is None else self._prefixes.get(key)

        def candidate(replica: RunningReplica) -> Candidate:
            stats = cast(RoutingStats, replica.routing_stats)
            own = replica.replica_id
            num_ongoing = self.replica_queue_len_cache.get(own) or 0
            return Candidate(
                load=num_ongoing / stats.get("max_num_seqs", 64),
                kv_cache_usage=stats.get("kv_cache_usage", 0.0),
                place=places[own],
                is_away=home is not None and home != own,
                share_of_homes=num_homes[own] / max(1, num_homes.total()),
                lacks_prefix=prefix is not None and prefix != own,
            )

        shuffled = random.sample(replicas, len(replicas))
        ranked = sorted(shuffled, key=lambda replica: cost(candidate(replica)))
        best = ranked[0].replica_id
        if key is not None:
            _remember(self._prefixes, key, best, MAX_PREFIXES)
        if request.adapter is not None:
            _remember(self._homes, request.adapter, home or best, MAX_HOMES)
        return ranked


def _place(replica: RunningReplica, adapter: str | None) -> Place | None:
    if adapter is None:
        return None
    places: tuple[Place, ...] = ("device", "host", "loading")
    return next((place for place in places if adapter in replica.routing_stats.get(place, ())), "disk")


def _prefix_key(request: GenerateRequest) -> int | None:
    """Equal for requests that may share cached blocks."""
    if len(request.prompt) < PREFIX_LEN:
        return None
    return hash((request.adapter, request.key_name, request.cache_salt, tuple(request.prompt[:PREFIX_LEN])))


def _remember(memory: "OrderedDict[Any, ReplicaID]", key: Any, replica: ReplicaID, size: int) -> None:
    memory[key] = replica
    memory.move_to_end(key)
    if len(memory) > size:
        memory.popitem(last=False)
