"""Greedy tokens are those of transformers, and with adapters those of PEFT, token for token in float32."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ray_lora import LLM, SamplingParams
from tests.tiny import expected_tokens, make_adapter, make_checkpoint, random_prompts

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-wide-heads": {"head_dim": 24},
    "llama-one-kv-head": {"num_key_value_heads": 1},
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
    "llama-dynamic": {
        "max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    },
    "llama-llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}},
    "llama-yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 10000.0,
        }
    },
    "mistral": {"sliding_window": None},
    "mistral-window": {"sliding_window": 16},
    "qwen2": {},
    "qwen2-window": {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    "qwen3": {},
    "qwen3-biases": {"attention_bias": True},
}

Shared = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    made: dict[str, Path] = {}

    def checkpoint(case: str) -> Path:
        if case not in made:
            made[case] = make_checkpoint(tmp_path_factory.mktemp(case) / "model", case.split("-")[0], **CASES[case])
        return made[case]

    return checkpoint


@pytest.fixture
def open_llm(tmp_path: Path) -> Iterator[Callable[..., LLM]]:
    opened: list[LLM] = []

    def start(checkpoint: Path, **args: Any) -> LLM:
        settings = {"kv_cache_memory_bytes": 1 << 24, "adapter_store_dir": str(tmp_path / "store"), "max_lora_rank": 64}
        opened.append(LLM(str(checkpoint), **{**settings, **args}))
        return opened[-1]

    yield start
    for llm in opened:
        llm.shutdown()


def tokens(llm: LLM, prompts: list[list[int]], adapters: list[str | None] | str | None = None) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, adapters)]


@pytest.mark.parametrize("case", CASES)
def test_base_tokens_equal_transformers(case: str, checkpoint_of: Shared, open_llm: Callable[..., LLM]) -> None:
    checkpoint = checkpoint_of(case)
    prompts = random_prompts(5, 320)
    llm = open_llm(checkpoint, max_num_batched_tokens=48)
    assert tokens(llm, prompts) == expected_tokens(checkpoint, None, prompts, 24)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3"])
def test_every_adapter_of_a_mixed_batch_equals_peft(
    case: str, checkpoint_of: Shared, open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    checkpoint = checkpoint_of(case)
    configs: dict[str, dict[str, Any]] = {
        "all": {},
        "rank1": {"r": 1, "target_modules": ["q_proj", "v_proj"]},
        "rank17-rslora": {"r": 17, "use_rslora": True, "target_modules": ["k_proj", "o_proj", "down_proj"]},
        "rank64": {"r": 64, "lora_alpha": 8},
        "regex": {"target_modules": r".*\.(1|2)\..*(gate|up)_proj"},
        "patterns": {"rank_pattern": {"q_proj": 20, "layers.1.mlp.up_proj": 3}, "alpha_pattern": {"down_proj": 3}},
        "one-layer": {"layers_to_transform": [1], "target_modules": ["q_proj", "o_proj", "gate_proj"]},
        "excluded": {"exclude_modules": ["v_proj", "down_proj"]},
    }
    adapters = {name: make_adapter(tmp_path / name, checkpoint, i, **c) for i, (name, c) in enumerate(configs.items())}
    llm = open_llm(checkpoint, adapters={name: str(path) for name, path in adapters.items()})
    prompts = random_prompts(2 * len(adapters) + 2, 320, seed=1)
    names: list[str | None] = [None, *adapters, *reversed(adapters), None]
    produced = tokens(llm, prompts, names)
    for name in {*names}:
        rows = [row for row, used in enumerate(names) if used == name]
        path = adapters[name] if name is not None else None
        expected = expected_tokens(checkpoint, path, [prompts[row] for row in rows], 24)
        assert [produced[row] for row in rows] == expected, name
    assert produced[0] != tokens(llm, prompts[:1], "all")[0], "an adapter must change something"


def test_tokens_do_not_depend_on_chunks_or_on_prefix_hits(
    checkpoint_of: Shared, open_llm: Callable[..., LLM], tmp_path: Path
) -> None:
    checkpoint = checkpoint_of("llama")
    adapter = make_adapter(tmp_path / "a", checkpoint, 3)
    prompts = random_prompts(4, 320, longest=120, shortest=90)
    expected = expected_tokens(checkpoint, adapter, prompts, 24)
    for chunk in (7, 64, 1024):
        llm = open_llm(checkpoint, adapters={"a": str(adapter)}, max_num_batched_tokens=chunk)
        assert tokens(llm, prompts, "a") == expected
        assert tokens(llm, prompts, "a") == expected
        assert llm.stats().prefix_cache_hits > 0


def test_tokens_do_not_depend_on_preemption(checkpoint_of: Shared, open_llm: Callable[..., LLM]) -> None:
    checkpoint = checkpoint_of("llama")
    prompts = random_prompts(6, 320, shortest=50)
    block_bytes = 2 * 3 * 3 * 16 * 16 * 4
    llm = open_llm(checkpoint, max_model_len=96, kv_cache_memory_bytes=14 * block_bytes)
    assert tokens(llm, prompts) == expected_tokens(checkpoint, None, prompts, 24)
    assert llm.stats().num_preemptions > 0


def test_the_end_of_sequence_ends_a_request(checkpoint_of: Shared, open_llm: Callable[..., LLM]) -> None:
    checkpoint = checkpoint_of("llama")
    prompts = random_prompts(12, 320)
    llm = open_llm(checkpoint)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64))
    assert [o.outputs[0].token_ids for o in outputs] == expected_tokens(checkpoint, None, prompts, 64, ignore_eos=False)
