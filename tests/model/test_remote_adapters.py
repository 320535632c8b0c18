"""Adapters that come over HTTP or are found by name, through the whole engine."""

import shutil
from pathlib import Path

import pytest

from ray_lora import LLM, SamplingParams
from ray_lora.adapters import fetch as fetch_module
from ray_lora.adapters.store_leases import size_of
from ray_lora.errors import CapacityError, InvalidRequestError, NotFoundError
from tests.file_server import file_server
from tests.tiny import make_adapter, make_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("adapters")
    return [make_adapter(directory / f"a{seed}", checkpoint, seed) for seed in range(3)]


def tokens(llm: LLM, adapter: str | None) -> list[int]:
    return list(llm.generate(PROMPT, GREEDY, adapters=adapter)[0].outputs[0].token_ids)


def test_a_fetched_and_a_found_adapter_answer_as_the_local_one_and_leave_room_when_unloaded(
    checkpoint: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_module, "FIRST_PAUSE_S", 0.01)
    root = tmp_path / "resolver"
    shutil.copytree(adapters[1], root / "found")
    settings = {
        "adapter_store_dir": str(tmp_path / "store"),
        "adapter_store_max_bytes": 2 * size_of(adapters[0]),
        "lora_resolver_dir": str(root),
        "kv_cache_memory_bytes": 1 << 23,
    }
    with file_server() as server, LLM(str(checkpoint), {"local": str(adapters[0])}, **settings) as llm:
        url = server.put("a0", adapters[0])
        server.faults = [503]
        info = llm.load_adapter("remote", url.replace("http://", "http://user:hunter2@"))
        assert "hunter2" not in info.source
        assert tokens(llm, "remote") == tokens(llm, "local") != tokens(llm, None)
        assert tokens(llm, "found") not in (tokens(llm, None), tokens(llm, "local"))
        assert {info.name for info in llm.list_adapters()} == {"local", "remote", "found"}
        with pytest.raises(CapacityError, match="adapter_store_max_bytes"):
            llm.load_adapter("third", str(adapters[2]))
        llm.unload_adapter("found")
        llm.load_adapter("third", str(adapters[2]))
        for source, error in (("s3x://bucket/a", InvalidRequestError), (f"{url}/absent", NotFoundError)):
            with pytest.raises(error):
                llm.load_adapter("fourth", source)
        with pytest.raises(NotFoundError):
            tokens(llm, "../found")
        assert tokens(llm, "remote") == tokens(llm, "local")
