"""More adapters than host memory holds: each request gets its own, and nothing in use leaves."""

import asyncio

import pytest
from fake_executor import make_manifest
from test_async_engine import Gate, expected, in_event_loop, serving, settle, until

from ray_lora.adapter import AdapterManifest, TierUse
from ray_lora.config import LoRAModule
from ray_lora.engine.adapter_resolver import Candidate
from ray_lora.errors import AdapterStagingError, CapacityError, InvalidRequestError, NotFoundError

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
        assert ("drop", "cold") not in server.executor.calls, "its files stay"
        server.executor.before_stage = lambda _: None
        assert (await server.generate(PROMPT, "cold")).outputs[0].token_ids == expected("cold", PROMPT)


@in_event_loop
async def test_a_new_adapter_that_cannot_come_up_is_forgotten_on_the_ranks() -> None:
    async with serving() as server:

        def fail(_: AdapterManifest) -> None:
            raise AdapterStagingError("rank 1 has no room")

        server.executor.before_stage = fail
        with pytest.raises(AdapterStagingError):
            await server.load("new")
        assert server.executor.calls[-1] == ("drop", "new")


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


@in_event_loop
async def test_host_memory_is_bounded_in_bytes_too() -> None:
    most = 0
    async with serving(max_loras=4, max_lora_rank=64, max_cpu_lora_bytes=2500) as server:  # 800 a page of the fake

        def count(manifest: AdapterManifest) -> None:
            nonlocal most
            held = [*server.executor.staged.values(), manifest]
            most = max(most, sum(each.shard_bytes for each in held))

        server.executor.before_stage = count
        for name, rank in (("a", 16), ("b", 32), ("c", 16), ("d", 32)):
            await server.load(name, rank=rank)
        assert server.engine.adapter_tiers()["host"] == TierUse(2, 64, 2400, 2500)
        names = [*"abcd"] * 4
        outputs = await asyncio.gather(*(server.generate(PROMPT, name) for name in names))
        for name, output in zip(names, outputs, strict=True):
            assert output.outputs[0].token_ids == expected(name, PROMPT)
        with pytest.raises(CapacityError, match="exceed max_cpu_lora_bytes 2500"):
            await server.load("large", rank=51)
    assert 2000 < most <= 2500


@in_event_loop
async def test_pinning_a_cold_adapter_brings_it_up_and_it_stays() -> None:
    async with serving(max_loras=2, max_cpu_loras=2) as server:
        for name in "abcd":
            await server.load(name)
        info = await server.engine.pin_adapter("a")
        assert (info.pinned, info.tier, info.num_loads) == (True, "host", 2)
        await asyncio.gather(*(server.generate(PROMPT, name) for name in [*"bcda"] * 3))
        tiers = {info.name: info.tier for info in server.engine.list_adapters()}
        assert tiers["a"] == "device"
        await server.engine.pin_adapter("a", False)
        await asyncio.gather(*(server.generate(PROMPT, name) for name in "bc"))
        tiers = {info.name: info.tier for info in server.engine.list_adapters()}
        assert tiers["a"] == "disk"


@in_event_loop
async def test_a_configured_adapter_has_its_settings_from_the_start() -> None:
    async with serving(max_loras=2) as server:
        for name, settings in (("a", {"weight": 2.0, "pinned": True}), ("b", {})):
            manifest = make_manifest(name)
            server.executor.sources[manifest.source] = manifest
            await server.engine.load_configured(LoRAModule(name=name, path=manifest.source, **settings))
        infos = server.engine.list_adapters()
        assert [(info.weight, info.pinned) for info in infos] == [(2.0, True), (1.0, False)]
        info = await server.engine.set_adapter_weight("b", 0.5)
        assert (info, server.engine.list_adapters()[1].weight) == (server.engine.list_adapters()[1], 0.5)
        with pytest.raises(InvalidRequestError, match="weight"):
            await server.engine.set_adapter_weight("b", 0)
        assert await server.load("b", "other", load_inplace=True)
        assert server.engine.list_adapters()[1].weight == 0.5


@in_event_loop
async def test_an_adapter_that_cannot_come_up_is_not_pinned() -> None:
    async with serving(max_loras=2, max_cpu_loras=2) as server:
        for name in "abc":
            await server.load(name)

        def fail(_: AdapterManifest) -> None:
            raise AdapterStagingError("rank 1 has no room")

        server.executor.before_stage = fail
        with pytest.raises(AdapterStagingError):
            await server.engine.pin_adapter("a")
        assert not any(info.pinned for info in server.engine.list_adapters())


@in_event_loop
async def test_a_dry_run_stages_nothing_and_tells_of_the_name() -> None:
    async with serving() as server:
        await server.load("a")
        server.executor.sources["/adapters/b"] = make_manifest("b")
        server.executor.calls.clear()
        assert (await server.engine.validate_adapter("/adapters/b")).refusals == ()
        taken = await server.engine.validate_adapter("/adapters/b", "a")
        assert [refusal.param for refusal in taken.refusals] == ["lora_name"]
        server.executor.sources["/adapters/large"] = make_manifest("large", rank=500)
        assert [refusal.param for refusal in (await server.engine.validate_adapter("/adapters/large")).refusals] == [
            "r"
        ]
        assert server.executor.calls == [("inspect", f"/adapters/{name}") for name in ("b", "b", "large")]
        with pytest.raises(InvalidRequestError, match="not a name"):
            await server.engine.validate_adapter("/adapters/b", "no name")


@in_event_loop
async def test_an_adapter_that_was_here_before_waits_on_disk_if_host_memory_is_full() -> None:
    async with serving(max_loras=1, max_cpu_loras=1) as server:
        for name in "ab":
            manifest = make_manifest(name)
            server.executor.sources[manifest.source] = manifest
            await server.engine.point_adapter(name, Candidate(manifest.source, name))
        assert [info.tier for info in server.engine.list_adapters()] == ["host", "disk"]
        assert ("keep", "b") in server.executor.calls
        assert (await server.generate(PROMPT, "b")).outputs[0].token_ids == expected("b", PROMPT)
        with pytest.raises(NotFoundError, match="other content now"):
            await server.engine.point_adapter("c", Candidate("/adapters/a", "another"))
        await server.engine.unload_adapter("b")
        await until(lambda: ("drop", "b") in server.executor.calls)
