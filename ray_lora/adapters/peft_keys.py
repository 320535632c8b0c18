"""Which tensors an adapter's file holds, from its configuration: every key is expected or refused, none is missing."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from ray_lora.adapters.peft_config import PeftConfig, reject, show
from ray_lora.adapters.peft_targets import TargetModule, served_modules
from ray_lora.architecture import Architecture, Projection

Role = Literal["lora_a", "lora_b", "lora_bias", "magnitude", "base_bias"]

_PREFIX = "base_model.model."
_SUFFIXES: dict[str, Role] = {
    "lora_A.weight": "lora_a",
    "lora_B.weight": "lora_b",
    "lora_B.bias": "lora_bias",
    "lora_magnitude_vector": "magnitude",
    "base_layer.bias": "base_bias",
    "bias": "base_bias",
}
_KEY = re.compile(rf"base_model\.model\.(?P<module>[\w.]+?)\.(?P<suffix>{'|'.join(map(re.escape, _SUFFIXES))})")
_WHY: dict[Role, str] = {
    "lora_a": "target_modules selects its module",
    "lora_b": "target_modules selects its module",
    "lora_bias": "lora_bias is true and target_modules selects its module",
    "magnitude": "use_dora is true and target_modules selects its module",
    "base_bias": "bias says that it was trained",
}
# PEFT leaves the adapter's name out of its files; some trainers write the state dict as it is, with `.default`.
_ADAPTER_NAME = re.compile(r"(?<=\.lora_[AB])\.default(?=\.)|(?<=\.lora_magnitude_vector)(\.default)?(\.weight)?$")


class ExpectedTensor(NamedTuple):
    """One tensor that the configuration asks for."""

    layer: int
    projection: Projection
    role: Role
    shape: tuple[int, ...]


def expected_tensors(
    config: PeftConfig, targets: tuple[TargetModule, ...], arch: Architecture
) -> dict[str, ExpectedTensor]:
    """By key as PEFT 0.21 writes it, in the order the modules run; biases of the base last."""
    expected = {}
    for target in targets:
        for suffix, role, shape in _lora_tensors(config, target):
            expected[f"{_PREFIX}{target.name}.{suffix}"] = ExpectedTensor(target.layer, target.projection, role, shape)
    selected = {target.name for target in targets}
    for name, (layer, projection) in served_modules(arch).items():
        if arch.has_bias(projection.name) and (config.bias == "all" or (config.bias != "none" and name in selected)):
            suffix = "base_layer.bias" if name in selected else "bias"
            shape = (projection.out_features,)
            expected[f"{_PREFIX}{name}.{suffix}"] = ExpectedTensor(layer, projection, "base_bias", shape)
    return expected


def _lora_tensors(config: PeftConfig, target: TargetModule) -> Iterator[tuple[str, Role, tuple[int, ...]]]:
    in_features, out_features = target.projection.in_features, target.projection.out_features
    yield "lora_A.weight", "lora_a", (target.rank, in_features)
    yield "lora_B.weight", "lora_b", (out_features, target.rank)
    if config.lora_bias:
        yield "lora_B.bias", "lora_bias", (out_features,)
    if config.use_dora:
        yield "lora_magnitude_vector", "magnitude", (out_features,)


def assign_keys(
    keys: Iterable[str], expected: Mapping[str, ExpectedTensor], arch: Architecture
) -> list[tuple[ExpectedTensor, str]]:
    """Every expected tensor with its key in the file.

    Raises:
        AdapterRejectedError: a key is not expected, is there twice, or is missing; `param` is the key.
    """
    assigned: dict[str, str] = {}
    for key in sorted(keys):
        canonical = _ADAPTER_NAME.sub("", key)
        if canonical not in expected:
            _reject_unexpected(key, canonical, expected, arch)
        if canonical in assigned:
            reject(key, f"tensor {show(key)} is there twice, also as {show(assigned[canonical])}")
        assigned[canonical] = key
    for canonical, tensor in expected.items():
        if canonical not in assigned:
            reject(canonical, f"tensor {canonical!r} is missing, though {_WHY[tensor.role]}")
    return [(tensor, assigned[canonical]) for canonical, tensor in expected.items()]


def _reject_unexpected(key: str, canonical: str, expected: Mapping[str, ExpectedTensor], arch: Architecture) -> None:
    match = _KEY.fullmatch(canonical)
    if match is None:
        reject(
            key,
            f"tensor {show(key)} is not supported: only those of lora_A, lora_B, lora_magnitude_vector and trained "
            "biases are; save without embeddings (save_embedding_layers=False) and other trained parameters",
        )
    module, suffix = match["module"], match["suffix"]
    if module not in served_modules(arch):
        reject(
            key,
            f"tensor {show(key)} adapts {show(module)}, which is not served: this base model has {arch.num_layers} "
            f"layers of {', '.join(projection.name for projection in arch.projections)}",
        )
    if f"{_PREFIX}{module}.lora_A.weight" not in expected and "lora" in suffix:
        reject(key, f"tensor {show(key)} is for a module that target_modules and its like do not select")
    reject(key, f"tensor {show(key)} is not expected: it would be if {_WHY[_SUFFIXES[suffix]]}, and the base has it")
