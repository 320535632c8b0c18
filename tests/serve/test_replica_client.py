"""The ingress's side and the replica's side of a request, joined without Serve between them."""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import start_fake

from ray_lora.config import EngineConfig
from ray_lora.errors import RayLoraError
from ray_lora.request import GenerateRequest, SamplingParams
from ray_lora.serve import outbox as outbox_module
from ray_lora.serve import replica as replica_module
from ray_lora.serve.replica import LLMReplica
from ray_lora.serve.replica_client import ReplicaClient
from ray_lora.serve.request_observer import RequestObserver

Replica = type("Replica", (LLMReplica,), {"__del__": lambda self: None})
"""Serve awaits the replica's own `__del__`; here nobody does."""


class DirectHandle:
    """A deployment handle to one replica in this process, for calls that stream."""

    def __init__(self, replica: LLMReplica, method_name: str = "") -> None:
        self._replica, self._method = replica, method_name

    def options(self, method_name: str, stream: bool) -> "DirectHandle":
        assert stream
        return DirectHandle(self._replica, method_name)

    def remote(self, *args: Any) -> AsyncGenerator[Any, None]:
        stream: AsyncGenerator[Any, None] = getattr(self._replica, self._method)(*args)
        return stream


@pytest.fixture
def start_client(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Awaitable[ReplicaClient]]:
    """Makes a replica, and its client."""
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"))
    monkeypatch.setattr(replica_module.serve, "get_replica_context", lambda: context)

    async def start() -> ReplicaClient:
        replica: LLMReplica = Replica.__new__(Replica)
        await Replica.__init__(replica, config, start_fake)
        return ReplicaClient(DirectHandle(replica), RequestObserver(config, str))  # type: ignore[arg-type]

    return start


def test_requests_after_any_pause_are_answered(
    start_client: Callable[[], Awaitable[ReplicaClient]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "IDLE_S", 0.05)
    monkeypatch.setattr(replica_module, "FORGET_S", 0.3)

    async def main() -> None:
        client = await start_client()
        for pause_s in (0.0, 0.1, 0.6, 0.0, 0.6, 0.28):
            await asyncio.sleep(pause_s)
            request = GenerateRequest(prompt=[5, 6], sampling_params=SamplingParams(max_tokens=3))
            async with asyncio.timeout(5):
                tokens = [token async for chunk in client.generate(request) for token in chunk.outputs[0].token_ids]
            assert tokens == [7, 8, 9]

    asyncio.run(main())


def test_every_request_is_told_of_once_it_has_ended(
    start_client: Callable[[], Awaitable[ReplicaClient]], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        client = await start_client()
        for seed, name in ((0, "done"), (-1, "broken"), (-3, "refused")):
            params = SamplingParams(max_tokens=5, seed=seed)
            request = GenerateRequest(prompt=[5, 6], sampling_params=params, request_id=name)
            with suppress(RayLoraError):
                _ = [chunk async for chunk in client.generate(request)]

    with caplog.at_level(logging.INFO, "ray.serve"):
        asyncio.run(main())
    told = [re.match(r"request request_id=(\w+) status=(\d+) .* completion_tokens=(\d+)", m) for m in caplog.messages]
    assert [match.groups() for match in told if match] == [
        ("done", "200", "5"),
        ("broken", "500", "2"),
        ("refused", "429", "0"),
    ]
