"""`adapter_model.safetensors` -> `AdapterWeights`: every tensor is used or refused by its name, none is missing."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load

from ray_lora.adapters.finite import all_finite
from ray_lora.adapters.peft_config import CONFIG_FILE, PeftConfig, read_peft_config, reject, show
from ray_lora.adapters.peft_keys import Role, assign_keys, expected_tensors
from ray_lora.adapters.peft_saved import resolve_saved
from ray_lora.adapters.peft_targets import TargetModule, resolve_targets, served_modules
from ray_lora.adapters.store import WEIGHTS_FILE
from ray_lora.architecture import EMBEDDING, HEAD, Architecture
from ray_lora.config import MAX_RANK

MAX_HEADER_BYTES = 8 << 20
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class LoRAWeight:
    """One module's change of its base weight, `lora_b @ lora_a`, and what was trained with it."""

    lora_a: torch.Tensor
    """`[rank, in_features]`, in the file's dtype."""
    lora_b: torch.Tensor
    """`[out_features, rank]`, float32, the scale multiplied in."""
    bias: torch.Tensor | None = None
    """Of `lora_bias`: `[out_features]`, float32, the scale multiplied in."""
    magnitude: torch.Tensor | None = None
    """Of DoRA: `[out_features]`, float32; the norm that each row of the changed weight is brought to."""

    @property
    def rank(self) -> int:
        return self.lora_a.shape[0]


class OutputChange(NamedTuple):
    """One module's output becomes `scale * (base and its bias + delta) + shift`; both `[out_features]`, float32."""

    scale: torch.Tensor
    shift: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """A whole adapter in host memory, on the CPU, checked against the base model's shape."""

    modules: Mapping[tuple[int, str], LoRAWeight]
    """By layer and projection, e.g. `(0, "self_attn.q_proj")`, in the order they run."""
    num_bytes: int
    """Size of the tensors in the file."""
    base_biases: Mapping[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    """Biases `[out_features]` that replace the base's, float32, of any module of the base."""
    vocabulary: Mapping[str, LoRAWeight] = field(default_factory=dict)
    """Of the embedding (lora_a `[rank, vocab_size]`) and the head, by module name."""
    saved: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Weights that replace the base's: norms `[hidden_size]`, embedding and head `[vocab_size, hidden_size]`."""
    token_rows: Mapping[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Of the embedding and the head: token ids, int64, and the rows `[num_ids, hidden_size]` that replace theirs."""
    base_copies: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What the file says of the base's own embedding and head."""
    outputs: Mapping[tuple[int, str], OutputChange] = field(default_factory=dict)
    """What biases and magnitudes do besides adding the low-rank delta; those of the embedding and the head are at
    `NO_LAYER`."""

    @property
    def rank(self) -> int:
        """Largest rank of any module."""
        return max(weight.rank for weight in (*self.modules.values(), *self.vocabulary.values()))


def read_weights(directory: Path, arch: Architecture, max_lora_rank: int) -> AdapterWeights:
    """Read and check both files of an adapter. The tensors are copies; the file may vanish afterwards.

    Raises:
        AdapterRejectedError: the configuration or a tensor cannot be honoured; `param` is the field, the file or the
            tensor at fault.
    """
    config = read_peft_config(directory)
    targets = resolve_targets(config, arch)
    _check_ranks(config, targets, max_lora_rank)
    if config.lora_bias and any(target.name == EMBEDDING for target in targets):
        reject("lora_bias", "lora_bias cannot be used with embed_tokens in target_modules, in PEFT either")
    saved = resolve_saved(config, targets, arch)
    expected = expected_tensors(config, targets, saved, arch)
    file = directory / WEIGHTS_FILE
    try:
        check_header_length(file)
        with safe_open(file, framework="pt") as tensors:
            keys = assign_keys(tensors.keys(), expected, arch)
            num_bytes = sum(_check_tensor(tensors, key, list(tensor.shape), config) for tensor, key in keys)
        stored = load(file.read_bytes())  # `safe_open` loses some memory with every tensor that it reads
        read: dict[Role, dict[str, torch.Tensor]] = defaultdict(dict)
        for tensor, key in keys:
            read[tensor.role][tensor.module] = finite(stored[key], key)
    except (SafetensorError, OSError, ValueError) as error:
        reject(WEIGHTS_FILE, f"{WEIGHTS_FILE} is truncated or damaged: {show(str(error))}")
    if config.ensure_weight_tying and arch.tie_word_embeddings:
        _check_ties(read)
    weights = {target: _lora_weight(target, read) for target in targets}
    served = served_modules(arch)
    return AdapterWeights(
        {(target.layer, target.projection.name): weight for target, weight in weights.items() if target.name in served},
        num_bytes,
        {(served[name][0], served[name][1].name): bias.float() for name, bias in read["base_bias"].items()},
        {target.name: weight for target, weight in weights.items() if target.name not in served},
        read["saved"],
        {name: (torch.tensor(ids), read["token_rows"][source]) for name, (source, ids) in saved.tokens.items()},
        read["base_copy"],
    )


def _check_ties(read: Mapping[Role, Mapping[str, torch.Tensor]]) -> None:
    """The embedding and the head hold the same, whichever of them PEFT reads last."""
    saved, lora_a, lora_b = read["saved"], read["lora_a"], read["lora_b"]
    is_tied = HEAD not in saved or torch.equal(saved[HEAD], saved[EMBEDDING])
    if HEAD in lora_a:
        is_tied &= torch.equal(lora_a[HEAD], lora_b[EMBEDDING].T) and torch.equal(lora_b[HEAD], lora_a[EMBEDDING].T)
    if not is_tied:
        reject("ensure_weight_tying", "ensure_weight_tying is true, but the embedding and the head differ in the file")


def _check_ranks(config: PeftConfig, targets: tuple[TargetModule, ...], max_lora_rank: int) -> None:
    largest = max(targets, key=lambda target: target.rank)
    if largest.rank > max_lora_rank:
        field = "r" if largest.rank == config.r else "rank_pattern"
        reject(
            field,
            f"{field} is {largest.rank} for {largest.name}, more than max_lora_rank {max_lora_rank}; "
            f"raise max_lora_rank in the server's configuration (up to {MAX_RANK})",
        )


def check_header_length(file: Path) -> None:
    """Bound what the header may cost to parse. It is preceded by its length: 8 bytes, little-endian."""
    with file.open("rb") as reader:
        prefix = reader.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > MAX_HEADER_BYTES:
        raise ValueError(f"its header claims {length} bytes")


def _check_tensor(tensors: Any, key: str, expected: list[int], config: PeftConfig) -> int:
    """Check shape and type from the header of `tensors` (a `safe_open`, which is untyped); the size in bytes."""
    stored = tensors.get_slice(key)
    shape, dtype = list(stored.get_shape()), stored.get_dtype()
    if shape != expected:
        trained = f", trained on {show(config.base_model_name)}," if config.base_model_name else ""
        reject(
            key,
            f"tensor {show(key)} is {shape}, but this base model and {CONFIG_FILE} need {expected}; "
            f"the adapter{trained} is for another base model, or its two files do not belong together",
        )
    if dtype not in DTYPES:
        reject(key, f"tensor {show(key)} is of type {dtype}; save it as one of {', '.join(DTYPES)}")
    return math.prod(expected) * DTYPES[dtype].itemsize


def finite(tensor: torch.Tensor, key: str) -> torch.Tensor:
    """The tensor, unless it holds something that is not a number."""
    if not all_finite(tensor):
        reject(key, f"tensor {show(key)} holds values that are not finite")
    return tensor


def _lora_weight(target: TargetModule, read: Mapping[Role, Mapping[str, torch.Tensor]]) -> LoRAWeight:
    bias, magnitude = read["lora_bias"].get(target.name), read["magnitude"].get(target.name)
    return LoRAWeight(
        read["lora_a"][target.name],
        _scale(target, read["lora_b"][target.name]),
        None if bias is None else _scale(target, bias),
        None if magnitude is None else magnitude.float(),
    )


def _scale(target: TargetModule, tensor: torch.Tensor) -> torch.Tensor:
    """Multiply the scale in, once and in float32."""
    scaled = tensor.to(torch.float32) * target.scale
    if not all_finite(scaled):
        reject("lora_alpha", f"lora_alpha scales {target.name} by {target.scale:g}, beyond the range of float32")
    return scaled
