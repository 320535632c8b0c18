import torch

from ray_lora.adapters.peft_weights import AdapterWeights, LoRAWeight, OutputChange
from ray_lora.adapters.shard_cut import shard_weights
from ray_lora.architecture import Architecture, parse_architecture
from ray_lora.model.adapter_pool import AdapterPool
from ray_lora.step import AdapterPlan

QKV = "self_attn.qkv_proj"


def make_arch() -> Architecture:
    config = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return parse_architecture(config, {})


def test_a_slot_holds_its_latest_adapter_and_nothing_of_the_one_before() -> None:
    arch = make_arch()
    pool = AdapterPool(arch, 0, 1, 4, 2, torch.float32, torch.float32, torch.device("cpu"))

    pool.fused[QKV].scale[:, 0] = pool.fused[QKV].shift[:, 0] = 7

    def write(version: str, *changed: tuple[int, str]) -> None:
        modules = {(0, "self_attn.q_proj"): LoRAWeight(torch.ones(1, 16), torch.ones(16, 1))}
        outputs = {module: OutputChange(torch.full((16,), 3.0), torch.full((16,), 5.0)) for module in changed}
        weights = AdapterWeights(modules, 0, outputs=outputs)
        pool.write(AdapterPlan(version, (2,), 1), shard_weights(weights, arch, version, 0, 1, torch.float32))

    def held(layer: int) -> tuple[list[float], list[float]]:
        """One value of each of q, k and v."""
        fused = pool.fused[QKV]
        return fused.scale[layer, 1, ::16].tolist(), fused.shift[layer, 1, ::16].tolist()

    write("first", (0, "self_attn.k_proj"), (1, "self_attn.q_proj"))
    assert (held(0), held(1)) == (([1, 3, 1], [0, 5, 0]), ([3, 1, 1], [5, 0, 0]))
    write("second", (1, "self_attn.v_proj"))
    assert (held(0), held(1)) == (([1, 1, 1], [0, 0, 0]), ([1, 1, 3], [0, 0, 5]))
    assert (pool.fused[QKV].scale[:, 0] == 7).all(), "another slot was written"
    assert (pool.fused[QKV].shift[:, 0] == 7).all(), "another slot was written"


def test_what_is_not_paged_lives_as_long_as_its_adapter_holds_a_slot_whichever_it_is() -> None:
    arch = make_arch()
    pool = AdapterPool(arch, 0, 1, 4, 3, torch.float32, torch.float32, torch.device("cpu"))
    modules = {(0, "self_attn.q_proj"): LoRAWeight(torch.ones(1, 16), torch.ones(16, 1))}

    def write(version: str, slot: int, **parts: dict[str, torch.Tensor]) -> None:
        shard = shard_weights(AdapterWeights(modules, 0, **parts), arch, version, 0, 1, torch.float32)
        pool.write(AdapterPlan(version, (slot,), slot), shard)

    norm = {"model.norm": torch.full((16,), 2.0)}
    write("x", 1, saved=norm)
    write("y", 2, saved={"lm_head": torch.ones(32, 16)})
    write("x", 0, saved=norm)
    write("plain", 1)
    assert set(pool.unpaged) == {"x", "y"}, "x has moved to slot 0 meanwhile"
    assert torch.equal(pool.unpaged["x"].norms["model.norm"], norm["model.norm"])
    assert pool.unpaged["x"].head is None
    assert pool.unpaged["y"].head is not None
    write("plain", 2)
    assert set(pool.unpaged) == {"x"}
    pool.forget("x")
    pool.forget("x")
    assert not pool.unpaged
