"""The ingress's side and the replica's side of a request, joined without Serve between them."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_engine import start_fake

from ray_lora.config import EngineConfig
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


def test_requests_after_any_pause_are_answered(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "IDLE_S", 0.05)
    monkeypatch.setattr(replica_module, "FORGET_S", 0.3)
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="r1"))
    monkeypatch.setattr(replica_module.serve, "get_replica_context", lambda: context)

    async def main() -> None:
        replica: LLMReplica = Replica.__new__(Replica)
        await Replica.__init__(replica, config, start_fake)
        observer = RequestObserver(config, lambda _: "")
        client = ReplicaClient(DirectHandle(replica), observer)  # type: ignore[arg-type]
        for pause_s in (0.0, 0.1, 0.6, 0.0, 0.6, 0.28):
            await asyncio.sleep(pause_s)
            request = GenerateRequest(prompt=[5, 6], sampling_params=SamplingParams(max_tokens=3))
            async with asyncio.timeout(5):
                tokens = [token async for chunk in client.generate(request) for token in chunk.outputs[0].token_ids]
            assert tokens == [7, 8, 9]

    asyncio.run(main())
