"""Which tensors an adapter's file holds, from its configuration: every key is expected or refused, none is missing."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from ray_lora.adapters.peft_config import PeftConfig, reject, show
from ray_lora.adapters.peft_saved import SavedModules
from ray_lora.adapters.peft_targets import NO_LAYER, TargetModule, served_modules
from ray_lora.architecture import EMBEDDING, HEAD, Architecture

Role = Literal["lora_a", "lora_b", "lora_bias", "magnitude", "base_bias", "saved", "token_rows", "base_copy"]

_PREFIX = "base_model.model."
_SUFFIXES: dict[str, Role] = {
    "lora_A.weight": "lora_a",
    "lora_B.weight": "lora_b",
    "lora_embedding_A": "lora_a",
    "lora_embedding_B": "lora_b",
    "lora_B.bias": "lora_bias",
    "lora_magnitude_vector": "magnitude",
    "base_layer.bias": "base_bias",
    "bias": "base_bias",
    "token_adapter.trainable_tokens_delta": "token_rows",
    "base_layer.weight": "base_copy",
    "weight": "saved",
}
_KEY = re.compile(rf"base_model\.model\.(?P<module>[\w.]+?)\.(?P<suffix>{'|'.join(map(re.escape, _SUFFIXES))})")
_WHY: dict[Role, str] = {
    "lora_a": "target_modules selects its module",
    "lora_b": "target_modules selects its module",
    "lora_bias": "lora_bias is true and target_modules selects its module",
    "magnitude": "use_dora is true and target_modules selects its module",
    "base_bias": "bias says that it was trained",
    "saved": "modules_to_save names its module",
    "token_rows": "trainable_token_indices names its module",
    "base_copy": "target_modules selects its module",
}
# PEFT leaves the adapter's name out of its files; some trainers write the state dict as it is, with `.default`.
_ADAPTER_NAME = re.compile(
    r"(?<=\.lora_[AB])\.default(?=\.)"
    r"|(?<=\.lora_magnitude_vector)(\.default)?(\.weight)?$"
    r"|(?<=\.lora_embedding_[AB])\.default$"
)


def is_served_beside_lora(key: str) -> bool:
    """Whether a key is one that the server uses, if the configuration asks for it, besides A and B of linear layers."""
    match = _KEY.fullmatch(_ADAPTER_NAME.sub("", key))
    return match is not None and match["suffix"] not in ("lora_A.weight", "lora_B.weight")


class ExpectedTensor(NamedTuple):
    """One tensor that the configuration asks for."""

    module: str
    role: Role
    shape: tuple[int, ...]
    is_optional: bool = False


def expected_tensors(
    config: PeftConfig, targets: tuple[TargetModule, ...], saved: SavedModules, arch: Architecture
) -> dict[str, ExpectedTensor]:
    """By key as PEFT 0.21 writes it: those of the targets, then biases of the base, then what replaces the base's."""
    expected = {}
    for target in targets:
        for suffix, role, shape in _lora_tensors(config, target):
            expected[f"{_PREFIX}{target.name}.{suffix}"] = ExpectedTensor(target.name, role, shape)
        if target.layer == NO_LAYER:  # PEFT adds the base's own weight, unless told not to
            copy = ExpectedTensor(target.name, "base_copy", (arch.vocab_size, arch.hidden_size), is_optional=True)
            expected[f"{_PREFIX}{target.name}.base_layer.weight"] = copy
    selected = {target.name for target in targets}
    for name, (_, projection) in served_modules(arch).items():
        if arch.has_bias(projection.name) and (config.bias == "all" or (config.bias != "none" and name in selected)):
            suffix = "base_layer.bias" if name in selected else "bias"
            expected[f"{_PREFIX}{name}.{suffix}"] = ExpectedTensor(name, "base_bias", (projection.out_features,))
    for name in saved.whole:
        shape = (arch.vocab_size, arch.hidden_size) if name in (EMBEDDING, HEAD) else (arch.hidden_size,)
        expected[f"{_PREFIX}{name}.weight"] = ExpectedTensor(name, "saved", shape)
    for name, token_ids in saved.stored_tokens.items():
        rows = ExpectedTensor(name, "token_rows", (len(token_ids), arch.hidden_size))
        expected[f"{_PREFIX}{name}.token_adapter.trainable_tokens_delta"] = rows
    return expected


def _lora_tensors(config: PeftConfig, target: TargetModule) -> Iterator[tuple[str, Role, tuple[int, ...]]]:
    in_features, out_features = target.projection.in_features, target.projection.out_features
    is_embedding = target.name == EMBEDDING
    yield "lora_embedding_A" if is_embedding else "lora_A.weight", "lora_a", (target.rank, in_features)
    yield "lora_embedding_B" if is_embedding else "lora_B.weight", "lora_b", (out_features, target.rank)
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
        if canonical not in assigned and not tensor.is_optional:
            reject(canonical, f"tensor {canonical!r} is missing, though {_WHY[tensor.role]}")
    return [(tensor, assigned[canonical]) for canonical, tensor in expected.items() if canonical in assigned]


def _reject_unexpected(key: str, canonical: str, expected: Mapping[str, ExpectedTensor], arch: Architecture) -> None:
    match = _KEY.fullmatch(canonical)
    if match is None:
        reject(key, f"tensor {show(key)} is of no kind that is supported; save what PEFT trains, and nothing else")
    module, role = match["module"], _SUFFIXES[match["suffix"]]
    if module not in {*served_modules(arch), *arch.vocabulary, *arch.norms}:
        reject(
            key,
            f"tensor {show(key)} adapts {show(module)}, which is not served: this base model has {arch.num_layers} "
            f"layers of {', '.join(projection.name for projection in arch.projections)}",
        )
    if role in ("lora_a", "lora_b") and not any(tensor.module == module for tensor in expected.values()):
        reject(key, f"tensor {show(key)} is for a module that target_modules and its like do not select")
    reject(key, f"tensor {show(key)} is not expected; it would be if {_WHY[role]}, and the base model has such a one")
