"""Every kind of adapter over several ranks: the tokens are PEFT's, whichever way a layer is cut."""

from pathlib import Path
from typing import Any

import pytest

from ray_lora import LLM, SamplingParams
from tests.kinds import IGNORE_PEFT_WARNINGS, KINDS
from tests.tiny import expected_tokens, make_adapter, make_checkpoint, random_prompts

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), *IGNORE_PEFT_WARNINGS]

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
BIASED: dict[str, Any] = {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True, "vocab_size": 322}


@pytest.mark.parametrize(("tp_size", "tied"), [(2, False), (3, True)])
def test_ranks_answer_as_peft_does_for_every_kind(tp_size: int, tied: bool, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "llama", **BIASED, tie_word_embeddings=tied)
    adapters = {
        name: str(make_adapter(tmp_path / name, checkpoint, i, **kind)) for i, (name, kind) in enumerate(KINDS.items())
    }
    names = [None, *adapters, None]
    prompts = random_prompts(len(names), 322, longest=30)
    args = {
        "kv_cache_memory_bytes": 1 << 23,
        "adapter_store_dir": str(tmp_path / "store"),
        "enable_prefix_caching": False,
    }
    with LLM(str(checkpoint), adapters, tensor_parallel_size=tp_size, max_loras=len(adapters), **args) as llm:
        outputs = llm.generate(prompts, GREEDY, names)
        plain = llm.generate(prompts, GREEDY)
    produced = [output.outputs[0].token_ids for output in outputs]
    for row in (0, -1):
        assert outputs[row].outputs[0].logprobs == plain[row].outputs[0].logprobs, "a base row has noticed the others"
    for prompt, name, tokens in zip(prompts, names, produced, strict=True):
        path = None if name is None else Path(adapters[name])
        assert tokens == expected_tokens(checkpoint, path, [prompt], 12)[0], name
