"""One rank's part of what an adapter does to the embedding, the head and the norms: tensors that are no pages.

By name, where `module` is `model.embed_tokens` or `lm_head`, `width` the tokens that the rank allots, zeros at the end:

    module.weight                [width, hidden]      what replaces the base's, in the pool's dtype
    module.row_ids, module.rows  [n], [n, hidden]     rows that replace the base's; ids are relative to the rank's part
    module.lora_a                [rank, hidden] for the head, [width, rank] for the embedding, float32
    module.lora_b                [rank, width] for the head, [rank, hidden] for the embedding, float32, scaled
    module.scale, module.shift   [width] for the head, [hidden] for the embedding, float32
    a norm's name                [hidden], float32
"""

import torch
from torch import Tensor

from ray_lora.adapters.finite import all_finite
from ray_lora.adapters.peft_config import reject
from ray_lora.adapters.peft_targets import NO_LAYER
from ray_lora.adapters.peft_weights import AdapterWeights
from ray_lora.architecture import EMBEDDING, Architecture


def cut_unpaged(
    weights: AdapterWeights, arch: Architecture, rank: int, tp_size: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Cut for tensor-parallel `rank` of `tp_size`, by vocabulary; empty for most adapters.

    Raises:
        AdapterRejectedError: a value is beyond the range of `dtype`; `param` is its module.
    """
    part, width = arch.vocabulary_part(rank, tp_size)

    def cut(tensor: Tensor) -> Tensor:
        """Rows of this rank's tokens, then zeros."""
        absent = tensor.new_zeros(width - (part.stop - part.start), *tensor.shape[1:])
        return torch.cat((tensor[part], absent))

    def convert(module: str, tensor: Tensor) -> Tensor:
        converted = tensor.to(dtype)
        if not all_finite(converted):
            reject(module, f"{module} has values beyond the range of {dtype}; set lora_dtype to bfloat16 or float32")
        return converted

    tensors: dict[str, Tensor] = {}
    for module, weight in weights.saved.items():
        if module in arch.vocabulary:
            tensors[f"{module}.weight"] = convert(module, cut(weight))
        else:
            tensors[module] = weight.float()
    for module, (ids, rows) in weights.token_rows.items():
        own = (ids >= part.start) & (ids < part.stop)
        tensors[f"{module}.row_ids"] = ids[own] - part.start
        tensors[f"{module}.rows"] = convert(module, rows[own])
    for module, lora in weights.vocabulary.items():
        lora_a, lora_b = lora.lora_a.float(), lora.lora_b
        tensors[f"{module}.lora_a"] = cut(lora_a.T) if module == EMBEDDING else lora_a
        tensors[f"{module}.lora_b"] = lora_b.T if module == EMBEDDING else cut(lora_b).T
        change = weights.outputs.get((NO_LAYER, module))
        if change is not None:
            for name, vector in zip(("scale", "shift"), change, strict=True):
                tensors[f"{module}.{name}"] = vector if module == EMBEDDING else cut(vector)
    return tensors
