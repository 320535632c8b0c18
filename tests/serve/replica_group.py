"""Replicas and their directory in this process, joined without Serve."""

import asyncio
import functools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import start_fake

from ray_lora.config import EngineConfig
from ray_lora.serve import replica as replica_module
from ray_lora.serve.adapter_directory import AdapterDirectory
from ray_lora.serve.replica import EngineStarter, LLMReplica
from ray_lora.serve.replica_client import ReplicaClient

Replica = type("Replica", (LLMReplica,), {"__del__": lambda self: None})
Directory = type("Directory", (AdapterDirectory,), {"__del__": lambda self: None})
"""Serve awaits their own `__del__`; here nobody does."""


class Stream:
    """What a streaming call gives. Whoever cancels it cancels the task that reads it as well, which is enough here."""

    def __init__(self, items: AsyncIterator[Any]) -> None:
        self._items = items

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._items

    def cancel(self) -> None:
        pass


class GroupHandle:
    """A deployment handle to objects in this process; calls go to the first of them, but no request to a dead one."""

    def __init__(self, targets: list[Any], method: str = "", stream: bool = False) -> None:
        self.targets = targets
        self._method, self._stream = method, stream
        self.failures: list[Exception] = []
        """Raised by the next broadcasts, one each."""

    def __getattr__(self, method: str) -> "GroupHandle":
        return GroupHandle(self.targets, method)

    def options(self, method_name: str, stream: bool) -> "GroupHandle":
        return GroupHandle(self.targets, method_name, stream)

    def remote(self, *args: Any) -> Any:
        targets = self.targets
        if self._method == "submit":
            targets = [each for each in targets if each._id not in args[3]]
        elif self._method in ("adapter_files", "outbox"):
            targets = [each for each in targets if each._id == args[0]]
        answer = getattr(targets[0], self._method)(*args)
        return Stream(answer) if self._stream else answer

    def broadcast(self, method: str, *args: Any) -> Any:
        async def results_async() -> list[Any]:
            if self.failures:
                raise self.failures.pop()
            return await asyncio.gather(*[getattr(target, method)(*args) for target in self.targets])

        return SimpleNamespace(results_async=results_async)


class Group:
    """`directory`, `replicas` and `client`, all real but for the handles between them."""

    def __init__(self, config: EngineConfig, start: EngineStarter) -> None:
        self.config, self._start = config, start
        self.replicas: list[Any] = []
        self.handle = GroupHandle(self.replicas)
        self.directory_handle = GroupHandle([])
        self.client = ReplicaClient(
            self.handle,  # type: ignore[arg-type]
            self.directory_handle,  # type: ignore[arg-type]
            config,
        )

    @property
    def directory(self) -> Any:
        return self.directory_handle.targets[0]

    @property
    def engines(self) -> list[Any]:
        return [replica._engine for replica in self.replicas]

    async def start_directory(self) -> None:
        """Also in place of one that has died."""
        directory: Any = Directory.__new__(Directory)
        await Directory.__init__(directory, self.config, self.handle)
        self.directory_handle.targets[:] = [directory]

    async def start_replica(self, joins: bool = True) -> Any:
        replica: Any = Replica.__new__(Replica)
        await Replica.__init__(replica, self.config, self._start)
        if joins:
            self.replicas.append(replica)
        return replica

    async def stop(self, replica: Any) -> None:
        await LLMReplica.__del__(replica)
        if replica in self.replicas:
            self.replicas.remove(replica)

    def held(self) -> list[dict[str, tuple[str, bool]]]:
        """Version and pin of every name, by replica."""
        return [{info.name: (info.version, info.pinned) for info in each.list_adapters()} for each in self.engines]


@asynccontextmanager
async def running(
    config: EngineConfig, num_replicas: int = 2, start: EngineStarter = start_fake
) -> AsyncIterator[Group]:
    group = Group(config, start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_module.serve, "get_replica_context", new_context)
        handles = {replica_module.DIRECTORY_NAME: group.directory_handle, "LLMReplica": group.handle}
        patch.setattr(replica_module.serve, "get_deployment_handle", lambda name, app: handles[name])
        await group.start_directory()
        try:
            for _ in range(num_replicas):
                await group.start_replica()
            yield group
        finally:
            for replica in list(group.replicas):
                await group.stop(replica)
            await AdapterDirectory.__del__(group.directory)


def new_context() -> Any:
    return SimpleNamespace(
        replica_id=SimpleNamespace(unique_id=uuid.uuid4().hex), app_name="llama", deployment="LLMReplica"
    )


def in_event_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test; its parameters are fixtures as usual."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        async def main() -> None:
            await test(*args, **fixtures)

        asyncio.run(main())

    return run
