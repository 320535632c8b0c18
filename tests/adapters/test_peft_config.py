import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig

from ray_lora.adapters.peft_config import PeftConfig, parse_peft_config, read_peft_config
from ray_lora.adapters.peft_fields import HONOURED, IRRELEVANT, REFUSED
from ray_lora.errors import AdapterRejectedError

PEFT_FIELDS = {field.name for field in dataclasses.fields(LoraConfig)}


def parse(**fields: Any) -> PeftConfig:
    return parse_peft_config({"peft_type": "LORA", "target_modules": ["q_proj"]} | fields)


def rejected(**fields: Any) -> str | None:
    with pytest.raises(AdapterRejectedError) as caught:
        parse(**fields)
    assert caught.value.param in str(caught.value)
    return caught.value.param


def test_every_field_of_peft_is_in_exactly_one_table() -> None:
    tables = [set(HONOURED), set(IRRELEVANT), set(REFUSED)]
    assert set.union(*tables) == PEFT_FIELDS
    assert sum(map(len, tables)) == len(PEFT_FIELDS)


def test_what_peft_writes_by_default_is_accepted() -> None:
    parsed = parse_peft_config(json.loads(json.dumps(LoraConfig().to_dict())))
    assert parsed == PeftConfig()


@pytest.mark.parametrize("field", sorted(IRRELEVANT))
def test_irrelevant_fields_may_hold_anything_and_change_nothing(field: str) -> None:
    for value in (None, True, 3, "text", [1], {"a": 1}):
        assert parse(**{field: value}).canonical() == parse().canonical()


REFUSED_VALUES = [
    ("peft_type", "ADALORA"),
    ("peft_type", None),
    ("task_type", "SEQ_CLS"),
    ("init_lora_weights", "pissa"),
    ("init_lora_weights", "pissa_niter_16"),
    ("init_lora_weights", "olora"),
    ("init_lora_weights", "corda"),
    ("init_lora_weights", "loftq"),
    ("init_lora_weights", "lora_ga"),
    ("init_lora_weights", "of tomorrow"),
    ("target_parameters", ["mlp.experts.gate_up_proj"]),
    ("layer_replication", [[0, 2], [1, 2]]),
    ("megatron_config", {"hidden_size": 64}),
    ("alora_invocation_tokens", [5]),
    ("use_qalora", True),
    ("arrow_config", {}),
    ("kasa_config", {}),
    ("monteclora_config", {}),
    ("use_bdlora", {}),
    ("velora_config", {}),
]


def test_every_refused_field_has_a_refused_value() -> None:
    assert {field for field, _ in REFUSED_VALUES} == set(REFUSED)


@pytest.mark.parametrize(("field", "value"), REFUSED_VALUES)
def test_fields_that_change_the_result_are_refused_by_name(field: str, value: object) -> None:
    assert rejected(**{field: value}) == field


@pytest.mark.parametrize("value", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_leave_the_base_alone_are_accepted(value: object) -> None:
    assert parse(init_lora_weights=value) == parse()


def test_a_refused_initialisation_tells_how_to_convert() -> None:
    for kind in ("pissa", "olora", "corda", "lora_ga"):
        with pytest.raises(AdapterRejectedError, match=r"adapter convert.*path_initial_model_for_weight_conversion"):
            parse(init_lora_weights=kind)


def test_unknown_fields_are_refused_unless_they_are_off() -> None:
    assert parse(lora_of_2031=None, quantum=False) == parse()
    for value in (True, 0, 1, "on", [], {}, {"a": 1}):
        assert rejected(lora_of_2031=value) == "lora_of_2031"


def test_a_rejection_can_be_encoded_whatever_the_file_says() -> None:
    with pytest.raises(AdapterRejectedError) as caught:
        parse(**{"\ud800" * 1000: "\udfff"})
    assert caught.value.param is not None
    assert len(caught.value.param.encode("utf-8")) <= 1200
    assert len(str(caught.value).encode("utf-8")) < 500


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("r", value) for value in ("8", 8.0, True, None, 0, -1, 513, 10**400, [8])],
        *[("lora_alpha", value) for value in ("16", None, True, math.nan, math.inf, 10**400, [16])],
        *[(field, value) for field in ("use_rslora", "use_dora", "lora_bias") for value in (1, "true", [])],
        *[("bias", value) for value in (None, True, "boft_only", ["all"])],
        *[("target_modules", value) for value in (3, {"q_proj": 1}, ["q_proj", 3], "(", "*")],
        *[("modules_to_save", value) for value in (True, 3, {"lm_head": 1}, [3], ["lm.*head"], [""])],
        *[
            ("trainable_token_indices", value)
            for value in (True, "5", [1.0], [True], [-1], [2, 2], {"a": 1}, {"(": [1]})
        ],
        *[("ensure_weight_tying", value) for value in (1, "true")],
        *[("exclude_modules", value) for value in (3, {}, [None], "[")],
        *[("rank_pattern", value) for value in ([], "x", {"q_proj": 0}, {"q_proj": "8"}, {"q_proj": 513}, {"(": 8})],
        *[("alpha_pattern", value) for value in ([], {"q_proj": None}, {"q_proj": math.nan}, {"a(?P<": 8})],
        *[("layers_to_transform", value) for value in ("1", 1.5, [True], [None], {"1": 1})],
    ],
)
def test_values_of_the_wrong_type_or_range_are_refused_by_name(field: str, value: object) -> None:
    assert rejected(**{field: value}) == field


def test_a_bias_of_b_beside_dora_is_refused_as_peft_refuses_it() -> None:
    assert rejected(use_dora=True, lora_bias=True) == "lora_bias"


def test_kinds_of_training_are_part_of_the_meaning() -> None:
    kinds: list[dict[str, Any]] = [{}, {"use_dora": True}, {"lora_bias": True}, {"bias": "all"}, {"bias": "lora_only"}]
    kinds += [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [3]}, {"ensure_weight_tying": True}]
    kinds += [{"trainable_token_indices": {"lm_head": [3]}}, {"trainable_token_indices": [4]}]
    assert len({parse(**fields).canonical() for fields in kinds}) == len(kinds)


def test_what_trains_nothing_beside_lora_is_nothing() -> None:
    for value in (None, False, [], {}):
        assert parse(trainable_token_indices=value) == parse()
    for value in (None, False, []):
        assert parse(modules_to_save=value) == parse()


def test_layer_fields_are_refused_where_peft_refuses_them() -> None:
    assert rejected(target_modules="all-linear", layers_to_transform=[0]) == "layers_to_transform"
    assert rejected(target_modules=".*q_proj", layers_pattern="layers") == "layers_pattern"
    assert rejected(layers_pattern=["layers"]) == "layers_pattern"
    assert rejected(layers_to_transform=[0], layers_pattern=[3]) == "layers_pattern"
    assert rejected(layers_to_transform=[0], layers_pattern="(") == "layers_pattern"


def test_a_layer_and_a_list_of_one_layer_are_the_same() -> None:
    assert parse(layers_to_transform=1) == parse(layers_to_transform=[1])


def test_the_canonical_form_ignores_the_order_of_sets_but_not_of_patterns() -> None:
    assert parse(target_modules=["a", "b"]).canonical() == parse(target_modules=["b", "a", "b"]).canonical()
    assert parse(lora_alpha=16).canonical() == parse(lora_alpha=16.0).canonical()
    forward, backward = {"q_proj": 8, ".*proj": 4}, {".*proj": 4, "q_proj": 8}
    assert parse(rank_pattern=forward).canonical() != parse(rank_pattern=backward).canonical()


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '"text"', "\xff", "[" * 100_000, "1" * 5000])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "adapter_config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(AdapterRejectedError) as caught:
        read_peft_config(tmp_path)
    assert caught.value.param == "adapter_config.json"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=6,
)
# Expressions other than plain names start a process each, so one field at a time is made of them.
plausible = st.sampled_from([8, "q_proj", ["q_proj"], {"q_proj": 8}, [0], ".*q_proj", "all-linear"])


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(PEFT_FIELDS)) | st.text(max_size=8), json_values | plausible, max_size=4))
def test_any_json_gives_a_config_or_a_rejection(fields: dict[str, Any]) -> None:
    rejection = None
    try:
        assert isinstance(parse_peft_config({"peft_type": "LORA"} | fields), PeftConfig)
    except AdapterRejectedError as error:
        rejection = error
    assert rejection is None or rejection.param is not None
    str(rejection).encode("utf-8")


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["target_modules", "exclude_modules", "layers_pattern", "rank_pattern"]), st.text(max_size=12))
def test_any_expression_gives_a_config_or_a_rejection(field: str, source: str) -> None:
    value = {source: 8} if field == "rank_pattern" else source
    blamed = field
    try:
        parse(**{field: value}, **({"layers_to_transform": [0]} if field == "layers_pattern" else {}))
    except AdapterRejectedError as error:
        blamed = str(error.param)
    assert blamed == field
