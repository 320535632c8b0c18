"""The ingress's side and the replica's side of a request, joined without Serve between them."""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import suppress

import pytest
from replica_group import running

from ray_lora.config import EngineConfig
from ray_lora.errors import RayLoraError
from ray_lora.request import GenerateRequest, SamplingParams
from ray_lora.serve import outbox as outbox_module
from ray_lora.serve import replica as replica_module
from ray_lora.serve.replica_client import ReplicaClient


async def answer(client: ReplicaClient, first: int) -> list[int]:
    request = GenerateRequest(prompt=[first], sampling_params=SamplingParams(max_tokens=3))
    async with asyncio.timeout(5):
        return [token async for chunk in client.generate(request) for token in chunk.outputs[0].token_ids]


def test_requests_after_any_pause_are_answered(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "IDLE_S", 0.05)
    monkeypatch.setattr(replica_module, "FORGET_S", 0.3)

    async def main() -> None:
        async with running(config, 1) as group:
            for pause_s in (0.0, 0.1, 0.6, 0.0, 0.6, 0.28):
                await asyncio.sleep(pause_s)
                assert await answer(group.client, 6) == [7, 8, 9]

    asyncio.run(main())


def test_a_request_is_answered_though_its_outbox_cannot_be_reached(config: EngineConfig) -> None:
    async def nothing(replica_id: str, ingress_id: str) -> AsyncGenerator[bytes, None]:
        for batch in ():
            yield batch

    async def main() -> None:
        async with running(config, 1) as group:
            group.replicas[0].outbox = nothing
            assert [await answer(group.client, first) for first in (5, 50)] == [[6, 7, 8], [51, 52, 53]]

    asyncio.run(main())


def test_every_request_is_told_of_once_it_has_ended(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running(config, 1) as group:
            for seed, name in ((0, "done"), (-1, "broken"), (-3, "refused")):
                params = SamplingParams(max_tokens=5, seed=seed)
                request = GenerateRequest(prompt=[5, 6], sampling_params=params, request_id=name)
                with suppress(RayLoraError):
                    _ = [chunk async for chunk in group.client.generate(request)]

    with caplog.at_level(logging.INFO, "ray.serve"):
        asyncio.run(main())
    told = [re.match(r"request request_id=(\w+) status=(\d+) .* completion_tokens=(\d+)", m) for m in caplog.messages]
    assert [match.groups() for match in told if match] == [
        ("done", "200", "5"),
        ("broken", "500", "2"),
        ("refused", "429", "0"),
    ]
