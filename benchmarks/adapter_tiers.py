"""What do adapters cost that are not on the device when a request comes for them?

The demo model, float32, adapters of rank 16 on all linear layers in bfloat16 pages (9.8 MB each). 16 clients, each
asking for 64 tokens after 64, one request after another.
"""

import asyncio
import bisect
import itertools
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.harness import MODEL, Row, report
from benchmarks.throughput import make_adapters
from ray_lora import EngineConfig, GenerateRequest, SamplingParams
from ray_lora.engine.async_engine import AsyncEngine
from ray_lora.serve.start import start_engine

NUM_CLIENTS, NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT = 16, 96, 64, 64
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
NUM_SPLIT, NUM_PART, NUM_HOT, HOT_SHARE = 100, 40, 20, 0.9
NUM_MANY, NUM_DEVICE, NUM_HOST = 1000, 16, 256
NUM_ROUNDS = 2


async def tokens_per_second(engine: AsyncEngine, names: Sequence[str]) -> float:
    """Each client takes the next of `names` as soon as its last request has ended."""
    todo = iter(enumerate(names))

    async def client() -> None:
        for index, name in todo:
            generator = torch.Generator().manual_seed(index)
            prompt = torch.randint(100, 40000, (NUM_PROMPT,), generator=generator).tolist()
            async for _ in engine.generate(GenerateRequest(prompt=prompt, adapter=name, sampling_params=PARAMS)):
                pass

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    return len(names) * NUM_OUTPUT / (time.perf_counter() - begin)


async def start(directory: Path, num_adapters: int, num_device: int, num_host: int) -> AsyncEngine:
    """An engine with `num_adapters` registered, named by their numbers."""
    engine = await start_engine(
        EngineConfig(
            model=str(MODEL),
            max_model_len=256,
            max_num_seqs=NUM_CLIENTS,
            kv_cache_memory_bytes=1 << 28,
            enable_prefix_caching=False,
            lora_dtype="bfloat16",
            max_lora_rank=16,
            max_loras=num_device,
            max_cpu_loras=num_host,
            adapter_store_dir=str(directory / "store"),
        )
    )
    (path,) = make_adapters(directory / "source", [16], dtype=torch.bfloat16).values()
    file = Path(path) / "adapter_model.safetensors"
    tensors = load_file(file)
    changed = next(iter(tensors.values()))
    for number in reversed(range(num_adapters)):  # so that the lowest numbers, the most wanted, are the latest
        changed.view(-1)[0], changed.view(-1)[1] = divmod(number, 128)  # a content of its own, also in bfloat16
        save_file(tensors, file)
        await engine.load_adapter(str(number), path)
    return engine


def zipf(num_adapters: int, seed: int) -> list[str]:
    """Names drawn with probability 1 / rank."""
    totals = list(itertools.accumulate(1 / rank for rank in range(1, num_adapters + 1)))
    chooser = random.Random(seed)
    return [str(bisect.bisect(totals, chooser.random() * totals[-1])) for _ in range(NUM_REQUESTS)]


def split(seed: int) -> list[str]:
    """Nine of ten requests for the hot ones, the last for one of the others."""
    chooser = random.Random(seed)
    hot, cold = range(NUM_HOT), range(NUM_HOT, NUM_SPLIT)
    return [str(chooser.choice(hot if chooser.random() < HOT_SHARE else cold)) for _ in range(NUM_REQUESTS)]


async def hot_and_cold(directory: Path) -> list[Row]:
    engines = [await start(directory / str(n), NUM_SPLIT, n, NUM_SPLIT) for n in (NUM_SPLIT, NUM_PART)]
    for engine in engines:
        await tokens_per_second(engine, split(seed=1))
    rates = [[await tokens_per_second(engine, split(seed)) for engine in engines] for seed in range(2, 2 + NUM_ROUNDS)]
    sizes = [engine.adapter_tiers()["device"].max_bytes or 0 for engine in engines]
    for engine in engines:
        await engine.shutdown()
    whole, part = (max(rate) for rate in zip(*rates, strict=True))
    return [
        Row("100 adapters, 20 of them hot, all on the device", whole, "tok/s", note=f"{sizes[0] / 1e6:.0f} MB"),
        Row(f"{NUM_PART} on the device", part, "tok/s", note=f"{sizes[1] / 1e6:.0f} MB"),
        Row("  device memory of adapters", sizes[1] / sizes[0], "x", bar=0.5, at_least=False),
        Row("  throughput", part / whole, "x", bar=0.92),
    ]


async def many(directory: Path) -> list[Row]:
    engine = await start(directory, NUM_MANY, NUM_DEVICE, NUM_HOST)
    await tokens_per_second(engine, zipf(NUM_MANY, seed=1))
    rates, moves = [], (0, 0)
    for seed in range(2, 2 + NUM_ROUNDS):
        before = counts(engine)
        everything = await tokens_per_second(engine, zipf(NUM_MANY, seed))
        moves = tuple(after - earlier for after, earlier in zip(counts(engine), before, strict=True))
        await tokens_per_second(engine, [str(number) for number in range(NUM_DEVICE)])
        rates.append((await tokens_per_second(engine, zipf(NUM_DEVICE, seed)), everything))
    await engine.shutdown()
    few, all_of_them = (max(rate) for rate in zip(*rates, strict=True))
    note = f"of {NUM_REQUESTS} requests {moves[0]} brought theirs from disk, {moves[1]} to the device"
    return [
        Row(f"{NUM_DEVICE} adapters, all on the device, zipf(1.0)", few, "tok/s"),
        Row(f"{NUM_MANY:,} adapters, {NUM_HOST} in host memory", all_of_them, "tok/s", note=note),
        Row("  throughput", all_of_them / few, "x", bar=0.9),
    ]


def counts(engine: AsyncEngine) -> tuple[int, int]:
    infos = engine.list_adapters()
    return sum(info.num_loads for info in infos), sum(info.num_page_ins for info in infos)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        rows = asyncio.run(hot_and_cold(Path(temporary)))
    with tempfile.TemporaryDirectory() as temporary:
        rows += asyncio.run(many(Path(temporary)))
    report("adapter_tiers", rows)


if __name__ == "__main__":
    main()
