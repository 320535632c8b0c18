"""A rank that does what a file says, once, at a point of a load or of a step."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ray import cloudpickle

from ray_lora import EngineConfig
from ray_lora.cluster.ray_tp import RayTPExecutor
from ray_lora.cluster.worker import Worker
from ray_lora.engine.adapter_resolver import AdapterResolver
from ray_lora.engine.async_engine import AsyncEngine
from ray_lora.serve.tokenizer_loader import load_tokenizer
from ray_lora.step import HEARTBEAT, ModelInfo

cloudpickle.register_pickle_by_value(sys.modules[__name__])

POINTS = {"prepare": "_allocate", "barrier": "_agree", "check": "_verify"}
"""Each rank's memory, their meeting before the transfer, and what the others hold after it. Besides, there are
`inspect` and `read`, the reader's, `commit`, when a load is staged on this rank, and `step`."""
DIE_SOON_S = 0.02


class FaultyWorker(Worker):
    """What the file `fault` in the store's directory says, `rank point action`, happens once."""

    def start(self, init_method: str | None = None) -> ModelInfo:
        info = super().start(init_method)
        for point, method in POINTS.items():
            setattr(self._staging, method, self._at(point, getattr(self._staging, method)))
        if self._reader is not None:
            self._reader.inspect = self._at("inspect", self._reader.inspect)  # type: ignore[method-assign]
            self._reader.read = self._at("read", self._reader.read)  # type: ignore[method-assign]
        self._runner.stage = self._at("commit", self._runner.stage)  # type: ignore[method-assign]
        self._runner.execute = self._at("step", self._runner.execute)  # type: ignore[method-assign]
        return info

    def _at(self, point: str, method: Callable[..., Any]) -> Callable[..., Any]:
        file = Path(self._config.adapter_store_dir, "fault")

        def faulty(*args: Any) -> Any:
            if HEARTBEAT in args or not file.exists():
                return method(*args)
            rank, where, action = file.read_text().split()
            if (rank, where) != (str(self._rank), point):
                return method(*args)
            file.unlink()
            match action:
                case "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "die-soon":
                    threading.Timer(DIE_SOON_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "fail":
                    return "MemoryError: no room" if point == "check" else (None, "cannot hold it")
                case "raise":
                    raise OSError("gone")
                case "out-of-memory":
                    raise MemoryError("no room")
            return method(*args)

        return faulty


async def start_faulty(config: EngineConfig, resolvers: Sequence[AdapterResolver] = ()) -> AsyncEngine:
    """As `start_engine`, with such ranks."""
    executor = await asyncio.to_thread(RayTPExecutor, config, FaultyWorker)
    return AsyncEngine(config, executor, load_tokenizer(config), resolvers)
