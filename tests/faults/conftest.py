"""A served application for all faults, and what they have found in figures, which is shown at the end."""

import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401  its own models use a deprecated spelling of pydantic's Field

from ray_lora.config import EngineConfig
from tests.faults.served_app import App, ranks, served, wait_for
from tests.faults.traffic import Question, Traffic, learn
from tests.faulty_worker import start_faulty
from tests.tiny import make_adapter, make_checkpoint, random_prompts

TP_SIZE = 2
NAMES = ("a0", "a1", "a2")
NUM_TOKENS = 100
STORE_BYTES = 8 << 20

FIGURES: list[str] = []


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[object], None]:
    """Add something to the figures."""
    return lambda what: FIGURES.append(f"{request.node.name}: {what}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FIGURES:
        terminalreporter.section("what the faults did")
        for line in FIGURES:
            terminalreporter.write_line(line)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 322}
    return make_checkpoint(tmp_path_factory.mktemp("faults") / "model", "qwen2", **shape)


@pytest.fixture(scope="module")
def store(checkpoint: Path) -> Iterator[Path]:
    """The directory of the adapters' copies: a small file system of its own, where this user may make one."""
    directory = checkpoint.parent / "store"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={STORE_BYTES}", "tmpfs", str(directory)]
    is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
    yield directory
    if is_mounted:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.fixture(scope="module")
def app(checkpoint: Path, store: Path) -> Iterator[App]:
    """One replica of two ranks, whose faults are ordered by a file in `store`, see `FaultyWorker`.

    Ray has room for one group of ranks, as a machine whose every NPU is in use: the next needs what the last one had.
    """
    config = EngineConfig(
        model=str(checkpoint),
        served_model_name="base",
        tensor_parallel_size=TP_SIZE,
        rank_num_cpus=1,
        num_threads=1,
        kv_cache_memory_bytes=1 << 23,
        adapter_store_dir=str(store),
        adapter_load_timeout_s=10,
        allow_runtime_lora_updating=True,
    )
    with served(config, start=start_faulty, num_cpus=TP_SIZE) as app:
        for seed, name in enumerate(NAMES):
            app.load(name, make_adapter(checkpoint.parent / name, checkpoint, seed)).raise_for_status()
        yield app


@pytest.fixture(scope="module")
def questions(app: App) -> list[Question]:
    return learn(app.url, ["base", *NAMES], random_prompts(2, 322, longest=30), NUM_TOKENS)


@pytest.fixture
def traffic(app: App, questions: list[Question]) -> Iterator[Traffic]:
    """That has begun; afterwards everything is as before."""
    with Traffic(app.url, questions) as traffic:
        traffic.wait_for_answers(8)
        traffic.wait_for_streams()
        yield traffic
    wait_for(lambda: app.get("/ready").status_code == 200, 120, "ready")
    assert len(ranks()) == TP_SIZE, "the old ranks are gone"
    assert set(NAMES) <= app.adapters, "the adapters are back"
