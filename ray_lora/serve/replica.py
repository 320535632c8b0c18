"""The deployment that owns an engine: one replica, with all its ranks."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

import ray
from ray import serve

from ray_lora.adapter import AdapterFiles, AdapterInfo, AdapterManifest, AdapterValidation, Tier, TierUse
from ray_lora.config import EngineConfig
from ray_lora.engine.adapter_resolver import AdapterResolver
from ray_lora.errors import EngineDeadError, RayLoraError
from ray_lora.request import GenerateChunk, GenerateRequest
from ray_lora.serve.adapter_entry import AdapterEntry, Revision, Snapshot
from ray_lora.serve.adapter_follower import AdapterEngine, AdapterFollower
from ray_lora.serve.outbox import Outbox
from ray_lora.serve.ray_metrics import RayMetrics
from ray_lora.serve.replica_calls import told
from ray_lora.serve.replica_router import RoutingStats
from ray_lora.serve.scaling_policy import load
from ray_lora.stats import EngineStats
from ray_lora.step import ModelInfo

DIRECTORY_NAME = "AdapterDirectory"
FORGET_S = 60.0
"""An outbox that nobody has come for is dropped after this; its ingress is gone."""
LAST_WORDS_S = 0.5
"""Time for a replica that ends to tell its callers why."""


class Engine(AdapterEngine, Protocol):
    """What a replica needs; `engine/async_engine.py` has the real one."""

    info: ModelInfo

    @property
    def dead(self) -> RayLoraError | None: ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]: ...
    async def inspect_adapter(self, path: str) -> AdapterManifest: ...
    def abandon_adapter(self, version: str) -> None: ...
    async def adapter_files(self, version: str) -> AdapterFiles | None: ...
    async def validate_adapter(self, path: str, name: str | None = None) -> AdapterValidation: ...
    def adapter_tiers(self) -> dict[Tier, TierUse]: ...
    def stats(self) -> EngineStats: ...
    async def check_health(self) -> None: ...
    async def shutdown(self) -> None: ...


EngineStarter = Callable[[EngineConfig, Sequence[AdapterResolver]], Awaitable[Engine]]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first answer to `submit`: who took the request, and which of its streams to the ingress will tell of it."""

    replica_id: str
    epoch: int


class LLMReplica:
    """Runs the engine; the ingress talks to it through `ReplicaClient`."""

    async def __init__(self, config: EngineConfig, start: EngineStarter | None = None) -> None:  # type: ignore[misc]
        _set_openmp(config)
        if start is None:
            from ray_lora.serve.start import start_engine

            start = start_engine
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        self._config = config
        self._is_leaving = False
        self._outboxes: dict[str, Outbox] = {}
        self._under_way: Counter[str | None] = Counter()
        """Requests by adapter."""
        directory, peers = (
            serve.get_deployment_handle(name, context.app_name) for name in (DIRECTORY_NAME, context.deployment)
        )
        self._follower = AdapterFollower(config, self._id, directory, peers)
        engine = await start(config, [self._follower])
        try:
            await self._follower.begin(engine)
        except BaseException:
            await engine.shutdown()
            raise
        self._engine = engine
        self._metrics = RayMetrics(config.base_model_name, engine.stats())
        self._publishing = asyncio.create_task(self._metrics.publish_for_ever(engine.stats))

    async def submit(
        self, request: GenerateRequest, ingress_id: str, key: int, dead: Sequence[str] = ()
    ) -> AsyncGenerator[Accepted | bytes, None]:
        """Run a request; its chunks, end or error go to the ingress's outbox. Cancelling this cancels the request.

        `dead` is for the router.

        If nobody has opened the outbox, they come here in one batch: Serve routes no new call to a replica that stops,
        also not that for the outbox of a request that it has just accepted.
        """
        outbox = self._outboxes.setdefault(ingress_id, Outbox())
        outbox.num_requests += 1
        self._under_way[request.adapter] += 1
        try:
            yield Accepted(self._id, outbox.epoch)
            try:
                if request.adapter is not None:
                    await self._follower.ask_about(request.adapter)
                async with aclosing(self._engine.generate(request)) as chunks:
                    async for chunk in chunks:
                        outbox.put(key, chunk)
                        if chunk.metrics is not None:
                            self._metrics.observe(chunk.metrics)
                outbox.put(key, None)
            except RayLoraError as error:
                outbox.put(key, error)
                self._leave_if_dead()
            if not outbox.is_open:
                yield outbox.take(key)
        finally:
            self._under_way -= Counter([request.adapter])  # which leaves no name behind that has none
            outbox.num_requests -= 1
            asyncio.get_running_loop().call_later(FORGET_S, self._forget, ingress_id, outbox)

    async def outbox(self, replica_id: str, ingress_id: str) -> AsyncGenerator[bytes, None]:
        """The stream of an ingress's batches. `replica_id` is for the router; another replica has nothing to tell."""
        if replica_id == self._id and ingress_id in self._outboxes:
            async with aclosing(self._outboxes[ingress_id].batches()) as batches:
                async for batch in batches:
                    yield batch

    async def inspect_adapter(self, path: str) -> tuple[str, AdapterManifest] | RayLoraError:
        """Fetch and check an adapter, and say who has done it."""
        found = await told(self._engine.inspect_adapter(path))
        return found if isinstance(found, RayLoraError) else (self._id, found)

    async def prepare_adapter(self, entry: AdapterEntry, path: str, reader: str) -> RayLoraError | None:
        """The directory's order; see `AdapterFollower.prepare`."""
        return await told(self._follower.prepare(entry, path, reader))

    async def holds_files(self, version: str) -> str | None:
        """This replica's id, if it has a content in its store."""
        try:
            return self._id if await self._engine.has_adapter_files(version) else None
        except RayLoraError:
            return None

    async def adapter_files(self, replica_id: str, version: str) -> AdapterFiles | RayLoraError | None:
        """A content, for another replica. `replica_id` is for the router; another one is not asked."""
        return await told(self._engine.adapter_files(version)) if replica_id == self._id else None

    async def abandon_adapter(self, version: str) -> None:
        """What was prepared is not wanted."""
        self._engine.abandon_adapter(version)

    async def take_entry(
        self, name: str, entry: AdapterEntry | None, before: Revision, after: Revision
    ) -> AdapterInfo | RayLoraError | None:
        """The directory's order; see `AdapterFollower.take`."""
        return await told(self._follower.take(name, entry, before, after))

    async def held_adapters(self) -> Snapshot | None:
        return self._follower.held()

    async def validate_adapter(self, path: str, name: str | None) -> AdapterValidation | RayLoraError:
        return await told(self._engine.validate_adapter(path, name))

    async def list_adapters(self) -> list[AdapterInfo]:
        return self._engine.list_adapters()

    async def adapter_tiers(self) -> dict[Tier, TierUse]:
        return self._engine.adapter_tiers()

    async def stats(self) -> tuple[str, EngineStats]:
        """With the replica's id."""
        return self._id, self._engine.stats()

    async def model_info(self) -> ModelInfo:
        return self._engine.info

    async def record_routing_stats(self) -> RoutingStats:
        """Called by Serve, which tells every router."""
        tiers: dict[Tier, list[str]] = {"device": [], "host": [], "disk": []}
        for info in self._engine.list_adapters():
            tiers[info.tier].append(info.name)
        return {
            "max_num_seqs": self._config.max_num_seqs,
            "kv_cache_usage": round(self._engine.stats().kv_cache_usage, 2),
            "device": tiers["device"],
            "host": tiers["host"],
            "loading": [name for name in tiers["disk"] if self._under_way[name] > 0],
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve, for `scaling_policy`."""
        usage = self._engine.stats().kv_cache_usage
        return {"load": load(self._under_way.total(), self._config.max_num_seqs, usage)}

    async def check_health(self) -> None:
        """Called by Serve, which rebuilds a replica that raises three times, or is gone."""
        try:
            await self._engine.check_health()
        finally:
            self._leave_if_dead()

    async def missing(self) -> list[str]:
        """What keeps this replica from answering as it should, in words; nothing if it can."""
        try:
            await self.check_health()
        except EngineDeadError as error:
            return [str(error)]
        return self._follower.missing()

    async def __del__(self) -> None:
        if hasattr(self, "_publishing"):
            self._publishing.cancel()
        if hasattr(self, "_engine"):
            await self._follower.end()
            await self._engine.shutdown()

    def _leave_if_dead(self) -> None:
        """Without its engine a replica is of no use, and as long as it is there, requests are sent to it."""
        if self._engine.dead is not None and not self._is_leaving:
            self._is_leaving = True
            own = ray.get_runtime_context().current_actor
            asyncio.get_running_loop().call_later(LAST_WORDS_S, ray.kill, own)

    def _forget(self, ingress_id: str, outbox: Outbox) -> None:
        if outbox.num_requests == 0 and not outbox.is_open and self._outboxes.get(ingress_id) is outbox:
            del self._outboxes[ingress_id]


def _set_openmp(config: EngineConfig) -> None:
    """Before torch is imported: its threads are those of the configuration, and sleep when they have nothing to do.

    Ray tells every actor to use as many as its `num_cpus`; and threads that spin take the cores from those that serve
    HTTP.
    """
    os.environ["OMP_NUM_THREADS"] = str(config.num_rank_threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
