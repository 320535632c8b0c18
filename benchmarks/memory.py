"""How much memory does every process hold beyond what is configured, and does it grow with requests?

5,000 short requests, some cancelled midway, over HTTP, for base and adapters; at TP 1 and TP 3.
"""

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import torch

from benchmarks.harness import MODEL, Row, report
from benchmarks.server import serving
from ray_lora.adapter import PAGE_RANK
from ray_lora.architecture import read_architecture

NUM_REQUESTS, WARM_UP, CONCURRENCY = 5000, 1000, 32
KV_BYTES = 1 << 28
NUM_PAGES = 6
ADAPTERS = Path(__file__).parents[1] / "deployments" / "adapters"
NAMES = tuple(sorted(path.parent.name for path in ADAPTERS.glob("*/adapter_config.json")))
MB = 1 << 20


async def requests(url: str, count: int, seed: int) -> None:
    """Send short requests, a tenth of them dropped by the client after the first token."""
    rng = random.Random(seed)
    queue = list(range(count))

    async def client(session: aiohttp.ClientSession) -> None:
        while queue:
            number = queue.pop()
            prompt = [rng.randrange(100, 40000) for _ in range(rng.randint(4, 24))]
            model = rng.choice(["base", *NAMES])
            body = {"model": model, "prompt": prompt, "max_tokens": rng.randint(1, 8), "stream": True, "seed": number}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                response.raise_for_status()
                async for _ in response.content:
                    if number % 10 == 0:
                        break

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
        await asyncio.gather(*(client(session) for _ in range(CONCURRENCY)))


def resident_bytes() -> dict[str, int]:
    """Memory by process of the server, those that a rank or a Serve part lives in."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline()) or process.name()
            if title.startswith("ray::") and "IDLE" not in title:
                found[f"{title.removeprefix('ray::').split('(')[0][:32]} {process.pid}"] = process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return found


def measure(tp_size: int) -> list[Row]:
    weights = (MODEL / "model.safetensors").stat().st_size
    args: dict[str, Any] = {
        "model": str(MODEL),
        "served_model_name": "base",
        "max_model_len": 1024,
        "kv_cache_memory_bytes": KV_BYTES,
        "max_lora_pages": NUM_PAGES,
        "tensor_parallel_size": tp_size,
        "lora_modules": {name: str(ADAPTERS / name) for name in NAMES},
    }
    with (
        tempfile.TemporaryDirectory() as temporary,
        serving(Path(temporary), **args, adapter_store_dir=f"{temporary}/store") as url,
    ):
        asyncio.run(requests(url, WARM_UP, seed=0))
        before = resident_bytes()
        asyncio.run(requests(url, NUM_REQUESTS - WARM_UP, seed=1))
        after = resident_bytes()
    arch = read_architecture(MODEL)
    rank_elements = sum(projection.in_features + projection.out_features for projection in arch.projections)
    page_bytes = arch.num_layers * PAGE_RANK * rank_elements * torch.float32.itemsize
    configured = (weights + NUM_PAGES * page_bytes) // tp_size + KV_BYTES
    rows = []
    for name, size in sorted(after.items()):
        is_rank = "LLMReplica" in name if tp_size == 1 else "Worker" in name
        growth = (size - before.get(name, size)) / MB
        rows.append(
            Row(
                f"TP {tp_size} {name}: peak",
                size / MB,
                "MiB",
                bar=configured / MB + 500 if is_rank else None,
                at_least=False,
                note=f"{growth:+.1f} MiB over the last {NUM_REQUESTS - WARM_UP} requests",
            )
        )
    return rows


def main() -> None:
    report("memory", [*measure(1), *measure(3)])


if __name__ == "__main__":
    main()
