"""Which modules are replaced as a whole, and which token rows, against PEFT itself on real models."""

import copy
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from transformers import LlamaForCausalLM

from ray_lora.adapters.peft_config import parse_peft_config
from ray_lora.adapters.peft_saved import SavedModules, resolve_saved
from ray_lora.adapters.peft_targets import resolve_targets
from ray_lora.architecture import EMBEDDING, HEAD, Architecture, parse_architecture
from ray_lora.errors import AdapterRejectedError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")
CASES: list[dict[str, Any]] = [
    {"modules_to_save": ["lm_head"]},
    {"modules_to_save": ["embed_tokens", "norm"]},
    {"modules_to_save": ["1.input_layernorm", "of_another_model"]},
    {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    {"trainable_token_indices": [3, 1]},
    {"trainable_token_indices": {"lm_head": [1, 2]}},
    {"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [1, 2]}},
    {"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [2, 1]}},
    {"trainable_token_indices": {"embed_tokens": [5]}, "ensure_weight_tying": True},
]


@pytest.fixture(scope="session", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tiny_llama: LlamaForCausalLM) -> LlamaForCausalLM:
    config = copy.deepcopy(tiny_llama.config)
    config.tie_word_embeddings = request.param
    return LlamaForCausalLM(config)


@pytest.fixture
def its_arch(model: LlamaForCausalLM) -> Architecture:
    return parse_architecture(model.config.to_dict(), {})


def resolve(arch: Architecture, **fields: Any) -> SavedModules:
    config = parse_peft_config({"peft_type": "LORA", "target_modules": ["q_proj"]} | fields)
    return resolve_saved(config, resolve_targets(config, arch), arch)


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_what_is_replaced_is_what_peft_wraps(
    fields: dict[str, Any], model: LlamaForCausalLM, its_arch: Architecture
) -> None:
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **copy.deepcopy(fields))
    wrapped = get_peft_model(copy.deepcopy(model), config)
    modules = {name.removeprefix("base_model.model."): module for name, module in wrapped.named_modules()}
    saved = resolve(its_arch, **fields)
    assert set(saved.whole) == {name for name, module in modules.items() if isinstance(module, ModulesToSaveWrapper)}
    tokens = {
        name: module.token_adapter.token_indices["default"]
        for name, module in modules.items()
        if isinstance(module, TrainableTokensWrapper)
    }
    assert {name: list(ids) for name, (_, ids) in saved.tokens.items()} == tokens
    stored = {name for name in tokens if not modules[name].token_adapter.tied_adapter}
    assert set(saved.stored_tokens) == stored


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"modules_to_save": ["mlp"]}, "modules_to_save"),
        ({"modules_to_save": ["up_proj"]}, "modules_to_save"),
        ({"modules_to_save": ["layers.0"]}, "modules_to_save"),
        ({"trainable_token_indices": {"q_proj": [1]}}, "trainable_token_indices"),
        ({"trainable_token_indices": {"embed_tokens": [1], "model.embed_tokens": [2]}}, "trainable_token_indices"),
        ({"trainable_token_indices": [96]}, "trainable_token_indices"),
        ({"trainable_token_indices": [1], "modules_to_save": ["embed_tokens"]}, "trainable_token_indices"),
        ({"trainable_token_indices": [1], "target_modules": ["embed_tokens"]}, "trainable_token_indices"),
    ],
)
def test_what_is_not_served_or_changed_twice_is_refused(
    fields: dict[str, Any], param: str, its_arch: Architecture
) -> None:
    with pytest.raises(AdapterRejectedError) as caught:
        resolve(its_arch, **fields)
    assert caught.value.param == param


def test_ties_that_contradict_the_rows_are_refused(tiny_llama: LlamaForCausalLM) -> None:
    arch = parse_architecture({**tiny_llama.config.to_dict(), "tie_word_embeddings": True}, {})
    rows = {"embed_tokens": [1], "lm_head": [2]}
    assert resolve(arch, trainable_token_indices=rows).tokens == {EMBEDDING: (EMBEDDING, (1,)), HEAD: (HEAD, (2,))}
    with pytest.raises(AdapterRejectedError, match="ensure_weight_tying"):
        resolve(arch, trainable_token_indices=rows, ensure_weight_tying=True)
