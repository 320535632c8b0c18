"""How adapters come to the ranks and leave them, beside the steps.

Reading, staging and dropping run in threads of their own, one adapter at a time; what changes the registry is called in
the engine's thread, between two steps.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ray_lora.adapter import AdapterInfo, AdapterManifest
from ray_lora.config import MAX_FETCHES, EngineConfig
from ray_lora.engine.adapter_manager import AdapterManager
from ray_lora.engine.adapter_resolver import AdapterResolver
from ray_lora.engine.executor import Executor
from ray_lora.engine.shared_calls import SharedCalls
from ray_lora.errors import AdapterExistsError, CapacityError, EngineDeadError
from ray_lora.names import check_adapter_name, url_scheme

T = TypeVar("T")

RETRY_S = 0.02
"""How often a cold adapter looks for room while all of host memory has requests."""


class EngineCall(Protocol):
    """Runs a function in the engine's thread, between two steps."""

    def __call__(self, function: Callable[[], T]) -> Awaitable[T]: ...


class AdapterLoader:
    """Made and used in one event loop."""

    def __init__(self, config: EngineConfig, executor: Executor, adapters: AdapterManager, call: EngineCall) -> None:
        self._config = config
        self._executor = executor
        self._adapters = adapters
        self._call = call
        self._adapter_lock = asyncio.Lock()
        self._held: set[str] = set()
        """Versions that the ranks hold in host memory; read and changed under the lock, as is `_cold`."""
        self._cold: set[str] = set()
        """Versions that they held before, and may hold again."""
        self._resolver: AdapterResolver | None = None
        if config.lora_resolver_dir is not None:
            self._resolver = AdapterResolver(Path(config.lora_resolver_dir), config.base_model_name)
        self._warming: SharedCalls[None] = SharedCalls()
        self._resolutions: SharedCalls[None] = SharedCalls()
        self._fetches: SharedCalls[AdapterManifest] = SharedCalls()
        self._fetch_slots = asyncio.Semaphore(MAX_FETCHES)
        self._tasks: set[asyncio.Task[Any]] = set()

    async def load(
        self, name: str, path: str, load_inplace: bool, expected_version: str | None = None
    ) -> tuple[AdapterInfo, bool]:
        """See `AsyncEngine.load_adapter`."""
        check_adapter_name(name, self._config.base_model_name)
        return await self._carry_through(self._load(name, path, load_inplace, expected_version))

    async def unload(self, name: str) -> None:
        """See `AsyncEngine.unload_adapter`."""

        async def unload() -> None:
            async with self._adapter_lock:
                await self._call(lambda: self._adapters.unregister(name))

        await self._carry_through(unload())

    def drop_soon(self, version: str) -> None:
        """Free a version that neither a name nor a request holds any more."""
        self._start(self._drop(version))

    async def _load(
        self, name: str, path: str, load_inplace: bool, expected_version: str | None = None
    ) -> tuple[AdapterInfo, bool]:
        manifest = await self._fetch(path) if url_scheme(path) is not None else None
        async with self._adapter_lock:
            if manifest is None:
                manifest = await asyncio.to_thread(self._executor.inspect_adapter, path)
            checked = partial(self._adapters.check_register, name, manifest, load_inplace, expected_version)
            if not await self._call(checked):
                return self._adapters.info(name), False
            if not await self._stage(manifest):
                raise CapacityError(
                    f"{len(self._held)} adapters in host memory, as many as max_cpu_loras allows, all have requests"
                )
            await self._call(lambda: self._adapters.register(name, manifest))
            return self._adapters.info(name), True

    async def _stage(self, manifest: AdapterManifest) -> bool:
        """Bring an adapter to host memory, in place of the least recently used; false if all there have requests."""
        if manifest.version in self._held:
            return True
        while len(self._held) >= self._config.max_staged_loras:
            idle = await self._call(lambda: self._adapters.take_idle(self._held))
            if idle is None:
                return False
            await asyncio.to_thread(self._executor.drop_adapter, idle, forget=False)
            self._held.discard(idle)
            self._cold.add(idle)
        await asyncio.to_thread(self._executor.stage_adapter, manifest)
        self._held.add(manifest.version)
        self._cold.discard(manifest.version)
        return True

    async def make_ready(self, name: str) -> None:
        """Wait until the adapter of this name, if there is one, is in host memory; requests for it wait together."""
        await self._resolve(name)
        manifest = self._adapters.find_cold(name)
        if manifest is not None:
            await self._warming.run(manifest.version, partial(self._warm, manifest))

    async def _warm(self, manifest: AdapterManifest) -> None:
        while True:
            async with self._adapter_lock:
                if not await self._call(lambda: self._adapters.is_registered(manifest.version)):
                    return
                if await self._stage(manifest):
                    return await self._call(lambda: self._adapters.mark_staged(manifest.version))
            await asyncio.sleep(RETRY_S)

    async def _fetch(self, url: str) -> AdapterManifest:
        """Inspect a remote adapter, before the lock is taken: other loads do not wait for its download."""

        async def inspect() -> AdapterManifest:
            async with self._fetch_slots:
                return await asyncio.to_thread(self._executor.inspect_adapter, url)

        return await self._fetches.run(url, inspect)

    async def _resolve(self, name: str) -> None:
        """Load an adapter of `lora_resolver_dir` that is asked for by name and is not registered yet."""
        if self._resolver is None or self._adapters.has_name(name):
            return
        resolver = self._resolver

        async def load() -> None:
            path = await asyncio.to_thread(resolver.find, name)
            if path is not None:
                await self._load(name, path, load_inplace=False)

        with suppress(AdapterExistsError):  # somebody has loaded it under this name meanwhile
            await self._resolutions.run(name, load)

    async def _carry_through(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._start(work))

    def _start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _drop(self, version: str) -> None:
        """Free a dead version on the ranks, unless it has been registered again or dropped meanwhile."""
        with suppress(EngineDeadError):  # what dead ranks held is gone
            async with self._adapter_lock:
                known = version in self._held or version in self._cold
                if known and not await self._call(lambda: self._adapters.is_registered(version)):
                    await asyncio.to_thread(self._executor.drop_adapter, version)
                    self._held.discard(version)
                    self._cold.discard(version)
