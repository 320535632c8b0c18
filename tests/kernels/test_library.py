"""`torch.ops.ray_lora.add_lora_`: schema, fake kernel, and the native kernel behind it."""

import torch
from torch import Tensor

from ray_lora.backends.cpu_library import load_cpu_kernels
from ray_lora.ops import library
from ray_lora.ops.lora import add_lora_reference_
from tests.kernels.test_add_lora import Case, make_case


def arguments(case: Case) -> tuple[Tensor | list[int], ...]:
    tables = case.segments
    return (
        *(case.y.clone(), case.x, case.pool_a, case.pool_b, list(case.slices)),
        *(tables.rows, tables.row_starts, tables.pages, tables.page_starts),
    )


def test_the_operator_keeps_torchs_rules() -> None:
    load_cpu_kernels()
    torch.library.opcheck(library.add_lora_, arguments(make_case()))


def test_the_operator_says_what_it_changes() -> None:
    schema = str(torch.ops.ray_lora.add_lora_.default._schema)
    assert "(Tensor(a0!) y, Tensor x, Tensor pool_a, Tensor pool_b, SymInt[] slices" in schema
    assert schema.endswith("-> ()")


def test_the_operator_adds_what_the_reference_adds() -> None:
    case = make_case("zipf", 33)
    given, expected = arguments(case), case.y.clone()
    torch.ops.ray_lora.add_lora_(*given)
    add_lora_reference_(expected, case.x, case.pool_a, case.pool_b, case.slices, case.segments)
    torch.testing.assert_close(given[0], expected)
