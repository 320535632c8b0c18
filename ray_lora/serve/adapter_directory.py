"""The one place that knows which adapters there are. Where they are, each replica knows for itself.

A load is fetched and checked by one replica, from which the others have the files; it is made ready by all, and only
then named by all. If one cannot, no name points elsewhere than before. A replica that was not there takes over the list
before it is ready, and asks every second whether there is a newer one.

The list outlives this process. With `lora_registry_path` the file is the truth, and a change counts once it is written
there; without, or if the file is lost or damaged, what the replicas hold is, and the one that has heard most is right.
"""

import asyncio
import logging
import sqlite3
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ray.serve.handle import DeploymentHandle

from ray_lora.adapter import AdapterInfo, AdapterManifest
from ray_lora.config import EngineConfig
from ray_lora.engine.adapter_resolver import DirectoryResolver
from ray_lora.engine.adapter_version import not_loaded, would_change
from ray_lora.errors import ConfigError, RayLoraError
from ray_lora.names import check_adapter_name
from ray_lora.serve.adapter_entry import AdapterEntry, AdapterSettings, Revision, Snapshot, in_order_of_need
from ray_lora.serve.adapter_listing import merged
from ray_lora.serve.adapter_registry import AdapterRegistry, is_damage
from ray_lora.serve.replica_calls import answer, answer_of_any, call, every_answer, told

logger = logging.getLogger("ray.serve")
T = TypeVar("T")
Write = Callable[[AdapterRegistry], None]

SAVE_PERIOD_S = 60.0
"""How often the times of last use are written."""


class AdapterDirectory:
    """A deployment of one replica. Changes happen one at a time, and are carried through whoever goes away."""

    async def __init__(self, config: EngineConfig, replicas: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        self._config = config
        self._replicas = replicas
        self._registry = _open_registry(config)
        self._folder = None
        if config.lora_resolver_dir is not None:
            self._folder = DirectoryResolver(Path(config.lora_resolver_dir), config.base_model_name)
        self._lock = asyncio.Lock()
        self._entries: dict[str, AdapterEntry] = {}
        self._revision = Revision(uuid.uuid4().hex, 0)
        self._tasks: set[asyncio.Task[Any]] = set()
        await self._rebuild()
        self._saving = asyncio.create_task(self._save_times_for_ever())

    async def load_adapter(
        self, name: str, path: str, load_inplace: bool = False, expected_version: str | None = None
    ) -> tuple[AdapterInfo, bool] | RayLoraError:
        """See `EngineClient.load_adapter`."""
        return await self._carry_through(self._load(name, path, load_inplace, expected_version, is_lasting=True))

    async def unload_adapter(self, name: str) -> RayLoraError | None:
        """See `EngineClient.unload_adapter`."""
        return await self._carry_through(self._unload(name))

    async def pin_adapter(self, name: str, is_pinned: bool) -> AdapterInfo | RayLoraError:
        """See `EngineClient.pin_adapter`."""
        return await self._carry_through(
            self._set(name, lambda registry: registry.set_pinned(name, is_pinned), pinned=is_pinned)
        )

    async def set_adapter_weight(self, name: str, weight: float) -> AdapterInfo | RayLoraError:
        """See `EngineClient.set_adapter_weight`."""
        return await self._carry_through(
            self._set(name, lambda registry: registry.set_weight(name, weight), weight=weight)
        )

    async def resolve(self, name: str) -> AdapterEntry | None:
        """What a name is that a replica has not heard of; one of `lora_resolver_dir` is loaded, on every replica."""
        if name not in self._entries and self._folder is not None:
            found = await asyncio.to_thread(self._folder.find, name)
            if found is not None:
                await self._carry_through(self._load(name, found.path, False, None, is_lasting=False))
        return self._entries.get(name)

    async def adopt(self, name: str, version: str) -> str | None:
        """The version that a configured name has: the first that a replica has read. None if it was unloaded."""
        async with self._lock:
            entry = self._entries.get(name)
            if entry is not None and entry.version is None:
                entry = self._entries[name] = replace(entry, version=version)
                self._revision = self._next_revision()
            return None if entry is None else entry.version

    async def news(self, revision: Revision | None, last_used: Mapping[str, float]) -> Snapshot | None:
        """All names, if they are not those of `revision`.

        Args:
            last_used: when requests came for which names, where the caller has not told yet.
        """
        async with self._lock:  # a change that is under way is told to those who are there, once it is through
            for name, at in last_used.items():
                entry = self._entries.get(name)
                if entry is not None and at > (entry.settings.last_used or 0.0):
                    self._entries[name] = replace(entry, settings=replace(entry.settings, last_used=at))
            return None if revision == self._revision else self._snapshot()

    async def __del__(self) -> None:
        if hasattr(self, "_saving"):
            self._saving.cancel()
            await asyncio.to_thread(self._save_times)

    async def _load(
        self, name: str, path: str, load_inplace: bool, expected_version: str | None, is_lasting: bool
    ) -> tuple[AdapterInfo, bool]:
        check_adapter_name(name, self._config.base_model_name)
        reader: str
        manifest: AdapterManifest
        reader, manifest = await answer_of_any(self._replicas, "inspect_adapter", path)
        version = manifest.version
        is_named = False
        try:
            async with self._lock:
                before = self._entries.get(name)
                current = None if before is None else before.version
                if not would_change(name, current, version, load_inplace, expected_version):
                    infos = await self._on_all("take_entry", name, before, self._revision, self._revision)
                    return merged([infos])[0], False
                settings = AdapterSettings() if before is None else before.settings
                entry = AdapterEntry(name, version, manifest.source, settings)
                await self._on_all("prepare_adapter", entry, path, reader)

                def write(registry: AdapterRegistry) -> None:
                    if is_lasting:
                        registry.put(name, version, path)

                infos = await self._change(name, entry, write)
                is_named = True
                return merged([infos])[0], True
        finally:
            if not is_named:
                await every_answer(self._replicas, "abandon_adapter", version)

    async def _unload(self, name: str) -> None:
        async with self._lock:
            if name not in self._entries:
                raise not_loaded(name)
            await self._change(name, None, lambda registry: registry.remove(name))

    async def _set(self, name: str, write: Write, **said: Any) -> AdapterInfo:
        await answer(call(self._replicas.model_info))  # waits for one, if none is running: it must agree
        async with self._lock:
            before = self._entries.get(name)
            if before is None:
                raise not_loaded(name)
            entry = replace(before, settings=replace(before.settings, **said))
            return merged([await self._change(name, entry, write)])[0]

    async def _change(self, name: str, entry: AdapterEntry | None, write: Write) -> list[AdapterInfo]:
        """Let a name be this on every replica, or on none; None forgets it. Hold the lock."""
        before, after, known = self._revision, self._next_revision(), self._entries.get(name)
        if entry is None:
            self._entries.pop(name, None)  # who asks while some have forgotten it must not learn it anew
        try:
            infos = await self._on_all("take_entry", name, entry, before, after)
            await asyncio.to_thread(self._write, write)
        except BaseException:
            if known is not None:
                self._entries[name] = known
            for undone in await every_answer(self._replicas, "take_entry", name, known, after, before):
                if isinstance(undone, RayLoraError):
                    logger.error("a change of adapter %r was refused and could not be undone: %s", name, undone)
            raise
        self._revision = after
        if entry is not None:
            self._entries[name] = entry
        return infos

    async def _on_all(self, method: str, *args: object) -> list[Any]:
        """What every replica says; raises if one refuses."""
        answers = await every_answer(self._replicas, method, *args)
        for each in answers:
            if isinstance(each, RayLoraError):
                raise each
        return answers

    async def _rebuild(self) -> None:
        if self._registry is not None and not self._registry.is_new:
            known = await asyncio.to_thread(self._registry.entries)
        else:
            held = [each for each in await every_answer(self._replicas, "held_adapters") if each is not None]
            latest = max(held, key=lambda each: each.revision.number, default=Snapshot(self._revision, ()))
            known = list(latest.entries)
            self._revision = replace(self._revision, number=latest.revision.number + 1)
        self._entries = {entry.name: entry for entry in known}
        if self._registry is not None and self._registry.is_new and known:
            await asyncio.to_thread(self._restore)
        for module in self._config.lora_modules:
            if module.name not in self._entries:
                settings = AdapterSettings() if self._registry is None else self._registry.settings(module.name)
                self._entries[module.name] = AdapterEntry(module.name, None, module.path, settings)

    def _write(self, write: Write) -> None:
        """To the file, if there is one; to one that is lost or damaged, all that is known goes first.

        Raises:
            RayLoraError: it cannot be written.
        """
        if self._registry is None:
            return
        try:
            try:
                write(self._registry)
            except sqlite3.Error as error:
                if not is_damage(error):
                    raise
                self._registry = AdapterRegistry(self._registry.path)
                self._restore()
                write(self._registry)
        except sqlite3.Error as error:
            raise RayLoraError(f"lora_registry_path: {self._registry.path} cannot be written: {error}") from None

    def _restore(self) -> None:
        """Write the names that came by a load, and what was said of any."""
        assert self._registry is not None
        entries = list(self._entries.values())
        configured = {module.name: module.path for module in self._config.lora_modules}
        loaded = []
        for entry in entries:
            found = None if self._folder is None else self._folder.find(entry.name)
            if entry.source not in (configured.get(entry.name), found and found.path):
                loaded.append(entry)
        settings = {entry.name: entry.settings for entry in entries if entry.settings != AdapterSettings()}
        self._registry.restore(loaded, settings)
        logger.error(
            "lora_registry_path: %s was empty; it has the %d adapters again that were loaded and are served",
            self._registry.path,
            len(loaded),
        )

    async def _save_times_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SAVE_PERIOD_S)
            try:
                await asyncio.to_thread(self._save_times)
            except RayLoraError as error:
                logger.error("%s", error)

    def _save_times(self) -> None:
        times = {each.name: each.settings.last_used for each in list(self._entries.values())}
        used = {name: at for name, at in times.items() if at is not None}
        self._write(lambda registry: registry.set_last_used(used))

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._revision, in_order_of_need(self._entries.values()))

    def _next_revision(self) -> Revision:
        return replace(self._revision, number=self._revision.number + 1)

    async def _carry_through(self, work: Coroutine[Any, Any, T]) -> T | RayLoraError:
        task = asyncio.ensure_future(told(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)


def _open_registry(config: EngineConfig) -> AdapterRegistry | None:
    if config.lora_registry_path is None:
        return None
    try:
        return AdapterRegistry(Path(config.lora_registry_path))
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"lora_registry_path: {config.lora_registry_path} cannot be used: {error}") from None
