"""The replicas and their directory, as the ingress sees them: one model that generates, loads and unloads."""

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from ray_lora.adapter import AdapterInfo, AdapterValidation, Tier, TierUse
from ray_lora.config import EngineConfig
from ray_lora.engine.deadlines import Deadlines
from ray_lora.errors import EngineDeadError, OverloadedError, RayLoraError, RequestTimeoutError
from ray_lora.request import GenerateChunk, GenerateRequest
from ray_lora.serve.adapter_listing import merged
from ray_lora.serve.outbox import Item, decode
from ray_lora.serve.replica import Accepted
from ray_lora.serve.replica_calls import answer, answer_of_any, as_ours, call, every_answer
from ray_lora.serve.scaling_policy import wants_none
from ray_lora.stats import EngineStats
from ray_lora.step import ModelInfo

logger = logging.getLogger("ray.serve")

HEALTH_TIMEOUT_S = 4.5
"""A replica that does not say within this how it is, is not well; its ranks get 3 s to say so themselves."""
RETRY_AFTER_S = 5.0
"""What a caller is told for whom no replica was there in time."""
AVOID_S = 30.0
"""No request is sent to a replica for so long after it said that its engine is dead; Serve takes it down meanwhile."""


class ReplicaClient:
    """Implements `EngineClient` over a handle of `LLMReplica`.

    Every request is a call of its own, so that Serve chooses the replica, counts what is under way and carries a
    cancellation. What a replica has to tell comes through one stream for all of them; see `outbox.py`.
    """

    def __init__(self, replicas: DeploymentHandle[Any], directory: DeploymentHandle[Any], config: EngineConfig) -> None:
        self._replicas = replicas
        self._directory = directory
        self._config = config
        self._submit = replicas.options(method_name="submit", stream=True)
        self._outbox = replicas.options(method_name="outbox", stream=True)
        self._id = uuid.uuid4().hex
        self._keys = itertools.count()
        self._queues: dict[int, asyncio.Queue[Item | Accepted]] = {}
        self._replica_of: dict[int, str] = {}
        self._opened: dict[str, int] = {}
        self._died_at: dict[str, float] = {}
        """By replica, when it said that its engine is dead."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        key = next(self._keys)
        queue: asyncio.Queue[Item | Accepted] = asyncio.Queue()
        self._queues[key] = queue
        submitted = call(self._submit, request, self._id, key, self._dead_replicas())
        watching = self._start(self._watch(submitted, key))
        is_over = False
        deadlines = Deadlines(self._config, request.waited_s)
        try:
            async with deadlines.while_waiting(), self._until_replica():
                item = await queue.get()
            deadlines.watch_end(queue.put_nowait)
            while item is not None:
                if isinstance(item, RayLoraError):
                    # With these two the replica may not know that the request has ended.
                    is_over = not isinstance(item, EngineDeadError | RequestTimeoutError)
                    raise item
                if isinstance(item, GenerateChunk):
                    yield item
                item = await queue.get()
            is_over = True
        finally:
            deadlines.close()
            del self._queues[key]
            self._replica_of.pop(key, None)
            if not is_over:
                submitted.cancel()
                watching.cancel()

    async def load_adapter(
        self, name: str, path: str, load_inplace: bool = False, expected_version: str | None = None
    ) -> tuple[AdapterInfo, bool]:
        loaded: tuple[AdapterInfo, bool] = await answer(
            self._directory.load_adapter.remote(name, path, load_inplace, expected_version)
        )
        return loaded

    async def unload_adapter(self, name: str) -> None:
        await answer(self._directory.unload_adapter.remote(name))

    async def pin_adapter(self, name: str, is_pinned: bool) -> AdapterInfo:
        info: AdapterInfo = await answer(self._directory.pin_adapter.remote(name, is_pinned))
        return info

    async def set_adapter_weight(self, name: str, weight: float) -> AdapterInfo:
        info: AdapterInfo = await answer(self._directory.set_adapter_weight.remote(name, weight))
        return info

    async def validate_adapter(self, path: str, name: str | None) -> AdapterValidation:
        found: AdapterValidation = await answer_of_any(self._replicas, "validate_adapter", path, name)
        return found

    async def list_adapters(self) -> list[AdapterInfo]:
        lists = await every_answer(self._replicas, "list_adapters")
        return merged(lists or [await self._ask_one("list_adapters")])  # which waits for a replica

    async def adapter_tiers(self) -> list[dict[Tier, TierUse]]:
        return await self._on_all("adapter_tiers")

    async def stats(self) -> dict[str, EngineStats]:
        return dict(await self._on_all("stats"))

    async def model_info(self) -> ModelInfo:
        info: ModelInfo = await self._ask_one("model_info")
        return info

    async def check_health(self) -> None:
        await self._ask_all("check_health")

    async def missing(self) -> list[str]:
        try:
            answers = await self._ask_all("missing")
        except EngineDeadError as error:
            return [str(error)]
        return [reason for answer in answers for reason in answer]

    def _dead_replicas(self) -> tuple[str, ...]:
        for replica_id, at in list(self._died_at.items()):
            if time.monotonic() - at > AVOID_S:
                del self._died_at[replica_id]
        return tuple(self._died_at)

    @asynccontextmanager
    async def _until_replica(self) -> AsyncGenerator[None, None]:
        """Around what waits until there is a replica.

        Raises:
            OverloadedError: it took too long.
        """
        limit_s = self._config.replica_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise OverloadedError(f"No replica has become available in {limit_s:g} s.", RETRY_AFTER_S) from None

    async def _watch(self, submitted: DeploymentResponseGenerator[Accepted | bytes], key: int) -> None:
        """Follow a request's own call: where it runs, and whether it breaks."""
        replica_id = ""
        try:
            async for accepted in submitted:
                if isinstance(accepted, bytes):
                    self._tell_all(replica_id, accepted)
                    continue
                replica_id = accepted.replica_id
                if key in self._queues:
                    self._replica_of[key] = replica_id
                    self._tell(key, accepted)
                if self._opened.get(replica_id, -1) < accepted.epoch:
                    self._opened[replica_id] = accepted.epoch
                    self._start(self._follow_outbox(replica_id))
        except Exception as error:
            self._tell(key, as_ours(error))

    async def _follow_outbox(self, replica_id: str) -> None:
        try:
            async for batch in call(self._outbox, replica_id, self._id):
                self._tell_all(replica_id, batch)
        except Exception as error:
            logger.warning("the stream of replica %s broke: %s", replica_id, error)
            self._opened.pop(replica_id, None)
            for key in [key for key, other in self._replica_of.items() if other == replica_id]:
                self._tell(key, as_ours(error))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _tell_all(self, replica_id: str, batch: bytes) -> None:
        for key, item in decode(batch):
            if isinstance(item, EngineDeadError):
                self._died_at[replica_id] = time.monotonic()
            self._tell(key, item)

    def _tell(self, key: int, item: Item | Accepted) -> None:
        queue = self._queues.get(key)
        if queue is not None:
            queue.put_nowait(item)

    async def _ask_one(self, method: str) -> Any:
        """Call any replica; a call that it answers at once."""
        async with self._until_replica():
            return await answer(call(getattr(self._replicas, method)))

    async def _ask_all(self, method: str) -> list[Any]:
        """Call every replica, but wait for none that hangs."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                return await self._on_all(method)
        except TimeoutError:
            raise EngineDeadError(f"a replica did not answer within {HEALTH_TIMEOUT_S} s") from None

    async def _on_all(self, method: str, *args: object) -> list[Any]:
        """Call every replica; the first error counts. There may be none if none is wanted."""
        results = await every_answer(self._replicas, method, *args)
        if not results and not await asyncio.to_thread(wants_none, self._replicas):
            raise EngineDeadError("no replica is running: the engine is starting, or could not start")
        for result in results:
            if isinstance(result, RayLoraError):
                raise result
        return results
