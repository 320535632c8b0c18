"""More adapters than host memory holds: each request gets its own, and nothing in use leaves."""

import asyncio

import pytest
from fake_executor import make_manifest
from test_async_engine import Gate, expected, in_event_loop, serving, settle, until

from ray_lora.adapter import AdapterManifest
from ray_lora.errors import AdapterStagingError, CapacityError

PROMPT = [1, 2, 3]


@in_event_loop
async def test_thirty_adapters_of_which_three_fit_each_answer_with_their_own() -> None:
    most = 0
    async with serving(max_loras=2, max_cpu_loras=3) as server:

        def count(_: AdapterManifest) -> None:
            nonlocal most
            most = max(most, len(server.executor.staged) + 1)

        server.executor.before_stage = count
        names = [f"a{i}" for i in range(30)]
        for name in names:
            await server.load(name)
        assert [info.tier for info in server.engine.list_adapters()].count("disk") == 27
        wanted = [names[(7 * i) % 30] for i in range(90)] + names[:5] * 3
        outputs = await asyncio.gather(*(server.generate([*PROMPT, i % 9], name) for i, name in enumerate(wanted)))
        for i, (name, output) in enumerate(zip(wanted, outputs, strict=True)):
            assert output.outputs[0].token_ids == expected(name, [*PROMPT, i % 9])
    assert most <= 3


@in_event_loop
async def test_requests_for_one_cold_adapter_bring_it_up_once() -> None:
    async with serving(max_loras=1, max_cpu_loras=1) as server:
        await server.load("cold")
        await server.load("hot")
        assert server.executor.calls[-2:] == [("unstage", "cold"), ("stage", "hot")]
        outputs = await asyncio.gather(*(server.generate(PROMPT, "cold") for _ in range(8)))
        assert all(output.outputs[0].token_ids == expected("cold", PROMPT) for output in outputs)
        assert server.executor.calls.count(("stage", "cold")) == 2


@in_event_loop
async def test_what_has_requests_stays_and_the_others_wait_for_room() -> None:
    async with serving(max_loras=1, max_cpu_loras=1) as server:
        await server.load("cold")
        await server.load("hot")
        gate = Gate(server.executor)
        running = server.start(PROMPT, "hot", max_tokens=25)
        await until(lambda: gate.num_arrived == 1)
        waiting = server.start(PROMPT, "cold")
        server.executor.sources["/adapters/new"] = make_manifest("new")
        loading = asyncio.create_task(server.engine.load_adapter("new", "/adapters/new"))
        while not loading.done():
            await settle()
            gate.let_through()
        with pytest.raises(CapacityError, match="max_cpu_loras"):
            await loading
        assert ("unstage", "hot") not in server.executor.calls
        assert set(server.versions) == {"cold", "hot"}
        gate.open()
        assert (await running).outputs[0].token_ids == expected("hot", PROMPT, 25)
        assert (await waiting).outputs[0].token_ids == expected("cold", PROMPT)


@in_event_loop
async def test_a_cold_adapter_that_cannot_come_up_fails_its_own_requests_alone() -> None:
    async with serving(max_loras=1, max_cpu_loras=1) as server:
        await server.load("cold")
        await server.load("hot")

        def fail(manifest: AdapterManifest) -> None:
            if manifest.version == "cold":
                raise AdapterStagingError("rank 1 has no room")

        server.executor.before_stage = fail
        results = await asyncio.gather(
            *(server.generate(PROMPT, name) for name in ("cold", "hot", "cold")), return_exceptions=True
        )
        assert [type(results[0]), type(results[2])] == [AdapterStagingError] * 2
        assert not isinstance(results[1], BaseException)
        assert results[1].outputs[0].token_ids == expected("hot", PROMPT)
        server.executor.before_stage = lambda _: None
        assert (await server.generate(PROMPT, "cold")).outputs[0].token_ids == expected("cold", PROMPT)


@in_event_loop
async def test_a_cold_adapter_that_is_unloaded_is_forgotten_on_the_ranks() -> None:
    async with serving(max_loras=1, max_cpu_loras=1) as server:
        await server.load("cold")
        await server.load("hot")
        await server.engine.unload_adapter("cold")
        await until(lambda: ("drop", "cold") in server.executor.calls)
        await server.load("cold")
        assert (await server.generate(PROMPT, "cold")).outputs[0].token_ids == expected("cold", PROMPT)


@in_event_loop
async def test_a_caller_that_leaves_while_its_adapter_comes_up_harms_nobody() -> None:
    async with serving(max_loras=1, max_cpu_loras=1) as server:
        await server.load("cold")
        await server.load("hot")
        left, stays = server.start(PROMPT, "cold"), server.start(PROMPT, "cold")
        await asyncio.sleep(0)
        left.cancel()
        assert (await stays).outputs[0].token_ids == expected("cold", PROMPT)
        await until(lambda: server.num_requests == 0)
