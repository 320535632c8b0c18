"""Whatever becomes of the registry's file, the server starts and what is served is served on."""

import logging
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from replica_group import Group, in_event_loop, running

from ray_lora.config import EngineConfig, LoRAModule
from ray_lora.errors import RayLoraError
from ray_lora.serve.adapter_directory import AdapterDirectory
from ray_lora.serve.adapter_entry import AdapterEntry
from ray_lora.serve.adapter_registry import AdapterRegistry


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


def set_middle(path: Path) -> None:
    """The page in which the first table lies."""
    content = bytearray(path.read_bytes())
    content[4096:8192] = b"\xff" * 4096
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "garbage": lambda path: path.write_bytes(b"not a database, but long enough to be looked at" * 400),
    "truncated": lambda path: os.truncate(path, 5000),
    "overwritten in the middle": set_middle,
    "a table less": lambda path: change(path, "DROP TABLE settings", "CREATE TABLE settings (a, b)"),
    "other columns": lambda path: change(path, "ALTER TABLE adapters RENAME COLUMN source TO origin"),
    "a name that is none": lambda path: change(path, "INSERT INTO adapters VALUES (x'00ff', 'v', 's')"),
    "a time that is none": lambda path: change(path, "UPDATE settings SET last_used = 'yesterday'"),
}
LOSSES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: os.truncate(path, 0),
    "deleted": Path.unlink,
}


@pytest.fixture
def registered(config: EngineConfig, tmp_path: Path) -> EngineConfig:
    modules = (LoRAModule(name="configured", path=adapter(tmp_path, 20)),)
    return config.model_copy(
        update={
            "lora_registry_path": str(tmp_path / "registry.sqlite"),
            "adapter_store_dir": str(tmp_path / "store"),
            "lora_modules": modules,
        }
    )


def adapter(directory: Path, rank: int) -> str:
    """What the fake engine takes for version `v{rank}`."""
    path = directory / f"adapter{rank}"
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(f'{{"r": {rank}}}')
    return str(path)


async def fill(group: Group, directory: Path) -> list[dict[str, tuple[str, bool]]]:
    await group.client.load_adapter("a", adapter(directory, 8))
    await group.client.load_adapter("b", adapter(directory, 9))
    await group.client.pin_adapter("b", True)
    await group.client.set_adapter_weight("configured", 2.0)
    group.directory._registry.set_last_used({"a": 5.0})
    return group.held()


@pytest.mark.parametrize("damage", [*DAMAGES, *LOSSES])
@in_event_loop
async def test_a_new_directory_has_from_the_replicas_what_the_file_has_lost(
    registered: EngineConfig, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "registry.sqlite"
    async with running(registered) as group:
        held = await fill(group, tmp_path)
        await AdapterDirectory.__del__(group.directory)
        (DAMAGES | LOSSES)[damage](path)
        with caplog.at_level(logging.ERROR, "ray.serve"):
            await group.start_directory()
        for replica in group.replicas:
            await replica._follower._sync()
        assert group.held() == held
        await group.client.load_adapter("c", adapter(tmp_path, 10))
    assert (f"{path} is damaged" in caplog.text) == (damage in DAMAGES)
    assert "it has the 2 adapters again" in caplog.text
    assert len(list(tmp_path.glob("registry.sqlite.damaged-*"))) == (damage in DAMAGES)
    restored = AdapterRegistry(path)
    assert {(each.name, each.version, bool(each.settings.pinned)) for each in restored.entries()} == {
        ("a", "v8", False),
        ("b", "v9", True),
        ("c", "v10", False),
    }
    assert restored.settings("configured").weight == 2.0


@pytest.mark.parametrize("damage", [*DAMAGES, *LOSSES])
@in_event_loop
async def test_a_server_starts_with_a_damaged_file(registered: EngineConfig, tmp_path: Path, damage: str) -> None:
    async with running(registered, 1) as group:
        await fill(group, tmp_path)
    (DAMAGES | LOSSES)[damage](tmp_path / "registry.sqlite")
    async with running(registered, 1) as group:
        assert group.held() == [{"configured": ("v20", False)}]
        await group.client.load_adapter("a", adapter(tmp_path, 8))
    assert [each.name for each in AdapterRegistry(tmp_path / "registry.sqlite").entries()] == ["a"]


@pytest.mark.parametrize("damage", ["garbage", "truncated", *LOSSES])
@in_event_loop
async def test_a_file_that_is_damaged_while_the_server_runs_is_written_anew_with_the_next_change(
    registered: EngineConfig, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "registry.sqlite"
    async with running(registered) as group:
        await fill(group, tmp_path)
        (DAMAGES | LOSSES)[damage](path)
        await group.client.unload_adapter("a")
        assert [{name: version for name, (version, _) in held.items()} for held in group.held()] == [
            {"configured": "v20", "b": "v9"}
        ] * 2
    (entry,) = AdapterRegistry(path).entries()
    assert (entry.name, entry.settings.pinned) == ("b", True)


@in_event_loop
async def test_a_change_that_cannot_be_written_is_refused_and_undone(
    registered: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(registered) as group:
        held = await fill(group, tmp_path)

        def put(self: AdapterRegistry, *_: str) -> None:
            with closing(sqlite3.connect(tmp_path / "full.sqlite")) as connection:
                connection.execute("PRAGMA max_page_count = 1")
                connection.execute("CREATE TABLE t (x)")

        monkeypatch.setattr(AdapterRegistry, "put", put)
        with pytest.raises(RayLoraError, match=r"lora_registry_path.*full"):
            await group.client.load_adapter("c", adapter(tmp_path, 10))
        assert group.held() == held
        monkeypatch.undo()
        await group.client.load_adapter("c", adapter(tmp_path, 10))
    assert AdapterEntry("c", "v10", adapter(tmp_path, 10)) in AdapterRegistry(tmp_path / "registry.sqlite").entries()
