"""Compress, merge and convert: the files they write, as PEFT and the server load them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SaveAdapter
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from ray_lora.adapters.adapter_files import read_adapter
from ray_lora.adapters.adapter_report import describe
from ray_lora.adapters.adapter_tools import compress, convert, merge
from ray_lora.adapters.peft_weights import read_weights
from ray_lora.architecture import Architecture
from ray_lora.errors import AdapterRejectedError, InvalidRequestError

PROMPT = torch.tensor([[1, 5, 9, 42, 7, 80]])
MIXED: dict[str, Any] = {
    "r": 6,
    "target_modules": "all-linear",
    "rank_pattern": {"k_proj": 3, r"layers\.1\.mlp\.up_proj": 9},
    "alpha_pattern": {"q_proj": 5},
    "use_rslora": True,
}


def served_deltas(directory: Path, arch: Architecture) -> dict[tuple[int, str], torch.Tensor]:
    """Dense, in float64, as the server computes them."""
    weights = read_weights(directory, arch, max_lora_rank=512)
    return {key: weight.lora_b.double() @ weight.lora_a.double() for key, weight in weights.modules.items()}


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(PROMPT).logits


def loaded_logits(tiny_llama: LlamaForCausalLM, directory: Path) -> torch.Tensor:
    return logits(PeftModel.from_pretrained(copy.deepcopy(tiny_llama), str(directory)).eval())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("energy", [0.5, 0.9, 0.999])
def test_a_compressed_delta_keeps_its_energy_and_reports_its_error(
    energy: float, dtype: torch.dtype, save_adapter: SaveAdapter, arch: Architecture, tmp_path: Path
) -> None:
    save_adapter(tmp_path / "old", dtype=dtype, **MIXED)
    cuts = {cut.name: cut for cut in compress(tmp_path / "old", tmp_path / "new", energy=energy, dtype=None)}
    before, after = served_deltas(tmp_path / "old", arch), served_deltas(tmp_path / "new", arch)
    assert before.keys() == after.keys()
    assert len(cuts) == len(before)
    for (layer, projection), delta in before.items():
        cut = cuts[f"model.layers.{layer}.{projection}"]
        error = float((delta - after[layer, projection]).norm())
        assert error <= (1 - energy) ** 0.5 * float(delta.norm()) * (1 + 1e-6)
        assert cut.error == pytest.approx(error, rel=1e-3, abs=1e-6)
        assert cut.norm == pytest.approx(float(delta.norm()), rel=1e-5)
        assert cut.new_rank <= cut.old_rank
    assert {tensor.dtype for tensor in load_file(tmp_path / "new" / "adapter_model.safetensors").values()} == {dtype}


def test_a_padded_rank_is_compressed_away(adapter_dir: Path, tmp_path: Path) -> None:
    twice = tmp_path / "twice"
    merge([adapter_dir, adapter_dir], [0.5, 0.5], twice, torch.float32)
    cuts = compress(twice, tmp_path / "new", energy=1 - 1e-10, dtype=None)
    assert {(cut.old_rank, cut.new_rank) for cut in cuts} == {(8, 4)}


def test_an_energy_that_a_dtype_cannot_hold_is_refused(adapter_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterRejectedError, match=r"bfloat16 cannot hold 0\.999999 of the energy"):
        compress(adapter_dir, tmp_path / "new", energy=0.999999, dtype=torch.bfloat16)
    assert not (tmp_path / "new").exists()


def test_a_given_rank_is_an_upper_limit(save_adapter: SaveAdapter, tmp_path: Path) -> None:
    save_adapter(tmp_path / "old", **MIXED)
    cuts = compress(tmp_path / "old", tmp_path / "new", rank=4, dtype=None)
    assert {(cut.old_rank, cut.new_rank) for cut in cuts} == {(3, 3), (6, 4), (9, 4)}


def test_peft_gives_the_same_logits_for_a_lossless_compression(
    save_adapter: SaveAdapter, tiny_llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    model = save_adapter(tmp_path / "old", **MIXED)
    compress(tmp_path / "old", tmp_path / "new", rank=9, dtype=None)
    torch.testing.assert_close(loaded_logits(tiny_llama, tmp_path / "new"), logits(model.eval()), rtol=1e-4, atol=1e-5)


def test_a_merge_is_the_weighted_sum_of_the_deltas(
    save_adapter: SaveAdapter, arch: Architecture, tmp_path: Path
) -> None:
    save_adapter(tmp_path / "a", seed=1, **MIXED)
    save_adapter(tmp_path / "b", seed=2, dtype=torch.bfloat16, target_modules=["q_proj", "down_proj"])
    ranks = merge([tmp_path / "a", tmp_path / "b"], [0.7, -1.5], tmp_path / "sum", torch.float32)
    a, b, total = (served_deltas(tmp_path / name, arch) for name in ("a", "b", "sum"))
    assert total.keys() == a.keys() | b.keys()
    for key, delta in total.items():
        torch.testing.assert_close(delta, 0.7 * a[key] - 1.5 * b.get(key, 0), rtol=1e-6, atol=1e-7)
    assert ranks["model.layers.0.self_attn.q_proj"] == 6 + 8
    assert ranks["model.layers.1.mlp.up_proj"] == 9


def test_peft_gives_the_logits_of_its_own_linear_combination(
    save_adapter: SaveAdapter, tiny_llama: LlamaForCausalLM, tmp_path: Path
) -> None:
    model = save_adapter(tmp_path / "a", seed=1)
    save_adapter(tmp_path / "b", seed=2)
    merge([tmp_path / "a", tmp_path / "b"], [0.25, 0.75], tmp_path / "sum", torch.float32)
    model.load_adapter(str(tmp_path / "b"), "b")
    model.add_weighted_adapter(["default", "b"], [0.25, 0.75], "sum", combination_type="cat")
    model.set_adapter("sum")
    torch.testing.assert_close(loaded_logits(tiny_llama, tmp_path / "sum"), logits(model.eval()), rtol=1e-4, atol=1e-5)


def test_adapters_of_different_base_models_are_not_merged(adapter_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    rewrite(adapter_dir, other, lambda name, tensor: torch.cat([tensor, tensor], 1) if "lora_A" in name else tensor)
    with pytest.raises(AdapterRejectedError, match="different base models"):
        merge([adapter_dir, other], [1, 1], tmp_path / "sum", torch.float32)


def test_a_merge_above_the_largest_rank_is_refused(save_adapter: SaveAdapter, tmp_path: Path) -> None:
    save_adapter(tmp_path / "a", r=300)
    with pytest.raises(AdapterRejectedError, match="rank 600, more than the 512"):
        merge([tmp_path / "a"] * 2, [1, 1], tmp_path / "sum", torch.float32)


@pytest.mark.filterwarnings("ignore:Using Rank-Stabilized LoRA:UserWarning")  # PEFT's own conversion cannot do it
@pytest.mark.parametrize("kind", ["pissa", "olora", "pissa_niter_4"])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_converted_adapter_gives_on_the_original_base_what_training_gave_on_its_own(
    kind: str, use_rslora: bool, tiny_llama: LlamaForCausalLM, arch: Architecture, tmp_path: Path
) -> None:
    fields = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    pattern = {"rank_pattern": {"down_proj": 3}}
    config = LoraConfig(init_lora_weights=kind, use_rslora=use_rslora, **fields, **pattern)
    model = get_peft_model(copy.deepcopy(tiny_llama), config).eval()
    torch.testing.assert_close(logits(model), logits(tiny_llama), rtol=1e-3, atol=1e-4)
    model.save_pretrained(str(tmp_path / "initial"))
    train(model)
    model.save_pretrained(str(tmp_path / "trained"))
    with pytest.raises(AdapterRejectedError, match="init_lora_weights"):
        read_weights(tmp_path / "trained", arch, 64)
    ranks = convert(tmp_path / "trained", tmp_path / "initial", tmp_path / "plain", torch.float32)
    assert set(ranks.values()) == {8, 6}
    read_weights(tmp_path / "plain", arch, 64)
    torch.testing.assert_close(loaded_logits(tiny_llama, tmp_path / "plain"), logits(model), rtol=1e-4, atol=1e-5)


def test_conversion_is_refused_where_it_is_not_needed_or_not_possible(adapter_dir: Path, tmp_path: Path) -> None:
    def attempt(trained: Path, initial: Path) -> None:
        convert(trained, initial, tmp_path / "plain", torch.float32)

    with pytest.raises(AdapterRejectedError, match="nothing to convert"):
        attempt(adapter_dir, adapter_dir)
    trained, loftq, other = tmp_path / "trained", tmp_path / "loftq", tmp_path / "other"
    rewrite(adapter_dir, trained, lambda _, tensor: tensor + 1, init_lora_weights="pissa")
    rewrite(adapter_dir, loftq, lambda _, tensor: tensor, init_lora_weights="loftq")
    with pytest.raises(AdapterRejectedError, match="train anew"):
        attempt(loftq, adapter_dir)
    with pytest.raises(AdapterRejectedError, match="nothing was trained"):
        attempt(trained, trained)
    merge([adapter_dir, adapter_dir], [1, 1], other, torch.float32)
    with pytest.raises(AdapterRejectedError, match="not where it started"):
        attempt(trained, other)
    assert not (tmp_path / "plain").exists()
    attempt(trained, adapter_dir)


def test_an_output_that_exists_is_left_alone(adapter_dir: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in adapter_dir.iterdir()}
    with pytest.raises(InvalidRequestError, match="exists"):
        compress(adapter_dir, adapter_dir, energy=0.9, dtype=None)
    with pytest.raises(InvalidRequestError, match="1 adapters but 2 weights"):
        merge([adapter_dir], [1, 2], tmp_path / "sum", torch.float32)
    assert {file.name: file.read_bytes() for file in adapter_dir.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_a_value_beyond_float16_is_refused_and_leaves_nothing(adapter_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterRejectedError, match="beyond the range"):
        merge([adapter_dir], [1e6], tmp_path / "sum", torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_the_report_measures_every_module(adapter_dir: Path, arch: Architecture) -> None:
    report = describe(adapter_dir, arch)
    assert report.refusals == ()
    assert [module.name for module in report.modules] == [
        "model.layers.1.mlp.down_proj",
        "model.layers.1.self_attn.q_proj",
    ]
    deltas = served_deltas(adapter_dir, arch)
    for module in report.modules:
        delta = deltas[1, module.name.removeprefix("model.layers.1.")]
        assert (module.out_features, module.in_features) == tuple(delta.shape)
        assert (module.rank, module.scale) == (4, 2.0)
        assert module.norm_delta == pytest.approx(float(delta.norm()), rel=1e-6)
    assert report.num_params == 4 * (64 + 64 + 128 + 64)
    assert report.num_bytes == 4 * report.num_params
    assert report.num_pages == 1


def test_the_report_names_everything_that_would_be_refused(adapter_dir: Path, arch: Architecture) -> None:
    file = adapter_dir / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_qalora": True, "task_type": "SEQ_CLS"}))
    report = describe(adapter_dir)
    assert len(report.modules) == 2
    assert [refusal.split()[0] for refusal in report.refusals] == ["task_type", "use_qalora"]


def test_the_report_checks_against_a_base_model(adapter_dir: Path, arch: Architecture, tmp_path: Path) -> None:
    other = tmp_path / "other"
    rewrite(adapter_dir, other, lambda name, tensor: torch.cat([tensor, tensor], 1) if "lora_A" in name else tensor)
    assert describe(other).refusals == ()
    (refusal,) = describe(other, arch).refusals
    assert "another base model" in refusal


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda tensors: tensors.popitem(), "is missing"),
        (lambda tensors: tensors.clear(), "holds no tensors"),
        (lambda tensors: tensors.update({"base_model.model.lm_head.weight": torch.zeros(2)}), "is not supported"),
        (lambda tensors: next(iter(tensors.values())).fill_(float("nan")), "not finite"),
    ],
)
def test_damaged_tensors_are_refused(break_it: Any, message: str, adapter_dir: Path) -> None:
    tensors = load_file(adapter_dir / "adapter_model.safetensors")
    break_it(tensors)
    save_file(tensors, adapter_dir / "adapter_model.safetensors")
    with pytest.raises(AdapterRejectedError, match=message):
        read_adapter(adapter_dir)


def test_a_missing_or_truncated_file_is_refused(adapter_dir: Path) -> None:
    weights = adapter_dir / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(AdapterRejectedError, match="truncated or damaged"):
        read_adapter(adapter_dir)
    weights.unlink()
    with pytest.raises(AdapterRejectedError, match="missing"):
        read_adapter(adapter_dir)


def train(model: PeftModel) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)


def rewrite(source: Path, target: Path, change: Any, **fields: Any) -> None:
    """A copy whose tensors went through `change` and whose configuration has other `fields`."""
    target.mkdir()
    config = json.loads((source / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(config | fields))
    tensors = load_file(source / "adapter_model.safetensors")
    save_file(
        {name: change(name, tensor).contiguous() for name, tensor in tensors.items()},
        target / "adapter_model.safetensors",
    )
