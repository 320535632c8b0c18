"""Adapters that are more than A and B: in one batch with plain ones and base rows, each equals PEFT token for token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from ray_lora import LLM, AdapterRejectedError, SamplingParams
from tests.kinds import IGNORE_PEFT_WARNINGS, KINDS
from tests.tiny import expected_tokens, load, make_adapter, make_checkpoint, perturb, random_prompts

pytestmark = IGNORE_PEFT_WARNINGS
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
WITH_LOGPROBS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
BASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen3": {"attention_bias": True},
}
NAMES = [None, *KINDS, None, *reversed(KINDS)]


@pytest.fixture(scope="module", params=BASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = request.param.split("-")[0]
    return make_checkpoint(tmp_path_factory.mktemp(request.param) / "model", family, **BASES[request.param])


@pytest.fixture(scope="module")
def adapters(checkpoint: Path) -> dict[str, str]:
    made = checkpoint.parent
    return {name: str(make_adapter(made / name, checkpoint, i, **kind)) for i, (name, kind) in enumerate(KINDS.items())}


@pytest.fixture
def llm(checkpoint: Path, adapters: dict[str, str]) -> Iterator[LLM]:
    store = str(checkpoint.parent / "store")
    args = {"kv_cache_memory_bytes": 1 << 24, "adapter_store_dir": store, "enable_prefix_caching": False}
    with LLM(str(checkpoint), adapters=adapters, max_num_batched_tokens=96, **args) as llm:
        yield llm


def test_every_kind_in_one_batch_equals_peft(llm: LLM, checkpoint: Path, adapters: dict[str, str]) -> None:
    prompts = random_prompts(len(NAMES), 320, seed=1, longest=30)
    produced = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, NAMES)]
    for name in {*NAMES}:
        rows = [row for row, used in enumerate(NAMES) if used == name]
        path = None if name is None else Path(adapters[name])
        expected = expected_tokens(checkpoint, path, [prompts[row] for row in rows], 16)
        assert [produced[row] for row in rows] == expected, name


def test_rows_of_the_base_and_of_plain_adapters_do_not_notice(llm: LLM) -> None:
    prompts = [prompt[:12] for prompt in random_prompts(len(NAMES), 320, shortest=12)]

    def others(names: list[str | None]) -> list[Any]:
        outputs = llm.generate(prompts, WITH_LOGPROBS, names)
        kept = [output.outputs[0] for output, name in zip(outputs, NAMES, strict=True) if name in (None, "plain")]
        return [(output.token_ids, output.logprobs) for output in kept]

    mixed = others(NAMES)
    assert mixed == others([name if name == "plain" else None for name in NAMES])


@pytest.mark.filterwarnings("ignore:(PiSSA|OLoRA) changes the base weights")
@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_a_kind_that_changes_the_base_is_served_once_peft_has_converted_it(kind: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    targets = ["q_proj", "o_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=kind, task_type="CAUSAL_LM")
    model = get_peft_model(load(checkpoint), config)
    model.save_pretrained(tmp_path / "initial")
    perturb(model, 0.3)
    model.save_pretrained(tmp_path / "trained")
    model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    prompts = random_prompts(3, 320)
    with LLM(str(checkpoint), kv_cache_memory_bytes=1 << 24, adapter_store_dir=str(tmp_path / "store")) as llm:
        with pytest.raises(AdapterRejectedError, match="adapter convert"):
            llm.load_adapter("trained", str(tmp_path / "trained"))
        llm.load_adapter("plain", str(tmp_path / "plain"))
        produced = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, "plain")]
    assert produced == expected_tokens(checkpoint, tmp_path / "trained", prompts, 16)
    assert produced != expected_tokens(checkpoint, None, prompts, 16)
