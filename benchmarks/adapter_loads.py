"""What does a load cost those who decode meanwhile, and how soon is the adapter there?

Rank-16 adapters on all linear layers, as bfloat16 files; 16 requests decode, float32, greedy. At TP 1 the demo model
(9.8 MB an adapter), at TP 2 a random Llama of hidden size 1024 and 8 layers (4.6 MB).
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import MODEL, Row, report
from benchmarks.tensor_parallel import make_checkpoint
from benchmarks.throughput import make_adapters
from ray_lora import EngineConfig, GenerateRequest, SamplingParams
from ray_lora.cluster.launch import prepare_cluster
from ray_lora.engine.async_engine import AsyncEngine
from ray_lora.serve.start import start_alone

NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT = 16, 64, 400
PERIOD_S = 1.0
NUM_RELOADS = 20


class Times:
    """When each token of a request came, and which it was."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.token_ids: list[int] = []

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.at, self.at[1:], strict=False)]


async def decode(engine: AsyncEngine, num_output: int = NUM_OUTPUT) -> list[Times]:
    """16 requests at once, the base and one adapter in turn."""

    async def one(index: int) -> Times:
        times = Times()
        generator = torch.Generator().manual_seed(index)
        prompt = torch.randint(100, 30000, (NUM_PROMPT,), generator=generator).tolist()
        params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
        adapter = "adapter0" if index % 2 else None
        request = GenerateRequest(prompt=prompt, adapter=adapter, sampling_params=params)
        async for chunk in engine.generate(request):
            times.at.append(time.perf_counter())
            times.token_ids += chunk.outputs[0].token_ids
        return times

    return await asyncio.gather(*(one(index) for index in range(NUM_REQUESTS)))


async def load_in_turn(engine: AsyncEngine, paths: Sequence[str], took: list[float], done: asyncio.Event) -> None:
    """One load a second, each of other content, in place of the one before."""
    for path in cycle(paths):
        if done.is_set():
            break
        begin = time.perf_counter()
        await engine.load_adapter("new", path, load_inplace=True)
        took.append(time.perf_counter() - begin)
        await asyncio.sleep(max(0.0, PERIOD_S - took[-1]))


async def disturbance(engine: AsyncEngine, paths: Sequence[str], tp_size: int) -> list[Row]:
    alone = await decode(engine)
    took: list[float] = []
    done = asyncio.Event()
    loading = asyncio.create_task(load_in_turn(engine, paths, took, done))
    disturbed = await decode(engine)
    done.set()
    await loading
    await engine.unload_adapter("new")
    assert [times.token_ids for times in alone] == [times.token_ids for times in disturbed], "a load changed a token"
    before, after = (p99(gap for times in each for gap in times.gaps[1:]) for each in (alone, disturbed))
    return [
        Row(f"TP {tp_size}: p99 between two tokens, no loads", before * 1e3, "ms"),
        Row(f"TP {tp_size}: the same, one load a second", after * 1e3, "ms", note=f"{len(took)} loads"),
        Row(f"TP {tp_size}: ratio", after / before, "x", bar=1.25, at_least=False),
        Row(f"TP {tp_size}: a load meanwhile, median", statistics.median(took) * 1e3, "ms"),
    ]


async def readiness(engine: AsyncEngine, path: str) -> list[Row]:
    """A load from the call to its answer; then the first step with the adapter, which pages it in, and the next."""
    loads, first, second = [], [], []
    for _ in range(NUM_RELOADS):
        begin = time.perf_counter()
        await engine.load_adapter("new", path)
        loads.append(time.perf_counter() - begin)
        first.append(await time_to_first_token(engine, "new"))
        second.append(await time_to_first_token(engine, "new"))
        await engine.unload_adapter("new")
    load, to_device = statistics.median(loads), statistics.median(first) - statistics.median(second)
    return [
        Row("to host memory, from disk, median", load * 1e3, "ms", bar=150, at_least=False),
        Row("to the device, from host memory, median", to_device * 1e3, "ms", bar=50, at_least=False),
        Row("the step that does it / the next", statistics.median(first) / statistics.median(second), "x"),
    ]


async def time_to_first_token(engine: AsyncEngine, adapter: str) -> float:
    begin = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=1)
    async for _ in engine.generate(GenerateRequest(prompt=[5] * 40, adapter=adapter, sampling_params=params)):
        pass
    return time.perf_counter() - begin


def p99(values: Any) -> float:
    return statistics.quantiles(values, n=100)[98]


async def measure(model: Path, tp_size: int, directory: Path) -> list[Row]:
    paths = make_adapters(directory / "adapters", [16] * 12, model, torch.bfloat16)
    first, *others = paths.values()
    config = EngineConfig(
        model=str(model),
        tensor_parallel_size=tp_size,
        enable_prefix_caching=False,
        max_model_len=1024,
        adapter_store_dir=str(directory / "store"),
        lora_modules={"adapter0": first},
    )
    prepare_cluster(config)
    engine = await start_alone(config)
    try:
        await decode(engine, 20)
        rows = await disturbance(engine, others, tp_size)
        return rows + (await readiness(engine, others[0]) if tp_size == 1 else [])
    finally:
        await engine.shutdown()


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        rows = asyncio.run(measure(MODEL, 1, directory / "tp1"))
        model = Path(make_checkpoint(directory / "model"))
        rows += asyncio.run(measure(model, 2, directory / "tp2"))
    report("adapter_loads", rows)


if __name__ == "__main__":
    main()
