"""The Triton kernels, interpreted, under the tests of every `add_lora_`, and what they promise beyond it."""

from typing import Any

import pytest
import torch

from ray_lora.backends.lora_blocks import BLOCKS
from ray_lora.backends.lora_plan import padded_plan
from ray_lora.backends.triton_lora import TritonLora
from ray_lora.ops.lora import Segments
from tests.kernels.test_add_lora import (
    TOLERANCE,
    WORKLOADS,
    Case,
    make_case,
    run,
    test_a_row_alone_is_bit_equal_to_itself_among_others,
    test_any_case_equals_the_oracle,
    test_awkward_sizes_equal_the_oracle,
    test_every_rank_equals_the_oracle,
    test_every_workload_equals_the_oracle,
    test_pages_may_be_of_another_type_than_activations,
    test_strided_rows_are_taken_and_what_lies_between_is_kept,
)

__all__ = [
    "test_a_row_alone_is_bit_equal_to_itself_among_others",
    "test_any_case_equals_the_oracle",
    "test_awkward_sizes_equal_the_oracle",
    "test_every_rank_equals_the_oracle",
    "test_every_workload_equals_the_oracle",
    "test_pages_may_be_of_another_type_than_activations",
    "test_strided_rows_are_taken_and_what_lies_between_is_kept",
]

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
"""The interpreter of triton-ascend 3.2 does it."""


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("target", BLOCKS)
def test_a_step_of_decode_and_prefill_equals_the_oracle(target: str, workload: str, dtype: torch.dtype) -> None:
    case = make_case(workload, 60, ranks=(16, 5, 33), dtype=dtype)
    kernels = TritonLora(target, decode_programs=7, prefill_programs=2)
    y = case.y.clone()
    plan = kernels.plan(case.segments, [0, 1, 2, 3, 40, 50, 60])
    kernels.add_lora_(y, case.x, case.pool_a, case.pool_b, case.slices, plan)
    error = (y.double() - case.oracle()).abs().max() / case.oracle().abs().max()
    assert error < TOLERANCE[dtype]


def test_rows_without_an_adapter_are_neither_read_nor_written(ops: Any) -> None:
    case = make_case("half-base", 37, ranks=(16, 16))
    spare = [row for row, adapter in enumerate(case.adapters) if adapter < 0]
    case.x[spare] = float("nan")
    case.y[spare] = float("nan")
    produced = run(ops, case)
    assert produced[spare].isnan().all()
    served = [row for row, adapter in enumerate(case.adapters) if adapter >= 0]
    assert (produced - case.oracle())[served].abs().max() < 1e-4


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_does_not_depend_on_the_rank_of_its_neighbours(ops: Any, dtype: torch.dtype) -> None:
    alone = make_case("half-base", 40, ranks=(16, 300), in_features=700, dtype=dtype)
    adapters = [0 if adapter == 0 else -1 for adapter in alone.adapters]
    without = Case(alone.y, alone.x, alone.pool_a, alone.pool_b, alone.slices, adapters, alone.pages)
    mine = [row for row, adapter in enumerate(adapters) if adapter == 0]
    assert mine
    assert torch.equal(run(ops, alone)[mine], run(ops, without)[mine])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("target", BLOCKS)
def test_a_launch_with_more_tiles_and_pages_than_it_needs_computes_the_same(target: str, dtype: torch.dtype) -> None:
    case = make_case("half-base", 12, ranks=(16, 5), dtype=dtype)
    kernels = TritonLora(target, decode_programs=7, prefill_programs=2)
    plan = kernels.plan(case.segments)
    results = []
    for chosen in (plan, padded_plan(plan, 12, 4)):
        results.append(case.y.clone())
        kernels.add_lora_(results[-1], case.x, case.pool_a, case.pool_b, case.slices, chosen)
    assert torch.equal(*results)
    y = case.y.clone()
    no_rows = Segments(*(torch.tensor(part, dtype=torch.int32) for part in ((), (0,), (), (0,))))
    none = padded_plan(kernels.plan(no_rows), 12, 1)
    kernels.add_lora_(y, case.x, case.pool_a, case.pool_b, case.slices, none)
    assert torch.equal(y, case.y)


def test_a_wrong_shape_is_refused(ops: Any) -> None:
    case = make_case()
    with pytest.raises(ValueError, match="does not fit"):
        ops.add_lora_(case.y, case.x[:, :-1], case.pool_a, case.pool_b, case.slices, case.segments)
    with pytest.raises(ValueError, match="must be contiguous"):
        ops.add_lora_(case.y.T.contiguous().T, case.x, case.pool_a, case.pool_b, case.slices, case.segments)


@pytest.mark.parametrize("target", BLOCKS)
@pytest.mark.parametrize("max_adapter_pages", [0, 1, 4, 5])
def test_every_kernel_that_adapters_can_need_is_launched_once(
    target: str, max_adapter_pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, launched = TritonLora(target, decode_programs=2, prefill_programs=2), list[Any]()
    add_lora_ = kernels.add_lora_

    def launch(*arguments: Any) -> None:
        launched.append(arguments[-1])
        add_lora_(*arguments)

    monkeypatch.setattr(kernels, "add_lora_", launch)
    kernels.compile(max_adapter_pages, torch.float32, torch.device("cpu"))
    bounds = [bound for bound in BLOCKS[target].decode if bound < 2 * max_adapter_pages]
    assert [plan.max_pages for plan in launched] == bounds
    assert all(plan.num_decode_tiles and plan.num_prefill_tiles for plan in launched)
