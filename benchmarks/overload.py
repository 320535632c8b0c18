"""What is left of the throughput when twice, and five times, as much is asked as can be served?

The demo model behind HTTP, requests for the base and three adapters mixed. First and last its capacity, of streams that
begin as others end. Between, requests that come by themselves (Poisson), for a minute each: one counts if it is
answered in full and within its deadline, and of it the tokens that came in that minute. What is refused should cost
next to nothing, nothing should hang, and nothing should be left behind.

The clients are one process with a niceness of 5, on the same cores as the server. So are Serve's proxy and the ingress,
whose work for a refusal is the engine's loss on a machine of two cores: nearly all of it is Serve's own.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.harness import MODEL, Row, report
from benchmarks.server import serving

ADAPTERS = Path(__file__).parents[1] / "deployments" / "adapters"
MODELS = ("base", "pirate", "json", "emoji")
NUM_PROMPT, NUM_OUTPUT = (16, 96), (32, 96)
MAX_NUM_SEQS = 16
DEADLINE_S = 10.0
LATE_S = 5.0
"""What is neither answered nor refused so long after its deadline hangs."""
WARM_UP_S, CAPACITY_S, OVERLOAD_S = 3.0, 15.0, 60.0
FACTORS = (2, 5)
FRONT = ("ProxyActor", "ServeReplica:llama:Ingress")
"""The processes that a refused request passes; its CPU is what they use more in the second minute than in the first."""
MB = 1 << 20


@dataclass
class Answer:
    """What became of one request; times in seconds, of this process's clock."""

    sent: float
    num_wanted: int
    status: int = 0
    """0 is a request that hangs, or whose connection broke."""
    retry_after: str | None = None
    ended: float = 0.0
    token_times: list[float] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        in_time = self.ended - self.sent <= DEADLINE_S
        return self.status == 200 and len(self.token_times) == self.num_wanted and in_time

    @property
    def first_token_s(self) -> float:
        return self.token_times[0] - self.sent


async def ask(session: aiohttp.ClientSession, url: str, rng: random.Random) -> Answer:
    prompt = " ".join(rng.choices(("sea", "tea", "ship", "France", "planet", "number"), k=rng.randint(*NUM_PROMPT)))
    num_wanted = rng.randint(*NUM_OUTPUT)
    body = {"model": rng.choice(MODELS), "prompt": f"{rng.random()} {prompt}", "max_tokens": num_wanted}
    answer = Answer(time.perf_counter(), num_wanted)
    try:
        async with session.post(
            f"{url}/v1/completions", json={**body, "temperature": 0, "ignore_eos": True, "stream": True}
        ) as response:
            answer.retry_after = response.headers.get("Retry-After")
            async for line in response.content:
                if line.startswith(b'data: {"id"'):
                    answer.token_times.append(time.perf_counter())
                elif line.startswith(b'data: {"error"'):
                    answer.status = json.loads(line[6:])["error"]["code"]
            answer.status = answer.status or response.status
    except (aiohttp.ClientError, TimeoutError):
        pass
    answer.ended = time.perf_counter()
    return answer


def tokens_within(answers: list[Answer], begin: float, end: float) -> int:
    return sum(begin <= at < end for answer in answers for at in answer.token_times)


async def capacity(session: aiohttp.ClientSession, url: str) -> tuple[float, float]:
    """Tokens and requests per second, with as many streams as one step takes."""
    begin = time.perf_counter() + WARM_UP_S
    end = begin + CAPACITY_S
    rng, answers = random.Random(0), []

    async def client() -> None:
        while time.perf_counter() < end:
            answers.append(await ask(session, url, rng))

    await asyncio.gather(*(client() for _ in range(MAX_NUM_SEQS)))
    num_ended = sum(begin <= answer.ended < end for answer in answers)
    return tokens_within(answers, begin, end) / CAPACITY_S, num_ended / CAPACITY_S


async def overload(session: aiohttp.ClientSession, url: str, rate: float) -> dict[str, Any]:
    """A minute of requests at `rate` per second."""
    rng = random.Random(1)
    begin = at = time.perf_counter()
    tasks = []
    while at < begin + OVERLOAD_S:
        await asyncio.sleep(at - time.perf_counter())
        tasks.append(asyncio.create_task(ask(session, url, rng)))
        at += rng.expovariate(rate)
    answers = await asyncio.gather(*tasks)
    good = [answer for answer in answers if answer.is_good]
    refused = [answer for answer in answers if answer.status in (429, 503)]
    return {
        "goodput": tokens_within(good, begin, begin + OVERLOAD_S) / OVERLOAD_S,
        "num_sent": len(answers),
        "num_good": len(good),
        "num_hung": sum(answer.status == 0 for answer in answers),
        "statuses": Counter(str(answer.status) for answer in answers if answer.status != 0),
        "num_without_retry_after": sum(answer.retry_after is None for answer in refused),
        "refusal_ms": [1e3 * (answer.ended - answer.sent) for answer in refused],
        "first_token_ms": [1e3 * answer.first_token_s for answer in answers if answer.token_times],
    }


async def num_left(session: aiohttp.ClientSession, url: str) -> float:
    """Requests that the server still has, when all have ended."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))


@dataclass
class Usage:
    """Of the server's processes, by name."""

    cpu_s: dict[str, float]
    memory: dict[str, int]

    @classmethod
    def now(cls, of: psutil.Process) -> "Usage":
        cpu_s: dict[str, float] = {}
        memory: dict[str, int] = {}
        for process in of.children(recursive=True):
            try:
                name = process.name() if "::" not in process.name() else process.cmdline()[0]
                times, size = process.cpu_times(), process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
            name = name.removeprefix("ray::").split(".")[0]
            cpu_s[name] = cpu_s.get(name, 0.0) + times.user + times.system
            memory[name] = memory.get(name, 0) + size
        return cls(cpu_s, memory)


async def clients(url: str, server: psutil.Process) -> dict[str, Any]:
    os.nice(5)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S + LATE_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        tokens, requests = await capacity(session, url)
        figures: dict[str, Any] = {"requests": requests, "usage": [asdict(Usage.now(server))]}
        for factor in FACTORS:
            begin = time.process_time()
            figures[str(factor)] = await overload(session, url, factor * requests)
            figures[str(factor)]["client_cpu"] = (time.process_time() - begin) / OVERLOAD_S
            figures["usage"].append(asdict(Usage.now(server)))
        figures["tokens"] = tokens, (await capacity(session, url))[0]
        figures["num_left"] = await num_left(session, url)
    return figures


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


def table(figures: dict[str, Any]) -> None:
    mean = sum(figures["tokens"]) / 2
    rows = [
        Row(f"capacity, {when}", value, "tok/s")
        for when, value in zip(("first", "last"), figures["tokens"], strict=True)
    ]
    for factor in FACTORS:
        found, name = figures[str(factor)], f"{factor}x"
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(found["statuses"].items()))
        rows += [
            Row(f"{name}: goodput / capacity", found["goodput"] / mean, "x", bar=0.9, note=statuses),
            Row(f"{name}: hung", found["num_hung"], "", bar=0, at_least=False, note=f"of {found['num_sent']}"),
            Row(f"{name}: refusals without Retry-After", found["num_without_retry_after"], "", bar=0, at_least=False),
            Row(f"{name}: a refusal, p50", quantile(found["refusal_ms"], 0.5), "ms"),
            Row(f"{name}: a refusal, p99", quantile(found["refusal_ms"], 0.99), "ms"),
            Row(f"{name}: first token of the admitted, p50", quantile(found["first_token_ms"], 0.5), "ms"),
            Row(f"{name}: first token of the admitted, p99", quantile(found["first_token_ms"], 0.99), "ms"),
            Row(f"{name}: CPU of the clients", found["client_cpu"], "cores"),
        ]
    rows.append(Row("requests that the server still has at the end", figures["num_left"], "", bar=0, at_least=False))
    begin, middle, end = figures["usage"]
    low, high = (figures[str(factor)] for factor in FACTORS)
    num_more = len(high["refusal_ms"]) - len(low["refusal_ms"])
    for name in sorted(end["memory"]):
        growth = (end["memory"][name] - middle["memory"].get(name, 0)) / MB
        rows.append(
            Row(
                f"{name}: growth over the minute of {FACTORS[1]}x",
                growth,
                "MiB",
                note=f"of {end['memory'][name] / MB:.0f}",
            )
        )
    for name in FRONT:
        first, second, third = (usage["cpu_s"][name] for usage in (begin, middle, end))
        more_s = (third - second) - (second - first)
        note = f"{(third - second) / OVERLOAD_S:.2f} cores at {FACTORS[1]}x"
        rows.append(Row(f"{name}: CPU of a refusal", 1e3 * more_s / max(1, num_more), "ms", note=note))
    report("overload", rows, requests_per_second=figures["requests"], usage=figures["usage"])


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        with serving(
            directory,
            model=str(MODEL),
            served_model_name="base",
            max_model_len=512,
            max_num_seqs=MAX_NUM_SEQS,
            kv_cache_memory_bytes=1 << 28,
            max_loras=len(MODELS),
            lora_modules={name: str(ADAPTERS / name) for name in MODELS[1:]},
            adapter_store_dir=str(directory / "store"),
            request_timeout_s=DEADLINE_S,
        ) as url:
            command = [sys.executable, "-m", "benchmarks.overload", url, str(os.getpid())]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    table(json.loads(output))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(asyncio.run(clients(sys.argv[1], psutil.Process(int(sys.argv[2]))))))
    else:
        main()
