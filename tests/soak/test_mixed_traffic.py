"""Everything at once, for long: every answer is right, a lost rank harms only its requests, and all is given back."""

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from click.testing import CliRunner

from benchmarks.server import serving
from ray_lora.__main__ import main
from ray_lora.adapters.reader import MAX_KEPT
from ray_lora.text_table import text_table
from tests.kinds import IGNORE_PEFT_WARNINGS
from tests.soak.ledger import Ledger
from tests.soak.process_watch import ProcessWatch, leases
from tests.soak.reference import BASE, Reference
from tests.soak.served_api import ServedApi
from tests.soak.traffic import Traffic

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(0), *IGNORE_PEFT_WARNINGS]

NAMES = [f"{letter}{number}" for letter in "ab" for number in range(9)]
CONFIGURED = NAMES[:2]
NUM_REPLICAS, NUM_PAGES = 2, 8
OURS = ("Ingress", "AdapterDirectory", "LLMReplica", "Worker")
POOL_THREADS = 8
"""Pools start threads as they need them, and keep them."""
SAMPLE_PERIOD_S = 3.0
WARM_UP_S = 20.0
NOTICED_S = 5.0
RECOVERY_S = 300.0
IDLE_S = 60.0
BUSY_LIMIT = 2


@dataclass(frozen=True, slots=True)
class Served:
    """A running server, with keys for it."""

    url: str
    keys: dict[str, str]
    reference: Reference
    store: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("soak")
    reference = Reference(directory)
    keys = make_keys(directory / "keys.yaml")
    num_bytes = sum(file.stat().st_size for path in reference.contents.values() for file in path.iterdir())
    store = directory / "store"
    with serving(
        directory,
        num_replicas=NUM_REPLICAS,
        model=str(reference.model),
        served_model_name=BASE,
        tensor_parallel_size=2,
        num_threads=1,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=96,
        kv_cache_memory_bytes=1 << 19,
        max_loras=4,
        max_lora_pages=NUM_PAGES,
        max_cpu_loras=6,
        lora_modules={name: str(reference.contents["plain"]) for name in CONFIGURED},
        lora_registry_path=str(directory / "registry"),
        adapter_store_dir=str(store),
        adapter_store_max_bytes=num_bytes * 3 // 4,
        api_keys_file=str(directory / "keys.yaml"),
        adapter_load_timeout_s=600,
    ) as url:
        yield Served(url, keys, reference, store)


def make_keys(file: Path) -> dict[str, str]:
    tenants: dict[str, tuple[list[str], dict[str, int]]] = {
        "operator": (["--may-load"], {}),
        "acme": (["--adapters", "a*", "--may-load"], {}),
        "busy": ([], {"max_concurrent_requests": BUSY_LIMIT}),
        "poor": ([], {"tokens_per_minute": 3000}),
    }
    keys, entries = {}, []
    for name, (options, limits) in tenants.items():
        result = CliRunner().invoke(main, ["key", "new", name, *options])
        entries += [yaml.safe_load(result.stdout)[0] | {"limits": limits}]
        keys[name] = re.findall(r"sk-\S+", result.stderr)[0]
    file.write_text(yaml.safe_dump(entries))
    return keys


def test_mixed_traffic_is_answered_right_and_leaves_nothing_behind(
    served: Served, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    minutes = pytestconfig.getoption("--soak-minutes")
    asyncio.run(soak(served, 60 * minutes, kill_period_s=60 if minutes <= 5 else 300, capsys=capsys))


async def soak(served: Served, seconds: float, kill_period_s: float, capsys: Any) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        api, ledger, watch = ServedApi(served.url, served.keys, session), Ledger(NAMES), ProcessWatch()
        await recovered(api, ledger)
        versions = await api.learn_versions(served.reference)
        for name in CONFIGURED:
            ledger.names[name].versions = [versions["plain"]]
        traffic = Traffic(api, ledger, served.reference, versions)
        await traffic.run(WARM_UP_S)
        await idle(api)
        watch.sample()
        before = watch.most()
        async with sampling(watch):
            killing = asyncio.create_task(kill_ranks(api, ledger, watch, kill_period_s))
            await traffic.run(seconds)
            killing.cancel()
            with suppress(asyncio.CancelledError):
                await killing
            await recovered(api, ledger)
        await traffic.callers.ask_all()
        status, said = await api.post("busy", "v1/completions", prompt=[5, 6], n=BUSY_LIMIT, max_tokens=4)
        await api.unload_all()
        await idle(api)
        with capsys.disabled():
            report(ledger, traffic.callers.check.num_whole, watch)
        assert not ledger.wrong, "\n".join(ledger.wrong[:5])
        assert status == 200, f"what ended still counts against its key: {said}"
        await check_all_given_back(api, served.store, watch, before)


async def kill_ranks(api: ServedApi, ledger: Ledger, watch: ProcessWatch, period_s: float) -> None:
    rng = random.Random(0)
    while True:
        await asyncio.sleep(period_s)
        rank = rng.choice(watch.running("Worker"))
        ledger.is_broken = True
        os.kill(rank.process.pid, signal.SIGKILL)
        begin = time.monotonic()
        await asyncio.sleep(NOTICED_S)
        await recovered(api, ledger)
        ledger.tally["rank killed"][f"whole again after {time.monotonic() - begin:.0f} s"] += 1


async def recovered(api: ServedApi, ledger: Ledger) -> None:
    """All replicas are there, and well; one that is new may have missed the last changes."""
    async with asyncio.timeout(RECOVERY_S):
        while len((await api.metrics()).get("ray_lora:lora_pages", ())) < NUM_REPLICAS or not await api.is_ready():
            await asyncio.sleep(0.5)
    if ledger.is_broken:
        ledger.is_broken, ledger.whole_at = False, time.monotonic()


async def idle(api: ServedApi) -> None:
    """Nothing runs, nothing waits, and no block of the KV cache is in use."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    async with asyncio.timeout(IDLE_S):
        while True:
            metrics = await api.metrics()
            if not any(any(metrics.get(name, [1])) for name in names):
                return
            await asyncio.sleep(0.5)


async def check_all_given_back(
    api: ServedApi, store: Path, watch: ProcessWatch, before: dict[str, tuple[int, int]]
) -> None:
    _, listed = await api.get("operator", "v1/adapters")
    assert listed["data"] == []
    for tiers in listed["tiers"]:
        assert all((use["num_adapters"], use["num_bytes"]) == (0, 0) for use in tiers.values()), listed["tiers"]
    metrics = await api.metrics()
    assert metrics["ray_lora:lora_pages_free"] == metrics["ray_lora:lora_pages"] == [NUM_PAGES] * NUM_REPLICAS
    assert not list(store.glob(".incoming-*"))
    watch.sample()
    for rank in watch.running("Worker"):
        assert leases(rank.process, store) <= MAX_KEPT
    now = watch.most()
    more = {
        kind: (before[kind], now[kind])
        for kind in OURS
        if now[kind][0] > before[kind][0] or now[kind][1] > before[kind][1] + POOL_THREADS
    }
    assert not more, f"descriptors and threads, before and after: {more}"


@asynccontextmanager
async def sampling(watch: ProcessWatch) -> AsyncIterator[None]:
    async def sample() -> None:
        while True:
            await asyncio.sleep(SAMPLE_PERIOD_S)
            await asyncio.to_thread(watch.sample)

    task = asyncio.create_task(sample())
    yield
    task.cancel()


def report(ledger: Ledger, num_whole: int, watch: ProcessWatch) -> None:
    rows = [
        (kind, outcome, f"{count}")
        for kind, outcomes in sorted(ledger.tally.items())
        for outcome, count in sorted(outcomes.items())
    ]
    rows += [("completions", "compared whole", f"{num_whole}"), ("answers", "wrong", f"{len(ledger.wrong)}")]
    print(f"\n{text_table(('what', 'how it ended', 'times'), rows)}\n")
    heads = ("process", "pid", "seconds", "MiB", "MiB an hour", "descriptors", "threads")
    print(text_table(heads, list(watch.rows())))
