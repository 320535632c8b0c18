"""The ingress's side and the replica's side of a request, joined without Serve between them."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from replica_group import running

from ray_lora.config import EngineConfig
from ray_lora.errors import EngineDeadError, OverloadedError, RayLoraError, RequestTimeoutError
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


def test_a_request_is_sent_to_no_replica_that_has_said_that_its_engine_is_dead(config: EngineConfig) -> None:
    async def main() -> None:
        async with running(config, 2) as group:
            group.engines[0].deaths = [1]
            with pytest.raises(EngineDeadError, match="rank 1 is gone"):
                await answer(group.client, 5)
            assert [await answer(group.client, first) for first in (5, 50)] == [[6, 7, 8], [51, 52, 53]]
            assert [len(engine.requests) for engine in group.engines] == [1, 2]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ({"replica_timeout_s": 0.05}, OverloadedError),
        ({"queue_timeout_s": 0.05}, OverloadedError),
        ({"request_timeout_s": 0.05}, RequestTimeoutError),
    ],
)
def test_a_request_waits_for_a_replica_as_long_as_it_may(
    limits: dict[str, float], error: type[RayLoraError], config: EngineConfig
) -> None:
    num_cancelled = 0

    async def no_replica(*_: object) -> AsyncGenerator[bytes, None]:
        nonlocal num_cancelled
        try:
            await asyncio.Event().wait()
            yield b""
        except asyncio.CancelledError:
            num_cancelled += 1
            raise

    async def main() -> None:
        async with running(config.model_copy(update=limits), 1) as group:
            group.replicas[0].submit = no_replica
            with pytest.raises(error) as caught:
                await answer(group.client, 5)
            if "replica_timeout_s" in limits:
                assert str(caught.value) == "No replica has become available in 0.05 s."
                assert isinstance(caught.value, OverloadedError)
                assert caught.value.retry_after
            await asyncio.sleep(0)
            assert num_cancelled == 1

    asyncio.run(main())


def test_a_request_that_has_waited_before_has_that_much_less_time(config: EngineConfig) -> None:
    async def main() -> None:
        async with running(config.model_copy(update={"request_timeout_s": 60.0}), 1) as group:
            request = GenerateRequest(prompt=[5], waited_s=61.0)
            with pytest.raises(RequestTimeoutError):
                _ = [chunk async for chunk in group.client.generate(request)]

    asyncio.run(main())


def test_a_request_that_is_out_of_time_here_is_cancelled_there(config: EngineConfig) -> None:
    async def main() -> None:
        async with running(config.model_copy(update={"request_timeout_s": 0.2}), 1) as group:
            (engine,) = group.engines
            engine.step_s = 0.05
            request = GenerateRequest(prompt=[5], sampling_params=SamplingParams(max_tokens=50), request_id="slow")
            with pytest.raises(RequestTimeoutError):
                _ = [chunk async for chunk in group.client.generate(request)]
            async with asyncio.timeout(5):
                while engine.cancelled != ["slow"]:
                    await asyncio.sleep(0.01)

    asyncio.run(main())
