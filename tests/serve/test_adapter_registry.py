"""Adapters that were loaded at run time come back with the replica, each with the content that it had."""

import asyncio
import logging
import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ray_lora.config import EngineConfig
from ray_lora.errors import ConfigError, NotFoundError
from ray_lora.request import GenerateRequest, SamplingParams
from ray_lora.serve.adapter_registry import AdapterRegistry, RegistryEntry
from ray_lora.serve.durable_engine import DurableEngine
from ray_lora.serve.start import start_engine
from tests.tiny import make_adapter, make_checkpoint


def test_entries_are_kept_in_order_and_replaced_by_name(tmp_path: Path) -> None:
    registry = AdapterRegistry(tmp_path / "deep" / "registry.sqlite")
    first, second = RegistryEntry("a", "v1", "/a"), RegistryEntry("b", "v2", "s3://bucket/b")
    registry.put(first)
    registry.put(second)
    assert AdapterRegistry(registry.path).entries() == [first, second]
    moved = RegistryEntry("a", "v3", "/c")
    registry.put(moved)
    assert registry.entries() == [moved, second]
    registry.remove("a")
    registry.remove("nobody")
    assert registry.entries() == [second]


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
    registry.put(RegistryEntry("a", "v1", "/a"))
    assert registry.entries() == [RegistryEntry("a", "v1", "/a")]
    (aside,) = tmp_path.glob("registry.sqlite.damaged-*")
    assert aside.read_bytes() == content
    assert str(aside) in caplog.text


@pytest.fixture
def model(tmp_path: Path) -> EngineConfig:
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    return EngineConfig(
        model=str(checkpoint),
        kv_cache_memory_bytes=1 << 22,
        adapter_store_dir=str(tmp_path / "store"),
        lora_registry_path=str(tmp_path / "registry.sqlite"),
    )


def run(config: EngineConfig, use: Callable[[DurableEngine], Awaitable[None]]) -> dict[str, str]:
    """Start an engine, use it, shut it down; the versions by name that it ended with."""

    async def main() -> dict[str, str]:
        engine = await start_engine(config)
        assert isinstance(engine, DurableEngine)
        try:
            await use(engine)
            return {info.name: info.version for info in engine.list_adapters()}
        finally:
            await engine.shutdown()

    return asyncio.run(main())


async def nothing(_: DurableEngine) -> None:
    pass


def test_what_was_loaded_comes_back_and_what_was_unloaded_does_not(model: EngineConfig, tmp_path: Path) -> None:
    paths = {name: make_adapter(tmp_path / name, model.model_path, seed) for seed, name in enumerate("abc")}

    async def load(engine: DurableEngine) -> None:
        for name, path in paths.items():
            await engine.load_adapter(name, str(path))
        await engine.unload_adapter("b")

    before = run(model, load)
    assert set(before) == {"a", "c"}
    shutil.rmtree(paths["a"])
    assert run(model, nothing) == before, "from the store's copy, though the source is gone"

    async def generate(engine: DurableEngine) -> None:
        request = GenerateRequest(prompt=[5, 6], adapter="a", sampling_params=SamplingParams(max_tokens=2))
        assert [chunk async for chunk in engine.generate(request)]
        with pytest.raises(NotFoundError):
            await engine.unload_adapter("b")

    assert run(model, generate) == before


def test_content_that_is_lost_is_left_out_and_said_loudly(
    model: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, changed, gone = (make_adapter(tmp_path / name, model.model_path, 1 + i) for i, name in enumerate("kcg"))

    async def load(engine: DurableEngine) -> None:
        for path in (kept, changed, gone):
            await engine.load_adapter(path.name, str(path))

    before = run(model, load)
    shutil.rmtree(tmp_path / "store")
    shutil.rmtree(gone)
    make_adapter(changed, model.model_path, 77)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        assert run(model, nothing) == {"k": before["k"]}
    assert "'c' of the registry cannot be restored" in caplog.text
    assert "'g' of the registry cannot be restored" in caplog.text


def test_a_registry_that_cannot_be_opened_is_a_config_error(model: EngineConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = model.model_copy(update={"lora_registry_path": str(tmp_path / "file" / "registry.sqlite")})
    with pytest.raises(ConfigError, match="lora_registry_path"):
        asyncio.run(start_engine(config))


def test_two_replicas_write_to_one_file(tmp_path: Path) -> None:
    first, second = (AdapterRegistry(tmp_path / "registry.sqlite") for _ in range(2))
    holder = sqlite3.connect(first.path)
    holder.execute("BEGIN IMMEDIATE")
    holder.rollback()
    first.put(RegistryEntry("a", "v1", "/a"))
    second.put(RegistryEntry("a", "v1", "/a"))
    holder.close()
    assert first.entries() == second.entries() == [RegistryEntry("a", "v1", "/a")]
