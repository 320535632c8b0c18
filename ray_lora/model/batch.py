"""A `StepPlan` as tensors: built once per step on the host, read by every layer."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ray_lora.model.rotary import RotaryTables
from ray_lora.model.unpaged_part import Members, UnpagedPart, group_rows
from ray_lora.ops.attention import AttentionTables
from ray_lora.ops.lora import Segments
from ray_lora.ops.scale_shift import SlotRows
from ray_lora.ops.step_tables import StepTables
from ray_lora.step import StepPlan


@dataclass(frozen=True, slots=True)
class Batch(StepTables):
    """One step's input on one rank."""

    unpaged: Members
    """Rows of adapters that change the embedding, the head or norms."""


def build_batch(
    plan: StepPlan,
    block_size: int,
    rotary: RotaryTables,
    prompt_len: Callable[[int], int],
    fused_modules: Mapping[str, frozenset[str]],
    output_modules: Mapping[str, frozenset[str]],
    unpaged: Mapping[str, UnpagedPart],
    device: torch.device,
) -> Batch:
    """Lay out a plan's tokens one sequence after another, on the host; `Backend.place` brings it to the device.

    Args:
        prompt_len: tokens in a request's prompt, by request id; asked only where rotary frequencies depend on it.
        fused_modules: by adapter version, the fused linears that it changes.
        output_modules: by adapter version, those whose outputs it scales or shifts; one without any may be absent.
        unpaged: by adapter version, what it has outside pages and slots; one without it is absent.
        device: where `unpaged` lies.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_starts = [0]
    for sequence in plan.sequences:
        token_ids.extend(sequence.token_ids)
        for position in range(sequence.start, sequence.start + len(sequence.token_ids)):
            positions.append(position)
            slots.append(sequence.block_ids[position // block_size] * block_size + position % block_size)
        query_starts.append(len(token_ids))
    block_tables = np.zeros((len(plan.sequences), max(len(s.block_ids) for s in plan.sequences)), dtype=np.int32)
    for index, sequence in enumerate(plan.sequences):
        block_tables[index, : len(sequence.block_ids)] = sequence.block_ids
    cos, sin, rotary_rows = rotary.cos, rotary.sin, positions
    if rotary.is_length_dependent:
        cos, sin = rotary.dynamic_rows(positions, _rotary_lengths(plan, prompt_len))
        rotary_rows = list(range(len(positions)))

    def int32(values: "list[int] | np.ndarray[tuple[int, ...], np.dtype[np.int32]]") -> Tensor:
        return torch.as_tensor(values, dtype=torch.int32)

    tables = AttentionTables(
        query_starts=int32(query_starts),
        context_lens=int32([sequence.start + len(sequence.token_ids) for sequence in plan.sequences]),
        block_tables=int32(block_tables),
        positions=int32(rotary_rows),
        slot_mapping=int32(slots),
    )
    return Batch(
        torch.tensor(token_ids, dtype=torch.int64),
        tables,
        cos,
        sin,
        build_segments(plan, query_starts, fused_modules),
        build_slot_rows(plan, query_starts, output_modules),
        _unpaged_members(plan, unpaged, device),
    )


def build_segments(
    plan: StepPlan, query_starts: list[int], fused_modules: Mapping[str, frozenset[str]]
) -> dict[str, Segments]:
    """Which rows each adapter of the plan changes, for every fused linear that at least one of them changes."""
    rows = _rows_by_adapter(plan, query_starts)
    touched = [fused_modules[adapter.version] for adapter in plan.adapters]
    built: dict[tuple[int, ...], Segments] = {}
    segments: dict[str, Segments] = {}
    for name in sorted(frozenset().union(*touched)):
        members = tuple(index for index, names in enumerate(touched) if name in names)
        if members not in built:
            built[members] = _segments(
                (rows[index] for index in members), (plan.adapters[index].pages for index in members)
            )
        segments[name] = built[members]
    return segments


def build_slot_rows(
    plan: StepPlan, query_starts: list[int], output_modules: Mapping[str, frozenset[str]]
) -> dict[str, SlotRows]:
    """Which rows have their outputs scaled and shifted, and from which slot, by fused linear."""
    touched = [output_modules.get(adapter.version, frozenset()) for adapter in plan.adapters]
    names = frozenset[str]().union(*touched)
    if not names:
        return {}
    rows = _rows_by_adapter(plan, query_starts)
    built: dict[str, SlotRows] = {}
    for name in sorted(names):
        members = [index for index, touches in enumerate(touched) if name in touches]
        row_ids = [row for index in members for row in rows[index]]
        slots = [plan.adapters[index].slot for index in members for _ in rows[index]]
        built[name] = SlotRows(torch.tensor(row_ids), torch.tensor(slots))
    return built


def _unpaged_members(plan: StepPlan, unpaged: Mapping[str, UnpagedPart], device: torch.device) -> Members:
    if unpaged.keys().isdisjoint(adapter.version for adapter in plan.adapters):
        return ()
    versions = (version for s in plan.sequences for version in [plan.version_of(s)] * len(s.token_ids))
    return group_rows(versions, unpaged, device)


def _rows_by_adapter(plan: StepPlan, query_starts: list[int]) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in plan.adapters]
    for index, sequence in enumerate(plan.sequences):
        if sequence.adapter >= 0:
            rows[sequence.adapter].extend(range(query_starts[index], query_starts[index + 1]))
    return rows


def _segments(rows: Iterable[list[int]], pages: Iterable[tuple[int, ...]]) -> Segments:
    row_ids, row_starts, page_ids, page_starts = list[int](), [0], list[int](), [0]
    for members, held in zip(rows, pages, strict=True):
        row_ids.extend(members)
        row_starts.append(len(row_ids))
        page_ids.extend(held)
        page_starts.append(len(page_ids))
    tables = (torch.tensor(values, dtype=torch.int32) for values in (row_ids, row_starts, page_ids, page_starts))
    return Segments(*tables)


def _rotary_lengths(plan: StepPlan, prompt_len: Callable[[int], int]) -> list[int]:
    """For each row the sequence length that its frequencies depend on: the prompt's, or its own once generated."""
    lengths: list[int] = []
    for sequence in plan.sequences:
        prompt = prompt_len(sequence.request_id)
        lengths.extend(max(prompt, sequence.start + i + 1) for i in range(len(sequence.token_ids)))
    return lengths
