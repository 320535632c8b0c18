import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from ray_lora.adapters.peft_weights import AdapterWeights, read_weights
from ray_lora.architecture import Architecture
from ray_lora.errors import AdapterRejectedError

Tensors = dict[str, torch.Tensor]
PREFIX = "base_model.model.model.layers.1."
Q_A, Q_B = f"{PREFIX}self_attn.q_proj.lora_A.weight", f"{PREFIX}self_attn.q_proj.lora_B.weight"


def edit_config(directory: Path, **fields: Any) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def edit_tensors(directory: Path, edit: Callable[[Tensors], object]) -> None:
    file = directory / "adapter_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file)


def assert_equal_to_peft(weights: AdapterWeights, model: Any) -> None:
    """The same modules, and the same delta for each."""
    expected = {
        name.removeprefix("base_model.model."): module.get_delta_weight("default")
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert {f"model.layers.{layer}.{projection}" for layer, projection in weights.modules} == set(expected)
    for (layer, projection), weight in weights.modules.items():
        delta = weight.lora_b @ weight.lora_a.float()
        torch.testing.assert_close(delta, expected[f"model.layers.{layer}.{projection}"].float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]},
        {"target_modules": r".*layers\.0\.mlp\.(up|down)_proj"},
        {"target_modules": "all-linear", "exclude_modules": r".*mlp.*"},
        {
            "target_modules": "all-linear",
            "r": 3,
            "rank_pattern": {"q_proj": 2, "mlp.*": 5},
            "alpha_pattern": {"o_proj": 1},
        },
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        {"target_modules": ["q_proj", "o_proj"], "exclude_modules": ["layers.1.self_attn.o_proj"], "use_rslora": True},
        {"target_modules": ["up_proj"], "use_rslora": True, "rank_pattern": {"layers.0.*": 5}, "lora_alpha": 7},
        {"init_lora_weights": "orthogonal", "lora_alpha": 3, "r": 6},
        {"init_lora_weights": "mica"},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.5},
        {"use_dora": True, "target_modules": ["q_proj", "down_proj"]},
    ],
    ids=str,
)
def test_deltas_are_those_of_peft(
    fields: dict[str, Any], tmp_path: Path, arch: Architecture, save_adapter: Callable[..., Any]
) -> None:
    model = save_adapter(tmp_path, **fields)
    assert_equal_to_peft(read_weights(tmp_path, arch, 64), model)


def test_fan_in_fan_out_has_no_effect_as_in_peft(
    tmp_path: Path, arch: Architecture, save_adapter: Callable[..., Any]
) -> None:
    with pytest.warns(UserWarning, match="fan_in_fan_out"):
        model = save_adapter(tmp_path, target_modules=["q_proj", "down_proj"], fan_in_fan_out=True)
    edit_config(tmp_path, fan_in_fan_out=True)
    assert_equal_to_peft(read_weights(tmp_path, arch, 64), model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_keeps_the_type_of_the_file_and_b_is_scaled_in_float32(
    dtype: torch.dtype, adapter_dir: Path, arch: Architecture
) -> None:
    edit_tensors(adapter_dir, lambda tensors: tensors.update({key: t.to(dtype) for key, t in tensors.items()}))
    edit_config(adapter_dir, lora_alpha=12)
    stored = load_file(adapter_dir / "adapter_model.safetensors")
    weights = read_weights(adapter_dir, arch, 64)
    weight = weights.modules[1, "self_attn.q_proj"]
    assert torch.equal(weight.lora_a, stored[Q_A])
    assert torch.equal(weight.lora_b, stored[Q_B].float() * 3)
    assert weights.num_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert weights.rank == 4


def test_weights_outlive_their_files(adapter_dir: Path, arch: Architecture) -> None:
    weights = read_weights(adapter_dir, arch, 64)
    before = weights.modules[1, "mlp.down_proj"].lora_a.clone()
    (adapter_dir / "adapter_model.safetensors").write_bytes(b"")
    assert torch.equal(weights.modules[1, "mlp.down_proj"].lora_a, before)


MAGNITUDE_NAMES = ("lora_magnitude_vector", "lora_magnitude_vector.default", "lora_magnitude_vector.default.weight")


@pytest.mark.parametrize("magnitude", MAGNITUDE_NAMES)
def test_keys_with_the_default_adapter_name_are_accepted(magnitude: str, adapter_dir: Path, arch: Architecture) -> None:
    expected = read_weights(adapter_dir, arch, 64)

    def rename(tensors: Tensors) -> None:
        for key in list(tensors):
            tensors[key.replace(".weight", ".default.weight")] = tensors.pop(key)
        tensors.update(
            {f"{PREFIX}{name}.{magnitude}": torch.ones(64) for name in ("self_attn.q_proj", "mlp.down_proj")}
        )

    edit_config(adapter_dir, use_dora=True)
    edit_tensors(adapter_dir, rename)
    weights = read_weights(adapter_dir, arch, 64)
    for module, weight in expected.modules.items():
        assert torch.equal(weights.modules[module].lora_b, weight.lora_b)
        assert torch.equal(weights.modules[module].magnitude, torch.ones(64))


def put(key: str, value: torch.Tensor | None = None) -> Callable[[Path], None]:
    """An edit that adds or replaces one tensor."""
    return lambda directory: edit_tensors(
        directory, lambda tensors: tensors.update({key: torch.ones(1) if value is None else value})
    )


def poison(key: str, value: float) -> Callable[[Path], None]:
    return lambda directory: edit_tensors(directory, lambda tensors: tensors[key].view(-1)[-1:].fill_(value))


def drop(key: str) -> Callable[[Path], None]:
    return lambda directory: edit_tensors(directory, lambda tensors: tensors.pop(key))


def config(**fields: Any) -> Callable[[Path], None]:
    return lambda directory: edit_config(directory, **fields)


def overwrite(edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        file = directory / "adapter_model.safetensors"
        file.write_bytes(edit(file.read_bytes()))

    return apply


FILE = "adapter_model.safetensors"
BAD_ADAPTERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "no weights": (lambda directory: (directory / FILE).unlink(), FILE),
    "no config": (lambda directory: (directory / "adapter_config.json").unlink(), "adapter_config.json"),
    "empty file": (overwrite(lambda raw: b""), FILE),
    "truncated header": (overwrite(lambda raw: raw[:100]), FILE),
    "truncated data": (overwrite(lambda raw: raw[:-4]), FILE),
    "trailing data": (overwrite(lambda raw: raw + b"1234"), FILE),
    "header too long": (overwrite(lambda raw: (1 << 40).to_bytes(8, "little") + raw[8:]), FILE),
    "header is not JSON": (overwrite(lambda raw: raw[:8] + b"x" + raw[9:]), FILE),
    "a pickle": (overwrite(lambda raw: b"\x80\x04]\x94."), FILE),
    "wrong input size": (put(Q_A, torch.ones(4, 32)), Q_A),
    "wrong output size": (put(Q_B, torch.ones(32, 4)), Q_B),
    "transposed": (put(Q_A, torch.ones(64, 4)), Q_A),
    "one dimension": (put(Q_A, torch.ones(256)), Q_A),
    "empty tensor": (put(Q_A, torch.ones(0)), Q_A),
    "other rank than r": (put(Q_A, torch.ones(8, 64)), Q_A),
    "other rank than rank_pattern": (config(rank_pattern={"q_proj": 8}), Q_A),
    "rank 0": (put(Q_A, torch.ones(0, 64)), Q_A),
    "float64": (put(Q_A, torch.ones(4, 64, dtype=torch.float64)), Q_A),
    "int8": (put(Q_A, torch.ones(4, 64, dtype=torch.int8)), Q_A),
    "nan": (poison(Q_A, float("nan")), Q_A),
    "inf": (poison(Q_B, float("inf")), Q_B),
    "alpha beyond float32": (config(lora_alpha=1e300), "lora_alpha"),
    "alpha that overflows B": (config(lora_alpha=1e39), "lora_alpha"),
    "a tensor is missing": (drop(Q_B), Q_B),
    "a module is missing": (config(target_modules=["q_proj", "k_proj", "down_proj"]), Q_A.replace("q_proj", "k_proj")),
    "a layer is missing": (config(layers_to_transform=[0, 1]), Q_A.replace("layers.1", "layers.0")),
    "a module is not selected": (config(target_modules=["down_proj"]), Q_A),
    "no prefix": (
        put("model.layers.1.self_attn.q_proj.lora_A.weight"),
        "model.layers.1.self_attn.q_proj.lora_A.weight",
    ),
    "twice": (put(Q_A.replace(".weight", ".default.weight"), torch.ones(4, 64)), Q_A),
    "layer too high": (put(Q_A.replace("layers.1", "layers.2")), Q_A.replace("layers.1", "layers.2")),
    "head": (put("base_model.model.lm_head.lora_A.weight"), "base_model.model.lm_head.lora_A.weight"),
    "embedding": (
        put("base_model.model.model.embed_tokens.lora_embedding_A"),
        "base_model.model.model.embed_tokens.lora_embedding_A",
    ),
    "saved head": (put("base_model.model.lm_head.weight"), "base_model.model.lm_head.weight"),
    "DoRA without use_dora": (
        put(f"{PREFIX}self_attn.q_proj.lora_magnitude_vector"),
        f"{PREFIX}self_attn.q_proj.lora_magnitude_vector",
    ),
    "a bias without lora_bias": (put(Q_B.replace("weight", "bias")), Q_B.replace("weight", "bias")),
    "no magnitude": (config(use_dora=True), f"{PREFIX}self_attn.q_proj.lora_magnitude_vector"),
    "no bias of B": (config(lora_bias=True), Q_B.replace("weight", "bias")),
    "a bias that the base lacks": (
        lambda directory: [edit(directory) for edit in (config(bias="all"), put(f"{PREFIX}self_attn.q_proj.bias"))],
        f"{PREFIX}self_attn.q_proj.bias",
    ),
}


@pytest.mark.parametrize("case", BAD_ADAPTERS)
def test_a_bad_adapter_is_refused_by_the_name_of_what_is_wrong(
    case: str, adapter_dir: Path, arch: Architecture
) -> None:
    edit, param = BAD_ADAPTERS[case]
    edit(adapter_dir)
    with pytest.raises(AdapterRejectedError) as caught:
        read_weights(adapter_dir, arch, 64)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_a_wrong_shape_tells_both_shapes_and_the_trainers_base(adapter_dir: Path, arch: Architecture) -> None:
    put(Q_A, torch.ones(4, 32))(adapter_dir)
    edit_config(adapter_dir, base_model_name_or_path="acme/other-8b")
    with pytest.raises(AdapterRejectedError, match=r"\[4, 32\].*\[4, 64\].*acme/other-8b"):
        read_weights(adapter_dir, arch, 64)


@pytest.mark.parametrize(
    ("fields", "param"), [({"r": 65}, "r"), ({"rank_pattern": {"mlp.*": 512, "q_proj": 8}}, "rank_pattern")]
)
def test_a_rank_above_the_limit_names_the_key_to_raise(
    fields: dict[str, Any], param: str, adapter_dir: Path, arch: Architecture
) -> None:
    edit_config(adapter_dir, **fields)
    with pytest.raises(AdapterRejectedError, match="raise max_lora_rank") as caught:
        read_weights(adapter_dir, arch, 64)
    assert caught.value.param == param


def test_embeddings_take_no_bias_as_in_peft(adapter_dir: Path, arch: Architecture) -> None:
    edit_config(adapter_dir, target_modules=["embed_tokens"], layers_to_transform=None, lora_bias=True)
    with pytest.raises(AdapterRejectedError, match="embed_tokens") as caught:
        read_weights(adapter_dir, arch, 64)
    assert caught.value.param == "lora_bias"


def test_ties_that_the_file_breaks_are_refused(adapter_dir: Path, arch: Architecture) -> None:
    """PEFT would let the one that it reads last win."""
    tied = replace(arch, tie_word_embeddings=True)
    edit_config(adapter_dir, modules_to_save=["lm_head"], ensure_weight_tying=True)
    embedding, head = (f"base_model.model.{name}.weight" for name in ("model.embed_tokens", "lm_head"))
    put(embedding, torch.ones(96, 64))(adapter_dir)
    put(head, torch.ones(96, 64))(adapter_dir)
    assert set(read_weights(adapter_dir, tied, 64).saved) == {"model.embed_tokens", "lm_head"}
    put(head, torch.zeros(96, 64))(adapter_dir)
    with pytest.raises(AdapterRejectedError, match="differ in the file") as caught:
        read_weights(adapter_dir, tied, 64)
    assert caught.value.param == "ensure_weight_tying"


def test_an_r_that_no_module_has_is_not_limited(adapter_dir: Path, arch: Architecture) -> None:
    edit_config(adapter_dir, r=512, rank_pattern={".*_proj": 4})
    assert read_weights(adapter_dir, arch, 4).rank == 4


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_to_the_file_gives_weights_or_a_rejection(
    data: st.DataObject, adapter_dir: Path, arch: Architecture
) -> None:
    file = adapter_dir / FILE
    pristine = file.read_bytes()
    header_length = 8 + int.from_bytes(pristine[:8], "little")
    damaged = bytearray(pristine)
    for _ in range(data.draw(st.integers(1, 4))):
        region = data.draw(st.sampled_from([8, header_length, len(pristine)]))
        damaged[data.draw(st.integers(0, region - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.just(len(damaged)) | st.integers(0, len(damaged)))
    file.write_bytes(damaged[:cut])
    modules, param = {}, None
    try:
        modules = read_weights(adapter_dir, arch, 64).modules
    except AdapterRejectedError as error:
        param = error.param
    finally:
        file.write_bytes(pristine)
    assert modules or param
    assert all(torch.isfinite(weight.lora_b).all() for weight in modules.values())
