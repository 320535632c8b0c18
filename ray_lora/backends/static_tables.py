"""A step's tables on a device: each at a place of its own for good, and all sent by one copy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from ray_lora.backends.base import Tables
from ray_lora.backends.lora_plan import LoraPlan
from ray_lora.ops.attention import AttentionTables
from ray_lora.ops.lora import Segments
from ray_lora.ops.step_tables import StepLimits, moved

ALIGNMENT = 128
"""Tables start at multiples of so many entries: 512 bytes, the coarsest alignment of an NPU's buffers."""


@dataclass(frozen=True, slots=True)
class TiledSegments(Segments):
    """Segments on the host, and the tiles they are cut into, on the device."""

    plan: LoraPlan


class CopyEvent(Protocol):
    """A device's mark in its queue of work."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


class StaticTables:
    """int32 tables whose addresses never change, so that captured graphs read them and no step allocates any.

    `put` writes a table to pinned host memory and returns its place on the device; `send` brings all of them there.
    """

    def __init__(self, capacities: Mapping[str, int], device: torch.device, copied: CopyEvent | None) -> None:
        """
        Args:
            capacities: the most entries of each table; those that every step has come first, for `send` stops after
                the last one that was put.
            copied: told when a copy is done; None where host memory is not pinned, as a copy then is done at once.
        """
        self._places: dict[str, tuple[int, int]] = {}
        size = 0
        for name, capacity in capacities.items():
            self._places[name] = size, capacity
            size += -(-capacity // ALIGNMENT) * ALIGNMENT
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=copied is not None)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._copied = copied
        self._end = 0

    def begin(self) -> None:
        """A new step: wait until the last one's tables have left the host memory that is to be written."""
        if self._copied is not None and self._end:
            self._copied.synchronize()
        self._end = 0

    def put(self, name: str, values: Tensor) -> Tensor:
        """The table's place on the device, in the shape of `values`; holds them once they are sent.

        Raises:
            ValueError: more entries than the table has room for.
        """
        start, capacity = self._places[name]
        stop = start + values.numel()
        if values.numel() > capacity:
            raise ValueError(f"table {name!r} has {values.numel()} entries but room for {capacity}")
        self._host[start:stop].view(values.shape).copy_(values)
        self._end = max(self._end, stop)
        return self._device[start:stop].view(values.shape)

    def send(self) -> None:
        """Bring what was put to the device, behind the work that is queued there."""
        self._device[: self._end].copy_(self._host[: self._end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


LORA_TABLES = ("rows", "decode_tiles", "prefill_tiles", "pages")


def table_capacities(limits: StepLimits) -> dict[str, int]:
    """Room for the tables of any step: a tile has 4 entries and at least one row."""
    tokens = limits.max_tokens
    capacities = {
        "token_ids": tokens,
        "query_starts": limits.max_sequences + 1,
        "context_lens": limits.max_sequences,
        "positions": tokens,
        "slot_mapping": tokens,
        "block_tables": limits.max_sequences * limits.max_blocks,
    }
    room = (tokens, 4 * tokens, 4 * tokens, limits.max_pages)
    for linear in limits.linears:
        capacities |= {f"{linear} {name}": entries for name, entries in zip(LORA_TABLES, room, strict=True)}
    return capacities


def send_step(
    static: StaticTables, step: Tables, cut: Callable[[Segments], LoraPlan]
) -> tuple[dict[str, Tensor], Tables]:
    """Send all tables of a step to the device, its segments as the tiles that `cut` makes of them.

    Returns:
        The fields of its `AttentionTables` on the device, and the step with the rest there.
    """
    static.begin()
    token_ids = static.put("token_ids", step.token_ids)
    sent = {field.name: static.put(field.name, getattr(step.tables, field.name)) for field in fields(AttentionTables)}
    plans: dict[int, LoraPlan] = {}
    segments: dict[str, TiledSegments] = {}
    for linear, part in step.segments.items():
        if id(part) not in plans:
            plans[id(part)] = cut(part)
        plan = put_plan(static, linear, plans[id(part)])
        segments[linear] = TiledSegments(part.rows, part.row_starts, part.pages, part.page_starts, plan)
    static.send()
    outputs = moved(step.outputs, token_ids.device)
    return sent, replace(step, token_ids=token_ids, segments=segments, outputs=outputs)


def put_plan(tables: StaticTables, linear: str, plan: LoraPlan) -> LoraPlan:
    """The same plan with its tables in this linear's places on the device."""
    rows, decode_tiles, prefill_tiles, pages = (
        tables.put(f"{linear} {name}", getattr(plan, name)) for name in LORA_TABLES
    )
    return replace(plan, rows=rows, decode_tiles=decode_tiles, prefill_tiles=prefill_tiles, pages=pages)
