"""Remote adapters and adapters found by name: one load for all who want it, and nobody else waits."""

import asyncio
import shutil
import threading
from pathlib import Path

import pytest
from fake_executor import make_manifest
from test_async_engine import TIMEOUT_S, Server, expected, in_event_loop, serving, settle, until

from ray_lora.engine.adapter_resolver import FILES
from ray_lora.errors import AdapterRejectedError, NotFoundError


def publish(server: Server, source: str, version: str) -> str:
    server.executor.sources[source] = make_manifest(version)
    return source


def num_calls(server: Server, kind: str) -> int:
    return sum(call == kind for call, _ in server.executor.calls)


def _wait(event: threading.Event) -> None:
    assert event.wait(TIMEOUT_S)


class Held:
    """Holds inspections of one source until released."""

    def __init__(self, server: Server, source: str) -> None:
        self.release = threading.Event()
        self.num_waiting = 0
        self._source = source
        server.executor.before_inspect = self._wait

    def _wait(self, source: str) -> None:
        if source == self._source:
            self.num_waiting += 1
            _wait(self.release)


@in_event_loop
async def test_concurrent_loads_of_one_url_share_one_fetch_and_others_do_not_wait() -> None:
    async with serving() as server:
        url = publish(server, "s3://bucket/a", "v")
        held = Held(server, url)
        loads = [asyncio.create_task(server.engine.load_adapter(f"a{index}", url)) for index in range(10)]
        await until(lambda: held.num_waiting == 1)
        assert await server.load("b", "w"), "a load of another adapter passes by"
        await server.engine.unload_adapter("b")
        held.release.set()
        await asyncio.gather(*loads)
        assert held.num_waiting == 1
        assert server.versions == {f"a{index}": "v" for index in range(10)}
        assert [call for call in server.executor.calls if call == ("stage", "v")] == [("stage", "v")]


@in_event_loop
async def test_a_later_load_of_a_url_fetches_it_anew() -> None:
    async with serving() as server:
        url = publish(server, "hf://team/a", "v1")
        await server.engine.load_adapter("a", url)
        publish(server, url, "v2")
        info, changed = await server.engine.load_adapter("a", url, load_inplace=True)
        assert (info.version, changed) == ("v2", True)


@in_event_loop
async def test_a_failed_fetch_fails_every_load_that_shares_it_and_the_next_one_tries_again() -> None:
    async with serving() as server:
        held = Held(server, "http://host/a")
        loads = [asyncio.create_task(server.engine.load_adapter("a", "http://host/a")) for _ in range(3)]
        await until(lambda: held.num_waiting == 1)
        held.release.set()
        results = await asyncio.gather(*loads, return_exceptions=True)
        assert [type(result) for result in results] == [NotFoundError] * 3
        publish(server, "http://host/a", "v")
        await server.engine.load_adapter("a", "http://host/a")


@in_event_loop
async def test_many_slow_fetches_leave_threads_for_health_checks_and_local_loads() -> None:
    async with serving(max_cpu_loras=99) as server:
        release = threading.Event()
        server.executor.before_inspect = lambda source: None if "://" not in source else _wait(release)
        urls = [publish(server, f"s3://bucket/{index}", f"v{index}") for index in range(20)]
        loads = [asyncio.create_task(server.engine.load_adapter(f"a{index}", url)) for index, url in enumerate(urls)]
        await settle()
        await server.engine.check_health()
        await server.load("local")
        release.set()
        await asyncio.gather(*loads)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("legal", "medical"):
        (tmp_path / name).mkdir()
        for file in FILES:
            (tmp_path / name / file).write_text("")
    return tmp_path


@in_event_loop
async def test_an_unknown_name_is_loaded_from_the_directory_by_its_first_request(root: Path) -> None:
    async with serving(lora_resolver_dir=str(root)) as server:
        publish(server, str(root / "legal"), "v")
        for _ in range(2):
            output = await server.generate([1, 2, 3], "legal")
            assert output.outputs[0].token_ids == expected("v", [1, 2, 3])
            assert output.adapter_version == "v"
        assert (num_calls(server, "inspect"), num_calls(server, "stage")) == (1, 1)
        assert server.versions == {"legal": "v"}


@in_event_loop
async def test_concurrent_first_requests_share_one_load_and_base_requests_do_not_wait(root: Path) -> None:
    async with serving(lora_resolver_dir=str(root)) as server:
        held = Held(server, publish(server, str(root / "legal"), "v"))
        tasks = [server.start([1, 2, index], "legal") for index in range(12)]
        await until(lambda: held.num_waiting == 1)
        assert (await server.generate([1, 2, 3])).outputs[0].token_ids == expected(None, [1, 2, 3])
        tasks[0].cancel()
        await settle()
        held.release.set()
        for index, task in enumerate(tasks[1:], start=1):
            assert (await task).outputs[0].token_ids == expected("v", [1, 2, index])
        assert num_calls(server, "inspect") == 1
        await server.until_idle()


@in_event_loop
async def test_a_name_that_is_not_there_is_not_found_and_nothing_is_read(root: Path) -> None:
    async with serving(lora_resolver_dir=str(root)) as server:
        for name in ("absent", "../legal", str(root / "legal")):
            with pytest.raises(NotFoundError):
                await server.generate([1, 2, 3], name)
        assert server.executor.calls == []


@in_event_loop
async def test_without_a_directory_nothing_is_looked_for() -> None:
    async with serving() as server:
        with pytest.raises(NotFoundError):
            await server.generate([1, 2, 3], "legal")
        assert server.executor.calls == []


@in_event_loop
async def test_an_adapter_that_is_refused_fails_its_requests_and_is_tried_again_when_it_is_mended(root: Path) -> None:
    async with serving(lora_resolver_dir=str(root)) as server:

        def refuse(_: str) -> None:
            raise AdapterRejectedError("use_dora is not supported", "use_dora")

        server.executor.before_inspect = refuse
        publish(server, str(root / "legal"), "v")
        results = await asyncio.gather(*(server.start([1], "legal") for _ in range(3)), return_exceptions=True)
        assert [type(result) for result in results] == [AdapterRejectedError] * 3
        assert (await server.generate([1, 2, 3])).outputs[0].token_ids == expected(None, [1, 2, 3])
        server.executor.before_inspect = lambda _: None
        assert (await server.generate([1, 2, 3], "legal")).adapter_version == "v"


@in_event_loop
async def test_a_request_that_leaves_while_its_adapter_is_refused_complains_to_nobody(root: Path) -> None:
    async with serving(lora_resolver_dir=str(root)) as server:
        held = Held(server, str(root / "legal"))
        task = server.start([1, 2, 3], "legal")
        await until(lambda: held.num_waiting == 1)
        task.cancel()
        await settle()
        held.release.set()
        await settle()


@in_event_loop
async def test_a_name_that_was_loaded_by_hand_is_not_looked_for(root: Path) -> None:
    async with serving(lora_resolver_dir=str(root)) as server:
        await server.load("legal", "by-hand")
        assert (await server.generate([1, 2, 3], "legal")).adapter_version == "by-hand"
        assert num_calls(server, "inspect") == 1


@in_event_loop
async def test_a_load_by_hand_that_wins_the_race_is_what_the_request_gets(root: Path) -> None:
    async with serving(lora_resolver_dir=str(root)) as server:
        manual = publish(server, "/adapters/manual", "by-hand")
        held = Held(server, manual)
        publish(server, str(root / "legal"), "found")
        by_hand = asyncio.create_task(server.engine.load_adapter("legal", manual))
        await until(lambda: held.num_waiting == 1)
        task = server.start([1, 2, 3], "legal")
        await settle()
        held.release.set()
        await by_hand
        assert (await task).adapter_version == "by-hand"


@in_event_loop
async def test_a_name_that_is_forgotten_while_its_first_request_waits_for_other_loads_is_not_loaded(root: Path) -> None:
    async with serving(lora_resolver_dir=str(root)) as server:
        publish(server, str(root / "legal"), "v")
        held = Held(server, publish(server, "/adapters/other", "w"))
        other = asyncio.create_task(server.engine.load_adapter("other", "/adapters/other"))
        await until(lambda: held.num_waiting == 1)
        task = server.start([1, 2, 3], "legal")
        await settle()
        shutil.rmtree(root / "legal")
        held.release.set()
        await other
        with pytest.raises(NotFoundError):
            await task
        assert server.versions == {"other": "w"}
