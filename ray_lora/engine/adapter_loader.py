"""How names come to point to adapters, beside the steps: they are fetched, checked, staged, and only then named."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from ray_lora.adapter import AdapterInfo, AdapterManifest, AdapterValidation, Refusal, StagingTimes
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


@dataclass(frozen=True, slots=True)
class Prepared:
    """An adapter that was inspected, and perhaps staged, but has no name yet."""

    manifest: AdapterManifest
    staged: StagingTimes | None = None


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
        self._prepared: dict[str, Prepared] = {}
        """By version."""
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

    @asynccontextmanager
    async def ready(self, name: str | None) -> AsyncIterator[None]:
        """Inside, the adapter of this name, if there is one, is in host memory; requests for it wait together."""
        if name is None:
            yield
            return
        await self.resolve(name)
        async with self.host.warm(name):
            yield

    async def resolve(self, name: str) -> None:
        """Load the adapter of this name from where the resolvers know it, if it is not registered yet."""
        if self._resolvers and not self._adapters.has_name(name):
            with suppress(AdapterExistsError):  # somebody has loaded it under this name meanwhile
                await self._resolutions.run(name, partial(self._resolve, name))

    async def inspect(self, path: str) -> AdapterManifest:
        """See `AsyncEngine.inspect_adapter`."""
        with self._metrics.counting_failed_loads():
            manifest = await self._inspect(Candidate(path))
        self._prepared[manifest.version] = Prepared(manifest)
        return manifest

    async def prepare(self, name: str, candidate: Candidate, stages: bool) -> None:
        """See `AsyncEngine.prepare_adapter`."""
        with self._metrics.counting_failed_loads():
            await self._carry_through(self._prepare(name, candidate, stages))

    async def point(self, name: str, candidate: Candidate) -> AdapterInfo:
        """See `AsyncEngine.point_adapter`."""
        return await self._carry_through(self._point(name, candidate))

    def abandon(self, version: str) -> None:
        """See `AsyncEngine.abandon_adapter`."""
        self._prepared.pop(version, None)
        self.drop_soon(version)

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
        fetched = await self._fetch(candidate)
        async with self.host.lock:
            return await self._load_fetched(name, candidate, fetched, load_inplace, expected_version, makes_room)

    async def _load_fetched(
        self,
        name: str,
        candidate: Candidate,
        fetched: AdapterManifest | None,
        load_inplace: bool,
        expected_version: str | None = None,
        makes_room: bool = True,
    ) -> tuple[AdapterInfo, bool]:
        """Hold the lock."""
        if fetched is None:
            fetched = await asyncio.to_thread(self._executor.inspect_adapter, candidate.path, candidate.version)
        manifest = _of_version(fetched, candidate)
        checked = partial(self._adapters.check_register, name, manifest, load_inplace, expected_version)
        if not await self._call(checked):
            return self._adapters.info(name), False
        register, staged = self._adapters.register, None
        if makes_room or self.host.has_room(manifest):
            staged = await self.host.stage(manifest)
        else:
            await self.host.keep(manifest)
            register = self._adapters.register_cold
        await self.host.commit(name, partial(register, name, manifest), _read_times(manifest), staged)
        return self._adapters.info(name), True

    async def _resolve(self, name: str) -> None:
        for resolver in self._resolvers:
            while (candidate := await asyncio.to_thread(resolver.find, name)) is not None:
                with self._metrics.counting_failed_loads():
                    fetched = await self._fetch(candidate)
                    async with self.host.lock:  # an unload has to come before this, or after
                        if await asyncio.to_thread(resolver.find, name) == candidate:
                            await self._load_fetched(name, candidate, fetched, load_inplace=False)
                            return

    async def _prepare(self, name: str, candidate: Candidate, stages: bool) -> None:
        prepared = self._prepared.get(candidate.version or "")
        if prepared is None:
            prepared = Prepared(_of_version(await self._inspect(candidate), candidate))
        manifest = prepared.manifest
        async with self.host.lock:
            if await self._call(partial(self._adapters.check_register, name, manifest, load_inplace=True)):
                if stages:
                    prepared = Prepared(manifest, await self.host.stage(manifest))
                else:
                    await self.host.keep(manifest)
                self._prepared[manifest.version] = prepared

    async def _point(self, name: str, candidate: Candidate) -> AdapterInfo:
        prepared = self._prepared.pop(candidate.version or "", None)
        if prepared is None:
            with self._metrics.counting_failed_loads():
                info, _ = await self._load(name, candidate, load_inplace=True, makes_room=False)
            return info
        manifest = prepared.manifest
        async with self.host.lock:
            if await self._call(partial(self._adapters.check_register, name, manifest, load_inplace=True)):
                await self.host.keep(manifest)
                is_staged = self.host.holds(manifest.version)
                register = self._adapters.register if is_staged else self._adapters.register_cold
                await self.host.commit(name, partial(register, name, manifest), _read_times(manifest), prepared.staged)
            return self._adapters.info(name)

    async def _pin(self, name: str) -> AdapterInfo:
        await self._call(lambda: self._adapters.pin(name))
        try:
            async with self.host.warm(name):
                return self._adapters.info(name)
        except RayLoraError:
            with suppress(NotFoundError):
                await self._call(lambda: self._adapters.unpin(name))
            raise

    async def _unpin(self, name: str) -> AdapterInfo:
        await self._call(lambda: self._adapters.unpin(name))
        return self._adapters.info(name)

    async def _fetch(self, candidate: Candidate) -> AdapterManifest | None:
        """Of a URL, inspected before the lock is taken."""
        return None if url_scheme(candidate.path) is None else await self._inspect(candidate)

    async def _inspect(self, candidate: Candidate) -> AdapterManifest:
        """Before the lock is taken: other loads do not wait for a download. Who wants the same URL shares it."""

        async def inspect() -> AdapterManifest:
            async with self._fetch_slots:
                return await asyncio.to_thread(self._executor.inspect_adapter, candidate.path, candidate.version)

        is_local = url_scheme(candidate.path) is None
        return await (inspect() if is_local else self._fetches.run(candidate, inspect))

    async def _carry_through(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._start(work))

    def _start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _read_times(manifest: AdapterManifest) -> dict[str, float]:
    return {"fetch": manifest.fetch_s, "parse": manifest.parse_s}


def _of_version(manifest: AdapterManifest, candidate: Candidate) -> AdapterManifest:
    if candidate.version not in (None, manifest.version):
        raise NotFoundError(f"{manifest.source} has other content now, {manifest.version}", "lora_path")
    return manifest
