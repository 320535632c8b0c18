import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_lora.adapters.peft_weights import AdapterWeights, LoRAWeight, read_weights
from ray_lora.adapters.shard import AdapterShard
from ray_lora.adapters.shard_cut import shard_weights
from ray_lora.architecture import Architecture, parse_architecture
from ray_lora.errors import AdapterRejectedError

VERSION = "0" * 64


def make_arch(num_heads: int, num_kv_heads: int) -> Architecture:
    """Two layers of heads of 8, hidden 48, intermediate 96."""
    config = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 8,
    }
    return parse_architecture(config, {})


def random_weights(arch: Architecture, scale: float = 1.0) -> AdapterWeights:
    """Rank 5 on every projection of layer 0, rank 2 on those of the MLP of layer 1."""
    generator = torch.Generator().manual_seed(3)
    modules = {}
    for layer, rank in ((0, 5), (1, 2)):
        for projection in arch.projections:
            if layer == 1 and not projection.name.startswith("mlp"):
                continue
            modules[layer, projection.name] = LoRAWeight(
                torch.randn(rank, projection.in_features, generator=generator),
                torch.randn(projection.out_features, rank, generator=generator) * scale,
            )
    return AdapterWeights(modules, 0)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tp_size"),
    [(4, 2, 1), (4, 2, 2), (6, 3, 3), (4, 2, 4), (8, 1, 4), (8, 2, 8)],
)
def test_the_shards_of_all_ranks_together_are_the_adapter(num_heads: int, num_kv_heads: int, tp_size: int) -> None:
    arch = make_arch(num_heads, num_kv_heads)
    arch.check_tensor_parallel(tp_size)
    weights = random_weights(arch)
    projections = {projection.name: projection for projection in arch.projections}
    deltas = {
        module: torch.full((weight.lora_b.shape[0], weight.lora_a.shape[1]), float("nan"))
        for module, weight in weights.modules.items()
    }
    for rank in range(tp_size):
        shard = shard_weights(weights, arch, VERSION, rank, tp_size, torch.float32)
        for entry in shard.entries:
            projection = projections[entry.projection]
            assert shard.lora_a(entry).shape == (entry.rank, entry.in_features)
            assert shard.lora_b_t(entry).shape == (entry.rank, entry.out_features)
            delta = shard.lora_b_t(entry).T @ shard.lora_a(entry)
            cut = projection.shard(rank, tp_size)
            whole = deltas[entry.layer, entry.projection]
            (whole[cut] if projection.style == "column" else whole[:, cut]).copy_(delta)
    for module, weight in weights.modules.items():
        torch.testing.assert_close(deltas[module], weight.lora_b @ weight.lora_a, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_peft_adapter_survives_reading_and_sharding(
    tp_size: int, tmp_path: Path, arch: Architecture, save_adapter: Callable[..., Any]
) -> None:
    """Column- and row-parallel outputs, summed and put side by side as the ranks would, equal PEFT's delta."""
    model = save_adapter(tmp_path, target_modules=["k_proj", "down_proj"], use_rslora=True)
    weights = read_weights(tmp_path, arch, 64)
    shards = [shard_weights(weights, arch, VERSION, rank, tp_size, torch.float32) for rank in range(tp_size)]
    layer = model.base_model.model.model.layers[1]
    generator = torch.Generator().manual_seed(0)

    x = torch.randn(3, 64, generator=generator)
    index = [entry[:2] for entry in shards[0].entries].index((1, "self_attn.k_proj"))
    outputs = [x @ shard.lora_a(shard.entries[index]).T @ shard.lora_b_t(shard.entries[index]) for shard in shards]
    copies = max(1, tp_size // arch.num_kv_heads)
    expected = x @ layer.self_attn.k_proj.get_delta_weight("default").T
    torch.testing.assert_close(torch.cat(outputs[::copies], dim=1), expected, rtol=1e-5, atol=1e-5)

    x = torch.randn(3, 128, generator=generator)
    index = [entry[:2] for entry in shards[0].entries].index((1, "mlp.down_proj"))
    parts = x.chunk(tp_size, dim=1)
    total = sum(
        part @ shard.lora_a(shard.entries[index]).T @ shard.lora_b_t(shard.entries[index])
        for part, shard in zip(parts, shards, strict=True)
    )
    torch.testing.assert_close(total, x @ layer.mlp.down_proj.get_delta_weight("default").T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_rounded_once_from_float32(dtype: torch.dtype) -> None:
    arch = make_arch(4, 2)
    weights = random_weights(arch)
    shard = shard_weights(weights, arch, VERSION, 0, 1, dtype)
    assert shard.data.dtype == dtype
    for entry in shard.entries:
        weight = weights.modules[entry.layer, entry.projection]
        assert torch.equal(shard.lora_a(entry), weight.lora_a.to(dtype))
        assert torch.equal(shard.lora_b_t(entry), weight.lora_b.to(dtype).T)


def test_the_flat_tensor_has_no_holes() -> None:
    arch = make_arch(4, 2)
    shard = shard_weights(random_weights(arch), arch, VERSION, 1, 2, torch.bfloat16)
    assert [entry.offset for entry in shard.entries] == [0, *(entry.end for entry in shard.entries[:-1])]
    assert shard.data.shape == (shard.entries[-1].end,)
    assert shard.payload.nbytes == 2 * shard.entries[-1].end == shard.header.num_bytes


def test_values_beyond_float16_are_refused_by_module() -> None:
    arch = make_arch(4, 2)
    weights = random_weights(arch, scale=1e6)
    with pytest.raises(AdapterRejectedError, match="lora_dtype") as caught:
        shard_weights(weights, arch, VERSION, 0, 1, torch.float16)
    assert caught.value.param == "model.layers.0.self_attn.q_proj"
    shard_weights(weights, arch, VERSION, 0, 1, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_shard_travels_as_a_pickled_header_and_bytes(dtype: torch.dtype) -> None:
    arch = make_arch(4, 2)
    shard = shard_weights(random_weights(arch), arch, VERSION, 1, 2, dtype)
    assert shard.payload.data_ptr() == shard.data.data_ptr()
    header = pickle.loads(pickle.dumps(shard.header))
    received = torch.empty(header.num_bytes, dtype=torch.uint8).copy_(shard.payload)
    again = AdapterShard(header, received)
    assert again.data.data_ptr() == received.data_ptr()
    assert (again.version, again.entries, again.digest()) == (shard.version, shard.entries, shard.digest())


def test_a_payload_of_another_header_is_refused() -> None:
    arch = make_arch(4, 2)
    shard = shard_weights(random_weights(arch), arch, VERSION, 0, 2, torch.float32)
    for payload in (shard.payload[:-4], shard.data):
        with pytest.raises(ValueError, match="payload"):
            AdapterShard(shard.header, payload)


def test_digests_tell_apart_every_bit_version_rank_and_dtype() -> None:
    arch = make_arch(4, 2)
    weights = random_weights(arch)

    def make(version: str = VERSION, rank: int = 0, dtype: torch.dtype = torch.float16) -> AdapterShard:
        return shard_weights(weights, arch, version, rank, 2, dtype)

    flipped = make()
    flipped.payload[-1] ^= 1
    others = [flipped, make(version="1" * 64), make(rank=1), make(dtype=torch.bfloat16)]
    assert make().digest() == make().digest()
    assert len({shard.digest() for shard in (make(), *others)}) == 5


def test_fused_modules_are_those_with_at_least_one_changed_part() -> None:
    arch = make_arch(4, 2)
    whole = random_weights(arch)

    def fused(*names: str) -> frozenset[str]:
        modules = {module: weight for module, weight in whole.modules.items() if module[1] in names}
        return shard_weights(AdapterWeights(modules, 0), arch, VERSION, 0, 1, torch.float32).fused_modules(arch)

    assert fused("self_attn.v_proj") == {"self_attn.qkv_proj"}
    assert fused("mlp.up_proj", "self_attn.o_proj") == {"mlp.gate_up_proj", "self_attn.o_proj"}
    assert fused("mlp.down_proj") == {"mlp.down_proj"}
