"""The application, but for the NPUs: Ray places the ranks as for them, and they compute with the CPU's operators."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from ray.serve import Application

from ray_lora.backends.cpu import CPUBackend
from ray_lora.cluster import worker
from ray_lora.cluster.ray_tp import RayTPExecutor
from ray_lora.config import EngineConfig
from ray_lora.engine.adapter_resolver import AdapterResolver
from ray_lora.engine.async_engine import AsyncEngine
from ray_lora.serve import app, start
from ray_lora.step import ModelInfo


class StandInWorker(worker.Worker):
    """A rank without its NPU."""

    def start(self, init_method: str | None = None) -> ModelInfo:
        vars(worker)["make_backend"] = lambda device: CPUBackend()
        return super().start(init_method)


async def start_engine(config: EngineConfig, resolvers: Sequence[AdapterResolver]) -> AsyncEngine:
    vars(start)["start_executor"] = partial(RayTPExecutor, worker_class=StandInWorker)
    return await start.start_engine(config, resolvers)


def build_app(args: dict[str, Any]) -> Application:
    """As `ray_lora.serve.app:build_app`, whose place it takes in a serve config."""
    vars(app)["bind_app"] = partial(app.bind_app, start=start_engine)
    return app.build_app(args)
