"""What every layer of a step reads beside weights and caches: built on the host, once, then placed by a backend."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from ray_lora.ops.attention import AttentionTables
from ray_lora.ops.lora import Segments
from ray_lora.ops.scale_shift import SlotRows


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that will come, for backends that keep their tables in one place."""

    max_tokens: int
    max_sequences: int
    max_blocks: int
    """KV blocks of one sequence."""
    max_pages: int
    """Pages of all adapters of a step together."""
    max_adapter_pages: int
    """Pages of one adapter; 0 without LoRA."""
    linears: tuple[str, ...]
    """The fused linears of a layer, each of which may have segments of its own."""
    head_dim: int


@dataclass(frozen=True, slots=True)
class StepTables:
    token_ids: Tensor
    """[num_tokens] int64, or int32 once placed"""
    tables: AttentionTables
    cos: Tensor
    sin: Tensor
    """Rotary tables that `tables.positions` points into."""
    segments: Mapping[str, Segments]
    """By fused linear; one that no adapter of this step changes is absent, and so is everything in a base-only step."""
    outputs: Mapping[str, SlotRows]
    """By fused linear whose output changes beyond the delta; empty unless an adapter of this step has such a change."""

    def to(self, device: torch.device) -> Self:
        """Everything here on the device; what a subclass adds stays where it is."""
        return replace(self, **{field.name: moved(getattr(self, field.name), device) for field in fields(StepTables)})


Movable = TypeVar("Movable")


def moved(value: Movable, device: torch.device) -> Movable:
    """A tensor on the device; of a mapping or a dataclass, a copy whose tensors are."""
    return cast(Movable, _moved(value, device))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: _moved(part, device) for name, part in value.items()}
    return replace(value, **{field.name: _moved(getattr(value, field.name), device) for field in fields(value)})
