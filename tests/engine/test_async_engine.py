"""The engine's thread against event-loop time: whatever happens when, nothing hangs, is lost or is told twice."""

import asyncio
import functools
import gc
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from driver import make_config, make_executor
from fake_executor import POISON, FakeExecutor, FakeTokenizer, expected_tokens, make_manifest

from ray_lora.engine import async_engine
from ray_lora.engine.async_engine import AsyncEngine
from ray_lora.errors import (
    AdapterExistsError,
    AdapterRejectedError,
    AdapterStagingError,
    EngineDeadError,
    InvalidRequestError,
    NotFoundError,
    NumericsError,
    RayLoraError,
)
from ray_lora.request import GenerateRequest, RequestOutput, SamplingParams

MAX_MODEL_LEN = 32
TIMEOUT_S = 20


class Server:
    """An engine on fake ranks whose adapters are found at `/adapters/<version>`."""

    def __init__(self, engine: AsyncEngine, executor: FakeExecutor) -> None:
        self.engine = engine
        self.executor = executor

    async def load(self, name: str, version: str | None = None, rank: int = 16, load_inplace: bool = False) -> bool:
        """Load a version under a name; false if the name has that content already."""
        manifest = make_manifest(version or name, rank)
        self.executor.sources[manifest.source] = manifest
        info, changed = await self.engine.load_adapter(name, manifest.source, load_inplace)
        assert (info.name, info.version) == (name, manifest.version)
        return changed

    async def generate(self, prompt: Sequence[int], adapter: str | None = None, **params: Any) -> RequestOutput:
        output = RequestOutput("", None, n=params.get("n", 1))
        async for chunk in self.engine.generate(request(prompt, adapter, **params)):
            output.append(chunk)
        return output

    def start(self, prompt: Sequence[int], adapter: str | None = None, **params: Any) -> "asyncio.Task[RequestOutput]":
        return asyncio.create_task(self.generate(prompt, adapter, **params))

    @property
    def versions(self) -> dict[str, str]:
        return {info.name: info.version for info in self.engine.list_adapters()}

    async def until_idle(self) -> None:
        """Wait until no request is left and nothing that one held, and no version on the ranks without a name."""
        await until(lambda: self.num_requests == 0 and not self.engine._streams)
        await until(lambda: self.engine.stats().kv_cache_usage == 0)
        await until(lambda: all(info.num_running + info.num_waiting == 0 for info in self.engine.list_adapters()))
        await until(lambda: set(self.executor.staged) == set(self.versions.values()))

    @property
    def num_requests(self) -> int:
        stats = self.engine.stats()
        return stats.num_requests_running + stats.num_requests_waiting


class Gate:
    """Holds the engine in its steps until they are let through."""

    def __init__(self, executor: FakeExecutor) -> None:
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self.num_arrived = 0
        executor.before_step = self._wait

    def _wait(self, _: object) -> None:
        self.num_arrived += 1
        if not self._is_open:
            assert self._permits.acquire(timeout=TIMEOUT_S)

    def let_through(self, num_steps: int = 1) -> None:
        self._permits.release(num_steps)

    def open(self) -> None:
        self._is_open = True
        self._permits.release()


def request(prompt: Sequence[int], adapter: str | None = None, **params: Any) -> GenerateRequest:
    params = {"temperature": 0, "max_tokens": 8} | params
    return GenerateRequest(prompt=list(prompt), adapter=adapter, sampling_params=SamplingParams(**params))


def expected(version: str | None, prompt: Sequence[int], max_tokens: int = 8) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return expected_tokens(version, prompt, params, MAX_MODEL_LEN)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.0005)


async def settle() -> None:
    """Let the event loop and the engine's thread do what they can do now."""
    for _ in range(5):
        await asyncio.sleep(0.0005)


@asynccontextmanager
async def serving(num_blocks: int = 64, **overrides: Any) -> AsyncIterator[Server]:
    """A server that is shut down in the end; nothing may have gone wrong behind anybody's back."""
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    config = make_config(**overrides)
    executor = make_executor(config, num_blocks, MAX_MODEL_LEN)
    engine = AsyncEngine(config, executor, FakeTokenizer())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield Server(engine, executor)
    finally:
        await engine.shutdown()
    assert executor.was_shut_down
    engine._core.scheduler.check_integrity()
    await settle()
    gc.collect()
    assert complaints == []


def in_event_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def main() -> None:
            await test(*args, **kwargs)

        asyncio.run(main())

    return run


# Streams


@in_event_loop
async def test_a_stream_gives_one_token_at_a_time_and_tells_of_the_prompt_first() -> None:
    async with serving() as server:
        chunks = [chunk async for chunk in server.engine.generate(request([1, 2, 3]))]
        assert [chunk.outputs[0].token_ids for chunk in chunks] == [(token,) for token in expected(None, [1, 2, 3])]
        assert [chunk.prompt_token_ids for chunk in chunks] == [(1, 2, 3)] + [None] * 7
        assert [chunk.outputs[0].finish_reason for chunk in chunks] == [None] * 7 + ["length"]
        await server.until_idle()


@in_event_loop
async def test_many_streams_at_once_get_each_its_own_tokens() -> None:
    async with serving(num_blocks=12) as server:
        for name in "abc":
            await server.load(name)
        prompts = [([1, 2, 3, 4, 5, 6, i % 7], ["a", None, "b", "c"][i % 4], 1 + i % 9) for i in range(40)]
        tasks = [server.start(prompt, name, max_tokens=count) for prompt, name, count in prompts]
        for task, (prompt, name, count) in zip(tasks, prompts, strict=True):
            output = await task
            assert output.outputs[0].token_ids == expected(name, prompt, count)
            assert output.adapter_version == name
        await server.until_idle()


@in_event_loop
async def test_several_completions_come_in_one_stream() -> None:
    async with serving() as server:
        output = await server.generate([1, 2, 3], n=3, temperature=1, seed=5)
        assert output.finished
        assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
        await server.until_idle()


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"prompt": []}, InvalidRequestError, "prompt"),
        ({"prompt": [1] * MAX_MODEL_LEN}, InvalidRequestError, "prompt"),
        ({"prompt": [1], "adapter": "nobody"}, NotFoundError, "lora_name"),
        ({"prompt": [1], "stop_token_ids": [1000]}, InvalidRequestError, "stop_token_ids"),
    ],
)
@in_event_loop
async def test_a_bad_request_is_told_so_and_harms_nobody(
    fields: dict[str, Any], error: type[InvalidRequestError], param: str
) -> None:
    async with serving() as server:
        good = server.start([1, 2, 3], max_tokens=20)
        with pytest.raises(error) as caught:
            await server.generate(**fields)
        assert caught.value.param == param
        assert (await good).outputs[0].token_ids == expected(None, [1, 2, 3], 20)
        await server.until_idle()


@in_event_loop
async def test_a_row_that_is_not_finite_ends_only_its_stream() -> None:
    async with serving() as server:
        good, broken = server.start([1, 2, 3], max_tokens=20), server.start([1, 2, POISON], n=2)
        with pytest.raises(NumericsError):
            await broken
        assert (await good).outputs[0].token_ids == expected(None, [1, 2, 3], 20)
        await server.until_idle()


@in_event_loop
async def test_a_reader_that_pauses_stops_nobody_and_misses_nothing() -> None:
    async with serving() as server:
        stream = server.engine.generate(request([1, 2, 3]))
        chunks = [await anext(stream)]
        await server.generate([4, 5, 6])
        await until(lambda: server.num_requests == 0)
        chunks += [chunk async for chunk in stream]
        assert [chunk.outputs[0].token_ids[0] for chunk in chunks] == expected(None, [1, 2, 3])


# Cancelling


@pytest.mark.parametrize("num_chunks", [0, 1, 3, 8])
@in_event_loop
async def test_closing_a_stream_cancels_its_request(num_chunks: int) -> None:
    async with serving() as server:
        await server.load("a")
        gate = Gate(server.executor)
        stream = server.engine.generate(request([1, 2, 3, 4, 5], "a", max_tokens=None))
        for _ in range(num_chunks):
            gate.let_through()
            await anext(stream)
        other = server.start([1, 2, 3], "a", max_tokens=20)
        await until(lambda: gate.num_arrived == num_chunks + 1)
        await stream.aclose()
        gate.open()
        assert (await other).outputs[0].token_ids == expected("a", [1, 2, 3], 20)
        await server.until_idle()
        assert server.engine.stats().requests_succeeded == {"length": 1}
        assert server.engine.stats().generation_tokens <= 20 + num_chunks + 1


@pytest.mark.parametrize("num_steps", range(7))
@pytest.mark.parametrize("num_turns", [0, 1, 2, 5])
@in_event_loop
async def test_cancelling_the_task_cancels_its_request_at_whatever_moment(num_steps: int, num_turns: int) -> None:
    async with serving() as server:
        await server.load("a")
        gate = Gate(server.executor)
        other = server.start([9, 9], max_tokens=3)
        await until(lambda: gate.num_arrived == 1)
        task = server.start([1] * 20, "a", n=2, max_tokens=3)
        for turn in range(num_turns):
            await asyncio.sleep(0.001 * (turn == 4))
        for step in range(num_steps):
            gate.let_through()
            await until(lambda step=step: gate.num_arrived == step + 2 or server.num_requests == 0)
        task.cancel()
        gate.open()
        with suppress(asyncio.CancelledError):
            await task
        assert (await other).outputs[0].token_ids == expected(None, [9, 9], 3)
        await server.until_idle()
        await server.engine.unload_adapter("a")
        await server.until_idle()
        assert server.engine.stats().num_free_lora_pages == server.engine.stats().num_lora_pages


@in_event_loop
async def test_a_request_cancelled_before_it_was_added_is_cancelled_once_it_is() -> None:
    async with serving() as server:
        gate = Gate(server.executor)
        other = server.start([9, 9], max_tokens=2)
        await until(lambda: gate.num_arrived == 1)
        task = server.start([1, 2, 3], max_tokens=20)
        await settle()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.let_through()
        await until(lambda: gate.num_arrived == 2)
        await settle()
        gate.open()
        await other
        await server.until_idle()
        assert server.engine.stats().requests_succeeded == {"length": 1}
        assert server.engine.stats().generation_tokens <= 3


@in_event_loop
async def test_a_bad_request_whose_caller_left_is_forgotten() -> None:
    async with serving() as server:
        gate = Gate(server.executor)
        other = server.start([9, 9], max_tokens=2)
        await until(lambda: gate.num_arrived == 1)
        task = server.start([1, 2, 3], "nobody")
        await settle()
        task.cancel()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await task
        await other
        await server.until_idle()


@in_event_loop
async def test_a_stream_that_is_never_read_is_never_added() -> None:
    async with serving() as server:
        await server.engine.generate(request([1, 2, 3])).aclose()
        await server.until_idle()
        assert server.executor.plans == []


# Loading and unloading


@in_event_loop
async def test_a_loaded_adapter_serves_until_it_is_unloaded() -> None:
    async with serving() as server:
        assert await server.load("a", "v1")
        assert server.versions == {"a": "v1"}
        assert (await server.generate([1, 2, 3], "a")).outputs[0].token_ids == expected("v1", [1, 2, 3])
        await server.engine.unload_adapter("a")
        with pytest.raises(NotFoundError):
            await server.generate([1, 2, 3], "a")
        with pytest.raises(NotFoundError):
            await server.engine.unload_adapter("a")
        await server.until_idle()
        assert server.executor.calls == [("inspect", "/adapters/v1"), ("stage", "v1"), ("drop", "v1")]


@pytest.mark.parametrize("load_inplace", [False, True])
@in_event_loop
async def test_loading_the_same_content_again_does_nothing(load_inplace: bool) -> None:
    async with serving() as server:
        assert await server.load("a", "v1")
        for _ in range(3):
            assert not await server.load("a", "v1", load_inplace=load_inplace)
        await server.generate([1, 2, 3], "a", max_tokens=20)
        assert [kind for kind, _ in server.executor.calls] == ["inspect", "stage", "inspect", "inspect", "inspect"]


@in_event_loop
async def test_the_same_content_under_two_names_is_staged_once_and_dropped_with_the_second() -> None:
    async with serving() as server:
        await asyncio.gather(server.load("a", "v"), server.load("b", "v"))
        await server.engine.unload_adapter("a")
        assert (await server.generate([1, 2, 3], "b")).outputs[0].token_ids == expected("v", [1, 2, 3])
        await server.engine.unload_adapter("b")
        await server.until_idle()
        assert [call for call in server.executor.calls if call[0] != "inspect"] == [("stage", "v"), ("drop", "v")]


@in_event_loop
async def test_loads_at_once_of_one_name_agree_on_one_content() -> None:
    async with serving() as server:
        results = await asyncio.gather(*(server.load("a", "v1") for _ in range(5)))
        assert sorted(results) == [False] * 4 + [True]
        results = await asyncio.gather(*(server.load("b", f"w{i}") for i in range(3)), return_exceptions=True)
        assert [isinstance(result, AdapterExistsError) for result in results] == [False, True, True]
        assert server.versions == {"a": "v1", "b": "w0"}


@in_event_loop
async def test_reloading_in_place_lets_running_streams_finish_on_the_old_content() -> None:
    async with serving() as server:
        await server.load("a", "v0")
        gate = Gate(server.executor)
        streams = [server.start([1, 2, 3], "a", max_tokens=12)]
        await until(lambda: gate.num_arrived == 1)
        for version in ("v1", "v2", "v3"):
            loading = asyncio.create_task(server.load("a", version, load_inplace=True))
            while not loading.done():
                gate.let_through()
                await settle()
            streams.append(server.start([1, 2, 3], "a", max_tokens=12))
            await settle()
        gate.open()
        for version, stream in zip(("v0", "v1", "v2", "v3"), streams, strict=True):
            output = await stream
            assert output.adapter_version == version
            assert output.outputs[0].token_ids == expected(version, [1, 2, 3], 12)
        await server.until_idle()
        drops = [version for kind, version in server.executor.calls if kind == "drop"]
        assert sorted(drops) == ["v0", "v1", "v2"]


@in_event_loop
async def test_unloading_lets_running_streams_finish_and_drops_once_after_the_last() -> None:
    async with serving() as server:
        await server.load("a")
        gate = Gate(server.executor)
        streams = [server.start([i, i], "a", max_tokens=3 + i) for i in range(3)]
        await until(lambda: gate.num_arrived == 1)
        unloading = asyncio.create_task(server.engine.unload_adapter("a"))
        await settle()
        gate.let_through()
        await unloading
        assert server.versions == {}
        assert ("drop", "a") not in server.executor.calls
        gate.open()
        for i, stream in enumerate(streams):
            assert (await stream).outputs[0].token_ids == expected("a", [i, i], 3 + i)
        await server.until_idle()
        assert server.executor.calls.count(("drop", "a")) == 1


@in_event_loop
async def test_steps_go_on_while_an_adapter_is_staged() -> None:
    async with serving() as server:
        await server.load("a", "v1")
        release = threading.Event()
        server.executor.before_stage = lambda _: release.wait(TIMEOUT_S)
        loading = asyncio.create_task(server.load("a", "v2", load_inplace=True))
        await until(lambda: ("stage", "v2") in server.executor.calls)
        for _ in range(3):
            output = await server.generate([1, 2, 3], "a")
            assert output.adapter_version == "v1"
        assert not loading.done()
        release.set()
        assert await loading
        assert (await server.generate([1, 2, 3], "a")).adapter_version == "v2"


@in_event_loop
async def test_a_load_is_carried_through_though_its_caller_leaves() -> None:
    async with serving() as server:
        release = threading.Event()
        server.executor.before_stage = lambda _: release.wait(TIMEOUT_S)
        loading = asyncio.create_task(server.load("a"))
        await until(lambda: ("stage", "a") in server.executor.calls)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        release.set()
        await until(lambda: server.versions == {"a": "a"})
        assert (await server.generate([1, 2, 3], "a")).outputs[0].token_ids == expected("a", [1, 2, 3])


@in_event_loop
async def test_a_load_that_fails_on_the_ranks_leaves_what_was_there() -> None:
    def fail(_: object) -> None:
        raise RayLoraError("rank 1 disagrees")

    async with serving() as server:
        await server.load("a", "v1")
        server.executor.before_stage = fail
        for name, load_inplace in (("a", True), ("b", False)):
            with pytest.raises(RayLoraError, match="rank 1 disagrees"):
                await server.load(name, "v2", load_inplace=load_inplace)
        assert server.versions == {"a": "v1"}
        assert (await server.generate([1, 2, 3], "a")).outputs[0].token_ids == expected("v1", [1, 2, 3])
        server.executor.before_stage = lambda _: None
        assert await server.load("a", "v2", load_inplace=True)
        await server.until_idle()
        assert set(server.executor.staged) == {"v2"}


@pytest.mark.parametrize(
    ("name", "version", "rank", "error", "param"),
    [
        ("a", "v2", 16, AdapterExistsError, "lora_name"),
        ("b", "v2", 33, AdapterRejectedError, "r"),
        ("../b", "v2", 16, InvalidRequestError, "lora_name"),
        ("fake", "v2", 16, InvalidRequestError, "lora_name"),
        ("b", "missing", 16, NotFoundError, "lora_path"),
    ],
)
@in_event_loop
async def test_an_adapter_that_cannot_be_served_is_refused_before_anything_is_staged(
    name: str, version: str, rank: int, error: type[RayLoraError], param: str | None
) -> None:
    async with serving() as server:
        await server.load("a", "v1")
        if version != "missing":
            server.executor.sources[f"/adapters/{version}"] = make_manifest(version, rank)
        with pytest.raises(error) as caught:
            await server.engine.load_adapter(name, f"/adapters/{version}")
        assert getattr(caught.value, "param", None) == param
        assert server.versions == {"a": "v1"}
        assert ("stage", "v2") not in server.executor.calls
        assert (await server.generate([1, 2, 3], "a")).outputs[0].token_ids == expected("v1", [1, 2, 3])


@pytest.mark.parametrize("num_steps", range(1, 9))
@in_event_loop
async def test_a_version_that_dies_while_it_is_loaded_again_serves_and_is_not_dropped(num_steps: int) -> None:
    """The last request of an unloaded version ends about `num_steps` steps after a load of the same content begins."""
    async with serving() as server:
        await server.load("a", "v")
        gate = Gate(server.executor)
        last = server.start([1, 2, 3], "a", max_tokens=num_steps + 1)
        busy = server.start([4, 5, 6], max_tokens=None)
        await until(lambda: gate.num_arrived == 1)
        unloading = asyncio.create_task(server.engine.unload_adapter("a"))
        await settle()
        gate.let_through()
        await unloading
        loading = asyncio.create_task(server.load("b", "v"))
        while not (loading.done() and last.done()):
            await settle()
            gate.let_through()
        assert await loading
        gate.open()
        assert (await last).outputs[0].token_ids == expected("v", [1, 2, 3], num_steps + 1)
        await busy
        assert (await server.generate([1, 2, 3], "b")).outputs[0].token_ids == expected("v", [1, 2, 3])
        await server.until_idle()
        assert ("drop", "v") not in server.executor.calls
        await server.engine.unload_adapter("b")
        await server.until_idle()
        assert [kind for kind, _ in server.executor.calls if kind != "inspect"] == ["stage", "drop"]


@in_event_loop
async def test_a_dead_version_that_is_staged_again_before_it_was_dropped_is_kept() -> None:
    async with serving() as server:
        await server.load("a", "v")
        release = threading.Event()
        server.executor.before_inspect = lambda _: release.wait(TIMEOUT_S)
        gate = Gate(server.executor)
        last = server.start([1, 2, 3], "a", max_tokens=2)
        await until(lambda: gate.num_arrived == 1)
        unloading = asyncio.create_task(server.engine.unload_adapter("a"))
        await settle()
        gate.let_through()
        await unloading
        loading = asyncio.create_task(server.load("b", "v"))
        await settle()
        gate.open()
        await last
        await settle()
        assert ("drop", "v") not in server.executor.calls, "a load under way decides first"
        release.set()
        await loading
        assert (await server.generate([1, 2, 3], "b")).outputs[0].token_ids == expected("v", [1, 2, 3])
        await server.until_idle()
        assert ("drop", "v") not in server.executor.calls


@in_event_loop
async def test_a_version_that_dies_twice_before_it_is_dropped_is_dropped_once() -> None:
    async with serving() as server:
        await server.load("a", "v")
        release = threading.Event()
        server.executor.before_inspect = lambda _: release.wait(TIMEOUT_S)
        gate = Gate(server.executor)
        last = server.start([1, 2, 3], "a", max_tokens=2)
        await until(lambda: gate.num_arrived == 1)
        unloading = asyncio.create_task(server.engine.unload_adapter("a"))
        await settle()
        gate.let_through()
        await unloading
        loading = asyncio.create_task(server.load("b", "v"))
        await settle()
        unloading = asyncio.create_task(server.engine.unload_adapter("b"))
        await settle()
        gate.open()
        await last
        release.set()
        await asyncio.gather(loading, unloading)
        await server.until_idle()
        assert [kind for kind, _ in server.executor.calls if kind != "inspect"] == ["stage", "drop"]


# Death and shutdown


@in_event_loop
async def test_when_a_rank_dies_every_stream_and_every_later_call_says_so() -> None:
    async with serving(max_num_seqs=2) as server:
        await server.load("a")
        gate = Gate(server.executor)
        streams = [server.start([1, 2, i], max_tokens=20) for i in range(5)]
        await until(lambda: gate.num_arrived == 1)
        calls = [asyncio.create_task(server.load("b")), asyncio.create_task(server.engine.unload_adapter("a"))]
        streams += [server.start([1, 2, i], "a", max_tokens=20) for i in range(5)]
        await settle()
        server.executor.dead = True
        gate.open()
        for result in await asyncio.gather(*streams, *calls, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert "rank 0 is gone" in str(result)
        for call in (
            server.generate([1, 2, 3]),
            server.load("c"),
            server.engine.unload_adapter("a"),
            server.engine.check_health(),
        ):
            with pytest.raises(EngineDeadError):
                await call
        assert server.engine._streams == {}
        assert server.versions == {"a": "a"}


@in_event_loop
async def test_what_was_computed_before_a_rank_died_is_delivered_first() -> None:
    async with serving() as server:
        gate = Gate(server.executor)
        stream = server.engine.generate(request([1, 2, 3]))
        first = asyncio.ensure_future(anext(stream))
        gate.let_through(2)
        await until(lambda: gate.num_arrived == 3)
        server.executor.dead = True
        gate.open()
        tokens = [(await first).outputs[0].token_ids[0], (await anext(stream)).outputs[0].token_ids[0]]
        assert tokens == expected(None, [1, 2, 3])[:2]
        with pytest.raises(EngineDeadError):
            await anext(stream)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@in_event_loop
async def test_an_unforeseen_failure_is_a_death_that_names_it() -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError("oops")

    async with serving() as server:
        server.executor.before_step = fail
        with pytest.raises(EngineDeadError, match="ZeroDivisionError: oops"):
            await server.generate([1, 2, 3])
        with pytest.raises(EngineDeadError, match="ZeroDivisionError: oops"):
            await server.engine.check_health()


@in_event_loop
async def test_health_is_what_the_ranks_say() -> None:
    async with serving() as server:
        await server.engine.check_health()
        server.executor.dead = True
        with pytest.raises(EngineDeadError, match="rank 0 is gone"):
            await server.engine.check_health()


@in_event_loop
async def test_loads_are_told_by_stage_and_failed_ones_by_reason() -> None:
    def fail(_: object) -> None:
        raise AdapterStagingError("no room on rank 1")

    async with serving(max_loras=1, max_cpu_loras=1) as server:
        await server.load("a")
        await server.load("b")
        await server.generate([1, 2, 3], "a")
        server.executor.before_stage = fail
        with pytest.raises(AdapterStagingError):
            await server.load("c")
        with pytest.raises(AdapterStagingError):
            await server.generate([1, 2, 3], "b")
        stats = server.engine.stats()
    loads = stats.by_adapter["a"].loads
    assert (loads["stage"], loads["barrier"], loads["commit"][0]) == ((2, 1.0), (2, 0.5), 2)
    assert stats.by_adapter["b"].loads["stage"] == (1, 0.5)
    assert stats.by_adapter["a"].evictions["host"] == 2, "for b, and for c in vain"
    assert stats.load_failures["AdapterStagingError"] == 2
    assert sum(stats.load_failures.values()) == 2


@in_event_loop
async def test_idle_ranks_meet_again_and_again_and_a_dead_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "HEARTBEAT_S", 0.005)
    async with serving() as server:
        await until(lambda: server.executor.num_heartbeats > 2)
        assert (await server.generate([1, 2, 3])).outputs[0].token_ids == expected(None, [1, 2, 3])
        await server.engine.check_health()
        server.executor.dead = True
        await until(lambda: server.engine.dead is not None)


@in_event_loop
async def test_an_idle_engine_whose_ranks_cannot_meet_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "HEARTBEAT_S", 0.005)
    monkeypatch.setattr(async_engine, "OVERDUE_S", 0.05)
    stuck = threading.Event()
    async with serving() as server:
        server.executor.before_heartbeat = lambda: stuck.wait(TIMEOUT_S) and None
        await until(lambda: server.engine.stats().last_step_age_s > 0.05)
        with pytest.raises(EngineDeadError, match="no step has gone through every rank for"):
            await server.engine.check_health()
        stuck.set()
        await until(lambda: server.engine.stats().last_step_age_s < 0.05)
        await server.engine.check_health()


@in_event_loop
async def test_a_long_step_is_healthy_as_long_as_the_ranks_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "OVERDUE_S", 0.0)
    async with serving() as server:
        gate = Gate(server.executor)
        stream = server.start([1, 2, 3])
        await until(lambda: gate.num_arrived == 1)
        await server.engine.check_health()
        gate.open()
        await stream


@in_event_loop
async def test_shutting_down_ends_running_and_waiting_streams() -> None:
    async with serving(max_num_seqs=2) as server:
        gate = Gate(server.executor)
        streams = [server.start([1, 2, i], max_tokens=20) for i in range(6)]
        await until(lambda: gate.num_arrived == 1)
        await settle()
        gate.open()
        await server.engine.shutdown()
        for result in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert "shut down" in str(result)
        with pytest.raises(EngineDeadError):
            await server.generate([1])
        await server.engine.shutdown()


@in_event_loop
async def test_shutting_down_during_a_load_ends_the_load() -> None:
    async with serving() as server:
        release = threading.Event()
        server.executor.before_stage = lambda _: release.wait(TIMEOUT_S)
        loading = asyncio.create_task(server.load("a"))
        await until(lambda: ("stage", "a") in server.executor.calls)
        await server.engine.shutdown()
        release.set()
        with pytest.raises(EngineDeadError):
            await loading


@in_event_loop
async def test_shutting_down_right_after_an_unload_complains_of_nothing() -> None:
    async with serving() as server:
        await server.load("a")
        gate = Gate(server.executor)
        stream = server.start([1, 2, 3], "a", max_tokens=1)
        await until(lambda: gate.num_arrived == 1)
        unloading = asyncio.create_task(server.engine.unload_adapter("a"))
        await settle()
        stopping = asyncio.create_task(server.engine.shutdown())
        gate.open()
        await asyncio.gather(stream, unloading, stopping, return_exceptions=True)


@in_event_loop
async def test_an_idle_engine_shuts_down() -> None:
    async with serving():
        pass


# All at once


@pytest.mark.parametrize("seed", range(4))
@in_event_loop
async def test_a_storm_of_requests_cancellations_and_reloads_leaves_nothing_behind(seed: int) -> None:
    chooser = random.Random(seed)

    async def client(server: Server) -> None:
        for _ in range(6):
            prompt = [chooser.choice([1, 2]) for _ in range(chooser.randint(1, 12))]
            name, count = chooser.choice([None, "a", "b", "c"]), chooser.randint(1, 10)
            task = server.start(prompt, name, max_tokens=count)
            if chooser.random() < 0.4:
                await asyncio.sleep(chooser.random() * 0.004)
                task.cancel()
            try:
                output = await task
            except (asyncio.CancelledError, NotFoundError):
                continue
            assert output.outputs[0].token_ids == expected(output.adapter_version, prompt, count)

    async def operator(server: Server) -> None:
        for _ in range(15):
            name = chooser.choice("abc")
            with suppress(NotFoundError):
                if chooser.random() < 0.7:
                    await server.load(name, f"v{chooser.randint(0, 5)}", load_inplace=True)
                else:
                    await server.engine.unload_adapter(name)

    async with serving(num_blocks=14, max_loras=1, max_cpu_loras=20) as server:
        await asyncio.gather(*(client(server) for _ in range(8)), *(operator(server) for _ in range(2)))
        await server.until_idle()
        for name in server.versions:
            await server.engine.unload_adapter(name)
        await server.until_idle()
        assert server.executor.staged == {}
        assert server.engine.stats().num_free_lora_pages == server.engine.stats().num_lora_pages
