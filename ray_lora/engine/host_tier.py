"""The adapters in the ranks' host memory: who comes, who gives way, who is freed. Used in one event loop.

Staging and dropping run in threads of their own, one adapter at a time; what changes the registry is called in the
engine's thread, between two steps.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Protocol, TypeVar

from ray_lora.adapter import AdapterManifest, StagingTimes, TierUse
from ray_lora.config import EngineConfig
from ray_lora.engine.adapter_manager import AdapterManager
from ray_lora.engine.engine_metrics import EngineMetrics
from ray_lora.engine.executor import Executor
from ray_lora.engine.shared_calls import SharedCalls
from ray_lora.errors import CapacityError, EngineDeadError, RayLoraError

T = TypeVar("T")

RETRY_S = 0.02
"""How often a cold adapter looks for room while none in host memory may leave."""


class EngineCall(Protocol):
    """Runs a function in the engine's thread, between two steps; functions run in the order of the calls."""

    def __call__(self, function: Callable[[], T]) -> Awaitable[T]: ...


class HostTier:
    """Every change of what the ranks hold happens under `lock`."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        adapters: AdapterManager,
        call: EngineCall,
        metrics: EngineMetrics,
    ) -> None:
        self.lock = asyncio.Lock()
        self._config = config
        self._executor = executor
        self._adapters = adapters
        self._call = call
        self._metrics = metrics
        self._held: dict[str, int] = {}
        """Versions that the ranks hold, and their bytes."""
        self._on_disk: set[str] = set()
        """Versions that they do not hold, but whose files are kept."""
        self._warming: SharedCalls[None] = SharedCalls()
        self._awaited: Counter[str] = Counter()
        """Cold versions that requests wait for, until these hold them."""

    def use(self) -> TierUse:
        held = list(self._held.values())
        return TierUse(len(held), self._config.max_staged_loras, sum(held), self._config.max_cpu_lora_bytes)

    async def stage(self, manifest: AdapterManifest) -> StagingTimes | None:
        """Bring an adapter to host memory, in place of the least recently used; None if it is there. Hold the lock.

        Raises:
            CapacityError: there is no room, and none of the adapters there may leave.
            RayLoraError: a rank failed or disagreed, and none holds it.
        """
        if manifest.version in self._held:
            return None
        while not self.has_room(manifest):
            idle = await self._call(partial(self._adapters.take_idle, self._held.keys() - self._awaited.keys()))
            if idle is None:
                raise CapacityError(
                    f"the {len(self._held)} adapters in host memory, as many as max_cpu_loras and max_cpu_lora_bytes "
                    "allow, all have requests or are pinned"
                )
            await asyncio.to_thread(self._executor.drop_adapter, idle, forget=False)
            del self._held[idle]
            self._on_disk.add(idle)
        try:
            times = await asyncio.to_thread(self._executor.stage_adapter, manifest)
        except RayLoraError:
            if manifest.version not in self._on_disk:
                await asyncio.to_thread(self._executor.drop_adapter, manifest.version)
            raise
        self._held[manifest.version] = manifest.shard_bytes
        self._on_disk.discard(manifest.version)
        return times

    def has_room(self, manifest: AdapterManifest) -> bool:
        """Whether an adapter is in host memory, or nothing has to leave for it."""
        if manifest.version in self._held:
            return True
        max_bytes = self._config.max_cpu_lora_bytes
        if max_bytes is not None and sum(self._held.values()) + manifest.shard_bytes > max_bytes:
            return False
        return len(self._held) < self._config.max_staged_loras

    def holds(self, version: str) -> bool:
        """Whether it is in host memory."""
        return version in self._held

    async def keep(self, manifest: AdapterManifest) -> None:
        """Keep the files of an adapter, unless it is in host memory. Hold the lock.

        Raises:
            CapacityError: they had to leave the store already.
        """
        if manifest.version not in self._held and manifest.version not in self._on_disk:
            await asyncio.to_thread(self._executor.keep_adapter, manifest)
            self._on_disk.add(manifest.version)

    def commit(
        self, name: str, change: Callable[[], None], read: Mapping[str, float], staged: StagingTimes | None
    ) -> Awaitable[None]:
        """Change the registry between two steps; to be called under the lock, and waited for with or without it.

        Args:
            read, staged: how long it took to read the adapter of this name, if it was, and then to bring it to host
                memory, if it was not there.
        """
        begin = time.monotonic()

        def run() -> None:
            change()
            if staged is not None:
                stages = {"stage": staged.stage_s, "barrier": staged.barrier_s, "commit": time.monotonic() - begin}
                self._metrics.loaded(name, {**read, **stages})

        return self._call(run)

    @asynccontextmanager
    async def warm(self, name: str) -> AsyncIterator[None]:
        """Inside, the adapter of this name, if there is one, is in host memory; all who want it wait together.

        One that was brought there for this stays inside. Without that, two who take each other's room would go on.
        """
        manifest = self._adapters.find_cold(name)
        if manifest is None:
            yield
            return
        self._awaited[manifest.version] += 1
        try:
            await self._warming.run(manifest.version, partial(self._warm_up, name, manifest))
            yield
        finally:
            self._awaited[manifest.version] -= 1
            self._awaited += Counter()  # keeps what is above zero

    async def drop(self, version: str) -> None:
        """Free a dead version on the ranks, unless it has been registered again or dropped meanwhile."""
        with suppress(EngineDeadError):  # what dead ranks held is gone
            async with self.lock:
                known = version in self._held or version in self._on_disk
                if known and not await self._call(lambda: self._adapters.is_registered(version)):
                    await asyncio.to_thread(self._executor.drop_adapter, version)
                    self._held.pop(version, None)
                    self._on_disk.discard(version)

    async def _warm_up(self, name: str, manifest: AdapterManifest) -> None:
        while True:
            async with self.lock:
                if not self._adapters.is_registered(manifest.version):
                    return
                with self._metrics.counting_failed_loads(), suppress(CapacityError):
                    staged = await self.stage(manifest)
                    committed = self.commit(name, partial(self._adapters.mark_staged, manifest.version), {}, staged)
                    break
            await asyncio.sleep(RETRY_S)
        await committed  # outside the lock: the next one's call comes after this one
