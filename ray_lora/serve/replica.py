"""The deployment that owns an engine: one replica, with all its ranks."""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from ray import serve

from ray_lora.adapter import AdapterInfo, AdapterValidation, Tier, TierUse
from ray_lora.config import EngineConfig
from ray_lora.errors import EngineDeadError, RayLoraError
from ray_lora.request import GenerateChunk, GenerateRequest
from ray_lora.serve.outbox import Outbox
from ray_lora.serve.ray_metrics import RayMetrics
from ray_lora.stats import EngineStats
from ray_lora.step import ModelInfo

T = TypeVar("T")

FORGET_S = 60.0
"""An outbox that nobody has come for is dropped after this; its ingress is gone."""


class Engine(Protocol):
    """What a replica needs; `engine/async_engine.py` has the real one."""

    info: ModelInfo

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]: ...
    async def load_adapter(
        self, name: str, path: str, load_inplace: bool = False, expected_version: str | None = None
    ) -> tuple[AdapterInfo, bool]: ...
    async def unload_adapter(self, name: str) -> None: ...
    async def pin_adapter(self, name: str, is_pinned: bool = True) -> AdapterInfo: ...
    async def set_adapter_weight(self, name: str, weight: float) -> AdapterInfo: ...
    async def validate_adapter(self, path: str, name: str | None = None) -> AdapterValidation: ...
    def list_adapters(self) -> list[AdapterInfo]: ...
    def adapter_tiers(self) -> dict[Tier, TierUse]: ...
    def stats(self) -> EngineStats: ...
    async def check_health(self) -> None: ...
    async def shutdown(self) -> None: ...


EngineStarter = Callable[[EngineConfig], Awaitable[Engine]]


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
        self._engine = await start(config)
        self._id = serve.get_replica_context().replica_id.unique_id
        self._outboxes: dict[str, Outbox] = {}
        self._metrics = RayMetrics(config.base_model_name, self._engine.stats())
        self._publishing = asyncio.create_task(self._metrics.publish_for_ever(self._engine.stats))

    async def submit(self, request: GenerateRequest, ingress_id: str, key: int) -> AsyncGenerator[Accepted, None]:
        """Run a request; its chunks, end or error go to the ingress's outbox. Cancelling this cancels the request."""
        outbox = self._outboxes.setdefault(ingress_id, Outbox())
        outbox.num_requests += 1
        try:
            yield Accepted(self._id, outbox.epoch)
            try:
                async with aclosing(self._engine.generate(request)) as chunks:
                    async for chunk in chunks:
                        outbox.put(key, chunk)
                        if chunk.metrics is not None:
                            self._metrics.observe(chunk.metrics)
                outbox.put(key, None)
            except RayLoraError as error:
                outbox.put(key, error)
        finally:
            outbox.num_requests -= 1
            asyncio.get_running_loop().call_later(FORGET_S, self._forget, ingress_id, outbox)

    async def outbox(self, replica_id: str, ingress_id: str) -> AsyncGenerator[bytes, None]:
        """The stream of an ingress's batches. `replica_id` is for the router; another replica has nothing to tell."""
        if replica_id == self._id and ingress_id in self._outboxes:
            async with aclosing(self._outboxes[ingress_id].batches()) as batches:
                async for batch in batches:
                    yield batch

    async def load_adapter(
        self, name: str, path: str, load_inplace: bool = False, expected_version: str | None = None
    ) -> tuple[AdapterInfo, bool] | RayLoraError:
        return await _told(self._engine.load_adapter(name, path, load_inplace, expected_version))

    async def unload_adapter(self, name: str) -> RayLoraError | None:
        return await _told(self._engine.unload_adapter(name))

    async def pin_adapter(self, name: str, is_pinned: bool) -> AdapterInfo | RayLoraError:
        return await _told(self._engine.pin_adapter(name, is_pinned))

    async def set_adapter_weight(self, name: str, weight: float) -> AdapterInfo | RayLoraError:
        return await _told(self._engine.set_adapter_weight(name, weight))

    async def validate_adapter(self, path: str, name: str | None) -> AdapterValidation | RayLoraError:
        return await _told(self._engine.validate_adapter(path, name))

    async def list_adapters(self) -> list[AdapterInfo]:
        return self._engine.list_adapters()

    async def adapter_tiers(self) -> dict[Tier, TierUse]:
        return self._engine.adapter_tiers()

    async def stats(self) -> tuple[str, EngineStats]:
        """With the replica's id."""
        return self._id, self._engine.stats()

    async def model_info(self) -> ModelInfo:
        return self._engine.info

    async def check_health(self) -> None:
        """Called by Serve, which rebuilds a replica that raises."""
        await self._engine.check_health()

    async def missing(self) -> list[str]:
        """What keeps this replica from answering as it should, in words; nothing if it can."""
        try:
            await self._engine.check_health()
        except EngineDeadError as error:
            return [str(error)]
        return []

    async def __del__(self) -> None:
        if hasattr(self, "_publishing"):
            self._publishing.cancel()
        if hasattr(self, "_engine"):
            await self._engine.shutdown()

    def _forget(self, ingress_id: str, outbox: Outbox) -> None:
        if outbox.num_requests == 0 and not outbox.is_open and self._outboxes.get(ingress_id) is outbox:
            del self._outboxes[ingress_id]


async def _told(work: Awaitable[T]) -> T | RayLoraError:
    """Errors are returned, not raised, so that Serve does not log a caller's mistake as a failure."""
    try:
        return await work
    except RayLoraError as error:
        return error


def _set_openmp(config: EngineConfig) -> None:
    """Before torch is imported: its threads are those of the configuration, and sleep when they have nothing to do.

    Ray tells every actor to use as many as its `num_cpus`; and threads that spin take the cores from those that serve
    HTTP.
    """
    os.environ["OMP_NUM_THREADS"] = str(config.num_rank_threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
