"""From a configuration to an engine."""

import asyncio
from collections.abc import Sequence

from ray_lora.cluster.launch import start_executor
from ray_lora.config import EngineConfig
from ray_lora.engine.adapter_resolver import AdapterResolver
from ray_lora.engine.async_engine import AsyncEngine
from ray_lora.errors import ConfigError, RayLoraError
from ray_lora.serve.tokenizer_loader import load_tokenizer


async def start_engine(config: EngineConfig, resolvers: Sequence[AdapterResolver] = ()) -> AsyncEngine:
    """Load the model on every rank; adapters come later. Belongs to the running event loop.

    Raises:
        ConfigError: the model or the tokenizer cannot be served; one line that names it.
    """
    tokenizer = load_tokenizer(config)
    executor = await asyncio.to_thread(start_executor, config)
    return AsyncEngine(config, executor, tokenizer, resolvers)


async def start_alone(config: EngineConfig) -> AsyncEngine:
    """An engine that holds the adapters of `lora_modules`, and follows no directory.

    Raises:
        ConfigError: it or one of them cannot be served; one line that names it.
    """
    if config.lora_registry_path is not None:
        raise ConfigError("lora_registry_path: only a server remembers its adapters")
    engine = await start_engine(config)
    try:
        for module in config.lora_modules:
            try:
                await engine.load_configured(module)
            except RayLoraError as error:
                raise ConfigError(f"lora_modules: {module.name!r}: {error}") from error
    except BaseException:
        await engine.shutdown()
        raise
    return engine
