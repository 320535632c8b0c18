"""Rotary position embeddings of every type that is served, as tables of cosines and sines.

Sources: RoFormer (rotary), NTK-aware scaling (dynamic), Llama 3.1 (llama3) and YaRN (yarn), as transformers has them.
"""

import math

import torch
from torch import Tensor

from ray_lora.architecture import Architecture, RopeConfig


class RotaryTables:
    """Cosines and sines by position, float32 [max_positions, head_dim / 2]; see `score_scale` for YaRN's factor.

    With `dynamic` scaling a row's frequencies depend on the length of its sequence, not only on its position; see
    `dynamic_rows`.
    """

    def __init__(self, arch: Architecture, max_positions: int, device: torch.device) -> None:
        self._arch = arch
        self._device = device
        self.is_length_dependent = arch.rope.rope_type == "dynamic" and max_positions > arch.max_position_embeddings
        frequencies, _ = inverse_frequencies(arch.rope, arch.head_dim, arch.max_position_embeddings)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        self.cos, self.sin = angles.cos().to(device), angles.sin().to(device)

    def dynamic_rows(self, positions: list[int], lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Cosines and sines of rows at `positions` in sequences of `lengths` tokens, [num_rows, head_dim / 2]."""
        rope, trained_len = self._arch.rope, self._arch.max_position_embeddings
        factor, size = float(rope.parameters["factor"]), self._arch.head_dim
        longest = torch.tensor(lengths).clamp(min=trained_len).float()
        theta = rope.theta * ((factor * longest / trained_len) - (factor - 1)) ** (size / (size - 2))
        frequencies = 1.0 / theta.unsqueeze(1) ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        angles = torch.tensor(positions, dtype=torch.float32).unsqueeze(1) * frequencies
        return angles.cos().to(self._device), angles.sin().to(self._device)


def score_scale(arch: Architecture) -> float:
    """What attention multiplies its scores by.

    YaRN's factor on cosines and sines is in queries and keys alike, so it can be here, squared: the tables stay within
    -1 and 1, beyond which an NPU's operator does not take them.
    """
    _, factor = inverse_frequencies(arch.rope, arch.head_dim, arch.max_position_embeddings)
    return float(arch.head_dim**-0.5 * factor**2)


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Frequencies [head_dim / 2] and the factor on cosines and sines, for lengths up to the trained one."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return frequencies / float(rope.parameters["factor"]), 1.0
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, head_dim, max_positions)
    return frequencies, 1.0


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Slow frequencies are divided by the factor, fast ones kept, those between blended."""
    parameters = rope.parameters
    factor, low, high = (float(parameters[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(parameters["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * frequencies / factor + smooth * frequencies


def _yarn(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Interpolate slow dimensions, keep fast ones, and sharpen attention by a factor on cosines and sines."""
    parameters = rope.parameters
    factor = float(parameters["factor"])
    original = float(parameters.get("original_max_position_embeddings") or max_positions)
    beta_fast, beta_slow = float(parameters.get("beta_fast") or 32), float(parameters.get("beta_slow") or 1)
    scaling = parameters.get("attention_factor")
    if scaling is None:
        mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and mscale_all:
            scaling = _yarn_mscale(factor, float(mscale)) / _yarn_mscale(factor, float(mscale_all))
        else:
            scaling = _yarn_mscale(factor, 1.0)

    def dimension(num_rotations: float) -> float:
        return head_dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    base = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return (1.0 / (factor * base)) * (1 - kept) + (1.0 / base) * kept, float(scaling)


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
