"""What `config.json` means, against transformers' own configuration classes."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from ray_lora.architecture import Architecture, Projection, parse_architecture, read_architecture
from ray_lora.errors import ConfigError

CONFIG_CLASSES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
FAMILIES = list(CONFIG_CLASSES)

REQUIRED: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}


def make_config(family: str = "llama", **fields: Any) -> dict[str, Any]:
    return {"model_type": family, "num_key_value_heads": 2} | REQUIRED | fields


def make_arch(family: str = "llama", **fields: Any) -> Architecture:
    return parse_architecture(make_config(family, **fields), {})


def projection(name: str, **fields: Any) -> Projection:
    (found,) = [entry for entry in make_arch(**fields).projections if entry.name == name]
    return found


# Against transformers

COMPARED = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
    "eos_token_id",
]
"""Fields that mean the same in transformers and here."""
OURS = {
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "eos_token_id": "eos_token_ids",
}
SILENT = [pytest.param(family, field) for family in FAMILIES for field in COMPARED]


def compare(arch: Architecture, config: PreTrainedConfig, field: str) -> None:
    theirs = getattr(config, field, None)
    if field == "head_dim" and theirs is None:
        theirs = config.hidden_size // config.num_attention_heads
    if field == "eos_token_id":
        theirs = () if theirs is None else (theirs,)
    assert getattr(arch, OURS.get(field, field)) == theirs


@pytest.mark.parametrize(("family", "field"), SILENT)
def test_a_silent_config_means_what_it_means_to_transformers(family: str, field: str) -> None:
    given = REQUIRED | {"num_attention_heads": 16}
    compare(parse_architecture({"model_type": family} | given, {}), CONFIG_CLASSES[family](**given), field)


@pytest.mark.parametrize("field", COMPARED)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_is_read_back(family: str, field: str, tmp_path: Path) -> None:
    config = CONFIG_CLASSES[family](
        **REQUIRED,
        num_key_value_heads=4,
        head_dim=24,
        rms_norm_eps=1e-4,
        max_position_embeddings=77,
        tie_word_embeddings=True,
        eos_token_id=9,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        dtype="bfloat16",
    )
    config.save_pretrained(tmp_path)
    arch = read_architecture(tmp_path)
    compare(arch, config, field)
    assert (arch.family, arch.dtype, arch.rope.theta, arch.rope.rope_type) == (family, "bfloat16", 5e5, "default")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_defaults_that_transformers_writes_are_read_back(family: str, tmp_path: Path) -> None:
    config = CONFIG_CLASSES[family](**REQUIRED)
    config.save_pretrained(tmp_path)
    arch = read_architecture(tmp_path)
    for field in COMPARED:
        compare(arch, config, field)
    window = getattr(config, "sliding_window", None)
    assert arch.sliding_windows == (window,) * 4
    assert arch.rope.theta == config.rope_parameters["rope_theta"]


# Families


@pytest.mark.parametrize(
    ("family", "qkv_bias", "o_bias", "mlp_bias", "qk_norm"),
    [
        ("llama", False, False, False, False),
        ("mistral", False, False, False, False),
        ("qwen2", True, False, False, False),
        ("qwen3", False, False, False, True),
    ],
)
def test_families_differ_in_biases_and_norms(
    family: str, qkv_bias: bool, o_bias: bool, mlp_bias: bool, qk_norm: bool
) -> None:
    arch = make_arch(family)
    assert (arch.qkv_bias, arch.o_bias, arch.mlp_bias, arch.qk_norm) == (qkv_bias, o_bias, mlp_bias, qk_norm)


@pytest.mark.parametrize(
    ("family", "fields", "biases"),
    [
        ("llama", {"attention_bias": True}, (True, True, False)),
        ("llama", {"mlp_bias": True}, (False, False, True)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
        ("qwen3", {"mlp_bias": True}, (False, False, False)),
        ("qwen2", {"attention_bias": False}, (True, False, False)),
    ],
)
def test_biases_can_be_asked_for_where_transformers_lets_them(
    family: str, fields: dict[str, Any], biases: tuple[bool, bool, bool]
) -> None:
    arch = make_arch(family, **fields)
    assert (arch.qkv_bias, arch.o_bias, arch.mlp_bias) == biases


@pytest.mark.parametrize(
    ("family", "fields", "head_dim"),
    [("llama", {}, 8), ("mistral", {}, 8), ("qwen2", {}, 8), ("qwen3", {}, 128), ("llama", {"head_dim": 24}, 24)],
)
def test_the_size_of_a_head_is_given_or_follows_from_the_family(
    family: str, fields: dict[str, Any], head_dim: int
) -> None:
    arch = make_arch(family, **fields)
    assert arch.head_dim == head_dim
    assert arch.projections[0].out_features == 8 * head_dim
    assert arch.projections[3].in_features == 8 * head_dim


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("llama", {"sliding_window": 16}, [None] * 4),
        ("mistral", {"sliding_window": 16}, [16] * 4),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("qwen2", {"sliding_window": 16}, [None] * 4),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": False}, [None] * 4),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True}, [None] * 4),
        ("qwen2", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1}, [None, 16, 16, 16]),
        (
            "qwen3",
            {"sliding_window": 16, "use_sliding_window": True, "layer_types": [SLIDING, FULL, SLIDING, FULL]},
            [16, None, 16, None],
        ),
        ("mistral", {}, [4096] * 4),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, [4096] * 4),
    ],
)
def test_a_window_is_applied_to_the_layers_that_have_one(
    family: str, fields: dict[str, Any], windows: list[int | None]
) -> None:
    assert make_arch(family, **fields).sliding_windows == tuple(windows)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "ids"),
    [
        ({"eos_token_id": 2}, {}, (2,)),
        ({"eos_token_id": [2, 3]}, {}, (2, 3)),
        ({"eos_token_id": 2}, {"eos_token_id": [5, 6]}, (5, 6)),
        ({"eos_token_id": 2}, {"temperature": 0.6}, (2,)),
        ({"eos_token_id": None}, {}, ()),
    ],
)
def test_the_generation_config_has_the_last_word_on_the_end_of_sequence(
    in_config: dict[str, Any], in_generation: dict[str, Any], ids: tuple[int, ...]
) -> None:
    assert parse_architecture(make_config(**in_config), in_generation).eos_token_ids == ids


# Rotary positions


@pytest.mark.parametrize(
    ("fields", "rope_type", "theta"),
    [
        ({}, "default", 10000.0),
        ({"rope_theta": 5e5}, "default", 5e5),
        ({"rope_scaling": None, "rope_theta": 5e5}, "default", 5e5),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear", 10000.0),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope_theta": 100}, "dynamic", 100.0),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 7.0, "factor": 4.0}}, "yarn", 7.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 9.0}, "default", 7.0),
    ],
)
def test_rotary_parameters_are_read_from_old_and_new_configs(
    fields: dict[str, Any], rope_type: str, theta: float
) -> None:
    rope = make_arch(**fields).rope
    assert (rope.rope_type, rope.theta) == (rope_type, theta)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({}, 100),
        ({"rope_type": "linear", "factor": 2.5}, 250),
        ({"rope_type": "dynamic", "factor": 4.0}, 400),
        ({"rope_type": "yarn", "factor": 4.0}, 100),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50}, 200),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 20}, 100),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 12}, 100),
    ],
)
def test_the_longest_context_includes_the_scaling(rope: dict[str, Any], longest: int) -> None:
    assert make_arch(max_position_embeddings=100, rope_scaling=rope).max_context_len == longest


# What is refused


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "mixtral"}, "mixtral"),
        ({"model_type": ""}, "llama, mistral, qwen2, qwen3"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type 'longrope'"),
        ({"rope_scaling": {"type": "su"}}, "rope_type 'su'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_architecture(make_config() | fields, {})
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named(field: str, tmp_path: Path) -> None:
    config = make_config()
    del config[field]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=f"has no '{field}'"):
        read_architecture(tmp_path)


def test_what_is_no_model_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        read_architecture(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_architecture(tmp_path)


# Tensor parallelism


@pytest.mark.parametrize(
    ("fields", "tp_size", "name"),
    [
        ({}, 3, "num_attention_heads 8"),
        ({}, 16, "num_attention_heads 8"),
        ({"intermediate_size": 98}, 4, "intermediate_size 98"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96}, 6, "num_key_value_heads 4"),
    ],
)
def test_a_size_that_does_not_divide_is_refused_by_name(fields: dict[str, Any], tp_size: int, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_arch(**fields).check_tensor_parallel(tp_size)
    assert f"tensor_parallel_size {tp_size}" in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_sizes_that_divide_are_accepted_with_kv_heads_repeated_where_ranks_outnumber_them(tp_size: int) -> None:
    make_arch().check_tensor_parallel(tp_size)


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"])
def test_the_ranks_parts_cover_a_cut_dimension_once_and_in_order(name: str, tp_size: int) -> None:
    entry = projection(name)
    size = entry.out_features if entry.style == "column" else entry.in_features
    parts = [entry.shard(rank, tp_size) for rank in range(tp_size)]
    assert [index for part in parts for index in range(size)[part]] == list(range(size))
    assert len({part.stop - part.start for part in parts}) == 1


@pytest.mark.parametrize("name", ["self_attn.k_proj", "self_attn.v_proj"])
@pytest.mark.parametrize(
    ("num_kv_heads", "tp_size", "heads"),
    [
        (2, 1, [[0, 1]]),
        (2, 2, [[0], [1]]),
        (2, 4, [[0], [0], [1], [1]]),
        (2, 8, [[0], [0], [0], [0], [1], [1], [1], [1]]),
        (1, 4, [[0]] * 4),
        (8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_kv_heads_are_cut_or_repeated_so_that_each_query_head_finds_its_own(
    name: str, num_kv_heads: int, tp_size: int, heads: list[list[int]]
) -> None:
    arch = make_arch(num_key_value_heads=num_kv_heads)
    (kv,) = [entry for entry in arch.projections if entry.name == name]
    query = arch.projections[0]
    group = arch.num_heads // num_kv_heads
    for rank in range(tp_size):
        part, query_part = kv.shard(rank, tp_size), query.shard(rank, tp_size)
        assert list(range(part.start // arch.head_dim, part.stop // arch.head_dim)) == heads[rank]
        query_heads = range(query_part.start // arch.head_dim, query_part.stop // arch.head_dim)
        assert {head // group for head in query_heads} == set(heads[rank])


def test_the_linear_layers_of_a_decoder_layer() -> None:
    arch = make_arch(head_dim=16)
    assert [(entry.name, entry.in_features, entry.out_features, entry.style) for entry in arch.projections] == [
        ("self_attn.q_proj", 64, 128, "column"),
        ("self_attn.k_proj", 64, 32, "column"),
        ("self_attn.v_proj", 64, 32, "column"),
        ("self_attn.o_proj", 128, 64, "row"),
        ("mlp.gate_proj", 64, 96, "column"),
        ("mlp.up_proj", 64, 96, "column"),
        ("mlp.down_proj", 96, 64, "row"),
    ]


def test_fused_layers_hold_every_projection_once_with_one_input_and_one_style() -> None:
    arch = make_arch()
    assert [entry for fused in arch.fused_linears for entry in fused.slices] == list(arch.projections)
    for fused in arch.fused_linears:
        assert len({(entry.in_features, entry.style) for entry in fused.slices}) == 1
