"""Does anything grow over 10,000 loads and unloads, or over 10,000 requests of which many are cancelled?

A tiny random Llama, TP 1 and TP 2. Growth is that of each rank's memory over the second half.
"""

import asyncio
import random
import sys
import tempfile
from pathlib import Path

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Row, report
from benchmarks.throughput import make_adapters
from ray_lora import EngineConfig, GenerateRequest, SamplingParams
from ray_lora.cluster.launch import prepare_cluster
from ray_lora.cluster.ray_tp import RayTPExecutor
from ray_lora.engine.async_engine import AsyncEngine
from ray_lora.serve.start import start_alone

NUM_CYCLES, NUM_REQUESTS, NUM_CLIENTS, NUM_ADAPTERS = 10_000, 10_000, 16, 8
MAX_TOKENS = 12
MB = 1 << 20


def make_checkpoint(directory: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


class Memory:
    """Resident bytes of every rank's process."""

    def __init__(self, engine: AsyncEngine) -> None:
        executor = engine._executor
        pids = executor._call_all("process_id", "health") if isinstance(executor, RayTPExecutor) else [None]
        self._ranks = [psutil.Process(pid) for pid in pids]
        self._samples: list[list[int]] = []

    def sample(self) -> None:
        self._samples.append([rank.memory_info().rss for rank in self._ranks])

    def rows(self, name: str, number: int) -> list[Row]:
        """Growth over the second half, and as a slope."""
        middle, last = self._samples[len(self._samples) // 2], self._samples[-1]
        growths = [(after - before) / MB for before, after in zip(middle, last, strict=True)]
        return [
            Row(f"{name}, rank {rank}: growth", growth, "MiB", note=f"{growth * MB / (number / 2):.0f} bytes each")
            for rank, growth in enumerate(growths)
        ]


async def churn(engine: AsyncEngine, paths: list[str], memory: Memory) -> None:
    for cycle in range(NUM_CYCLES):
        await engine.load_adapter("churned", paths[cycle % len(paths)])
        await engine.unload_adapter("churned")
        if cycle % (NUM_CYCLES // 20) == 0:
            memory.sample()
    memory.sample()


async def cancel(engine: AsyncEngine, names: list[str], memory: Memory) -> None:
    todo = iter(range(NUM_REQUESTS))

    async def client() -> None:
        for number in todo:
            chooser = random.Random(number)
            prompt = [chooser.randrange(5, 500) for _ in range(chooser.randint(1, 60))]
            params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
            request = GenerateRequest(prompt=prompt, adapter=chooser.choice([None, *names]), sampling_params=params)
            num_wanted = chooser.choice([0, 1, 5, MAX_TOKENS, MAX_TOKENS])
            stream = engine.generate(request)
            if num_wanted:
                async for chunk in stream:
                    num_wanted -= len(chunk.outputs[0].token_ids)
                    if num_wanted <= 0:
                        break
            await stream.aclose()
            if number % (NUM_REQUESTS // 20) == 0:
                memory.sample()

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    memory.sample()


async def measure(model: Path, tp_size: int, directory: Path) -> list[Row]:
    adapters = make_adapters(directory / "adapters", [16] * NUM_ADAPTERS, model)
    config = EngineConfig(
        model=str(model),
        tensor_parallel_size=tp_size,
        max_model_len=128,
        kv_cache_memory_bytes=1 << 24,
        max_loras=4,
        max_lora_rank=16,
        max_cpu_loras=6,
        adapter_store_dir=str(directory / "store"),
        lora_modules=adapters,
    )
    prepare_cluster(config)
    engine = await start_alone(config)
    memory = Memory(engine)
    await cancel(engine, list(adapters), memory)
    rows = memory.rows(f"TP {tp_size}: 10,000 requests, two in five cut short", NUM_REQUESTS)
    memory = Memory(engine)
    extra = make_adapters(directory / "extra", [8, 12, 15], model)
    await churn(engine, list(extra.values()), memory)
    rows += memory.rows(f"TP {tp_size}: 10,000 loads and unloads", NUM_CYCLES)
    await check_returned(engine, len(adapters))
    await engine.shutdown()
    return rows


async def check_returned(engine: AsyncEngine, num_adapters: int) -> None:
    """Every block and page is free again once everything is unloaded."""
    infos = engine.list_adapters()
    assert len(infos) == num_adapters
    for info in infos:
        await engine.unload_adapter(info.name)
    stats, tiers = engine.stats(), engine.adapter_tiers()
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert stats.num_free_lora_pages == stats.num_lora_pages
    while engine.adapter_tiers()["host"].num_bytes:
        await asyncio.sleep(0.01)
    assert tiers["device"].num_bytes == 0


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        model = make_checkpoint(Path(temporary) / "model")
        sizes = [int(size) for size in sys.argv[1:]] or [1, 2]
        rows = [row for size in sizes for row in asyncio.run(measure(model, size, Path(temporary) / f"tp{size}"))]
    report("adapter_churn", rows)


if __name__ == "__main__":
    main()
