"""`adapter_model.safetensors` -> `AdapterWeights`: every tensor is used or refused by its name, none is missing."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ray_lora.adapters.peft_config import CONFIG_FILE, PeftConfig, read_peft_config, reject, show
from ray_lora.adapters.peft_targets import TargetModule, resolve_targets, served_modules
from ray_lora.adapters.store import WEIGHTS_FILE
from ray_lora.architecture import Architecture
from ray_lora.config import MAX_RANK

MAX_HEADER_BYTES = 8 << 20
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# PEFT leaves the adapter's name out of its files; some trainers write the state dict as it is, with `.default`.
TENSOR_KEY = re.compile(r"base_model\.model\.(?P<module>[\w.]+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")


@dataclass(frozen=True, slots=True, eq=False)
class LoRAWeight:
    """One module's change of its base weight: `lora_b @ lora_a`, `[out_features, in_features]`."""

    lora_a: torch.Tensor
    """`[rank, in_features]`, in the file's dtype."""
    lora_b: torch.Tensor
    """`[out_features, rank]`, float32, the scale multiplied in."""

    @property
    def rank(self) -> int:
        return self.lora_a.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """A whole adapter in host memory, on the CPU, checked against the base model's shape."""

    modules: Mapping[tuple[int, str], LoRAWeight]
    """By layer and projection, e.g. `(0, "self_attn.q_proj")`, in the order they run."""
    num_bytes: int
    """Size of the tensors in the file."""

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
    file = directory / WEIGHTS_FILE
    try:
        check_header_length(file)
        with safe_open(file, framework="pt") as tensors:
            keys = _assign_keys(list(tensors.keys()), targets, arch)
            num_bytes = 0
            for target, key_a, key_b in keys:
                a_shape = [target.rank, target.projection.in_features]
                b_shape = [target.projection.out_features, target.rank]
                num_bytes += _check_tensor(tensors, key_a, a_shape, config) + _check_tensor(
                    tensors, key_b, b_shape, config
                )
            modules = {
                (target.layer, target.projection.name): LoRAWeight(
                    read_tensor(tensors, key_a).clone(), _scale(target, read_tensor(tensors, key_b))
                )
                for target, key_a, key_b in keys
            }
    except (SafetensorError, OSError, ValueError) as error:
        reject(WEIGHTS_FILE, f"{WEIGHTS_FILE} is truncated or damaged: {show(str(error))}")
    return AdapterWeights(modules, num_bytes)


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


def _assign_keys(
    keys: list[str], targets: tuple[TargetModule, ...], arch: Architecture
) -> list[tuple[TargetModule, str, str]]:
    """The targets, each with the keys of its A and its B; no key is left over and none is missing."""
    selected = {target.name for target in targets}
    served = served_modules(arch)
    assigned: dict[tuple[str, str], str] = {}
    for key in sorted(keys):
        match = TENSOR_KEY.fullmatch(key)
        if match is None:
            reject(
                key,
                f"tensor {show(key)} is not supported: only base_model.model.<module>.lora_A.weight and lora_B.weight "
                "are; save without embeddings (save_embedding_layers=False), biases and other trained parameters",
            )
        module, side = match["module"], match["side"]
        if module not in served:
            reject(
                key,
                f"tensor {show(key)} adapts {show(module)}, which is not served: this base model has {arch.num_layers} "
                f"layers of {', '.join(projection.name for projection in arch.projections)}",
            )
        if module not in selected:
            reject(key, f"tensor {show(key)} is for a module that target_modules and its like do not select")
        if (module, side) in assigned:
            reject(key, f"tensor {show(key)} is there twice, also as {show(assigned[module, side])}")
        assigned[module, side] = key
    for target in targets:
        for side in "AB":
            if (target.name, side) not in assigned:
                missing = f"base_model.model.{target.name}.lora_{side}.weight"
                reject(missing, f"tensor {missing!r} is missing, though target_modules selects its module")
    return [(target, assigned[target.name, "A"], assigned[target.name, "B"]) for target in targets]


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


def _scale(target: TargetModule, lora_b: torch.Tensor) -> torch.Tensor:
    """Multiply the scale into B, once and in float32."""
    scaled = lora_b.to(torch.float32) * target.scale
    if not torch.isfinite(scaled).all():
        reject("lora_alpha", f"lora_alpha scales {target.name} by {target.scale:g}, beyond the range of float32")
    return scaled
