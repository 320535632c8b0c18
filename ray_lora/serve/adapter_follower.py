"""One replica's side of the directory: its engine has the names that the directory says, each with that content."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from ray.serve.handle import DeploymentHandle

from ray_lora.adapter import AdapterFiles, AdapterInfo
from ray_lora.config import EngineConfig, LoRAModule
from ray_lora.engine.adapter_resolver import Candidate
from ray_lora.engine.shared_calls import SharedCalls
from ray_lora.errors import ConfigError, EngineDeadError, NotFoundError, RayLoraError
from ray_lora.serve.adapter_entry import AdapterEntry, Revision, Snapshot
from ray_lora.serve.replica_calls import RETRY_S, answer, call, every_answer

logger = logging.getLogger("ray.serve")

SYNC_PERIOD_S = 1.0
"""How often a replica asks whether it has missed anything."""
ASK_TIMEOUT_S = 10.0
"""A directory that died is back within this time; until then a name that nobody here has heard of waits."""


class AdapterEngine(Protocol):
    """What of an engine is needed here; see `AsyncEngine`."""

    async def load_adapter(self, name: str, path: str) -> tuple[AdapterInfo, bool]: ...
    async def has_adapter_files(self, version: str) -> bool: ...
    async def add_adapter_files(self, files: AdapterFiles, source: str) -> None: ...
    async def prepare_adapter(self, name: str, candidate: Candidate, stages: bool) -> None: ...
    async def point_adapter(self, name: str, candidate: Candidate) -> AdapterInfo: ...
    async def unload_adapter(self, name: str) -> None: ...
    async def pin_adapter(self, name: str, is_pinned: bool = True) -> AdapterInfo: ...
    async def set_adapter_weight(self, name: str, weight: float) -> AdapterInfo: ...
    async def mark_used(self, name: str, at: float) -> None: ...
    def list_adapters(self) -> list[AdapterInfo]: ...


class AdapterFollower:
    """Made before the engine, for which it is an `AdapterResolver`; all else after `begin`, in one event loop.

    An adapter is read from its source once: the other replicas have its files from one that has them, in their own
    store if they share it, else over the network. The source is asked again only if no replica has them any more.

    Args:
        own_id: of this replica.
        peers: all replicas.
    """

    def __init__(
        self, config: EngineConfig, own_id: str, directory: DeploymentHandle[Any], peers: DeploymentHandle[Any]
    ) -> None:
        self._config = config
        self._id = own_id
        self._directory = directory
        self._peers = peers
        self._loop = asyncio.get_running_loop()
        self._configured = {module.name: module for module in config.lora_modules}
        self._engine: AdapterEngine
        self._entries: dict[str, AdapterEntry] = {}
        self._revision: Revision | None = None
        self._lock = asyncio.Lock()
        self._num_orders = 0
        self._syncing = asyncio.Lock()
        self._ordered: set[str] = set()
        """Names that orders were about since the news were last asked for."""
        self._told_used: dict[str, float] = {}
        self._num_returning = 0
        """Names of which `begin` has left the content to come behind it."""
        self._catching_up: asyncio.Task[None] | None = None
        self._asking: SharedCalls[None] = SharedCalls()
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, engine: AdapterEngine) -> None:
        """Take over all names that there are.

        Returns once the configured, the pinned and the most recently used, as many as host memory takes, are on every
        rank. The others come meanwhile, or with their first request. What cannot be had is left out, and said in the
        log.

        Raises:
            ConfigError: an adapter of `lora_modules` cannot be served.
            EngineDeadError: a rank is gone.
        """
        self._engine = engine
        snapshot = await self._ask_news()
        assert snapshot is not None, "who has nothing is told everything"
        self._entries = {entry.name: entry for entry in snapshot.entries}
        self._revision = snapshot.revision
        known = [entry for entry in snapshot.entries if entry.version is not None]
        num_first = self._config.max_staged_loras
        for entry in known[:num_first]:
            await self._recall(entry)
        for entry in snapshot.entries:
            if entry.version is None:
                await self._read_configured(entry)
        self._num_returning = len(known[num_first:])
        work = (self._recall_the_rest(known[num_first:]), self._follow())
        self._tasks = [asyncio.create_task(each) for each in work]

    async def end(self) -> None:
        """Tell once more when each name was last used, if the directory is still there."""
        for task in self._tasks:
            task.cancel()
        with suppress(RayLoraError, TimeoutError):
            async with asyncio.timeout(SYNC_PERIOD_S):
                await self._ask_news()

    def find(self, name: str) -> Candidate | None:
        """For the engine: where to load a name from that is known but not there yet. From a thread that may wait."""
        entry = self._entries.get(name)
        if entry is None:
            return None
        asyncio.run_coroutine_threadsafe(self._bring(entry), self._loop).result()
        return Candidate(entry.source, entry.version)

    async def ask_about(self, name: str) -> None:
        """Before a request: the directory may know a name that is new here; `find` does then."""
        if self._catching_up is None:
            self._catching_up = asyncio.create_task(self._catch_up())
        await asyncio.shield(self._catching_up)
        if name not in self._entries:
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    await self._asking.run(name, lambda: self._learn(name))

    async def prepare(self, entry: AdapterEntry, path: str, reader: str) -> None:
        """Do all that can fail before an entry is taken. Who has read the adapter stages it; others have its files.

        Args:
            path: where the content comes from, as the caller wrote it.
            reader: the replica that has read it.
        """
        if reader != self._id:
            await self._bring(entry, reader)
        await self._engine.prepare_adapter(entry.name, Candidate(path, entry.version), reader == self._id)

    async def take(
        self, name: str, entry: AdapterEntry | None, before: Revision, after: Revision
    ) -> AdapterInfo | None:
        """Let a name be what the directory says, whatever it was; None forgets it.

        Raises:
            RayLoraError: it cannot be had, or not be pinned.
        """
        async with self._lock:
            self._num_orders += 1
            self._ordered.add(name)
            info = await self._become(name, entry)
            if self._revision == before:
                self._revision = after
            return info

    def missing(self) -> list[str]:
        """What is not there yet, in words; no names, for anybody may ask."""
        return [f"adapters that are still coming back: {self._num_returning}"] if self._num_returning else []

    def held(self) -> Snapshot | None:
        """All that was heard from the directory."""
        return None if self._revision is None else Snapshot(self._revision, tuple(self._entries.values()))

    async def _become(self, name: str, entry: AdapterEntry | None) -> AdapterInfo | None:
        if entry is None:
            self._entries.pop(name, None)
            with suppress(NotFoundError):
                await self._engine.unload_adapter(name)
            return None
        self._entries[name] = entry
        await self._bring(entry)
        info = await self._engine.point_adapter(name, Candidate(entry.source, entry.version))
        settings, module = entry.settings, self._configured.get(name, LoRAModule(name=name, path=""))
        weight = module.weight if settings.weight is None else settings.weight
        is_pinned = module.pinned if settings.pinned is None else settings.pinned
        if info.weight != weight:
            info = await self._engine.set_adapter_weight(name, weight)
        if info.pinned != is_pinned:
            info = await self._engine.pin_adapter(name, is_pinned)
        return info

    async def _bring(self, entry: AdapterEntry, reader: str | None = None) -> None:
        """Have an entry's content in this replica's store, if another replica has it.

        Args:
            reader: a replica that has it.
        """
        version = entry.version
        if version is None or await self._engine.has_adapter_files(version):
            return
        try:
            for holder in await self._holders(version) if reader is None else [reader]:
                files = await answer(call(self._peers.adapter_files, holder, version))
                if files is not None:
                    return await self._engine.add_adapter_files(files, entry.source)
        except RayLoraError as error:
            logger.warning("adapter %r cannot be had from another replica: %s", entry.name, error)

    async def _holders(self, version: str) -> list[str]:
        """The replicas that have a content in their store."""
        answers = await every_answer(self._peers, "holds_files", version)
        return [holder for holder in answers if isinstance(holder, str)]

    async def _recall(self, entry: AdapterEntry) -> None:
        async with self._lock:
            if self._entries.get(entry.name) is entry:  # nobody has changed it meanwhile
                await self._try_to_become(entry)

    async def _try_to_become(self, entry: AdapterEntry) -> None:
        try:
            await self._become(entry.name, entry)
            if entry.settings.last_used is not None:
                await self._engine.mark_used(entry.name, entry.settings.last_used)
        except EngineDeadError:
            raise
        except RayLoraError as error:
            logger.error("adapter %r cannot be restored: %s", entry.name, error)

    async def _recall_the_rest(self, entries: Sequence[AdapterEntry]) -> None:
        with suppress(EngineDeadError):
            for entry in entries:
                await self._recall(entry)
                self._num_returning -= 1

    async def _read_configured(self, entry: AdapterEntry) -> None:
        """Nobody has read it yet, unless another replica does at the same time; then the first one counts."""
        name = entry.name
        try:
            info, _ = await self._engine.load_adapter(name, entry.source)
            version = await answer(self._directory.adopt.remote(name, info.version))
            await self._become(name, None if version is None else replace(entry, version=version))
        except RayLoraError as error:
            raise ConfigError(f"lora_modules: {name!r}: {error}") from error

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(SYNC_PERIOD_S)
            with suppress(RayLoraError):  # the directory is away, and will be back
                await self._sync()

    async def _catch_up(self) -> None:
        """Before the first request: what happened between `begin` and being reached by others."""
        with suppress(RayLoraError, TimeoutError):
            async with asyncio.timeout(SYNC_PERIOD_S):
                await self._sync()

    async def _sync(self) -> None:
        """Take over what the directory has said to others while this replica could not hear it.

        An order that comes meanwhile may be newer than the news, so they do not count for its name.
        """
        async with self._syncing:
            self._ordered.clear()
            snapshot = await self._ask_news()
            if snapshot is None:
                return
            async with self._lock:
                for name in self._entries.keys() - {entry.name for entry in snapshot.entries} - self._ordered:
                    await self._become(name, None)
                for entry in _changed(self._entries, snapshot.entries):
                    if entry.name not in self._ordered:
                        await self._try_to_become(entry)
                self._revision = snapshot.revision

    async def _ask_news(self) -> Snapshot | None:
        used = {}
        if self._revision is not None:
            times = {info.name: info.last_used for info in self._engine.list_adapters() if info.last_used is not None}
            used = {name: at for name, at in times.items() if self._told_used.get(name) != at}
        snapshot: Snapshot | None = await answer(self._directory.news.remote(self._revision, used))
        self._told_used |= used
        return snapshot

    async def _learn(self, name: str) -> None:
        """Ask the directory what a name is, and again if an order has come meanwhile, for that is newer."""
        while name not in self._entries:
            num_orders = self._num_orders
            try:
                entry: AdapterEntry | None = await answer(call(self._directory.resolve, name))
            except EngineDeadError as error:  # of the directory, which died while it was asked
                logger.warning("the directory is asked for %r again: %s", name, error)
                await asyncio.sleep(RETRY_S)
                continue
            if num_orders == self._num_orders:
                if entry is not None:
                    self._entries[name] = entry
                return


def _changed(mine: dict[str, AdapterEntry], theirs: Iterable[AdapterEntry]) -> Iterator[AdapterEntry]:
    for entry in theirs:
        known = mine.get(entry.name)
        if known is None or _lasting(known) != _lasting(entry):
            yield entry


def _lasting(entry: AdapterEntry) -> AdapterEntry:
    """All but when it was used."""
    return replace(entry, settings=replace(entry.settings, last_used=None))
