"""An engine whose registered adapters outlive it."""

import asyncio
import logging
from pathlib import Path

from ray_lora.adapter import AdapterInfo
from ray_lora.config import EngineConfig
from ray_lora.engine.async_engine import AsyncEngine
from ray_lora.engine.completion import Tokenizer
from ray_lora.engine.executor import Executor
from ray_lora.errors import EngineDeadError, NotFoundError, RayLoraError
from ray_lora.serve.adapter_registry import AdapterRegistry, RegistryEntry

logger = logging.getLogger("ray.serve")


class DurableEngine(AsyncEngine):
    """Writes every load and unload after `restore` to the registry; adapters of the configuration are loaded before."""

    def __init__(
        self, config: EngineConfig, executor: Executor, tokenizer: Tokenizer, registry: AdapterRegistry
    ) -> None:
        super().__init__(config, executor, tokenizer)
        self._registry = registry
        self._is_restored = False

    async def load_adapter(
        self, name: str, path: str, load_inplace: bool = False, expected_version: str | None = None
    ) -> tuple[AdapterInfo, bool]:
        info, changed = await super().load_adapter(name, path, load_inplace, expected_version)
        if self._is_restored:
            await asyncio.to_thread(self._registry.put, RegistryEntry(name, info.version, path))
        return info, changed

    async def unload_adapter(self, name: str) -> None:
        await super().unload_adapter(name)
        await asyncio.to_thread(self._registry.remove, name)

    async def restore(self) -> None:
        """Load what was registered, each name with exactly the content that it had; what cannot be had is left out.

        Raises:
            EngineDeadError: a rank is gone.
        """
        for entry in await asyncio.to_thread(self._registry.entries):
            try:
                await self._restore(entry)
            except EngineDeadError:
                raise
            except RayLoraError as error:
                logger.error("adapter %r of the registry cannot be restored: %s", entry.name, error)
        self._is_restored = True

    async def _restore(self, entry: RegistryEntry) -> None:
        """From the store's copy if it is still there, else from where it came from."""
        copy = Path(self.config.adapter_store_dir).expanduser() / entry.version
        try:
            await super().load_adapter(entry.name, str(copy), load_inplace=True)
            return
        except EngineDeadError:
            raise
        except RayLoraError:
            info, _ = await super().load_adapter(entry.name, entry.source, load_inplace=True)
        if info.version != entry.version:
            await super().unload_adapter(entry.name)
            raise NotFoundError(f"{info.source} has other content now, and the store has lost what it had", "lora_path")
