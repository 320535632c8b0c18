"""Normalisation with the residual added, and the gated activation."""

import torch.nn.functional as F
from torch import Tensor

from ray_lora.ops.attention import rms_norm_reference


def add_rms_norm_reference_(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add a block's output to the residual stream and normalise the sum for the next block.

    Semantics:
        residual += x                                    # in place, rounded to its type
        return rms_norm(residual, weight)

    Shapes: residual, x and the result [num_tokens, hidden_size]; weight [hidden_size]. The result may take the place
    of x.
    """
    residual.add_(x)
    return rms_norm_reference(residual, weight, eps)


def silu_and_mul_reference(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`, where `gate_up` [num_tokens, 2 * size] holds gate then up; returns [num_tokens, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
