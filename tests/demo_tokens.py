"""Greedy tokens of the demo model and its three adapters, on any executor."""

from pathlib import Path
from typing import Any

from fake_executor import FakeTokenizer

from ray_lora.config import EngineConfig
from ray_lora.engine.engine_core import EngineCore
from ray_lora.engine.executor import Executor
from ray_lora.request import GenerateRequest, SamplingParams

MODEL = Path("~/.cache/ray_lora/SmolLM2-135M-Instruct").expanduser()
ROOT = Path(__file__).parents[1]
ADAPTERS = ("pirate", "json", "emoji")
FRANCE = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2),
    *(198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
]
"""What is the capital of France? In the model's chat template."""
TEA = [*FRANCE[:24], 2020, 536, 339, 919, 7188, 47, *FRANCE[31:]]
"""How do I make tea?"""
MIXED = [(prompt, name) for prompt in (FRANCE, TEA) for name in (None, *ADAPTERS)]


def make_config(store: Path, **args: Any) -> EngineConfig:
    """Steps of 48 tokens, so that prompts are computed in chunks."""
    settings = {
        "model": str(MODEL),
        "dtype": "float32",
        "max_model_len": 256,
        "block_size": 16,
        "kv_cache_memory_bytes": 1 << 26,
        "adapter_store_dir": str(store),
        "max_loras": 3,
        "max_lora_rank": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 48,
        "num_threads": 1,
        "cudagraph_capture_sizes": (2, 8),
    }
    return EngineConfig.parse(settings | args)


def generate(
    config: EngineConfig, executor: Executor, requests: list[tuple[list[int], str | None]], max_tokens: int
) -> list[list[int]]:
    """Greedy tokens of requests that run together, each with its adapter."""
    core = EngineCore(config, executor, FakeTokenizer())
    for name in sorted({name for _, name in requests if name is not None}):
        manifest = executor.inspect_adapter(str(ROOT / "deployments" / "adapters" / name))
        executor.stage_adapter(manifest)
        core.adapters.register(name, manifest)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    groups = [
        core.add(GenerateRequest(prompt=prompt, adapter=name, sampling_params=params)) for prompt, name in requests
    ]
    while core.has_work:
        core.step()
    executor.shutdown()
    return [group.completions[0].sequence.token_ids[-max_tokens:] for group in groups]
