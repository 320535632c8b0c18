"""Thousands of requests with loads and unloads between them: everything is given back."""

import random
from pathlib import Path

import pytest

from ray_lora import LLM, SamplingParams
from tests.tiny import make_adapter, make_checkpoint


@pytest.mark.slow
def test_thousands_of_requests_and_reloads_give_every_block_and_page_back(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    paths = [str(make_adapter(tmp_path / f"a{i}", checkpoint, i)) for i in range(6)]
    rng = random.Random(0)
    with LLM(
        str(checkpoint),
        adapters={f"a{i}": path for i, path in enumerate(paths)},
        max_loras=3,
        max_lora_rank=8,
        kv_cache_memory_bytes=1 << 22,
        adapter_store_dir=str(tmp_path / "store"),
    ) as llm:
        for _ in range(60):
            prompts = [[rng.randrange(3, 320) for _ in range(rng.randint(1, 40))] for _ in range(50)]
            params = [SamplingParams(max_tokens=rng.randint(1, 12), seed=rng.randrange(100)) for _ in prompts]
            llm.generate(prompts, params, [rng.choice([None, *(f"a{i}" for i in range(6))]) for _ in prompts])
            name = rng.randrange(6)
            llm.load_adapter(f"a{name}", rng.choice(paths), load_inplace=True)
        stats = llm.stats()
        assert (stats.num_requests_running, stats.num_requests_waiting, stats.kv_cache_usage) == (0, 0, 0)
        for name in range(6):
            llm.unload_adapter(f"a{name}")
        assert llm.stats().num_free_lora_pages == stats.num_lora_pages
