"""An engine whose adapters outlive it."""

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

from ray_lora.adapter import AdapterInfo
from ray_lora.config import EngineConfig, LoRAModule
from ray_lora.engine.adapter_resolver import Candidate
from ray_lora.engine.async_engine import AsyncEngine
from ray_lora.engine.completion import Tokenizer
from ray_lora.engine.executor import Executor
from ray_lora.errors import EngineDeadError, NotFoundError, RayLoraError
from ray_lora.serve.adapter_registry import AdapterRegistry, AdapterSettings, RegistryEntry

logger = logging.getLogger("ray.serve")

SAVE_PERIOD_S = 60.0
"""How often the times of last use are written."""


class RegistryResolver:
    """Knows the registry's names, for requests that come before all of them are back."""

    def __init__(self, registry: AdapterRegistry, store: Path) -> None:
        self._registry = registry
        self._store = store

    def find(self, name: str) -> Candidate | None:
        entry = self._registry.find(name)
        return None if entry is None else self.candidate(entry)

    def candidate(self, entry: RegistryEntry) -> Candidate:
        """The store's copy if it is still there, else where it came from."""
        copy = self._store / entry.version
        return Candidate(str(copy) if copy.is_dir() else entry.source, entry.version)


class DurableEngine(AsyncEngine):
    """Writes to the registry what is loaded, unloaded and set at run time, and when each name was last used."""

    def __init__(
        self, config: EngineConfig, executor: Executor, tokenizer: Tokenizer, registry: AdapterRegistry
    ) -> None:
        self._registry = registry
        self._resolver = RegistryResolver(registry, Path(config.adapter_store_dir).expanduser())
        super().__init__(config, executor, tokenizer, [self._resolver])
        self._background: list[asyncio.Task[None]] = []

    async def load_adapter(
        self, name: str, path: str, load_inplace: bool = False, expected_version: str | None = None
    ) -> tuple[AdapterInfo, bool]:
        await self.resolve_adapter(name)
        info, changed = await super().load_adapter(name, path, load_inplace, expected_version)
        await asyncio.to_thread(self._registry.put, name, info.version, path)
        return info, changed

    async def load_configured(self, module: LoRAModule) -> None:
        """What was registered under this name at run time goes before, as do settings made then."""
        if await asyncio.to_thread(self._registry.find, module.name) is None:
            await super().load_adapter(module.name, module.path)
            await self._apply(module.name, await asyncio.to_thread(self._registry.settings, module.name))

    async def unload_adapter(self, name: str) -> None:
        with suppress(RayLoraError):  # it is lost, and so may be forgotten
            await self.resolve_adapter(name)
        was_known = await asyncio.to_thread(self._registry.find, name) is not None
        await asyncio.to_thread(self._registry.remove, name)
        try:
            await super().unload_adapter(name)
        except NotFoundError:
            if not was_known:
                raise

    async def pin_adapter(self, name: str, is_pinned: bool = True) -> AdapterInfo:
        await self.resolve_adapter(name)
        info = await super().pin_adapter(name, is_pinned)
        await asyncio.to_thread(self._registry.set_pinned, name, is_pinned)
        return info

    async def set_adapter_weight(self, name: str, weight: float) -> AdapterInfo:
        await self.resolve_adapter(name)
        info = await super().set_adapter_weight(name, weight)
        await asyncio.to_thread(self._registry.set_weight, name, weight)
        return info

    async def shutdown(self) -> None:
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.to_thread(self._save_times)
        await super().shutdown()

    async def restore(self) -> None:
        """Bring back what was registered, each name with exactly the content that it had.

        Returns once the pinned and the most recently used, as many as host memory takes, are on every rank. The others
        come back on disk meanwhile, or with their first request. What cannot be had is left out, and said in the log.

        Raises:
            EngineDeadError: a rank is gone.
        """
        entries = await asyncio.to_thread(self._registry.entries)
        num_first = self.config.max_staged_loras
        await self._restore(entries[:num_first])
        work = (self._restore_rest(entries[num_first:]), self._save_times_for_ever())
        self._background = [asyncio.create_task(each) for each in work]

    async def _restore(self, entries: list[RegistryEntry]) -> None:
        for entry in entries:
            try:
                current = await asyncio.to_thread(self._registry.find, entry.name)
                if current is not None and current.version == entry.version:  # nobody has changed it meanwhile
                    await self._restore_one(current)
            except EngineDeadError:
                raise
            except RayLoraError as error:
                logger.error("adapter %r of the registry cannot be restored: %s", entry.name, error)

    async def _restore_rest(self, entries: list[RegistryEntry]) -> None:
        with suppress(EngineDeadError):
            await self._restore(entries)

    async def _restore_one(self, entry: RegistryEntry) -> None:
        try:
            await self.recall_adapter(entry.name, self._resolver.candidate(entry))
        except EngineDeadError:
            raise
        except RayLoraError:  # the copy is damaged
            await self.recall_adapter(entry.name, Candidate(entry.source, entry.version))
        await self._apply(entry.name, entry.settings)

    async def _apply(self, name: str, settings: AdapterSettings) -> None:
        """What was not set at run time is as in `lora_modules`."""
        configured = {module.name: module for module in self.config.lora_modules}
        module = configured.get(name, LoRAModule(name=name, path=""))
        if settings.last_used is not None:
            await self.mark_used(name, settings.last_used)
        await super().set_adapter_weight(name, module.weight if settings.weight is None else settings.weight)
        if module.pinned if settings.pinned is None else settings.pinned:
            await super().pin_adapter(name)

    async def _save_times_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SAVE_PERIOD_S)
            await asyncio.to_thread(self._save_times)

    def _save_times(self) -> None:
        times = {info.name: info.last_used for info in self.list_adapters() if info.last_used is not None}
        self._registry.set_last_used(times)
