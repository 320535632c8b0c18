import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from ray_lora.adapters.peft_weights import AdapterWeights, LoRAWeight, OutputChange
from ray_lora.adapters.shard_cut import shard_weights
from ray_lora.architecture import Architecture, parse_architecture
from ray_lora.model.adapter_pool import AdapterPool
from ray_lora.step import AdapterPlan

QKV = "self_attn.qkv_proj"


def make_arch(num_layers: int = 2) -> Architecture:
    config = {
        "model_type": "llama",
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
    }
    return parse_architecture(config, {})


@given(
    ranks=st.lists(st.sampled_from([0, 1, 15, 16, 17, 32, 40]), min_size=28, max_size=28),
    tp_size=st.sampled_from([1, 2]),
)
@example(ranks=[32] * 28, tp_size=1)
@example(ranks=[16] * 27 + [32], tp_size=2)
@example(ranks=[16] * 7 + [0] * 7 + [16] * 14, tp_size=1)
@settings(max_examples=30)
def test_pages_hold_the_adapter_and_zeros_whatever_was_there(ranks: list[int], tp_size: int) -> None:
    arch = make_arch(num_layers=4)
    places = [(layer, projection.name) for layer in range(4) for projection in arch.projections]
    sizes = {projection.name: (projection.in_features, projection.out_features) for projection in arch.projections}
    assume(any(ranks))
    modules = {
        place: LoRAWeight(torch.randn(rank, sizes[place[1]][0]), torch.randn(sizes[place[1]][1], rank))
        for place, rank in zip(places, ranks, strict=True)
        if rank
    }
    shard = shard_weights(AdapterWeights(modules, 0), arch, "v", tp_size - 1, tp_size, torch.float32)
    pool = AdapterPool(arch, tp_size - 1, tp_size, 5, 1, torch.float32, torch.float32, torch.device("cpu"))
    for fused in pool.fused.values():
        fused.a.fill_(7)
        fused.b.fill_(7)
    pages = (4, 0, 2)[: -(-max(ranks) // 16)]
    pool.write(AdapterPlan("v", pages, 0), shard)
    expected = {name: (torch.full_like(f.a, 7), torch.full_like(f.b, 7)) for name, f in pool.fused.items()}
    for a, b in expected.values():
        a[:, pages] = 0
        b[:, pages] = 0
    for fused_linear in arch.fused_linears:
        offsets, (a, b) = pool.fused[fused_linear.name].slices, expected[fused_linear.name]
        for index, projection in enumerate(fused_linear.slices):
            for entry in shard.entries:
                if entry.projection == projection.name:
                    for row in range(entry.rank):
                        page, place = pages[row // 16], row % 16
                        a[entry.layer, page, index, place] = shard.lora_a(entry)[row]
                        b[entry.layer, page, place, offsets[index] : offsets[index + 1]] = shard.lora_b_t(entry)[row]
    for name, (a, b) in expected.items():
        assert torch.equal(pool.fused[name].a, a)
        assert torch.equal(pool.fused[name].b, b)


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
