from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
import torch

from ray_lora.adapters.output_change import ROWS_AT_ONCE, change_outputs, row_norms
from ray_lora.adapters.peft_weights import AdapterWeights, LoRAWeight
from ray_lora.adapters.shard_cut import shard_weights
from ray_lora.architecture import EMBEDDING, HEAD, Architecture, Projection, parse_architecture
from ray_lora.errors import AdapterRejectedError

Q, DOWN = (0, "self_attn.q_proj"), (1, "mlp.down_proj")


@pytest.fixture
def biased() -> Architecture:
    """Two layers, hidden 48, biases everywhere."""
    config = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "attention_bias": True,
        "mlp_bias": True,
    }
    return parse_architecture(config, {})


class RandomBase:
    """A base model whose every layer is drawn anew from its place."""

    def weight(self, module: str, projection: Projection) -> torch.Tensor:
        return self._draw(module, projection.out_features, projection.in_features)

    def bias(self, module: str, projection: Projection) -> torch.Tensor:
        return self._draw(module, projection.out_features)

    def _draw(self, module: str, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(crc32(module.encode())))


def lora_weight(projection: Projection, **vectors: torch.Tensor) -> LoRAWeight:
    generator = torch.Generator().manual_seed(1)
    lora_a = torch.randn(4, projection.in_features, generator=generator)
    return LoRAWeight(lora_a, torch.randn(projection.out_features, 4, generator=generator), **vectors)


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_ranks_together_compute_what_the_definition_says(tp_size: int, biased: Architecture) -> None:
    """magnitude / norm * (x @ W.T + x @ A.T @ B.T) + replaced bias, for a column- and a row-parallel module."""
    projections = {projection.name: projection for projection in biased.projections}
    base = RandomBase()
    for layer, name in (Q, DOWN):
        projection, module = projections[name], f"model.layers.{layer}.{name}"
        magnitude, new_bias = torch.rand(projection.out_features) + 0.5, torch.randn(projection.out_features)
        weight = lora_weight(projection, magnitude=magnitude)
        weights = AdapterWeights({(layer, name): weight}, 0, {(layer, name): new_bias})
        changed = change_outputs(weights, biased, lambda: base)
        base_weight, base_bias = base.weight(module, projection), base.bias(module, projection)
        x = torch.randn(5, projection.in_features)
        whole = base_weight + weight.lora_b @ weight.lora_a
        expected = x @ (magnitude / whole.norm(dim=1) * whole.T) + new_bias

        parts = []
        for rank in range(tp_size):
            shard = shard_weights(changed, biased, "v", rank, tp_size, torch.float32)
            (entry,), (output,) = shard.entries, shard.outputs
            cut = projection.shard(rank, tp_size)
            inputs = x if projection.style == "column" else x[:, cut]
            rows = base_weight[cut] if projection.style == "column" else base_weight[:, cut]
            own_bias = base_bias[cut] if projection.style == "column" else base_bias * (rank == 0)
            y = inputs @ rows.T + own_bias + inputs @ shard.lora_a(entry).T @ shard.lora_b_t(entry)
            change = shard.output_change(output)
            parts.append(change.scale * y + change.shift)
        total = torch.cat(parts, dim=1) if projection.style == "column" else sum(parts)
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_changes_of_outputs_travel_as_float32_whatever_the_pages_hold(dtype: torch.dtype, biased: Architecture) -> None:
    """Behind an odd number of half-precision values, at that."""
    projection = biased.projections[0]
    weight = LoRAWeight(torch.randn(1, 48), torch.randn(48, 1), bias=torch.randn(48))
    weights = change_outputs(AdapterWeights({Q: weight}, 0), biased, lambda: RandomBase())
    shard = shard_weights(weights, biased, "v", 0, 1, dtype)
    (output,) = shard.outputs
    change = shard.output_change(output)
    assert torch.equal(change.scale, torch.ones(projection.out_features))
    torch.testing.assert_close(change.shift, weight.bias, rtol=1e-6, atol=1e-6)
    before = shard.digest()
    shard.payload[-1] ^= 1
    assert shard.digest() != before


def test_norms_are_those_of_all_rows_at_once() -> None:
    projection = Projection("x", 24, 2 * ROWS_AT_ONCE + 3, "column")
    weight, base = lora_weight(projection), torch.randn(projection.out_features, 24)
    expected = (base + weight.lora_b @ weight.lora_a).norm(dim=1)
    torch.testing.assert_close(row_norms(base, weight), expected)


def test_a_magnitude_of_a_row_of_zeros_is_refused_by_its_tensor(biased: Architecture) -> None:
    base, weight = RandomBase(), lora_weight(biased.projections[0], magnitude=torch.ones(48))
    base.weight = lambda module, projection: -weight.lora_b @ weight.lora_a  # type: ignore[method-assign]
    with pytest.raises(AdapterRejectedError, match="row of zeros") as caught:
        change_outputs(AdapterWeights({Q: weight}, 0), biased, lambda: base)
    assert caught.value.param == "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"


def test_a_plain_adapter_never_opens_the_base(biased: Architecture, tmp_path: Path) -> None:
    weights = AdapterWeights({Q: lora_weight(biased.projections[0])}, 0)

    def open_base() -> RandomBase:
        raise AssertionError("opened")

    assert change_outputs(weights, biased, open_base) is weights


@pytest.mark.parametrize("module", [EMBEDDING, HEAD])
def test_another_base_in_the_file_is_refused_by_its_tensor(module: str, biased: Architecture) -> None:
    own = RandomBase().weight(module, biased.vocabulary[module])
    copy = own.T if module == EMBEDDING else own
    weights = AdapterWeights({Q: lora_weight(biased.projections[0])}, 0, base_copies={module: copy})
    assert not change_outputs(weights, biased, RandomBase).base_copies
    with pytest.raises(AdapterRejectedError, match="save_embedding_layers=False") as caught:
        change_outputs(replace(weights, base_copies={module: copy + 1}), biased, RandomBase)
    assert caught.value.param == f"base_model.model.{module}.base_layer.weight"
