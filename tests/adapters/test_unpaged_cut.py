import pytest
import torch

from ray_lora.adapters.peft_targets import NO_LAYER
from ray_lora.adapters.peft_weights import AdapterWeights, LoRAWeight, OutputChange
from ray_lora.adapters.shard import AdapterShard
from ray_lora.adapters.shard_cut import shard_weights
from ray_lora.adapters.unpaged_cut import cut_unpaged
from ray_lora.architecture import EMBEDDING, FINAL_NORM, HEAD, Architecture
from ray_lora.errors import AdapterRejectedError

VOCAB, HIDDEN = 96, 64


def make_weights() -> AdapterWeights:
    """A head that is LoRA with an output change, an embedding saved as a whole with token rows, and a norm."""
    return AdapterWeights(
        modules={},
        num_bytes=0,
        vocabulary={HEAD: LoRAWeight(torch.randn(3, HIDDEN), torch.randn(VOCAB, 3))},
        saved={EMBEDDING: torch.randn(VOCAB, HIDDEN), FINAL_NORM: torch.randn(HIDDEN)},
        token_rows={EMBEDDING: (torch.tensor([95, 3, 40]), torch.randn(3, HIDDEN))},
        outputs={(NO_LAYER, HEAD): OutputChange(torch.randn(VOCAB), torch.randn(VOCAB))},
    )


@pytest.mark.parametrize("tp_size", [1, 2, 5, 7])
def test_the_parts_of_all_ranks_together_are_the_adapter(tp_size: int, arch: Architecture) -> None:
    """Also where the last ranks have fewer tokens than the others."""
    weights = make_weights()
    parts = [cut_unpaged(weights, arch, rank, tp_size, torch.float32) for rank in range(tp_size)]
    width = -(-VOCAB // tp_size)

    def joined(name: str, dim: int = 0) -> torch.Tensor:
        whole = torch.cat([part[name] for part in parts], dim)
        assert not whole.narrow(dim, VOCAB, whole.shape[dim] - VOCAB).any(), "what pads is not zero"
        return whole.narrow(dim, 0, VOCAB)

    head, change = weights.vocabulary[HEAD], weights.outputs[NO_LAYER, HEAD]
    assert torch.equal(joined("model.embed_tokens.weight"), weights.saved[EMBEDDING])
    assert torch.equal(joined("lm_head.lora_b", dim=1), head.lora_b.T)
    assert torch.equal(joined("lm_head.scale"), change.scale)
    assert torch.equal(joined("lm_head.shift"), change.shift)
    for part in parts:
        assert torch.equal(part["lm_head.lora_a"], head.lora_a)
        assert torch.equal(part[FINAL_NORM], weights.saved[FINAL_NORM])
    ids = torch.cat([part[f"{EMBEDDING}.row_ids"] + rank * width for rank, part in enumerate(parts)])
    rows = torch.cat([part[f"{EMBEDDING}.rows"] for part in parts])
    expected_ids, expected_rows = weights.token_rows[EMBEDDING]
    order = [expected_ids.tolist().index(int(token_id)) for token_id in ids]
    assert sorted(order) == [0, 1, 2]
    assert torch.equal(rows, expected_rows[order])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shard_carries_them_without_a_page(dtype: torch.dtype, arch: Architecture) -> None:
    weights = make_weights()
    shard = shard_weights(weights, arch, "v", 1, 2, dtype)
    expected = cut_unpaged(weights, arch, 1, 2, dtype)
    again = AdapterShard(shard.header, shard.payload.clone())
    tensors = again.unpaged_tensors()
    assert list(tensors) == list(expected)
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])
    again.payload[-1] ^= 1
    assert again.digest() != shard.digest()


def test_values_beyond_float16_are_refused_by_module(arch: Architecture) -> None:
    weights = make_weights()
    weights.saved[EMBEDDING][3] = 1e6
    with pytest.raises(AdapterRejectedError, match="lora_dtype") as caught:
        shard_weights(weights, arch, "v", 0, 1, torch.float16)
    assert caught.value.param == EMBEDDING


def test_changes_of_outputs_are_found_before_an_odd_number_of_bytes(arch: Architecture) -> None:
    """What comes last may end between two float32."""
    q = (0, "self_attn.q_proj")
    weights = AdapterWeights(
        modules={q: LoRAWeight(torch.ones(1, 64), torch.ones(64, 1))},
        num_bytes=0,
        saved={HEAD: torch.randn(VOCAB, 1)},
        outputs={q: OutputChange(torch.randn(64), torch.randn(64))},
    )
    shard = shard_weights(weights, arch, "v", 0, 96, torch.bfloat16)
    assert shard.header.num_bytes % 4 != 0
    (output,) = shard.outputs
    assert shard.output_change(output).scale.shape == (output.out_features,)
