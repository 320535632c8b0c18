"""From a configuration to an engine that holds its adapters."""

import asyncio
import sqlite3
from pathlib import Path

from ray_lora.cluster.launch import start_executor
from ray_lora.config import EngineConfig
from ray_lora.engine.async_engine import AsyncEngine
from ray_lora.errors import ConfigError, RayLoraError
from ray_lora.serve.adapter_registry import AdapterRegistry
from ray_lora.serve.durable_engine import DurableEngine
from ray_lora.serve.tokenizer_loader import load_tokenizer


async def start_engine(config: EngineConfig) -> AsyncEngine:
    """Load the model on every rank, then the adapters of the registry, then those of `lora_modules`.

    Belongs to the running event loop.

    Raises:
        ConfigError: the model, the tokenizer, an adapter or the registry cannot be served; one line that names it.
    """
    tokenizer = load_tokenizer(config)
    registry = _open_registry(config)
    executor = await asyncio.to_thread(start_executor, config)
    engine = (
        AsyncEngine(config, executor, tokenizer)
        if registry is None
        else DurableEngine(config, executor, tokenizer, registry)
    )
    try:
        if isinstance(engine, DurableEngine):
            await engine.restore()
        for module in config.lora_modules:
            if module.base_model_name not in (None, config.base_model_name):
                raise ConfigError(
                    f"lora_modules: {module.name!r} is for {module.base_model_name!r}, not {config.base_model_name!r}"
                )
            try:
                await engine.load_configured(module)
            except RayLoraError as error:
                raise ConfigError(f"lora_modules: {module.name!r}: {error}") from error
    except BaseException:
        await engine.shutdown()
        raise
    return engine


def _open_registry(config: EngineConfig) -> AdapterRegistry | None:
    if config.lora_registry_path is None:
        return None
    try:
        return AdapterRegistry(Path(config.lora_registry_path))
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"lora_registry_path: {config.lora_registry_path} cannot be used: {error}") from None
