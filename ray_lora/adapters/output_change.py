"""What DoRA and trained biases do to a module's output, as two vectors that the base model decides together with them.

A module computes `magnitude / norm * (x @ W.T + delta) + bias`, where `norm` is that of each row of `W + delta` and
`bias` is the base's or what replaced it, plus that of B. The base layer has already added its own bias, so

    scale = magnitude / norm            # 1 without DoRA
    shift = bias - scale * base bias
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ray_lora.adapters.finite import all_finite
from ray_lora.adapters.peft_config import reject
from ray_lora.adapters.peft_targets import NO_LAYER
from ray_lora.adapters.peft_weights import AdapterWeights, LoRAWeight, OutputChange
from ray_lora.architecture import EMBEDDING, Architecture, Projection

ROWS_AT_ONCE = 1024
"""Rows of a weight whose norms are computed together, which bounds the memory that they take."""


class BaseLayers(Protocol):
    """The base model's linear layers, in the type that is served. `module` is e.g. `model.layers.0.mlp.up_proj`."""

    def weight(self, module: str, projection: Projection) -> Tensor:
        """[out_features, in_features], of all ranks."""

    def bias(self, module: str, projection: Projection) -> Tensor | None:
        """[out_features], of all ranks; None if the layer has none."""


def change_outputs(weights: AdapterWeights, arch: Architecture, open_base: Callable[[], BaseLayers]) -> AdapterWeights:
    """The weights with `outputs` filled in; the base is opened only for an adapter that needs it.

    Raises:
        AdapterRejectedError: a row of a changed weight is zero, so that its magnitude means nothing; or the file says
            something else of the base's embedding or head than the base does.
    """
    layers = [(layer, projection) for layer in range(arch.num_layers) for projection in arch.projections]
    lora = {**weights.modules, **{(NO_LAYER, name): weight for name, weight in weights.vocabulary.items()}}
    changed = {
        module for module, weight in lora.items() if weight.bias is not None or weight.magnitude is not None
    } | set(weights.base_biases)
    if not changed and not weights.base_copies:
        return weights
    base = open_base()
    _check_copies(weights, arch, base)
    outputs = {}
    for layer, projection in (*layers, *((NO_LAYER, projection) for projection in arch.vocabulary.values())):
        if (layer, projection.name) in changed:
            key = (layer, projection.name)
            outputs[key] = _output_change(key, projection, lora.get(key), weights.base_biases.get(key), base)
    return replace(weights, outputs=outputs, base_copies={})


def _output_change(
    key: tuple[int, str], projection: Projection, weight: LoRAWeight | None, new: Tensor | None, base: BaseLayers
) -> OutputChange:
    layer, name = key
    module = name if layer == NO_LAYER else f"model.layers.{layer}.{name}"
    scale = torch.ones(projection.out_features)
    if weight is not None and weight.magnitude is not None:
        scale = weight.magnitude / row_norms(base.weight(module, projection), weight)
        if not all_finite(scale):
            tensor = f"base_model.model.{module}.lora_magnitude_vector"
            reject(tensor, f"{tensor} scales a row of zeros; it was trained on another base model")
    base_bias = base.bias(module, projection)
    old = torch.zeros(projection.out_features) if base_bias is None else base_bias.float()
    if new is None:
        new = old
    if weight is not None and weight.bias is not None:
        new = new + weight.bias
    return OutputChange(scale, new - scale * old)


def _check_copies(weights: AdapterWeights, arch: Architecture, base: BaseLayers) -> None:
    for module, copy in weights.base_copies.items():
        own = base.weight(module, arch.vocabulary[module])
        if not torch.equal(copy.to(own.dtype), own.T if module == EMBEDDING else own):
            tensor = f"base_model.model.{module}.base_layer.weight"
            reject(tensor, f"{tensor} differs from this base model's; save with save_embedding_layers=False")


def row_norms(base_weight: Tensor, weight: LoRAWeight) -> Tensor:
    """Euclidean norm of each row of `base_weight + lora_b @ lora_a`, `[out_features]`, in float32."""
    lora_a = weight.lora_a.to(torch.float32, copy=True)  # where it lies in memory may decide how it is rounded
    return torch.cat(
        [
            torch.linalg.vector_norm(torch.addmm(rows.float(), lora_b, lora_a), dim=1)
            for rows, lora_b in zip(base_weight.split(ROWS_AT_ONCE), weight.lora_b.split(ROWS_AT_ONCE), strict=True)
        ]
    )
