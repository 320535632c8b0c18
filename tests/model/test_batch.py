from collections.abc import Mapping
from dataclasses import fields
from itertools import islice
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ray_lora.architecture import parse_architecture
from ray_lora.model.batch import Batch, build_batch, build_segments, build_slot_rows
from ray_lora.model.rotary import RotaryTables
from ray_lora.ops.lora import Segments
from ray_lora.step import AdapterPlan, SequencePlan, StepPlan

CPU = torch.device("cpu")
QKV, O_PROJ, GATE_UP = "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj"
TRAINED_LEN = 32


def make_rotary(rope_type: str = "default", max_positions: int = 64) -> RotaryTables:
    config = {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": TRAINED_LEN if rope_type == "dynamic" else 64,
        "rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0},
    }
    return RotaryTables(parse_architecture(config, {}), max_positions, CPU)


def sequence(request_id: int, tokens: list[int], start: int, blocks: list[int], adapter: int = -1) -> SequencePlan:
    return SequencePlan(request_id, tuple(tokens), start, tuple(blocks), adapter, sample=True, num_output_tokens=0)


def no_prompt_len(request_id: int) -> int:
    raise AssertionError("asked for a prompt's length where nothing depends on it")


def make_batch(
    plan: StepPlan,
    fused_modules: Mapping[str, frozenset[str]] | None = None,
    block_size: int = 16,
    rotary: RotaryTables | None = None,
) -> Batch:
    return build_batch(plan, block_size, rotary or make_rotary(), no_prompt_len, fused_modules or {}, {}, {}, CPU)


def test_a_placed_batch_has_every_table_on_the_device_and_keeps_the_rest() -> None:
    plan = StepPlan(1, (sequence(0, [5, 6], 0, [3], 0),), (AdapterPlan("x", (2,), 0),))
    batch = build_batch(
        plan, 16, make_rotary(), no_prompt_len, {"x": frozenset([QKV])}, {"x": frozenset([QKV])}, {}, CPU
    )
    placed = batch.to(torch.device("meta"))
    assert placed.unpaged == batch.unpaged == ()
    tensors = [placed.token_ids, placed.cos, placed.sin]
    for held in (placed.tables, placed.segments[QKV], placed.outputs[QKV]):
        tensors += [getattr(held, field.name) for field in fields(held)]
    assert len(tensors) == 3 + 5 + 4 + 2
    assert all(tensor.device.type == "meta" for tensor in tensors)


def as_lists(segments: Segments) -> tuple[list[int], list[int], list[int], list[int]]:
    return (
        segments.rows.tolist(),
        segments.row_starts.tolist(),
        segments.pages.tolist(),
        segments.page_starts.tolist(),
    )


# Attention tables


def test_the_docstring_example_of_the_attention_tables() -> None:
    plan = StepPlan(1, (sequence(1, [11, 12, 13], 5, [4]), sequence(2, [14], 16, [2, 7])))
    batch = make_batch(plan)
    tables = batch.tables
    assert batch.token_ids.tolist() == [11, 12, 13, 14]
    assert tables.query_starts.tolist() == [0, 3, 4]
    assert tables.context_lens.tolist() == [8, 17]
    assert tables.block_tables.tolist() == [[4, 0], [2, 7]]
    assert tables.positions.tolist() == [5, 6, 7, 16]
    assert tables.slot_mapping.tolist() == [69, 70, 71, 112]


def test_the_docstring_example_of_a_sequence_plan() -> None:
    """With blocks of 16, `block_ids=(7, 2)` puts position 17 at row 1 of block 2."""
    batch = make_batch(StepPlan(1, (sequence(1, [5], 17, [7, 2]),)))
    assert divmod(int(batch.tables.slot_mapping), 16) == (2, 1)


def test_tables_are_int32_on_the_device_and_token_ids_int64() -> None:
    batch = make_batch(StepPlan(1, (sequence(1, [5, 6], 0, [0]),)))
    assert batch.token_ids.dtype == torch.int64
    for field in fields(batch.tables):
        table = getattr(batch.tables, field.name)
        assert table.dtype == torch.int32
        assert table.is_contiguous()
        assert table.device == CPU


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=5),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
)
def test_every_token_goes_to_its_own_place_in_its_own_block(
    shapes: list[tuple[int, int]], block_size: int, chooser: Random
) -> None:
    blocks = list(range(200))
    chooser.shuffle(blocks)
    sequences = []
    for request_id, (num_tokens, start) in enumerate(shapes):
        held = [blocks.pop() for _ in range(-(-(start + num_tokens) // block_size))]
        sequences.append(sequence(request_id, [request_id * 10 + i for i in range(num_tokens)], start, held))
    batch = make_batch(StepPlan(1, tuple(sequences)), block_size=block_size)
    slots = batch.tables.slot_mapping.tolist()
    assert len(set(slots)) == len(slots)
    row = 0
    for index, planned in enumerate(sequences):
        assert batch.tables.query_starts[index] == row
        assert batch.tables.block_tables[index, : len(planned.block_ids)].tolist() == list(planned.block_ids)
        for offset, token_id in enumerate(planned.token_ids):
            position = planned.start + offset
            assert batch.token_ids[row] == token_id
            assert batch.tables.positions[row] == position
            assert divmod(slots[row], block_size) == (planned.block_ids[position // block_size], position % block_size)
            row += 1
        assert batch.tables.context_lens[index] == planned.start + len(planned.token_ids)
    assert batch.tables.query_starts[-1] == row == len(slots)


# Segments


def test_the_docstring_example_of_the_segments() -> None:
    """Rows 0, 3 use an adapter of pages (5, 9), row 2 one of page (1,), row 1 none."""
    adapters = (AdapterPlan("x", (5, 9), 0), AdapterPlan("y", (1,), 1))
    plan = StepPlan(
        1,
        tuple(sequence(i, [i], 0, [i], adapter) for i, adapter in enumerate([0, -1, 1, 0])),
        adapters,
    )
    segments = build_segments(plan, [0, 1, 2, 3, 4], {"x": frozenset([QKV]), "y": frozenset([QKV])})
    assert as_lists(segments[QKV]) == ([0, 3, 2], [0, 2, 3], [5, 9, 1], [0, 2, 3])


def test_a_step_without_adapters_has_no_segments() -> None:
    batch = make_batch(StepPlan(1, (sequence(1, [5], 0, [0]), sequence(2, [5, 6], 0, [1]))))
    assert batch.segments == {}


def test_all_rows_of_a_prompt_chunk_belong_to_its_adapter() -> None:
    sequences = (sequence(1, [1, 2], 0, [0]), sequence(2, [3, 4, 5], 4, [1], 0), sequence(3, [6], 9, [2], 0))
    plan = StepPlan(1, sequences, (AdapterPlan("x", (7,), 0),))
    batch = make_batch(plan, {"x": frozenset([QKV])})
    assert as_lists(batch.segments[QKV]) == ([2, 3, 4, 5], [0, 4], [7], [0, 1])


def test_a_module_is_skipped_for_adapters_that_lack_it_and_absent_if_all_do() -> None:
    adapters = (AdapterPlan("x", (5, 9), 0), AdapterPlan("y", (1,), 1))
    plan = StepPlan(1, (sequence(1, [1], 0, [0], 0), sequence(2, [2], 0, [1], 1)), adapters)
    segments = build_segments(plan, [0, 1, 2], {"x": frozenset([QKV, GATE_UP]), "y": frozenset([GATE_UP, O_PROJ])})
    assert set(segments) == {QKV, O_PROJ, GATE_UP}
    assert as_lists(segments[QKV]) == ([0], [0, 1], [5, 9], [0, 2])
    assert as_lists(segments[O_PROJ]) == ([1], [0, 1], [1], [0, 1])
    assert as_lists(segments[GATE_UP]) == ([0, 1], [0, 1, 2], [5, 9, 1], [0, 2, 3])


def test_modules_changed_by_the_same_adapters_share_one_table() -> None:
    adapters = (AdapterPlan("x", (5,), 0), AdapterPlan("y", (1,), 1))
    plan = StepPlan(1, (sequence(1, [1], 0, [0], 0), sequence(2, [2], 0, [1], 1)), adapters)
    modules = {"x": frozenset([QKV, O_PROJ, GATE_UP]), "y": frozenset([QKV, GATE_UP])}
    segments = build_segments(plan, [0, 1, 2], modules)
    assert segments[QKV] is segments[GATE_UP]
    assert segments[O_PROJ] is not segments[QKV]


def test_an_adapter_that_changes_nothing_is_in_no_segment() -> None:
    plan = StepPlan(1, (sequence(1, [1], 0, [0], 0),), (AdapterPlan("x", (5,), 0),))
    assert build_segments(plan, [0, 1], {"x": frozenset()}) == {}


def test_only_adapters_that_change_outputs_have_their_rows_scaled_and_shifted() -> None:
    adapters = (AdapterPlan("x", (5,), 3), AdapterPlan("y", (1,), 0), AdapterPlan("plain", (2,), 1))
    sequences = tuple(sequence(i, [i, i], 0, [i], adapter) for i, adapter in enumerate([0, -1, 1, 2]))
    plan = StepPlan(1, sequences, adapters)
    members = build_slot_rows(plan, [0, 2, 4, 6, 8], {"x": frozenset([QKV]), "y": frozenset([QKV, O_PROJ])})
    assert set(members) == {QKV, O_PROJ}
    assert (members[QKV].rows.tolist(), members[QKV].slots.tolist()) == ([0, 1, 4, 5], [3, 3, 0, 0])
    assert (members[O_PROJ].rows.tolist(), members[O_PROJ].slots.tolist()) == ([4, 5], [0, 0])
    assert build_slot_rows(plan, [0, 2, 4, 6, 8], {"elsewhere": frozenset([QKV])}) == {}


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 5)), min_size=1, max_size=10),
    st.lists(st.frozensets(st.sampled_from([QKV, O_PROJ, GATE_UP])), min_size=4, max_size=4),
    st.lists(st.integers(1, 4), min_size=4, max_size=4),
)
def test_every_row_meets_exactly_the_pages_of_its_own_adapter(
    shapes: list[tuple[int, int]], modules: list[frozenset[str]], num_pages: list[int]
) -> None:
    pages = iter(range(100))
    adapters = tuple(AdapterPlan(f"v{i}", tuple(islice(pages, count)), i) for i, count in enumerate(num_pages))
    sequences = tuple(sequence(i, [0] * size, 0, [i], adapter) for i, (adapter, size) in enumerate(shapes))
    plan = StepPlan(1, sequences, adapters)
    fused_modules = {adapter.version: modules[i] for i, adapter in enumerate(adapters)}
    segments = make_batch(plan, fused_modules).segments
    row_adapters = [adapter for adapter, size in shapes for _ in range(size)]
    assert set(segments) == frozenset().union(*modules)
    for name, table in segments.items():
        rows, row_starts, page_ids, page_starts = as_lists(table)
        assert len(row_starts) == len(page_starts)
        assert all(getattr(table, field.name).dtype == torch.int32 for field in fields(table))
        met = {
            row: tuple(page_ids[page_starts[segment] : page_starts[segment + 1]])
            for segment in range(len(row_starts) - 1)
            for row in rows[row_starts[segment] : row_starts[segment + 1]]
        }
        assert len(met) == len(rows), "a row is in two segments"
        assert met == {
            row: adapters[adapter].pages
            for row, adapter in enumerate(row_adapters)
            if adapter >= 0 and name in modules[adapter]
        }


# Rotary rows


def test_rotary_tables_are_shared_and_indexed_by_position() -> None:
    rotary = make_rotary()
    batch = make_batch(StepPlan(1, (sequence(1, [5, 6], 3, [0]),)), rotary=rotary)
    assert batch.cos is rotary.cos
    assert batch.sin is rotary.sin
    assert batch.tables.positions.tolist() == [3, 4]


def dynamic_angles(position: int, length: int) -> torch.Tensor:
    """transformers' dynamic NTK scaling, for one row."""
    head_dim, theta, factor, length = 8, 10000.0, 4.0, max(length, TRAINED_LEN)
    base = theta * ((factor * length / TRAINED_LEN) - (factor - 1)) ** (head_dim / (head_dim - 2))
    return position / base ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def test_dynamic_rows_depend_on_the_prompt_while_it_lasts_and_then_on_their_own_place() -> None:
    rotary = make_rotary("dynamic", max_positions=TRAINED_LEN * 4)
    sequences = (
        sequence(1, [1, 2, 3], 2, list(range(10, 14))),
        sequence(2, [1, 2], 39, list(range(3))),
        sequence(3, [7], 50, list(range(4, 8))),
    )
    prompt_lens = {1: 60, 2: 40, 3: 20}
    batch = build_batch(StepPlan(1, sequences), 16, rotary, prompt_lens.__getitem__, {}, {}, {}, CPU)
    rows = [(2, 60), (3, 60), (4, 60), (39, 40), (40, 41), (50, 51)]
    assert batch.tables.positions.tolist() == list(range(6))
    assert batch.tables.slot_mapping.tolist() == [162, 163, 164, 39, 40, 114]
    expected = torch.stack([dynamic_angles(*row) for row in rows])
    torch.testing.assert_close(batch.cos.double(), expected.cos(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(batch.sin.double(), expected.sin(), rtol=1e-5, atol=1e-5)


def test_within_the_trained_length_dynamic_scaling_changes_nothing() -> None:
    rotary = make_rotary("dynamic", max_positions=TRAINED_LEN)
    assert not rotary.is_length_dependent
    batch = make_batch(StepPlan(1, (sequence(1, [5], 3, [0]),)), rotary=rotary)
    assert batch.cos is rotary.cos
    torch.testing.assert_close(rotary.cos, make_rotary(max_positions=TRAINED_LEN).cos)


@pytest.mark.parametrize("rope_type", ["default", "linear"])
def test_other_scalings_never_ask_for_a_prompts_length(rope_type: str) -> None:
    rotary = make_rotary(rope_type)
    assert not rotary.is_length_dependent
    make_batch(StepPlan(1, (sequence(1, [5], 3, [0]),)), rotary=rotary)
