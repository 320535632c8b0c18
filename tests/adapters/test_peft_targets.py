"""The rules for choosing modules, ranks and scales, against PEFT's own code on the module names of real models."""

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ray_lora.adapters.peft_config import parse_peft_config
from ray_lora.adapters.peft_targets import TargetModule, module_names, resolve_targets, served_modules
from ray_lora.architecture import Architecture, parse_architecture
from ray_lora.errors import AdapterRejectedError

DEFAULTS: dict[str, Any] = {"r": 8, "lora_alpha": 12}
NO_LAYERS: dict[str, Any] = {"layers_to_transform": None, "layers_pattern": None}
CHOICES: dict[str, dict[str, Any]] = {
    "list": {"target_modules": ["q_proj", "v_proj"]},
    "list with names of other models": {"target_modules": ["c_attn", "k_proj", "query_key_value"]},
    "longer suffixes": {"target_modules": ["self_attn.q_proj", "1.mlp.up_proj", "layers.0.mlp.down_proj"]},
    "whole names": {"target_modules": ["model.layers.1.mlp.gate_proj"]},
    "suffixes end at dots": {"target_modules": ["proj", "up_proj"]},
    "regex": {"target_modules": r".*\.(q|v)_proj"},
    "regex of one layer": {"target_modules": r"model\.layers\.[1-9]\.(mlp|self_attn)\.\w+_proj"},
    "regex with a flag": {"target_modules": r"(?i)MODEL.*Q_PROJ"},
    "excluded by list": {"target_modules": ["q_proj", "o_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
    "excluded by regex": {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*layers\.0\..*"},
    "one layer": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": 1},
    "no layers mean all": {"target_modules": ["q_proj"], "layers_to_transform": []},
    "layers, some absent": {"target_modules": ["q_proj"], "layers_to_transform": [0, 7]},
    "layers behind a name": {"target_modules": ["o_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "layers behind a regex": {
        "target_modules": ["o_proj"],
        "layers_to_transform": [0],
        "layers_pattern": ["h", "l.*s"],
    },
    "embeddings are in no layer": {"target_modules": ["q_proj", "embed_tokens"], "layers_to_transform": [0]},
    "rank by name": {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"q_proj": 2, "1.mlp.up_proj": 3}},
    "first pattern wins": {"target_modules": ["q_proj", "k_proj"], "rank_pattern": {"._proj": 2, "q_proj": 3}},
    "patterns are anchored": {"target_modules": ["q_proj"], "rank_pattern": {"proj": 2, "^model.layers.1.*": 5}},
    "alternatives": {"target_modules": ["q_proj", "k_proj"], "alpha_pattern": {"q_proj|layers.0.*": 3, "k_proj": 1.5}},
    "rslora": {"target_modules": ["q_proj"], "use_rslora": True, "alpha_pattern": {"layers.0.*q_proj": 1}},
}


def resolve(arch: Architecture, **fields: Any) -> dict[str, TargetModule]:
    config = parse_peft_config({"peft_type": "LORA", "r": 8, "lora_alpha": 12} | fields)
    return {target.name: target for target in resolve_targets(config, arch)}


def rank_and_scale(config: LoraConfig, name: str) -> tuple[int, float]:
    """As PEFT's `_create_and_replace` and `update_layer` compute them."""
    rank = config.rank_pattern.get(get_pattern_key(config.rank_pattern.keys(), name), config.r)
    alpha = config.alpha_pattern.get(get_pattern_key(config.alpha_pattern.keys(), name), config.lora_alpha)
    return rank, alpha / (math.sqrt(rank) if config.use_rslora else rank)


@pytest.mark.parametrize("choice", CHOICES)
def test_modules_ranks_and_alphas_are_those_of_peft(
    choice: str, arch: Architecture, tiny_llama: LlamaForCausalLM
) -> None:
    config = LoraConfig(**(DEFAULTS | CHOICES[choice]))
    names = [name for name, _ in tiny_llama.named_modules() if name]
    expected = {name for name in names if check_target_module_exists(config, name)}
    targets = resolve(arch, **CHOICES[choice])
    assert set(targets) == expected
    for name, target in targets.items():
        assert (target.rank, target.scale) == rank_and_scale(config, name)


LISTED = [
    "q_proj",
    "self_attn.v_proj",
    "0.mlp.up_proj",
    "layers.1.mlp.down_proj",
    "model.layers.0.mlp.gate_proj",
    "mlp",
]
EXPRESSIONS = [
    "q_proj",
    ".*_proj",
    ".*[qk]_proj",
    r"model\.layers\.0\.\w+\.[a-p].*proj",
    "layers",
    ".*(mlp|1).*",
    "lm_head|",
]
choices = st.fixed_dictionaries(
    {"target_modules": st.lists(st.sampled_from(LISTED)) | st.sampled_from(EXPRESSIONS)},
    optional={
        "exclude_modules": st.lists(st.sampled_from(LISTED)) | st.sampled_from(EXPRESSIONS),
        "layers_to_transform": st.integers(0, 2) | st.lists(st.integers(0, 2)),
        "layers_pattern": st.sampled_from(["layers", "model.layers", "h", ".*", "", ["h", "lay.*"]]),
        "rank_pattern": st.dictionaries(st.sampled_from(LISTED + EXPRESSIONS), st.integers(1, 9)),
        "alpha_pattern": st.dictionaries(st.sampled_from(LISTED + EXPRESSIONS), st.integers(-3, 9)),
        "use_rslora": st.booleans(),
        "modules_to_save": st.lists(st.sampled_from(["lm_head", "embed_tokens", "norm", "mlp", "1.mlp", "q_proj"])),
    },
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=choices)
def test_any_configuration_selects_what_peft_selects_or_is_refused(fields: dict[str, Any], arch: Architecture) -> None:
    served = served_modules(arch) | arch.vocabulary
    try:
        config = LoraConfig(**(DEFAULTS | fields))
    except ValueError:  # layers with a regular expression, or a pattern without layers
        config = None
    expected = config and {name for name in module_names(arch) if check_target_module_exists(config, name)}
    spelt_out = fields.get("layers_to_transform", []) != [] and not served.keys().isdisjoint(fields["target_modules"])
    try:
        targets = resolve(arch, **fields)
    except AdapterRejectedError:
        assert not expected or not expected <= set(served) or spelt_out
        return
    if config is None:
        config = LoraConfig(**(DEFAULTS | fields | NO_LAYERS))
        expected = {name for name in served if check_target_module_exists(config, name)}
    assert set(targets) == expected
    for name, target in targets.items():
        assert (target.rank, target.scale) == rank_and_scale(config, name)


@pytest.mark.parametrize("target_modules", [None, "all-linear", "ALL-LINEAR"])
def test_defaults_and_all_linear_leave_the_head_and_the_embeddings_alone(
    target_modules: str | None, arch: Architecture
) -> None:
    names = {name.rpartition(".")[2] for name in resolve(arch, target_modules=target_modules)}
    attention = {"q_proj", "v_proj"}
    assert names == (
        attention | {"k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"} if target_modules else attention
    )


def test_targets_come_in_the_order_they_run(arch: Architecture) -> None:
    assert list(resolve(arch, target_modules="all-linear")) == list(served_modules(arch))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": ["c_attn"]}, "target_modules"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, "target_modules"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [7]}, "target_modules"),
        ({"target_modules": "q_proj"}, "target_modules"),
        ({"target_modules": ["q_proj", "norm"]}, "target_modules"),
        ({"target_modules": ["lm_head"], "modules_to_save": ["lm_head"]}, "target_modules"),
        ({"target_modules": ["mlp"]}, "target_modules"),
        ({"target_modules": r"model\.layers\.0.*"}, "target_modules"),
        ({"target_modules": ["model.layers.0.mlp.up_proj"], "layers_to_transform": [0]}, "layers_to_transform"),
    ],
)
def test_nothing_selected_and_things_that_are_not_served_are_refused(
    fields: dict[str, Any], param: str, arch: Architecture
) -> None:
    with pytest.raises(AdapterRejectedError) as caught:
        resolve(arch, **fields)
    assert caught.value.param == param


def test_the_known_modules_are_those_of_the_models(arch: Architecture, tiny_llama: LlamaForCausalLM) -> None:
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=16,
    )
    qwen3_arch = parse_architecture(config.to_dict(), {})
    for model, its_arch in ((tiny_llama, arch), (Qwen3ForCausalLM(config), qwen3_arch)):
        names = {name for name, _ in model.named_modules() if name}
        assert names == set(module_names(its_arch))
        assert set(served_modules(its_arch)) | set(its_arch.vocabulary) | set(its_arch.norms) < names
