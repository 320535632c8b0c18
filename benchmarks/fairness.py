"""How long does one adapter's request wait for its first token while another adapter is flooded?

200 requests at once for one adapter, and one now and then for another: the time to its first token, beside the same
without the flood, by turns. A request of the flooded adapter itself has to wait for its turn.
"""

import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import MODEL, Row, report
from ray_lora import GenerateRequest, SamplingParams
from ray_lora.config import EngineConfig
from ray_lora.engine.async_engine import AsyncEngine
from ray_lora.serve.start import start_alone

ADAPTERS = Path(__file__).parents[1] / "deployments" / "adapters"
FLOODED, OTHER = "pirate", "json"
FLOOD, FLOOD_PROMPT, FLOOD_OUTPUT = 200, (8, 24), (8, 40)
PROMPT, OUTPUT, PAUSE_S, NUM_ALONE, ROUNDS = 256, 4, 0.4, 15, 2
LIMITS: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 288}


def request(rng: random.Random, adapter: str, num_prompt: int, num_output: int) -> GenerateRequest:
    prompt = [rng.randrange(100, 40000) for _ in range(num_prompt)]
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    return GenerateRequest(prompt=prompt, adapter=adapter, sampling_params=params)


async def first_token_s(engine: AsyncEngine, asked: GenerateRequest) -> float:
    begin, first = time.perf_counter(), 0.0
    async for _ in engine.generate(asked):
        first = first or time.perf_counter() - begin
    return first


async def ask_now_and_then(engine: AsyncEngine, rng: random.Random, until: asyncio.Event, most: int) -> list[float]:
    """Times to the first token of one request after the other, at most so many, with a pause of any length between."""
    times: list[float] = []
    while len(times) < most and not until.is_set():
        times.append(await first_token_s(engine, request(rng, OTHER, PROMPT, OUTPUT)))
        await asyncio.sleep(PAUSE_S * rng.uniform(0.5, 1.5))
    return times


async def flood(engine: AsyncEngine, rng: random.Random) -> list[float]:
    asked = [request(rng, FLOODED, rng.randint(*FLOOD_PROMPT), rng.randint(*FLOOD_OUTPUT)) for _ in range(FLOOD)]
    return await asyncio.gather(*(first_token_s(engine, each) for each in asked))


async def measure(store: str) -> tuple[list[float], list[float], list[float]]:
    modules = {name: str(ADAPTERS / name) for name in (FLOODED, OTHER)}
    engine = await start_alone(EngineConfig(model=str(MODEL), adapter_store_dir=store, lora_modules=modules, **LIMITS))
    rng = random.Random(0)
    try:
        await ask_now_and_then(engine, rng, asyncio.Event(), 2)
        alone, beside, flooded = [], [], []
        for _ in range(ROUNDS):
            alone += await ask_now_and_then(engine, rng, asyncio.Event(), NUM_ALONE)
            is_over = asyncio.Event()
            asking = asyncio.create_task(ask_now_and_then(engine, rng, is_over, FLOOD))
            flooded += await flood(engine, rng)
            is_over.set()
            beside += await asking
        return alone, beside, flooded
    finally:
        await engine.shutdown()


def p99(times: list[float]) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[98]


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        alone, beside, flooded = asyncio.run(measure(f"{temporary}/store"))
    rows = [
        Row(f"first token {what}, {name}", 1000 * figure(times), "ms", note=f"{len(times)} requests")
        for what, times in (("alone", alone), ("beside a flood", beside), ("of the flood itself", flooded))
        for name, figure in (("median", statistics.median), ("p99", p99))
    ]
    report(
        "fairness",
        [
            *rows,
            Row("median beside a flood / alone", statistics.median(beside) / statistics.median(alone), "x"),
            Row("p99 beside a flood / alone", p99(beside) / p99(alone), "x", bar=2.0, at_least=False),
        ],
    )


if __name__ == "__main__":
    main()
