"""1,000 steps of random traces: the placed tables stay where they are, and name nothing that is not there."""

from collections import Counter
from itertools import chain
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from npu_references import NPUOnCPU
from test_random_traces import VERSIONS, EngineTrace

from ray_lora.architecture import parse_architecture
from ray_lora.backends.npu import NPUAttentionTables
from ray_lora.backends.static_tables import StaticTables, TiledSegments
from ray_lora.model.batch import build_batch
from ray_lora.model.rotary import RotaryTables
from ray_lora.ops.step_tables import StepLimits, StepTables
from ray_lora.step import StepPlan

ARCH = parse_architecture(
    {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    },
    {},
)
LINEARS = [fused.name for fused in ARCH.fused_linears]
MODULES = {version: frozenset(LINEARS[index % 3 :]) for index, version in enumerate(VERSIONS)}


class NPUTrace(EngineTrace):
    """A random trace whose every plan the backend places as well."""

    seen: ClassVar = Counter[str]()

    def step_once(self) -> None:
        executor = self.driver.executor
        if not hasattr(self, "backend"):
            info = executor.info
            self.rotary = RotaryTables(ARCH, info.max_model_len, torch.device("cpu"))
            self.limits = StepLimits(
                max_tokens=executor.max_num_batched_tokens,
                max_sequences=min(executor.max_num_seqs, executor.max_num_batched_tokens),
                max_blocks=-(-info.max_model_len // executor.block_size),
                max_pages=executor.num_lora_pages,
                max_adapter_pages=0,
                linears=tuple(LINEARS),
                head_dim=ARCH.head_dim,
            )
            self.backend = NPUOnCPU()
            self.backend.reserve(self.limits, torch.float32)
            self.addresses: dict[str, int] = {}
            executor.before_step = self.replay
        super().step_once()

    def replay(self, plan: StepPlan) -> None:
        NPUTrace.seen["steps"] += 1
        block_size = self.driver.executor.block_size
        batch = build_batch(plan, block_size, self.rotary, lambda _: 0, MODULES, {}, {}, torch.device("cpu"))
        step = self.backend.place(batch)
        self.check_attention(plan, step)
        for name, segments in step.segments.items():
            assert isinstance(segments, TiledSegments)
            self.check_lora(plan, name, segments)

    def check_attention(self, plan: StepPlan, step: StepTables) -> None:
        executor, tables = self.driver.executor, step.tables
        assert isinstance(tables, NPUAttentionTables)
        assert step.token_ids.tolist() == [token for sequence in plan.sequences for token in sequence.token_ids]
        assert tables.query_ends[-1] == plan.num_tokens == len(tables.positions) == tables.cos.shape[1]
        assert list(tables.query_ends) == tables.query_starts[1:].tolist()
        assert list(tables.context_lens_host) == tables.context_lens.tolist()
        assert tables.block_tables.numel() <= self.limits.max_sequences * self.limits.max_blocks
        assert int(tables.block_tables.min()) >= 0
        assert int(tables.block_tables.max()) < executor.info.num_kv_blocks
        assert all(length <= tables.block_tables.shape[1] * executor.block_size for length in tables.context_lens_host)
        slots = tables.slot_mapping.tolist()
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < executor.info.num_kv_blocks * executor.block_size for slot in slots)
        assert all(0 <= position < executor.info.max_model_len for position in tables.positions.tolist())
        for name in ("query_starts", "context_lens", "block_tables", "positions", "slot_mapping"):
            address = getattr(tables, name).data_ptr()
            assert self.addresses.setdefault(name, address) == address, f"{name} has moved"

    def check_lora(self, plan: StepPlan, linear: str, segments: TiledSegments) -> None:
        tiles, pages = segments.plan, segments.plan.pages.tolist()
        assert all(0 <= page < self.limits.max_pages for page in pages)
        NPUTrace.seen.update({"decode tiles": tiles.num_decode_tiles, "prefill tiles": tiles.num_prefill_tiles})
        held = Counter[tuple[int, tuple[int, ...]]]()
        rows = tiles.rows.tolist()
        for first, last, *places in tiles.decode_tiles.tolist():
            assert 0 <= first < last <= len(rows)
            held.update((row, self.pages_at(pages, *places)) for row in rows[first:last])
        for first, last, *places in tiles.prefill_tiles.tolist():
            assert 0 <= first < last <= plan.num_tokens
            held.update((row, self.pages_at(pages, *places)) for row in range(first, last))
        changed = [MODULES[adapter.version] for adapter in plan.adapters]
        by_row = chain.from_iterable([sequence.adapter] * len(sequence.token_ids) for sequence in plan.sequences)
        wanted = [
            (row, plan.adapters[adapter].pages)
            for row, adapter in enumerate(by_row)
            if adapter >= 0 and linear in changed[adapter]
        ]
        assert held == Counter(wanted), "a row is computed twice, not at all, or with another adapter's pages"

    def pages_at(self, pages: list[int], first: int, last: int) -> tuple[int, ...]:
        assert 0 <= first < last <= len(pages)
        return tuple(pages[first:last])


def test_random_plans_stay_within_the_static_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_lora.backends.lora_plan.MIN_CHUNK", 4)
    NPUTrace.seen.clear()
    many = settings(
        max_examples=300, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    run_state_machine_as_test(NPUTrace, settings=many)  # type: ignore[no-untyped-call]
    assert NPUTrace.seen["steps"] >= 1000
    assert NPUTrace.seen["decode tiles"] > 100
    assert NPUTrace.seen["prefill tiles"] > 100


def test_a_table_that_is_too_long_is_refused() -> None:
    tables = StaticTables({"a": 3, "b": 4}, torch.device("cpu"), None)
    tables.begin()
    tables.put("a", torch.arange(3))
    with pytest.raises(ValueError, match="table 'a' has 4 entries but room for 3"):
        tables.put("a", torch.arange(4))


class FakeEvent:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def record(self) -> None:
        self.calls.append("record")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


def test_host_memory_is_not_written_before_the_last_copy_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory=False, **kwargs: zeros(*size, **kwargs))
    event = FakeEvent()
    tables = StaticTables({"a": 3}, torch.device("cpu"), event)
    for step in range(2):
        tables.begin()
        placed = tables.put("a", torch.full((2,), step))
        tables.send()
        assert placed.tolist() == [step, step]
    assert event.calls == ["record", "synchronize", "record"]
