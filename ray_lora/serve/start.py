"""From a configuration to an engine that holds its adapters."""

import asyncio

from ray_lora.cluster.launch import start_executor
from ray_lora.config import EngineConfig
from ray_lora.engine.async_engine import AsyncEngine
from ray_lora.errors import ConfigError, RayLoraError
from ray_lora.serve.tokenizer_loader import load_tokenizer


async def start_engine(config: EngineConfig) -> AsyncEngine:
    """Load the model on every rank, then the adapters of `lora_modules`. Belongs to the running event loop.

    Raises:
        ConfigError: the model, the tokenizer or an adapter cannot be served; one line that names it.
    """
    tokenizer = load_tokenizer(config)
    executor = await asyncio.to_thread(start_executor, config)
    engine = AsyncEngine(config, executor, tokenizer)
    try:
        for module in config.lora_modules:
            if module.base_model_name not in (None, config.base_model_name):
                raise ConfigError(
                    f"lora_modules: {module.name!r} is for {module.base_model_name!r}, not {config.base_model_name!r}"
                )
            try:
                await engine.load_adapter(module.name, module.path)
            except RayLoraError as error:
                raise ConfigError(f"lora_modules: {module.name!r}: {error}") from error
    except BaseException:
        await engine.shutdown()
        raise
    return engine
