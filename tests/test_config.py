from pathlib import Path
from typing import Any

import pytest

from ray_lora.config import MAX_RANK, EngineConfig, LoRAModule
from ray_lora.errors import ConfigError

MODEL = {"model": "/models/tiny"}


def refusal(**fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.parse(MODEL | fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("max_lora", "max_loras"),
        ("max_lora_ranks", "max_lora_rank"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("served_model_names", "served_model_name"),
        ("max_num_seq", "max_num_seqs"),
        ("enable_prefix_cache", "enable_prefix_caching"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key: str, nearest: str) -> None:
    assert refusal(**{key: 1}) == f"unknown key {key!r}; did you mean {nearest!r}?"


def test_a_key_like_no_other_is_refused_without_a_guess() -> None:
    assert refusal(zzzzqqq=1) == "unknown key 'zzzzqqq'"


WRONG: list[tuple[str, Any]] = [
    ("model", 5),
    ("dtype", "int8"),
    ("device", "tpu"),
    ("seed", "x"),
    ("max_model_len", 0),
    ("max_num_seqs", 0),
    ("max_num_batched_tokens", -1),
    ("block_size", 0),
    ("block_size", 257),
    ("kv_cache_memory_bytes", 0),
    ("enable_prefix_caching", "maybe"),
    ("max_loras", -1),
    ("max_lora_rank", 0),
    ("max_lora_rank", MAX_RANK + 1),
    ("max_lora_rank", 1.5),
    ("max_lora_pages", 0),
    ("max_lora_pages", 3),
    ("max_cpu_loras", 0),
    ("lora_dtype", "int4"),
    ("lora_modules", 5),
    ("lora_modules", ["no separator"]),
    ("lora_modules", ["=path"]),
    ("lora_modules", ["name="]),
    ("lora_modules", [5]),
    ("lora_modules", [{"name": "a"}]),
    ("lora_modules", [{"name": "a", "path": "p", "rank": 5}]),
    ("lora_modules", {"a": None}),
    ("lora_modules", [{"name": "a", "path": "p", "weight": 0}]),
    ("lora_modules", [{"name": "a", "path": "p", "pinned": "maybe"}]),
    ("base_model_weight", 0),
    ("base_model_weight", float("nan")),
    ("base_model_weight", 1001),
    ("lora_modules", ["two\nlines"]),
    ("adapter_load_timeout_s", 0),
    ("tensor_parallel_size", 0),
    ("distributed_executor_backend", "mp"),
    ("placement_group_strategy", "NEAR"),
    ("num_threads", 0),
    ("rank_num_cpus", 0),
    ("step_timeout_s", -5),
    ("max_num_seqs", None),
    ("max_num_seqs", [1]),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_every_wrong_value_is_refused_in_one_line_that_names_the_key(key: str, value: Any) -> None:
    assert key in refusal(**{key: value})


def test_the_model_is_required() -> None:
    with pytest.raises(ConfigError, match=r"^model: "):
        EngineConfig.parse({})


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        (
            {"distributed_executor_backend": "local", "tensor_parallel_size": 2},
            ["distributed_executor_backend", "tensor_parallel_size"],
        ),
        ({"lora_modules": ["a=b"], "max_loras": 0}, ["lora_modules", "max_loras"]),
        ({"max_lora_pages": 1, "max_lora_rank": 17}, ["max_lora_pages", "max_lora_rank"]),
    ],
)
def test_values_that_do_not_fit_together_are_refused_by_both_names(fields: dict[str, Any], keys: list[str]) -> None:
    message = refusal(**fields)
    assert all(key in message for key in keys)


def test_the_place_of_a_fault_in_a_list_is_named() -> None:
    assert refusal(lora_modules=["a=b", {"name": "c"}]).startswith("lora_modules.1.path: ")


@pytest.mark.parametrize(
    "lora_modules",
    [
        ["a=/x/a", "b=/x=y/b"],
        {"a": "/x/a", "b": "/x=y/b"},
        [{"name": "a", "path": "/x/a"}, {"name": "b", "path": "/x=y/b"}],
        ["a=/x/a", {"name": "b", "path": "/x=y/b"}],
    ],
    ids=str,
)
def test_adapters_are_given_in_any_of_four_ways(lora_modules: Any) -> None:
    config = EngineConfig.parse(MODEL | {"lora_modules": lora_modules})
    assert config.lora_modules == (LoRAModule(name="a", path="/x/a"), LoRAModule(name="b", path="/x=y/b"))


def test_an_adapter_may_be_given_with_its_settings() -> None:
    module = {"name": "a", "path": "/x/a", "weight": 2, "pinned": True}
    config = EngineConfig.parse(MODEL | {"lora_modules": [module, "b=/x/b"]})
    assert [(each.weight, each.pinned) for each in config.lora_modules] == [(2.0, True), (1.0, False)]


def test_a_config_does_not_change() -> None:
    config = EngineConfig.parse(MODEL)
    with pytest.raises(ValueError, match="frozen"):
        config.max_loras = 3  # type: ignore[misc]


def test_names_come_from_the_path_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = EngineConfig.parse({"model": "~/models/tiny-llama"})
    assert config.model_path == Path("/home/me/models/tiny-llama")
    assert config.base_model_name == "tiny-llama"
    assert EngineConfig.parse(MODEL | {"served_model_name": "other"}).base_model_name == "other"


@pytest.mark.parametrize(
    ("fields", "num_pages"),
    [
        ({}, 16 * 4),
        ({"max_loras": 3, "max_lora_rank": 17}, 6),
        ({"max_loras": 3, "max_lora_rank": 16}, 3),
        ({"max_loras": 3, "max_lora_pages": 50}, 50),
        ({"max_loras": 0}, 0),
        ({"max_loras": 0, "max_lora_pages": 50}, 0),
        ({"max_loras": 1, "max_lora_rank": MAX_RANK}, 32),
    ],
)
def test_pages_are_enough_for_the_largest_adapters_unless_given(fields: dict[str, Any], num_pages: int) -> None:
    assert EngineConfig.parse(MODEL | fields).num_lora_pages == num_pages


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, 64),
        ({"max_loras": 100}, 100),
        ({"max_loras": 3, "max_cpu_loras": 3}, 3),
        ({"max_loras": 8, "max_cpu_loras": 200}, 200),
    ],
)
def test_as_many_adapters_are_in_host_memory_as_it_is_configured_for(fields: dict[str, Any], limit: int) -> None:
    assert EngineConfig.parse(MODEL | fields).max_staged_loras == limit


@pytest.mark.parametrize(
    ("fields", "uses_ray"),
    [
        ({}, False),
        ({"tensor_parallel_size": 2}, True),
        ({"distributed_executor_backend": "ray"}, True),
        ({"distributed_executor_backend": "ray", "tensor_parallel_size": 2}, True),
        ({"distributed_executor_backend": "local"}, False),
        ({"device": "npu"}, True),
        ({"device": "npu", "distributed_executor_backend": "local"}, False),
    ],
)
def test_ray_is_used_for_more_than_one_rank_or_if_asked_for(fields: dict[str, Any], uses_ray: bool) -> None:
    assert EngineConfig.parse(MODEL | fields).uses_ray == uses_ray


def test_ranks_share_the_cores_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    for size, num_threads in ((1, 8), (2, 4), (3, 2), (16, 1)):
        assert EngineConfig.parse(MODEL | {"tensor_parallel_size": size}).num_rank_threads == num_threads
    assert EngineConfig.parse(MODEL | {"num_threads": 5, "tensor_parallel_size": 2}).num_rank_threads == 5
