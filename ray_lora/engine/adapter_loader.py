"""How names come to point to adapters, beside the steps: they are fetched, checked, staged, and only then named."""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ray_lora.adapter import AdapterInfo, AdapterManifest, AdapterValidation, Refusal
from ray_lora.config import MAX_FETCHES, EngineConfig, LoRAModule
from ray_lora.engine.adapter_manager import AdapterManager
from ray_lora.engine.adapter_resolver import AdapterResolver, Candidate
from ray_lora.engine.engine_metrics import EngineMetrics
from ray_lora.engine.executor import Executor
from ray_lora.engine.host_tier import EngineCall, HostTier
from ray_lora.engine.shared_calls import SharedCalls
from ray_lora.errors import (
    AdapterExistsError,
    CapacityError,
    InvalidRequestError,
    NotFoundError,
    RayLoraError,
)
from ray_lora.names import check_adapter_name, url_scheme

T = TypeVar("T")


class AdapterLoader:
    """Made and used in one event loop. What is begun is carried through even if the caller goes away."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        adapters: AdapterManager,
        call: EngineCall,
        resolvers: Sequence[AdapterResolver],
        metrics: EngineMetrics,
    ) -> None:
        self.host = HostTier(config, executor, adapters, call, metrics)
        self._metrics = metrics
        self._config = config
        self._executor = executor
        self._adapters = adapters
        self._call = call
        self._resolvers = resolvers
        self._resolutions: SharedCalls[None] = SharedCalls()
        self._fetches: SharedCalls[AdapterManifest] = SharedCalls()
        self._fetch_slots = asyncio.Semaphore(MAX_FETCHES)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def load(
        self, name: str, path: str, load_inplace: bool, expected_version: str | None = None
    ) -> tuple[AdapterInfo, bool]:
        """See `AsyncEngine.load_adapter`."""
        check_adapter_name(name, self._config.base_model_name)
        with self._metrics.counting_failed_loads():
            return await self._carry_through(self._load(name, Candidate(path), load_inplace, expected_version))

    async def load_configured(self, module: LoRAModule) -> None:
        """See `AsyncEngine.load_configured`."""
        await self.load(module.name, module.path, load_inplace=False)
        await self.set_weight(module.name, module.weight)
        if module.pinned:
            await self.pin(module.name, True)

    async def unload(self, name: str) -> None:
        """See `AsyncEngine.unload_adapter`."""

        async def unload() -> None:
            async with self.host.lock:
                await self._call(lambda: self._adapters.unregister(name))

        await self._carry_through(unload())

    async def pin(self, name: str, is_pinned: bool) -> AdapterInfo:
        """See `AsyncEngine.pin_adapter`."""
        return await self._carry_through(self._pin(name) if is_pinned else self._unpin(name))

    async def set_weight(self, name: str, weight: float) -> AdapterInfo:
        """See `AsyncEngine.set_adapter_weight`."""
        await self._call(lambda: self._adapters.set_weight(name, weight))
        return self._adapters.info(name)

    async def validate(self, path: str, name: str | None) -> AdapterValidation:
        """See `AsyncEngine.validate_adapter`."""
        if name is not None:
            check_adapter_name(name, self._config.base_model_name)
        async with self._fetch_slots:
            found = await asyncio.to_thread(self._executor.validate_adapter, path)
        manifest = found.manifest
        if manifest is not None:
            try:
                await self._call(lambda: self._adapters.check_register(name or "", manifest, load_inplace=False))
            except (InvalidRequestError, CapacityError) as error:
                refusal = Refusal(str(error), getattr(error, "param", None))
                return replace(found, refusals=(*found.refusals, refusal))
        return found

    async def make_ready(self, name: str) -> None:
        """Wait until the adapter of this name, if there is one, is in host memory; requests for it wait together."""
        await self.resolve(name)
        await self.host.warm_up(name)

    async def resolve(self, name: str) -> None:
        """Load the adapter of this name from where the resolvers know it, if it is not registered yet."""
        if self._resolvers and not self._adapters.has_name(name):
            with suppress(AdapterExistsError):  # somebody has loaded it under this name meanwhile
                await self._resolutions.run(name, partial(self._resolve, name))

    async def recall(self, name: str, candidate: Candidate) -> None:
        """See `AsyncEngine.recall_adapter`."""
        if not self._adapters.has_name(name):
            await self._resolutions.run(name, partial(self._recall, name, candidate))

    def drop_soon(self, version: str) -> None:
        """Free a version that neither a name nor a request holds any more."""
        self._start(self.host.drop(version))

    async def _load(
        self,
        name: str,
        candidate: Candidate,
        load_inplace: bool,
        expected_version: str | None = None,
        makes_room: bool = True,
    ) -> tuple[AdapterInfo, bool]:
        """With `makes_room`, others may leave host memory for it."""
        path = candidate.path
        manifest = await self._fetch(path) if url_scheme(path) is not None else None
        async with self.host.lock:
            if manifest is None:
                manifest = await asyncio.to_thread(self._executor.inspect_adapter, path)
            if candidate.version not in (None, manifest.version):
                raise NotFoundError(f"{manifest.source} has other content now, {manifest.version}", "lora_path")
            checked = partial(self._adapters.check_register, name, manifest, load_inplace, expected_version)
            if not await self._call(checked):
                return self._adapters.info(name), False
            register, staged = self._adapters.register, None
            if makes_room or self.host.has_room(manifest):
                staged = await self.host.stage(manifest)
            else:
                await self.host.keep(manifest)
                register = self._adapters.register_cold
            read = {"fetch": manifest.fetch_s, "parse": manifest.parse_s}
            await self.host.commit(name, partial(register, name, manifest), read, staged)
            return self._adapters.info(name), True

    async def _resolve(self, name: str) -> None:
        for resolver in self._resolvers:
            candidate = await asyncio.to_thread(resolver.find, name)
            if candidate is not None:
                with self._metrics.counting_failed_loads():
                    await self._load(name, candidate, load_inplace=False)
                return

    async def _recall(self, name: str, candidate: Candidate) -> None:
        with self._metrics.counting_failed_loads():
            await self._load(name, candidate, load_inplace=False, makes_room=False)

    async def _pin(self, name: str) -> AdapterInfo:
        await self._call(lambda: self._adapters.pin(name))
        try:
            await self.host.warm_up(name)
            return self._adapters.info(name)
        except RayLoraError:
            with suppress(NotFoundError):
                await self._call(lambda: self._adapters.unpin(name))
            raise

    async def _unpin(self, name: str) -> AdapterInfo:
        await self._call(lambda: self._adapters.unpin(name))
        return self._adapters.info(name)

    async def _fetch(self, url: str) -> AdapterManifest:
        """Inspect a remote adapter, before the lock is taken: other loads do not wait for its download."""

        async def inspect() -> AdapterManifest:
            async with self._fetch_slots:
                return await asyncio.to_thread(self._executor.inspect_adapter, url)

        return await self._fetches.run(url, inspect)

    async def _carry_through(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._start(work))

    def _start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
