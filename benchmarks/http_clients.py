"""What does HTTP keep of the engine's throughput, how soon is the first token, how long does a load take?

16 streaming clients in a process of their own, 64 prompt and 64 output tokens each, against `LLM` in one process.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from benchmarks.harness import MODEL, Row, report, seconds
from benchmarks.server import serving
from benchmarks.throughput import NUM_OUTPUT, NUM_REQUESTS, PARAMS, make_adapters, prompts
from ray_lora import LLM

REPEATS = 4
LOADS = 5
ARGS: dict[str, Any] = {"model": str(MODEL), "served_model_name": "base", "max_model_len": 2048}


async def clients(url: str) -> None:
    """Print the seconds of the fastest of some rounds of 16 streams."""
    async with aiohttp.ClientSession() as session:

        async def stream(prompt: list[int]) -> None:
            body = {"model": "base", "prompt": prompt, "max_tokens": NUM_OUTPUT, "temperature": 0, "stream": True}
            async with session.post(f"{url}/v1/completions", json={**body, "ignore_eos": True}) as response:
                async for line in response.content:
                    if b"error" in line:
                        raise RuntimeError(line.decode())

        rounds = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            await asyncio.gather(*(stream(prompt) for prompt in prompts()))
            rounds.append(time.perf_counter() - begin)
    print(min(rounds))


def load_seconds(url: str, adapter: str) -> float:
    """The median time of loading 10 MB over HTTP, until the answer."""
    times = []
    for _ in range(LOADS):
        body = {"lora_name": "ten", "lora_path": adapter}
        times.append(seconds(lambda body=body: httpx.post(f"{url}/v1/load_lora_adapter", json=body, timeout=60), 1))
        httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "ten"}, timeout=60).raise_for_status()
    return sorted(times)[LOADS // 2]


def first_token(url: str) -> None:
    body = {"model": "base", "prompt": "Hello", "max_tokens": 1}
    httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()


def main() -> None:
    num_tokens = NUM_REQUESTS * NUM_OUTPUT
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        adapter = make_adapters(directory, [8])["adapter0"]
        size = (directory / "adapter0" / "adapter_model.safetensors").stat().st_size
        store = {"adapter_store_dir": str(directory / "store"), "max_lora_pages": 4}
        begin = time.perf_counter()
        with serving(directory, **ARGS, **store, enable_prefix_caching=False) as url:
            first_token(url)
            start_seconds = time.perf_counter() - begin
            command = [sys.executable, "-m", "benchmarks.http_clients", url]
            http = num_tokens / float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            load_tp1 = load_seconds(url, adapter)
        with serving(directory, **ARGS, **store, tensor_parallel_size=3) as url:
            first_token(url)
            load_tp3 = load_seconds(url, adapter)
        llm_args = {"max_model_len": 2048, "max_lora_pages": 4, "enable_prefix_caching": False}
        with LLM(str(MODEL), **llm_args) as llm:
            llm.generate(prompts(), PARAMS)
            alone = num_tokens / seconds(lambda: llm.generate(prompts(), PARAMS), REPEATS)
    report(
        "http_clients",
        [
            Row("LLM", alone, "tok/s"),
            Row("16 streaming clients over HTTP", http, "tok/s"),
            Row("HTTP / LLM", http / alone, "x", bar=0.8),
            Row("`ray-lora serve` to the first token", start_seconds, "s"),
            Row(f"load {size / 1e6:.1f} MB over HTTP, TP 1", load_tp1 * 1e3, "ms"),
            Row(f"load {size / 1e6:.1f} MB over HTTP, TP 3", load_tp3 * 1e3, "ms"),
        ],
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(clients(sys.argv[1]))
    else:
        main()
