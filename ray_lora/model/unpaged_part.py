"""What an adapter does beside its pages and slots, ready on the device, and the rows of a step that it does it to."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ray_lora.adapters.shard import AdapterShard
from ray_lora.architecture import EMBEDDING, HEAD
from ray_lora.ops.vocabulary_change import VocabularyChange


@dataclass(frozen=True, slots=True)
class UnpagedPart:
    """One adapter's own embedding, head and norms."""

    embedding: VocabularyChange | None
    head: VocabularyChange | None
    norms: Mapping[str, Tensor]
    """By module name, `[hidden_size]`, in the served type."""

    @classmethod
    def of(cls, shard: AdapterShard, dtype: torch.dtype, device: torch.device) -> "UnpagedPart":
        """Copy what a shard has of it to the device; weights and rows in the served `dtype`."""
        served = ("weight", "rows")
        tensors = {
            name: tensor.to(device, dtype if name.endswith(served) or "norm" in name else tensor.dtype)
            for name, tensor in shard.unpaged_tensors().items()
        }

        def change(module: str) -> VocabularyChange | None:
            parts = {field.name: tensors.pop(f"{module}.{field.name}", None) for field in fields(VocabularyChange)}
            return VocabularyChange(**parts) if any(part is not None for part in parts.values()) else None

        return cls(change(EMBEDDING), change(HEAD), tensors)


Members = tuple[tuple[UnpagedPart, Tensor], ...]
"""Adapters that have such a part, each with its rows [num_rows] int64; empty in nearly every step."""


def group_rows(versions: Iterable[str | None], parts: Mapping[str, UnpagedPart], device: torch.device) -> Members:
    """Rows by adapter, where row `i` uses the adapter `versions[i]`, None for the base model."""
    rows: dict[str, list[int]] = {}
    for row, version in enumerate(versions):
        if version is not None and version in parts:
            rows.setdefault(version, []).append(row)
    return tuple((parts[version], torch.tensor(members).to(device)) for version, members in rows.items())
