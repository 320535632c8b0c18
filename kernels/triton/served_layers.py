"""The fused linears of the models that are served, cut for tensor parallelism."""

from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes as in a model's `config.json`."""

    name: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128


@dataclass(frozen=True, slots=True)
class Layer:
    """One fused linear on one rank."""

    name: str
    in_features: int
    widths: tuple[int, ...]
    """Outputs of each slice."""

    @property
    def slices(self) -> tuple[int, ...]:
        return (0, *accumulate(self.widths))

    @property
    def out_features(self) -> int:
        return sum(self.widths)


MODELS = (
    Model("Qwen2.5-3B", 2048, 11008, 16, 2),
    Model("Qwen2.5-7B", 3584, 18944, 28, 4),
    Model("Llama-2-7B", 4096, 11008, 32, 32),
    Model("Llama-3.1-8B", 4096, 14336, 32, 8),
    Model("Llama-2-13B", 5120, 13824, 40, 40),
    Model("Llama-3.1-70B", 8192, 28672, 64, 8),
)
LLAMA_7B = MODELS[2]
TP_SIZES = (1, 2, 4, 8)


def served_layers() -> list[tuple[str, Layer]]:
    """Every fused linear of every model at every TP size that divides its heads, with a label."""
    return [
        (f"{model.name} tp{tp_size} {layer.name}", layer)
        for model in MODELS
        for tp_size in TP_SIZES
        if model.num_heads % tp_size == 0
        for layer in fused_linears(model, tp_size)
    ]


def fused_linears(model: Model, tp_size: int = 1) -> tuple[Layer, ...]:
    """The four fused linears of a decoder layer on one of `tp_size` ranks; key heads are repeated below one a rank."""
    q = model.num_heads * model.head_dim // tp_size
    kv = max(1, model.num_kv_heads // tp_size) * model.head_dim
    intermediate = model.intermediate // tp_size
    return (
        Layer("qkv", model.hidden, (q, kv, kv)),
        Layer("o", q, (model.hidden,)),
        Layer("gate_up", model.hidden, (intermediate, intermediate)),
        Layer("down", intermediate, (model.hidden,)),
    )
