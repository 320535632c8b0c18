"""A decoder's shape, read from `config.json`: the one place that knows how Llama, Mistral, Qwen2 and Qwen3 differ.

Also how each projection is cut over tensor-parallel ranks, which the base weights and the adapters must agree on.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ray_lora.errors import ConfigError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens", "lm_head", "model.norm"
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
"""Modules beside the linear layers, by the names that checkpoints and PEFT give them."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"eos_token_id": 2},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "eos_token_id": 2,
    },
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
}
"""By family that is served, what transformers assumes where `config.json` is silent and the families differ."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding; `parameters` are those of `config.json` for its type."""

    rope_type: str
    theta: float
    parameters: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear layer as the checkpoint and PEFT name it, e.g. `self_attn.q_proj`.

    The base weight is `[out_features, in_features]`. Column-parallel: outputs are cut, so LoRA's A is whole on every
    rank and B is cut. Row-parallel: inputs are cut, so A is cut and B is whole, and the delta joins the base's partial
    sum before its one all-reduce.
    """

    name: str
    in_features: int
    out_features: int
    style: Literal["column", "row"]
    num_heads: int | None = None
    """Set where the cut must fall between heads."""

    def shard(self, rank: int, tp_size: int) -> slice:
        """The part of the cut dimension that `rank` holds; KV heads are replicated where ranks outnumber them."""
        size = self.out_features if self.style == "column" else self.in_features
        if self.num_heads is not None and self.num_heads < tp_size:
            head_size = size // self.num_heads
            head = rank * self.num_heads // tp_size
            return slice(head * head_size, (head + 1) * head_size)
        part = size // tp_size
        return slice(rank * part, (rank + 1) * part)


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """Projections that read the same input and are computed by one matmul and one LoRA launch."""

    name: str
    slices: tuple[Projection, ...]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only transformer with RMSNorm, rotary positions, grouped KV heads and a gated MLP."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    """By layer: a token attends to this many positions, its own included; None is all."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    """The checkpoint's."""

    @property
    def max_context_len(self) -> int:
        """Positions that the rotary embedding covers, scaling included."""
        parameters = self.rope.parameters
        if self.rope.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * float(parameters["factor"]))
        if self.rope.rope_type == "yarn" and parameters.get("original_max_position_embeddings"):
            scaled = parameters["original_max_position_embeddings"] * float(parameters["factor"])
            return max(self.max_position_embeddings, int(scaled))
        return self.max_position_embeddings

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The seven linear layers of one decoder layer, in the order they run."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (
            Projection("self_attn.q_proj", self.hidden_size, q_size, "column", self.num_heads),
            Projection("self_attn.k_proj", self.hidden_size, kv_size, "column", self.num_kv_heads),
            Projection("self_attn.v_proj", self.hidden_size, kv_size, "column", self.num_kv_heads),
            Projection("self_attn.o_proj", q_size, self.hidden_size, "row", self.num_heads),
            Projection("mlp.gate_proj", self.hidden_size, self.intermediate_size, "column"),
            Projection("mlp.up_proj", self.hidden_size, self.intermediate_size, "column"),
            Projection("mlp.down_proj", self.intermediate_size, self.hidden_size, "row"),
        )

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        """The four matmuls of one decoder layer."""
        q, k, v, o, gate, up, down = self.projections
        return (
            FusedLinear("self_attn.qkv_proj", (q, k, v)),
            FusedLinear("self_attn.o_proj", (o,)),
            FusedLinear("mlp.gate_up_proj", (gate, up)),
            FusedLinear("mlp.down_proj", (down,)),
        )

    @property
    def vocabulary(self) -> dict[str, Projection]:
        """The embedding, taken as a linear layer on one-hot rows, and the head."""
        return {
            EMBEDDING: Projection(EMBEDDING, self.vocab_size, self.hidden_size, "row"),
            HEAD: Projection(HEAD, self.hidden_size, self.vocab_size, "column"),
        }

    @property
    def norms(self) -> tuple[str, ...]:
        """Every RMSNorm over the hidden size, in the order they run."""
        layers = (f"model.layers.{layer}.{norm}" for layer in range(self.num_layers) for norm in LAYER_NORMS)
        return (*layers, FINAL_NORM)

    def vocabulary_part(self, rank: int, tp_size: int) -> tuple[slice, int]:
        """The token ids whose embedding and logit `rank` computes, and how many rows all ranks allot for them."""
        width = -(-self.vocab_size // tp_size)
        first = min(rank * width, self.vocab_size)
        return slice(first, min(first + width, self.vocab_size)), width

    def has_bias(self, projection: str) -> bool:
        """Whether the base layer of that name has a bias."""
        if projection == "self_attn.o_proj":
            return self.o_bias
        return self.qkv_bias if projection.startswith("self_attn") else self.mlp_bias

    def check_tensor_parallel(self, tp_size: int) -> None:
        """Raise ConfigError naming what `tp_size` does not divide."""
        for name, count in (("num_attention_heads", self.num_heads), ("intermediate_size", self.intermediate_size)):
            if count % tp_size:
                raise ConfigError(f"tensor_parallel_size {tp_size} does not divide {name} {count}")
        kv_heads = self.num_kv_heads
        if kv_heads % tp_size and tp_size % kv_heads:
            raise ConfigError(
                f"tensor_parallel_size {tp_size} neither divides num_key_value_heads {kv_heads} nor is a multiple of it"
            )


def read_architecture(model_path: Path) -> Architecture:
    """Read `config.json` (and `generation_config.json`) of a Hugging Face directory.

    Raises:
        ConfigError: no such directory, or something in it that is not supported, by name.
    """
    config_file = model_path / "config.json"
    if not config_file.is_file():
        what = "has no config.json" if model_path.is_dir() else "is not a directory"
        raise ConfigError(f"model: {model_path} {what}; give a Hugging Face model directory")
    try:
        config = json.loads(config_file.read_text())
    except ValueError as error:
        raise ConfigError(f"model: {config_file} is not JSON: {error}") from None
    generation_file = model_path / "generation_config.json"
    generation = json.loads(generation_file.read_text()) if generation_file.is_file() else {}
    try:
        return parse_architecture(config, generation)
    except KeyError as error:
        raise ConfigError(f"model: {config_file} has no {error.args[0]!r}") from None


def parse_architecture(config: dict[str, Any], generation: dict[str, Any]) -> Architecture:
    """The architecture that a `config.json` describes, with transformers' defaults where it is silent."""
    family = config.get("model_type", "")
    if family not in DEFAULTS:
        raise ConfigError(f"model_type {family!r} is not supported; supported are {', '.join(DEFAULTS)}")
    for key in ("quantization_config",):
        if config.get(key):
            raise ConfigError(f"{key} is not supported: give an unquantised checkpoint")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act {activation!r} is not supported; supported is 'silu'")
    config = {**DEFAULTS[family], **config}
    num_heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
    num_layers = config["num_hidden_layers"]
    attention_bias = config.get("attention_bias", False)
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    return Architecture(
        family=family,
        vocab_size=config["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=config["intermediate_size"],
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or (128 if family == "qwen3" else hidden_size // num_heads),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=_parse_rope(config),
        max_position_embeddings=config.get("max_position_embeddings", 2048),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=True if family == "qwen2" else attention_bias,
        o_bias=attention_bias if family in ("llama", "qwen3") else False,
        mlp_bias=config.get("mlp_bias", False) if family == "llama" else False,
        qk_norm=family == "qwen3",
        sliding_windows=_parse_windows(config, family, num_layers),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
    )


def _parse_rope(config: dict[str, Any]) -> RopeConfig:
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise ConfigError(f"rope_type {rope_type!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    if config.get("partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError("partial_rotary_factor is not supported")
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    return RopeConfig(rope_type, float(theta), parameters)


def _parse_windows(config: dict[str, Any], family: str, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if family.startswith("qwen") and not config.get("use_sliding_window", False):
        window = None
    if window is None or family == "llama":
        return (None,) * num_layers
    layer_types = config.get("layer_types")
    if layer_types is None and family.startswith("qwen"):
        first = config.get("max_window_layers", 28)
        layer_types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    if layer_types is None:
        return (window,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
