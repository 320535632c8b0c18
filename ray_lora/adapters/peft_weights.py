"""`adapter_model.safetensors` -> `AdapterWeights`: every tensor is used or refused by its name, none is missing."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ray_lora.adapters.peft_config import CONFIG_FILE, PeftConfig, read_peft_config, reject, show
from ray_lora.adapters.peft_keys import Role, assign_keys, expected_tensors
from ray_lora.adapters.peft_targets import TargetModule, resolve_targets
from ray_lora.adapters.store import WEIGHTS_FILE
from ray_lora.architecture import Architecture
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
    outputs: Mapping[tuple[int, str], OutputChange] = field(default_factory=dict)
    """What all of these do to a module's output besides adding the low-rank delta; see `change_outputs`."""

    @property
    def rank(self) -> int:
        """Largest rank of any module."""
        return max(weight.rank for weight in self.modules.values())


def read_weights(directory: Path, arch: Architecture, max_lora_rank: int) -> AdapterWeights:
    """Read and check both files of an adapter. The tensors are copies; the file may vanish afterwards.

    Raises:
        AdapterRejectedError: the configuration or a tensor cannot be honoured; `param` is the field, the file or the
            tensor at fault.
    """
    config = read_peft_config(directory)
    targets = resolve_targets(config, arch)
    _check_ranks(config, targets, max_lora_rank)
    expected = expected_tensors(config, targets, arch)
    file = directory / WEIGHTS_FILE
    try:
        check_header_length(file)
        with safe_open(file, framework="pt") as tensors:
            keys = assign_keys(tensors.keys(), expected, arch)
            num_bytes = sum(_check_tensor(tensors, key, list(tensor.shape), config) for tensor, key in keys)
            read: dict[tuple[int, str], dict[Role, torch.Tensor]] = defaultdict(dict)
            for tensor, key in keys:
                read[tensor.layer, tensor.projection.name][tensor.role] = read_tensor(tensors, key).clone()
    except (SafetensorError, OSError, ValueError) as error:
        reject(WEIGHTS_FILE, f"{WEIGHTS_FILE} is truncated or damaged: {show(str(error))}")
    modules = {(target.layer, target.projection.name): target for target in targets}
    return AdapterWeights(
        {module: _lora_weight(target, read[module]) for module, target in modules.items()},
        num_bytes,
        {module: parts["base_bias"].float() for module, parts in read.items() if "base_bias" in parts},
    )


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


def read_tensor(tensors: Any, key: str) -> torch.Tensor:
    """A view of the file."""
    tensor: torch.Tensor = tensors.get_tensor(key)
    if not torch.isfinite(tensor).all():
        reject(key, f"tensor {show(key)} holds values that are not finite")
    return tensor


def _lora_weight(target: TargetModule, parts: Mapping[Role, torch.Tensor]) -> LoRAWeight:
    return LoRAWeight(
        parts["lora_a"],
        _scale(target, parts["lora_b"]),
        _scale(target, parts["lora_bias"]) if "lora_bias" in parts else None,
        parts["magnitude"].float() if "magnitude" in parts else None,
    )


def _scale(target: TargetModule, tensor: torch.Tensor) -> torch.Tensor:
    """Multiply the scale in, once and in float32."""
    scaled = tensor.to(torch.float32) * target.scale
    if not torch.isfinite(scaled).all():
        reject("lora_alpha", f"lora_alpha scales {target.name} by {target.scale:g}, beyond the range of float32")
    return scaled
