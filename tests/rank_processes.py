"""Tensor-parallel ranks of a backend on CPU tensors, each a process, with gloo between them.

Imports no torch: what makes the backend may have something to do first.
"""

import multiprocessing
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ray_lora.adapter import AdapterManifest
from ray_lora.config import EngineConfig
from ray_lora.step import ModelInfo, StepPlan, StepResult

if TYPE_CHECKING:
    from ray_lora.backends.base import Backend

TIMEOUT_S = 240


def serve_rank(
    connection: Connection, config: EngineConfig, rank: int, init_method: str, make_backend: "Callable[[], Backend]"
) -> None:
    """One rank: answers calls of the worker's methods until it is told None."""
    backend = make_backend()
    from ray_lora.cluster import worker as worker_module

    vars(worker_module)["make_backend"] = lambda device: backend
    worker = worker_module.Worker(config, rank)
    connection.send(worker.start(init_method))
    while (call := connection.recv()) is not None:
        method, arguments = call
        try:
            connection.send(getattr(worker, method)(*arguments))
        except BaseException:
            traceback.print_exc(file=sys.stderr)
            raise


class ProcessExecutor:
    """Implements `Executor` as far as a test needs it; each rank calls `make_backend`, a function of a module."""

    def __init__(self, config: EngineConfig, make_backend: "Callable[[], Backend]") -> None:
        from ray_lora.cluster.rank_groups import meeting_point

        address, context = meeting_point("127.0.0.1"), multiprocessing.get_context("spawn")
        self._connections, self._processes = list[Any](), list[Any]()
        for rank in range(config.tensor_parallel_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, config, rank, address, make_backend)
            process = context.Process(target=serve_rank, args=arguments, daemon=True)
            process.start()
            self._connections.append(ours)
            self._processes.append(process)
        self.infos: list[ModelInfo] = self._receive(self._connections)

    @property
    def info(self) -> ModelInfo:
        return self.infos[0]

    def execute(self, plan: StepPlan) -> StepResult:
        result: StepResult = self._call("execute", plan)[0]
        return result

    def inspect_adapter(self, source: str) -> AdapterManifest:
        self._connections[0].send(("inspect_adapter", (source,)))
        manifest: AdapterManifest = self._receive(self._connections[:1])[0]
        return manifest

    def stage_adapter(self, manifest: AdapterManifest) -> None:
        self._call("stage_adapter", manifest)

    def drop_adapter(self, version: str, forget: bool = True) -> None:
        self._call("drop_adapter", version, forget)

    def check_health(self) -> None:
        assert all(process.is_alive() for process in self._processes)

    def shutdown(self) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.send(None)
            process.join()

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        for connection in self._connections:
            connection.send((method, arguments))
        return self._receive(self._connections)

    def _receive(self, connections: list[Any]) -> list[Any]:
        answers = []
        for connection in connections:
            assert connection.poll(TIMEOUT_S), "a rank does not answer"
            answers.append(connection.recv())
        return answers
