"""Adapters that were loaded at run time come back with the server, each with the content that it had."""

import asyncio
import logging
import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest
from replica_group import Group, running

from ray_lora.config import EngineConfig, LoRAModule
from ray_lora.errors import AdapterExistsError, ConfigError, NotFoundError
from ray_lora.request import GenerateChunk, GenerateRequest, SamplingParams
from ray_lora.serve.adapter_entry import AdapterEntry, AdapterSettings
from ray_lora.serve.adapter_registry import AdapterRegistry
from ray_lora.serve.start import start_engine
from tests.tiny import make_adapter, make_checkpoint


def test_entries_are_kept_in_order_and_replaced_by_name(tmp_path: Path) -> None:
    registry = AdapterRegistry(tmp_path / "deep" / "registry.sqlite")
    registry.put("a", "v1", "/a")
    registry.put("b", "v2", "s3://bucket/b")
    first, second = AdapterEntry("a", "v1", "/a"), AdapterEntry("b", "v2", "s3://bucket/b")
    assert AdapterRegistry(registry.path).entries() == [first, second]
    registry.put("a", "v3", "/c")
    assert registry.entries() == [AdapterEntry("a", "v3", "/c"), second]
    registry.remove("a")
    registry.remove("nobody")
    assert registry.entries() == [second]


def test_the_pinned_come_first_and_then_the_lately_used(tmp_path: Path) -> None:
    registry = AdapterRegistry(tmp_path / "registry.sqlite")
    for name in "abcde":
        registry.put(name, f"v{name}", f"/{name}")
    registry.set_last_used({"b": 5.0, "d": 7.0})
    registry.set_last_used({"b": 9.0, "d": 6.0})
    registry.set_pinned("e", True)
    registry.set_pinned("c", True)
    registry.set_pinned("c", False)
    assert [entry.name for entry in registry.entries()] == ["e", "b", "d", "a", "c"]
    registry.set_weight("b", 2.0)
    registry.set_weight("b", 3.0)
    assert registry.settings("b") == AdapterSettings(weight=3.0, last_used=9.0)
    assert registry.settings("c") == AdapterSettings(pinned=False)
    assert registry.settings("d") == AdapterSettings(last_used=7.0)
    assert registry.settings("e") == AdapterSettings(pinned=True)
    assert registry.entries()[1].settings == registry.settings("b")
    registry.put("e", "other", "/other")
    assert registry.settings("e").pinned, "settings belong to the name"
    registry.remove("e")
    assert registry.settings("e") == AdapterSettings()


def test_no_credential_is_written_and_nobody_else_can_read(tmp_path: Path) -> None:
    registry = AdapterRegistry(tmp_path / "registry.sqlite")
    registry.put("a", "v1", "https://me:secret@host/a?token=secret")
    assert registry.entries() == [AdapterEntry("a", "v1", "https://host/a")]
    assert b"secret" not in registry.path.read_bytes()
    assert registry.path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "content", [b"not a database, but long enough to be looked at" * 40, b"SQLite format 3\0" + b"x" * 200]
)
def test_a_damaged_file_is_set_aside_and_said_loudly(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "registry.sqlite"
    path.write_bytes(content)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        registry = AdapterRegistry(path)
    registry.put("a", "v1", "/a")
    assert registry.entries() == [AdapterEntry("a", "v1", "/a")]
    (aside,) = tmp_path.glob("registry.sqlite.damaged-*")
    assert aside.read_bytes() == content
    assert str(aside) in caplog.text


def test_a_file_from_before_there_were_weights_keeps_what_it_has(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "registry.sqlite")) as connection, connection:
        connection.execute("CREATE TABLE adapters (name TEXT PRIMARY KEY, version TEXT NOT NULL, source TEXT NOT NULL)")
        connection.execute(
            "CREATE TABLE settings (name TEXT PRIMARY KEY, pinned INTEGER NOT NULL DEFAULT 0, last_used REAL)"
        )
        connection.execute("INSERT INTO adapters VALUES ('a', 'v1', '/a')")
        connection.execute("INSERT INTO settings VALUES ('a', 1, NULL), ('b', 0, 7.0)")
    for _ in range(2):
        registry = AdapterRegistry(tmp_path / "registry.sqlite")
        assert registry.entries() == [AdapterEntry("a", "v1", "/a", AdapterSettings(pinned=True))]
        assert registry.settings("b") == AdapterSettings(last_used=7.0)
    registry.set_weight("a", 2.0)
    assert registry.settings("a") == AdapterSettings(pinned=True, weight=2.0)


@pytest.fixture
def model(tmp_path: Path) -> EngineConfig:
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    return EngineConfig(
        model=str(checkpoint),
        kv_cache_memory_bytes=1 << 22,
        adapter_store_dir=str(tmp_path / "store"),
        lora_registry_path=str(tmp_path / "registry.sqlite"),
    )


def run(config: EngineConfig, use: Callable[[Group], Awaitable[None]]) -> dict[str, str]:
    """Start a directory and a replica, use them, shut them down; the versions by name that they ended with."""

    async def main() -> dict[str, str]:
        async with running(config, 1, start_engine) as group:
            await use(group)
            return {info.name: info.version for info in group.engines[0].list_adapters()}

    return asyncio.run(main())


async def nothing(_: Group) -> None:
    pass


def test_what_was_loaded_comes_back_and_what_was_unloaded_does_not(model: EngineConfig, tmp_path: Path) -> None:
    paths = {name: make_adapter(tmp_path / name, model.model_path, seed) for seed, name in enumerate("abc")}

    async def load(group: Group) -> None:
        for name, path in paths.items():
            await group.client.load_adapter(name, str(path))
        await group.client.unload_adapter("b")

    before = run(model, load)
    assert set(before) == {"a", "c"}
    shutil.rmtree(paths["a"])
    assert run(model, nothing) == before, "from the store's copy, though the source is gone"

    async def generate(group: Group) -> None:
        assert await answer(group, "a")
        with pytest.raises(NotFoundError):
            await group.client.unload_adapter("b")

    assert run(model, generate) == before


def test_content_that_is_lost_is_left_out_and_said_loudly(
    model: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, changed, gone = (make_adapter(tmp_path / name, model.model_path, 1 + i) for i, name in enumerate("kcg"))

    async def load(group: Group) -> None:
        for path in (kept, changed, gone):
            await group.client.load_adapter(path.name, str(path))

    before = run(model, load)
    shutil.rmtree(tmp_path / "store")
    shutil.rmtree(gone)
    make_adapter(changed, model.model_path, 77)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        assert run(model, nothing) == {"k": before["k"]}
    assert "'c' cannot be restored" in caplog.text
    assert "'g' cannot be restored" in caplog.text


def test_pins_come_back_and_the_rest_comes_with_its_first_request(model: EngineConfig, tmp_path: Path) -> None:
    config = model.model_copy(update={"max_loras": 2, "max_cpu_loras": 2})
    names = "abcde"
    paths = {name: make_adapter(tmp_path / name, model.model_path, 30 + i) for i, name in enumerate(names)}

    async def load(group: Group) -> None:
        for name, path in paths.items():
            await group.client.load_adapter(name, str(path))
        await group.client.pin_adapter("b", True)
        await group.client.set_adapter_weight("b", 4.0)
        await answer(group, "d")

    before = run(config, load)

    async def look(group: Group) -> None:
        infos = {info.name: info for info in group.engines[0].list_adapters()}
        assert set(infos) == {"b", "d"}, "the others are not waited for"
        assert (infos["b"].pinned, infos["b"].tier, infos["d"].tier) == (True, "host", "host")
        assert (infos["b"].weight, infos["d"].weight) == (4.0, 1.0)
        assert infos["d"].last_used is not None
        assert await answer(group, "e"), "it need not wait for its turn"
        await until_listed(group, len(names))
        tiers = {info.name: info.tier for info in group.engines[0].list_adapters()}
        assert (tiers["a"], tiers["c"]) == ("disk", "disk")
        assert await answer(group, "a")
        assert {info.name: info.tier for info in group.engines[0].list_adapters()}["b"] == "host"

    assert run(config, look) == before


def test_what_is_changed_while_the_rest_comes_back_stays_changed(model: EngineConfig, tmp_path: Path) -> None:
    config = model.model_copy(update={"max_loras": 1, "max_cpu_loras": 1})
    paths = {name: make_adapter(tmp_path / name, model.model_path, 40 + i) for i, name in enumerate("abcx")}

    async def load(group: Group) -> None:
        for name in "abc":
            await group.client.load_adapter(name, str(paths[name]))
        await answer(group, "a")

    before = run(config, load)

    async def change(group: Group) -> None:
        with pytest.raises(AdapterExistsError):
            await group.client.load_adapter("b", str(paths["x"]))
        await group.client.load_adapter("b", str(paths["x"]), load_inplace=True)
        await group.client.unload_adapter("c")
        await asyncio.gather(*group.replicas[0]._follower._tasks[:1])

    after = run(config, change)
    assert set(after) == {"a", "b"}
    assert after["a"] == before["a"]
    assert after["b"] != before["b"]
    assert run(config, lambda group: until_listed(group, 2)) == after


def test_a_configured_adapter_keeps_its_pin_and_its_runtime_content(model: EngineConfig, tmp_path: Path) -> None:
    first, other = (make_adapter(tmp_path / name, model.model_path, 50 + i) for i, name in enumerate("fo"))
    config = model.model_copy(update={"lora_modules": (LoRAModule(name="a", path=str(first)),)})

    async def pin(group: Group) -> None:
        await group.client.pin_adapter("a", True)

    original = run(config, pin)

    async def replace(group: Group) -> None:
        assert group.engines[0].list_adapters()[0].pinned
        await group.client.load_adapter("a", str(other), load_inplace=True)

    replaced = run(config, replace)
    assert replaced != original
    assert run(config, nothing) == replaced


@pytest.mark.parametrize("is_replaced", [False, True])
def test_settings_made_at_run_time_go_before_those_of_the_configuration(
    model: EngineConfig, tmp_path: Path, is_replaced: bool
) -> None:
    first, other = (make_adapter(tmp_path / name, model.model_path, 60 + i) for i, name in enumerate("fo"))
    modules = tuple(LoRAModule(name=name, path=str(first), weight=2.0, pinned=True) for name in "ab")
    config = model.model_copy(update={"lora_modules": modules})

    async def change(group: Group) -> None:
        assert [(info.weight, info.pinned) for info in group.engines[0].list_adapters()] == [(2.0, True), (2.0, True)]
        await group.client.set_adapter_weight("a", 5.0)
        await group.client.pin_adapter("b", False)
        if is_replaced:
            for name in "ab":
                await group.client.load_adapter(name, str(other), load_inplace=True)

    run(config, change)

    async def look(group: Group) -> None:
        settings = {info.name: (info.weight, info.pinned) for info in group.engines[0].list_adapters()}
        assert settings == {"a": (5.0, True), "b": (2.0, False)}

    run(config, look)


async def answer(group: Group, adapter: str) -> list[GenerateChunk]:
    request = GenerateRequest(prompt=[5, 6], adapter=adapter, sampling_params=SamplingParams(max_tokens=2))
    return [chunk async for chunk in group.client.generate(request)]


async def until_listed(group: Group, number: int) -> None:
    async with asyncio.timeout(20):
        while len(group.engines[0].list_adapters()) < number:
            await asyncio.sleep(0.01)


def test_a_registry_that_cannot_be_opened_is_a_config_error(model: EngineConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = model.model_copy(update={"lora_registry_path": str(tmp_path / "file" / "registry.sqlite")})
    with pytest.raises(ConfigError, match="lora_registry_path"):
        run(config, nothing)
