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

from ray_lora.adapters.peft_config import reject
from ray_lora.adapters.peft_weights import AdapterWeights, LoRAWeight, OutputChange
from ray_lora.architecture import Architecture, Projection

ROWS_AT_ONCE = 1024
"""Rows of a weight whose norms are computed together, which bounds the memory that they take."""


class BaseLayers(Protocol):
    """The base model's linear layers, in the type that is served."""

    def weight(self, layer: int, projection: Projection) -> Tensor:
        """[out_features, in_features], of all ranks."""

    def bias(self, layer: int, projection: Projection) -> Tensor | None:
        """[out_features], of all ranks; None if the layer has none."""


def change_outputs(weights: AdapterWeights, arch: Architecture, open_base: Callable[[], BaseLayers]) -> AdapterWeights:
    """The weights with `outputs` filled in; the base is opened only for an adapter that needs it.

    Raises:
        AdapterRejectedError: a row of a changed weight is zero, so that its magnitude means nothing.
    """
    changed = {
        module for module, weight in weights.modules.items() if weight.bias is not None or weight.magnitude is not None
    } | set(weights.base_biases)
    if not changed:
        return weights
    base = open_base()
    everything = [(layer, projection.name) for layer in range(arch.num_layers) for projection in arch.projections]
    projections = {projection.name: projection for projection in arch.projections}
    outputs = {}
    for layer, name in (module for module in everything if module in changed):
        projection, weight = projections[name], weights.modules.get((layer, name))
        scale = torch.ones(projection.out_features)
        if weight is not None and weight.magnitude is not None:
            scale = weight.magnitude / row_norms(base.weight(layer, projection), weight)
            if not torch.isfinite(scale).all():
                module = f"model.layers.{layer}.{name}"
                reject(
                    f"base_model.model.{module}.lora_magnitude_vector",
                    f"base_model.model.{module}.lora_magnitude_vector scales a row of zeros; its base is another one",
                )
        base_bias = base.bias(layer, projection)
        old = torch.zeros(projection.out_features) if base_bias is None else base_bias.float()
        new = weights.base_biases.get((layer, name), old)
        if weight is not None and weight.bias is not None:
            new = new + weight.bias
        outputs[layer, name] = OutputChange(scale, new - scale * old)
    return replace(weights, outputs=outputs)


def row_norms(base_weight: Tensor, weight: LoRAWeight) -> Tensor:
    """Euclidean norm of each row of `base_weight + lora_b @ lora_a`, `[out_features]`, in float32."""
    lora_a = weight.lora_a.float()
    return torch.cat(
        [
            torch.linalg.vector_norm(torch.addmm(rows.float(), lora_b, lora_a), dim=1)
            for rows, lora_b in zip(base_weight.split(ROWS_AT_ONCE), weight.lora_b.split(ROWS_AT_ONCE), strict=True)
        ]
    )
