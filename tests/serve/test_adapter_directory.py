"""Several replicas have the same names at the same versions, whatever fails between them."""

import asyncio
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError
from replica_group import in_event_loop, running

from ray_lora.config import EngineConfig, LoRAModule
from ray_lora.errors import (
    AdapterExistsError,
    CapacityError,
    ConfigError,
    EngineDeadError,
    NotFoundError,
    RayLoraError,
    VersionConflictError,
)
from ray_lora.request import GenerateRequest, SamplingParams
from ray_lora.serve import adapter_follower

MakeAdapter = Callable[[int], str]


@pytest.fixture
def adapter(tmp_path: Path) -> MakeAdapter:
    """A directory that the fake engine takes for version `v{rank}`."""

    def make(rank: int) -> str:
        path = tmp_path / f"adapter{rank}"
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps({"r": rank}))
        return str(path)

    return make


@in_event_loop
async def test_a_load_is_staged_by_one_replica_and_named_by_all(config: EngineConfig, adapter: MakeAdapter) -> None:
    async with running(config, 3) as group:
        staged: list[bool] = []
        for engine in group.engines:
            prepare = engine.prepare_adapter

            async def spy(name: str, candidate: Any, stages: bool, prepare: Any = prepare) -> None:
                staged.append(stages)
                await prepare(name, candidate, stages)

            engine.prepare_adapter = spy
        info, changed = await group.client.load_adapter("a", adapter(8))
        assert (info.version, changed) == ("v8", True)
        assert group.held() == [{"a": ("v8", False)}] * 3
        assert sorted(staged) == [False, False, True]
        assert (await group.client.load_adapter("a", adapter(8)))[1] is False
        with pytest.raises(AdapterExistsError):
            await group.client.load_adapter("a", adapter(9))
        assert all(engine.prepared == {} for engine in group.engines)


@in_event_loop
async def test_a_name_moves_on_all_replicas_and_is_forgotten_by_all(config: EngineConfig, adapter: MakeAdapter) -> None:
    async with running(config) as group:
        await group.client.load_adapter("a", adapter(8))
        await group.client.load_adapter("a", adapter(9), load_inplace=True)
        assert group.held() == [{"a": ("v9", False)}] * 2
        await group.client.unload_adapter("a")
        assert group.held() == [{}, {}]
        with pytest.raises(NotFoundError):
            await group.client.unload_adapter("a")


@pytest.mark.parametrize("asks", ["before", "meanwhile"])
@in_event_loop
async def test_who_asks_about_a_name_while_it_is_forgotten_does_not_learn_it_anew(
    config: EngineConfig, adapter: MakeAdapter, asks: str, tmp_path: Path
) -> None:
    kept = config.model_copy(update={"lora_registry_path": str(tmp_path / "registry")})
    async with running(kept) as group:
        await group.client.load_adapter("a", adapter(8))
        follower = group.replicas[0]._follower
        await follower.ask_about("a")  # the first request has a reason of its own to ask
        if asks == "before":
            del follower._entries["a"]  # as if it had missed the load
            answers: asyncio.Queue[Any] = asyncio.Queue()
            resolve = group.directory.resolve

            async def slow(name: str) -> Any:
                await answers.put(entry := await resolve(name))
                await asyncio.sleep(0.1)
                return entry

            group.directory.resolve = slow
            asking = asyncio.create_task(follower.ask_about("a"))
            assert await answers.get() is not None
            await group.client.unload_adapter("a")
        else:
            forgotten = asyncio.Event()
            group.directory._registry.remove = lambda name: (loop.call_soon_threadsafe(forgotten.set), time.sleep(0.1))
            loop = asyncio.get_running_loop()
            unloading = asyncio.create_task(group.client.unload_adapter("a"))
            await forgotten.wait()
            asking = asyncio.create_task(follower.ask_about("a"))
            await unloading
        await asking
        assert follower.find("a") is None
        assert group.held() == [{}, {}]


@in_event_loop
async def test_a_replica_that_missed_a_change_catches_up_however_many_more_come(
    config: EngineConfig, adapter: MakeAdapter
) -> None:
    async with running(config) as group:
        for name, rank in (("a", 8), ("b", 9)):
            await group.client.load_adapter(name, adapter(rank))
        late = group.replicas.pop()
        await group.client.unload_adapter("a")
        group.replicas.append(late)
        news = group.directory.news

        async def overtaken(*args: Any) -> Any:
            snapshot = await news(*args)
            await group.client.load_adapter("b", adapter(10), load_inplace=True)
            await group.client.load_adapter("c", adapter(11), load_inplace=True)
            return snapshot

        group.directory.news = overtaken
        await late._follower._sync()
        assert group.held() == [{"b": ("v10", False), "c": ("v11", False)}] * 2


@pytest.mark.parametrize("fails", ["prepare_adapter", "point_adapter"])
@in_event_loop
async def test_if_one_replica_cannot_the_name_points_where_it_did_on_all(
    config: EngineConfig, adapter: MakeAdapter, fails: str
) -> None:
    async with running(config, 3) as group:
        await group.client.load_adapter("a", adapter(8))
        last = group.engines[2]
        work = getattr(last, fails)

        async def fail(name: str, candidate: Any, *more: Any) -> Any:
            if candidate.version == "v9":
                raise CapacityError("no room")
            return await work(name, candidate, *more)

        setattr(last, fails, fail)
        for name in ("a", "b"):
            with pytest.raises(CapacityError, match="no room"):
                await group.client.load_adapter(name, adapter(9), load_inplace=True)
            assert group.held() == [{"a": ("v8", False)}] * 3
            assert all(engine.prepared == {} for engine in group.engines)
        await group.client.load_adapter("a", adapter(10), load_inplace=True)
        assert group.held() == [{"a": ("v10", False)}] * 3


@in_event_loop
async def test_a_pin_that_one_replica_refuses_is_none_anywhere(config: EngineConfig, adapter: MakeAdapter) -> None:
    async with running(config) as group:
        for name, rank in (("a", 8), ("b", 9)):
            await group.client.load_adapter(name, adapter(rank))
        assert (await group.client.pin_adapter("a", True)).pinned
        assert group.held() == [{"a": ("v8", True), "b": ("v9", False)}] * 2
        await group.client.pin_adapter("a", False)
        await group.engines[1].pin_adapter("a", True)  # no room for another pin here
        with pytest.raises(CapacityError):
            await group.client.pin_adapter("b", True)
        assert [held["b"] for held in group.held()] == [("v9", False)] * 2
        with pytest.raises(NotFoundError):
            await group.client.pin_adapter("nobody", True)


@in_event_loop
async def test_a_weight_is_the_same_on_all_also_on_a_late_replica(config: EngineConfig, adapter: MakeAdapter) -> None:
    async with running(config) as group:
        await group.client.load_adapter("a", adapter(8))
        assert (await group.client.set_adapter_weight("a", 4.0)).weight == 4.0
        await group.start_replica()
        assert [engine.adapters["a"].weight for engine in group.engines] == [4.0] * 3
        with pytest.raises(NotFoundError):
            await group.client.set_adapter_weight("nobody", 2.0)


@in_event_loop
async def test_of_two_writers_who_expect_the_same_version_one_is_told(
    config: EngineConfig, adapter: MakeAdapter
) -> None:
    async with running(config) as group:
        await group.client.load_adapter("a", adapter(8))
        loads = [group.client.load_adapter("a", adapter(rank), True, "v8") for rank in (9, 10)]
        results = await asyncio.gather(*loads, return_exceptions=True)
        assert sorted(type(result) for result in results if isinstance(result, RayLoraError)) == [VersionConflictError]
        first, second = group.held()
        assert first == second


@in_event_loop
async def test_a_late_replica_has_everything_before_it_is_ready(config: EngineConfig, adapter: MakeAdapter) -> None:
    async with running(config, 1) as group:
        for name, rank in (("a", 8), ("b", 9), ("c", 10)):
            await group.client.load_adapter(name, adapter(rank))
        await group.client.pin_adapter("b", True)
        await group.client.unload_adapter("c")
        await group.start_replica()
        first, second = group.held()
        assert first == second == {"a": ("v8", False), "b": ("v9", True)}


@in_event_loop
async def test_a_replica_that_missed_orders_hears_of_them(
    config: EngineConfig, adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_follower, "SYNC_PERIOD_S", 0.01)
    async with running(config, 1) as group:
        for name, rank in (("a", 8), ("b", 9)):
            await group.client.load_adapter(name, adapter(rank))
        late = await group.start_replica(joins=False)
        await group.client.load_adapter("a", adapter(11), load_inplace=True)
        await group.client.unload_adapter("b")
        await group.client.load_adapter("c", adapter(12))
        group.replicas.append(late)
        await until(lambda: group.held()[0] == group.held()[1])
        assert group.held()[1] == {"a": ("v11", False), "c": ("v12", False)}


@in_event_loop
async def test_the_first_request_of_a_replica_sees_what_was_said_before_it_could_hear(
    config: EngineConfig, adapter: MakeAdapter
) -> None:
    async with running(config, 1) as group:
        await group.client.load_adapter("a", adapter(8))
        late = await group.start_replica(joins=False)
        await group.client.load_adapter("a", adapter(9), load_inplace=True)
        group.replicas[:] = [late]
        assert await versions(group, "a") == {"v9"}


@in_event_loop
async def test_a_name_that_a_replica_has_not_heard_of_is_asked_for(config: EngineConfig, adapter: MakeAdapter) -> None:
    async with running(config) as group:
        late = group.replicas.pop()
        late._follower._has_served = True
        await group.client.load_adapter("a", adapter(8))
        await late._follower.ask_about("a")
        assert (await asyncio.to_thread(late._follower.find, "a")).version == "v8"
        await late._follower.ask_about("nobody")
        assert await asyncio.to_thread(late._follower.find, "nobody") is None
        await group.stop(late)


@in_event_loop
async def test_an_adapter_of_the_resolvers_folder_is_loaded_on_all(config: EngineConfig, tmp_path: Path) -> None:
    folder = tmp_path / "folder" / "mine"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    (folder / "adapter_model.safetensors").write_text("")
    settings = {"lora_resolver_dir": str(folder.parent)}
    async with running(config.model_copy(update=settings)) as group:
        assert await versions(group, "mine") == {"v8"}
        assert group.held() == [{"mine": ("v8", False)}] * 2


@in_event_loop
async def test_a_new_directory_knows_what_the_replicas_hold(config: EngineConfig, adapter: MakeAdapter) -> None:
    async with running(config) as group:
        await group.client.load_adapter("a", adapter(8))
        await group.client.pin_adapter("a", True)
        await group.client.load_adapter("b", adapter(9))
        stale = await group.start_replica(joins=False)
        await group.client.unload_adapter("b")
        group.replicas.append(stale)
        await group.start_directory()
        for replica in group.replicas:
            await replica._follower._sync()
        assert group.held() == [{"a": ("v8", True)}] * 3
        with pytest.raises(VersionConflictError):
            await group.client.load_adapter("a", adapter(9), True, "v7")


@in_event_loop
async def test_with_a_registry_its_file_is_the_truth(
    config: EngineConfig, adapter: MakeAdapter, tmp_path: Path
) -> None:
    config = config.model_copy(update={"lora_registry_path": str(tmp_path / "registry.sqlite")})
    async with running(config) as group:
        await group.client.load_adapter("a", adapter(8))
        group.directory._registry.put = fail
        with pytest.raises(RayLoraError, match="disk full"):
            await group.client.load_adapter("a", adapter(9), load_inplace=True)
        assert group.held() == [{"a": ("v8", False)}] * 2, "what cannot be written has not happened"
    async with running(config) as group:
        assert group.held() == [{"a": ("v8", False)}] * 2


@in_event_loop
async def test_a_replica_that_dies_during_a_load_does_not_stop_it(config: EngineConfig, adapter: MakeAdapter) -> None:
    async with running(config) as group:
        group.handle.failures = [RayActorError()]
        await group.client.load_adapter("a", adapter(8))
        assert group.held() == [{"a": ("v8", False)}] * 2
        group.handle.failures = [RayActorError() for _ in range(20)]
        with pytest.raises(EngineDeadError):
            await group.client.list_adapters()


@in_event_loop
async def test_the_list_is_the_same_and_sums_up_what_each_has(config: EngineConfig, adapter: MakeAdapter) -> None:
    async with running(config) as group:
        for name, rank in (("a", 8), ("b", 9)):
            await group.client.load_adapter(name, adapter(rank))
        await group.engines[0].mark_used("a", 5.0)
        await group.engines[1].mark_used("a", 7.0)
        first = await group.client.list_adapters()
        group.replicas.reverse()
        second = await group.client.list_adapters()
        assert first == second
        assert [(info.name, info.num_loads, info.last_used) for info in first] == [("a", 2, 7.0), ("b", 2, None)]


@in_event_loop
async def test_a_configured_adapter_is_what_the_first_replica_read(config: EngineConfig, adapter: MakeAdapter) -> None:
    config = config.model_copy(update={"lora_modules": (LoRAModule(name="a", path=adapter(8)),)})
    async with running(config, 1) as group:
        assert group.held() == [{"a": ("v8", False)}]
        await group.client.unload_adapter("a")
        await group.start_replica()
        assert group.held() == [{}, {}], "it stays unloaded"
    bad = config.model_copy(update={"lora_modules": (LoRAModule(name="a", path="/nowhere"),)})
    with pytest.raises(ConfigError, match="lora_modules: 'a'"):
        async with running(bad, 1):
            pass


@in_event_loop
async def test_a_name_is_asked_for_again_if_the_directory_dies_over_it(
    config: EngineConfig, adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_follower, "RETRY_S", 0.01)
    async with running(config) as group:
        late = await group.start_replica(joins=False)
        await late._follower.ask_about("nobody")
        await group.client.load_adapter("a", adapter(8))
        resolve, num_asked = group.directory.resolve, 0

        async def die_once(name: str) -> Any:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 1:
                raise RayActorError()
            return await resolve(name)

        group.directory.resolve = die_once
        await late._follower.ask_about("a")
        assert (num_asked, (await asyncio.to_thread(late._follower.find, "a")).version) == (2, "v8")
        await group.stop(late)


async def versions(group: Any, adapter: str) -> set[str | None]:
    request = GenerateRequest(prompt=[5, 6], adapter=adapter, sampling_params=SamplingParams(max_tokens=1))
    return {chunk.adapter_version async for chunk in group.client.generate(request)}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def fail(*_: object) -> None:
    raise OSError("disk full")


@in_event_loop
async def test_a_source_is_read_once_and_the_files_travel_to_replicas_that_cannot_reach_it(
    config: EngineConfig, adapter: MakeAdapter
) -> None:
    async with running(config, 3) as group:
        readers: list[int] = []
        for number, engine in enumerate(group.engines):
            inspect = engine.inspect_adapter

            async def spy(path: str, number: int = number, inspect: Any = inspect) -> Any:
                readers.append(number)
                return await inspect(path)

            engine.inspect_adapter = spy
        await group.client.load_adapter("a", adapter(8))
        assert readers == [0]
        assert group.held() == [{"a": ("v8", False)}] * 3
        assert [set(engine.files) for engine in group.engines] == [{"v8"}] * 3


@in_event_loop
async def test_a_path_of_one_node_is_found_by_the_replica_that_has_it(
    config: EngineConfig, adapter: MakeAdapter
) -> None:
    async with running(config, 3) as group:
        for engine in group.engines[:2]:
            engine.inspect_adapter = engine.validate_adapter = unreachable
        found = await group.client.validate_adapter(adapter(8), None)
        assert found.manifest is not None
        assert found.manifest.version == "v8"
        await group.client.load_adapter("a", adapter(8))
        assert group.held() == [{"a": ("v8", False)}] * 3
        group.engines[2].inspect_adapter = group.engines[2].validate_adapter = unreachable
        with pytest.raises(NotFoundError):
            await group.client.load_adapter("b", adapter(9))
        with pytest.raises(NotFoundError):
            await group.client.validate_adapter(adapter(9), None)


@in_event_loop
async def test_a_late_replica_has_the_files_of_another_when_the_source_is_gone(
    config: EngineConfig, adapter: MakeAdapter
) -> None:
    async with running(config, 2) as group:
        await group.client.load_adapter("a", adapter(8))
        del group.engines[0].files["v8"]
        shutil.rmtree(adapter(8))
        late = await group.start_replica()
        assert group.held() == [{"a": ("v8", False)}] * 3
        assert set(late._engine.files) == {"v8"}


@in_event_loop
async def test_if_no_replica_has_the_files_any_more_the_source_is_read_again(
    config: EngineConfig, adapter: MakeAdapter
) -> None:
    async with running(config, 2) as group:
        await group.client.load_adapter("a", adapter(8))
        for engine in group.engines:
            engine.files.clear()
        await group.start_replica()
        assert group.held() == [{"a": ("v8", False)}] * 3


@in_event_loop
async def test_a_request_for_an_adapter_that_is_still_to_come_has_the_files_of_another_replica(
    config: EngineConfig, adapter: MakeAdapter
) -> None:
    async with running(config, 2) as group:
        await group.client.load_adapter("a", adapter(8))
        await group.engines[1].unload_adapter("a")
        group.engines[1].files.clear()
        found = await asyncio.to_thread(group.replicas[1]._follower.find, "a")
        assert found.version == "v8"
        assert set(group.engines[1].files) == {"v8"}


async def unreachable(path: str, _: object = None) -> Any:
    raise NotFoundError(f"lora_path: {path} does not exist", "lora_path")
