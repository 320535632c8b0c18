"""Everything at once, for long: every answer is right, a lost rank harms only its requests, and all is given back."""

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.server import serving
from ray_lora.__main__ import main
from ray_lora.adapters.reader import MAX_KEPT
from ray_lora.text_table import text_table
from tests.kinds import IGNORE_PEFT_WARNINGS
from tests.soak.process_watch import ProcessWatch, leases
from tests.soak.reference import BASE, Reference
from tests.soak.traffic import Traffic

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(0), *IGNORE_PEFT_WARNINGS]

NAMES = [f"{letter}{number}" for letter in "ab" for number in range(9)]
OURS = ("Ingress", "AdapterDirectory", "LLMReplica", "Worker")
SAMPLE_PERIOD_S = 3.0
RECOVERY_S = 180.0
IDLE_S = 60.0
BUSY_LIMIT = 2


@dataclass(slots=True)
class Served:
    """A running server and what the test knows about it."""

    url: str
    keys: dict[str, str]
    reference: Reference
    store: Path
    watch: ProcessWatch = field(default_factory=ProcessWatch)

    async def metrics(self, session: aiohttp.ClientSession) -> dict[str, list[float]]:
        """Values by name, one for each replica; empty if they cannot be had now."""
        head = {"Authorization": f"Bearer {self.keys['operator']}"}
        async with session.get(self.url + "/metrics", headers=head) as response:
            text = await response.text() if response.status == 200 else ""
        found: dict[str, list[float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample.value)
        return found

    async def is_ready(self, session: aiohttp.ClientSession) -> bool:
        async with session.get(self.url + "/ready") as response:
            return response.status == 200


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("soak")
    reference = Reference(directory)
    keys = make_keys(directory / "keys.yaml")
    num_bytes = sum(file.stat().st_size for path in reference.contents.values() for file in path.iterdir())
    store = directory / "store"
    with serving(
        directory,
        num_replicas=2,
        model=str(reference.model),
        served_model_name=BASE,
        tensor_parallel_size=2,
        num_threads=1,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=96,
        kv_cache_memory_bytes=1 << 19,
        max_loras=4,
        max_lora_pages=8,
        max_cpu_loras=6,
        lora_modules={name: str(reference.contents["plain"]) for name in NAMES[:2]},
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
        traffic = Traffic(served.url, served.keys, served.reference, NAMES, session)
        await traffic.learn_versions()
        for name in NAMES[:2]:
            traffic.names[name].versions = [traffic.versions["plain"]]
        await traffic.run(20)
        await idle(served, session)
        served.watch.sample()
        before = served.watch.most()
        async with sampling(served.watch):
            killing = asyncio.create_task(kill_ranks(served, traffic, session, kill_period_s))
            await traffic.run(seconds)
            killing.cancel()
            with suppress(asyncio.CancelledError):
                await killing
            await recovered(served, traffic, session)
        await traffic.check_all()
        await check_busy_key(served, session)
        await traffic.unload_all()
        await idle(served, session)
        with capsys.disabled():
            report(traffic, served.watch)
        assert not traffic.wrong, "\n".join(traffic.wrong[:5])
        await check_all_given_back(served, session, before)


async def kill_ranks(served: Served, traffic: Traffic, session: aiohttp.ClientSession, period_s: float) -> None:
    rng = random.Random(0)
    while True:
        await asyncio.sleep(period_s)
        rank = rng.choice(served.watch.running("Worker"))
        traffic.is_broken = True
        os.kill(rank.process.pid, signal.SIGKILL)
        begin = time.monotonic()
        await asyncio.sleep(5)
        await recovered(served, traffic, session)
        traffic.tally["ranks killed"][f"whole again after {time.monotonic() - begin:.0f} s"] += 1


async def recovered(served: Served, traffic: Traffic, session: aiohttp.ClientSession) -> None:
    """Both replicas are there, and well."""
    async with asyncio.timeout(RECOVERY_S):
        while len((await served.metrics(session)).get("ray_lora:lora_pages", ())) < 2 or not await served.is_ready(
            session
        ):
            await asyncio.sleep(0.5)
    if traffic.is_broken:
        traffic.is_broken, traffic.whole_at = False, time.monotonic()


async def idle(served: Served, session: aiohttp.ClientSession) -> None:
    """Nothing runs, nothing waits, and no block of the KV cache is in use."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    async with asyncio.timeout(IDLE_S):
        while True:
            metrics = await served.metrics(session)
            if not any(any(metrics.get(name, [1])) for name in names):
                return
            await asyncio.sleep(0.5)


async def check_busy_key(served: Served, session: aiohttp.ClientSession) -> None:
    """What ended, broke off or was cancelled does not count against its key any more."""
    head = {"Authorization": f"Bearer {served.keys['busy']}"}
    body = {"prompt": [5, 6], "n": BUSY_LIMIT, "max_tokens": 4}
    async with session.post(served.url + "/v1/completions", json=body, headers=head) as response:
        assert response.status == 200, await response.text()


async def check_all_given_back(
    served: Served, session: aiohttp.ClientSession, before: dict[str, tuple[int, int]]
) -> None:
    head = {"Authorization": f"Bearer {served.keys['operator']}"}
    async with session.get(served.url + "/v1/adapters", headers=head) as response:
        listed = await response.json()
    assert listed["data"] == []
    for tiers in listed["tiers"]:
        assert {tier: (use["num_adapters"], use["num_bytes"]) for tier, use in tiers.items()} == {
            "device": (0, 0),
            "host": (0, 0),
        }
    metrics = await served.metrics(session)
    assert metrics["ray_lora:lora_pages_free"] == metrics["ray_lora:lora_pages"] == [8, 8]
    assert not list(served.store.glob(".incoming-*"))
    served.watch.sample()
    for rank in served.watch.running("Worker"):
        assert leases(rank.process, served.store) <= MAX_KEPT
    now = served.watch.most()
    more = {
        kind: (before[kind], now[kind])
        for kind in OURS
        if any(after > least for after, least in zip(now[kind], before[kind], strict=True))
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


def report(traffic: Traffic, watch: ProcessWatch) -> None:
    rows = [
        (kind, outcome, f"{count}")
        for kind, outcomes in sorted(traffic.tally.items())
        for outcome, count in sorted(outcomes.items())
    ]
    rows += [("completions", "compared whole", f"{traffic.num_checked}"), ("answers", "wrong", f"{len(traffic.wrong)}")]
    print(f"\n{text_table(('what', 'how it ended', 'times'), rows)}\n")
    heads = ("process", "pid", "seconds", "MiB", "MiB an hour", "descriptors", "threads")
    print(text_table(heads, list(watch.rows())))
