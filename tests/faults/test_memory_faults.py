"""A rank's memory really ends: the allocator refuses, or the kernel kills. No token is wrong, and the service heals."""

import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import httpx
import psutil
import pytest

from tests.faults.conftest import TP_SIZE
from tests.faults.served_app import App, ranks, wait_for
from tests.faults.traffic import Traffic
from tests.tiny import make_adapter, make_checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

LONG_PROMPTS = [[token] * 100 for token in range(10)]
"""Their step needs megabytes more than those of the traffic."""
HEADROOM_BYTES = 256 << 10
"""Above what a rank has when the limit is set; a part of an adapter of rank 64 is ten times that."""
MOST_LOADS = 12
MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")
PAGE_BYTES = 4096

Tell = Callable[[object], None]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that a step and a load need more than a heap has in reserve."""
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 322}
    wide = {"hidden_size": 512, "intermediate_size": 2048}
    return make_checkpoint(tmp_path_factory.mktemp("faults") / "model", "qwen2", **shape, **wide)


@pytest.fixture(scope="module")
def store(checkpoint: Path) -> Path:
    return checkpoint.parent / "store"


def test_a_rank_whose_allocator_refuses_in_a_step_is_replaced(app: App, traffic: Traffic, tell: Tell) -> None:
    victim = ranks()[1]
    traffic.mark_fault()
    limit_memory(victim, 0)
    try:
        wait_for(lambda: ask_long(app) and victim not in ranks(), 60, "the rank's end")
    finally:
        with suppress(ProcessLookupError):
            lift_limit(victim)
    traffic.wait_until_steady(120)
    tell(f"{traffic.report}; {traffic.report.last_message}")
    app.check_healed(traffic.report)


@pytest.mark.parametrize("victim", range(TP_SIZE))
def test_a_load_for_which_a_rank_cannot_allocate_is_refused_and_works_once_it_can(
    victim: int, app: App, checkpoint: Path, traffic: Traffic, tell: Tell, tmp_path: Path
) -> None:
    before = ranks()
    adapters = {f"new{i}": make_adapter(tmp_path / f"new{i}", checkpoint, 10 + i, r=64) for i in range(MOST_LOADS)}
    traffic.mark_fault()
    limit_memory(before[victim], HEADROOM_BYTES)
    try:
        for name, adapter in adapters.items():  # until the heap's reserve is used up
            if (loaded := app.load(name, adapter)).status_code != 200:
                break
        traffic.wait_until_steady(120)
    finally:
        with suppress(ProcessLookupError):
            lift_limit(before[victim])
    tell(f"{name}: {loaded.status_code} {loaded.text}; {traffic.report}")
    app.check_healed(traffic.report)
    assert name not in app.adapters
    if loaded.status_code == 500:
        assert "rank" in loaded.json()["error"]["message"]
        assert traffic.report.num_answered == traffic.report.num_sent, "nobody else is touched"
        assert ranks() == before
    else:  # Ray had no memory to hand over the call, and the ranks are others
        assert loaded.status_code == 503, loaded.text
        assert ranks() != before
    app.load(name, adapters[name]).raise_for_status()
    for each in app.adapters & set(adapters):
        app.unload(each).raise_for_status()


def test_a_rank_that_the_kernel_kills_for_its_memory_is_replaced(
    app: App, traffic: Traffic, tell: Tell, cgroup: Path
) -> None:
    victim = ranks()[1]
    traffic.mark_fault()
    (cgroup / "memory.limit_in_bytes").write_text(str(PAGE_BYTES))
    (cgroup / "cgroup.procs").write_text(str(victim.pid))
    wait_for(lambda: ask_long(app) and victim not in ranks(), 60, "the kernel's killer")
    traffic.wait_until_steady(120)
    tell(f"{traffic.report}; {traffic.report.last_message}")
    app.check_healed(traffic.report)
    assert "oom_kill 1" in (cgroup / "memory.oom_control").read_text(), "it was the kernel"


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup (v1) that is empty at first and in the end."""
    directory = MEMORY_CGROUP / f"ray-lora-{uuid4().hex}"
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"needs a memory cgroup that this user may write: {error}")
    yield directory
    wait_for(lambda: not (directory / "cgroup.procs").read_text(), 30, "an empty cgroup")
    directory.rmdir()


def limit_memory(process: psutil.Process, headroom: int) -> None:
    """From now on the process gets no more than this many bytes of data: real allocations fail.

    A limit of its address space would not reach what `malloc` has set aside for each thread.
    """
    soft = process.memory_info().data + headroom
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (soft, resource.RLIM_INFINITY))


def lift_limit(process: psutil.Process) -> None:
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def ask_long(app: App) -> bool:
    """True unless it is refused as wrong, so that a condition can begin with it."""
    body = {"prompt": LONG_PROMPTS, "max_tokens": 1}
    return httpx.post(f"{app.url}/v1/completions", json=body, timeout=120).status_code in (200, 503)
