"""A request that waits or runs for too long ends, and harms nobody. Time passes when a test says so."""

import asyncio
from contextlib import nullcontext

import pytest
from test_async_engine import MAX_MODEL_LEN, TIMEOUT_S, Gate, expected, in_event_loop, serving, settle, until

from ray_lora.config import EngineConfig
from ray_lora.errors import ConfigError, OverloadedError, RequestTimeoutError
from ray_lora.request import GenerateRequest

LIMIT_S = TIMEOUT_S * 0.7
"""Jumped over by the tests, and too long to pass by itself."""


async def let_pass(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]
    await settle()


@in_event_loop
async def test_who_waits_past_the_queue_deadline_is_refused_and_who_runs_goes_on() -> None:
    async with serving(max_num_seqs=1, queue_timeout_s=LIMIT_S) as server:
        gate = Gate(server.executor)
        running = server.start([1, 2, 3], max_tokens=20)
        await until(lambda: gate.num_arrived == 1)
        waiting = server.start([4, 5, 6], n=2)
        await settle()
        await let_pass(LIMIT_S)
        with pytest.raises(OverloadedError, match="overloaded"):
            await waiting
        gate.open()
        assert (await running).outputs[0].token_ids == expected(None, [1, 2, 3], 20)
        await server.until_idle()


@in_event_loop
async def test_a_request_whose_cold_adapter_does_not_come_up_is_refused_at_the_queue_deadline() -> None:
    async with serving(max_loras=1, max_cpu_loras=1, max_num_seqs=1, queue_timeout_s=LIMIT_S) as server:
        await server.load("cold")
        await server.load("hot")
        gate = Gate(server.executor)
        holder = server.start([1, 2, 3], "hot")
        await until(lambda: gate.num_arrived == 1)
        waiting = server.start([1, 2, 3], "cold")
        await settle()
        await let_pass(LIMIT_S)
        with pytest.raises(OverloadedError):
            await waiting
        gate.open()
        assert (await holder).outputs[0].token_ids == expected("hot", [1, 2, 3])
        await until(lambda: server.num_requests == 0)


@in_event_loop
async def test_who_runs_past_the_request_timeout_is_aborted_and_gives_back_all_it_held() -> None:
    async with serving(request_timeout_s=LIMIT_S) as server:
        gate = Gate(server.executor)
        slow = server.start([1, 2, 3], max_tokens=MAX_MODEL_LEN - 3)
        gate.let_through(3)
        await until(lambda: gate.num_arrived == 4)
        await let_pass(LIMIT_S)
        with pytest.raises(RequestTimeoutError, match="aborted"):
            await slow
        gate.open()
        await server.until_idle()
        assert (await server.generate([1, 2, 3])).outputs[0].token_ids == expected(None, [1, 2, 3])


@in_event_loop
async def test_without_a_queue_deadline_the_request_timeout_holds_for_who_waits_as_well() -> None:
    async with serving(max_num_seqs=1, request_timeout_s=LIMIT_S) as server:
        gate = Gate(server.executor)
        tasks = [server.start([1, 2, 3]), server.start([4, 5, 6])]
        await until(lambda: gate.num_arrived == 1 and server.num_requests == 2)
        await let_pass(LIMIT_S)
        gate.open()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [RequestTimeoutError, RequestTimeoutError]
        await server.until_idle()


@in_event_loop
async def test_what_a_request_has_waited_elsewhere_counts() -> None:
    for limits, error in (
        ({"queue_timeout_s": LIMIT_S}, OverloadedError),
        ({"request_timeout_s": LIMIT_S}, RequestTimeoutError),
    ):
        async with serving(**limits) as server:
            for waited_s in (LIMIT_S / 2, LIMIT_S + 1):
                request = GenerateRequest(prompt=[1, 2, 3], waited_s=waited_s)
                expects = pytest.raises(error) if waited_s > LIMIT_S else nullcontext()
                with expects:
                    assert [chunk async for chunk in server.engine.generate(request)]
            await server.until_idle()


def test_a_request_may_not_wait_for_longer_than_it_may_take() -> None:
    with pytest.raises(ConfigError, match=r"queue_timeout_s 3.0 is more than request_timeout_s 2.0"):
        EngineConfig.parse({"model": "m", "queue_timeout_s": 3, "request_timeout_s": 2})
