"""`add_lora_` against a float64 oracle: named workloads, awkward sizes, every rank, every storage type."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ray_lora.adapter import num_pages
from ray_lora.ops.lora import Segments

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
"""Relative to the largest output: the rounding of y, and of float32 sums over K."""
WORKLOADS = ("identical", "distinct", "uniform", "zipf", "skewed", "base-only", "half-base", "one-row", "empty")
RANKS = (1, 4, 8, 15, 16, 17, 64, 100, 128, 256, 512)


@dataclass(frozen=True)
class Case:
    y: Tensor
    x: Tensor
    pool_a: Tensor
    pool_b: Tensor
    slices: tuple[int, ...]
    adapters: list[int]
    """By row, -1 for none."""
    pages: list[tuple[int, ...]]
    """By adapter."""

    @property
    def segments(self) -> Segments:
        rows, row_starts, page_ids, page_starts = list[int](), [0], list[int](), [0]
        for adapter, held in enumerate(self.pages):
            members = [row for row, used in enumerate(self.adapters) if used == adapter]
            if members:
                rows += members
                row_starts.append(len(rows))
                page_ids += held
                page_starts.append(len(page_ids))
        return Segments(
            *(torch.tensor(table, dtype=torch.int32) for table in (rows, row_starts, page_ids, page_starts))
        )

    def oracle(self) -> Tensor:
        """What y should become, in float64."""
        out = self.y.double()
        for row, adapter in enumerate(self.adapters):
            for page in self.pages[adapter] if adapter >= 0 else ():
                for index, (start, stop) in enumerate(zip(self.slices, self.slices[1:], strict=False)):
                    s = self.pool_a[page, index].double() @ self.x[row].double()
                    out[row, start:stop] += s @ self.pool_b[page, :, start:stop].double()
        return out


def choose(workload: str, num_rows: int, num_adapters: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    everyone = range(num_adapters)
    weights = [1 / (index + 1) ** 1.5 for index in everyone]
    match workload:
        case "identical":
            return [0] * num_rows
        case "distinct":
            return [row % num_adapters for row in range(num_rows)]
        case "uniform":
            return [rng.choice(everyone) for _ in range(num_rows)]
        case "zipf":
            return rng.choices(everyone, weights, k=num_rows)
        case "skewed":
            return [0 if rng.random() < 0.9 else rng.choice(everyone) for _ in range(num_rows)]
        case "half-base":
            return [rng.choice(everyone) if row % 2 else -1 for row in range(num_rows)]
        case "one-row":
            return [-1] * (num_rows - 1) + [0]
    return [-1] * num_rows


def make_case(
    workload: str = "uniform",
    num_rows: int = 9,
    ranks: tuple[int, ...] = (8, 17, 40),
    in_features: int = 72,
    widths: tuple[int, ...] = (40, 24, 24),
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    slices = tuple(sum(widths[:index]) for index in range(len(widths) + 1))
    total = sum(num_pages(rank) for rank in ranks) + 3
    free = torch.randperm(total, generator=generator).tolist()
    pages = [tuple(free.pop() for _ in range(num_pages(rank))) for rank in ranks]
    pool_a = torch.full((total, len(widths), 16, in_features), float("nan"))
    pool_b = torch.full((total, 16, slices[-1]), float("nan"))
    for rank, held in zip(ranks, pages, strict=True):
        for index, page in enumerate(held):
            used = min(16, rank - 16 * index)
            pool_a[page], pool_b[page] = 0, 0
            pool_a[page, :, :used] = torch.randn(len(widths), used, in_features, generator=generator) / in_features**0.5
            pool_b[page, :used] = torch.randn(used, slices[-1], generator=generator) / rank**0.5
    stored = pool_dtype or dtype
    return Case(
        torch.randn(num_rows, slices[-1], generator=generator).to(dtype),
        torch.randn(num_rows, in_features, generator=generator).to(dtype),
        pool_a.to(stored),
        pool_b.to(stored),
        slices,
        choose(workload, num_rows, len(ranks), seed),
        pages,
    )


def run(ops: Any, case: Case) -> Tensor:
    y = case.y.clone()
    ops.add_lora_(y, case.x, case.pool_a, case.pool_b, case.slices, case.segments)
    return y


def check(ops: Any, case: Case) -> None:
    produced, expected = run(ops, case), case.oracle()
    untouched = [row for row, adapter in enumerate(case.adapters) if adapter < 0]
    assert torch.equal(produced[untouched], case.y[untouched]), "a row without an adapter changed"
    if case.y.numel():
        error = (produced.double() - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE[case.y.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_equals_the_oracle(ops: Any, workload: str, dtype: torch.dtype) -> None:
    num_rows = {"one-row": 1, "empty": 0}.get(workload, 33)
    check(ops, make_case(workload, num_rows, dtype=dtype))


@pytest.mark.parametrize("rank", RANKS)
def test_every_rank_equals_the_oracle(ops: Any, rank: int) -> None:
    check(ops, make_case(ranks=(rank, 3)))


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 7, 8, 13, 16, 31, 64, 100, 133, 300])
@pytest.mark.parametrize(
    ("in_features", "widths"), [(576, (576, 192, 192)), (130, (33,)), (17, (1, 2, 3)), (96, (200,))]
)
def test_awkward_sizes_equal_the_oracle(ops: Any, num_rows: int, in_features: int, widths: tuple[int, ...]) -> None:
    check(ops, make_case(num_rows=num_rows, in_features=in_features, widths=widths))


@pytest.mark.parametrize("pool_dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_pages_may_be_of_another_type_than_activations(ops: Any, dtype: torch.dtype, pool_dtype: torch.dtype) -> None:
    check(ops, make_case(dtype=dtype, pool_dtype=pool_dtype))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_case_equals_the_oracle(ops: Any, data: st.DataObject) -> None:
    check(
        ops,
        make_case(
            data.draw(st.sampled_from(WORKLOADS[:7])),
            data.draw(st.integers(1, 70)),
            tuple(data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=5))),
            data.draw(st.integers(1, 90)),
            tuple(data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=3))),
            data.draw(st.sampled_from(list(TOLERANCE))),
            data.draw(st.sampled_from(list(TOLERANCE))),
            data.draw(st.integers(0, 1000)),
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_alone_is_bit_equal_to_itself_among_others(native: Any, dtype: torch.dtype) -> None:
    case = make_case("uniform", 64, ranks=(8, 17, 100), in_features=576, dtype=dtype)
    together = run(native, case)
    for row in range(0, 64, 7):
        alone = Case(
            case.y[row : row + 1], case.x[row : row + 1], case.pool_a, case.pool_b, case.slices,
            [case.adapters[row]], case.pages,
        )  # fmt: skip
        assert torch.equal(run(native, alone)[0], together[row])


def test_strided_rows_are_taken_and_what_lies_between_is_kept(ops: Any) -> None:
    case = make_case("half-base", 12)
    wide_y = torch.full((12, case.y.shape[1] + 9), 7.0)
    wide_x = torch.full((12, case.x.shape[1] + 5), float("nan"))
    y, x = wide_y[:, : case.y.shape[1]], wide_x[:, : case.x.shape[1]]
    y.copy_(case.y)
    x.copy_(case.x)
    ops.add_lora_(y, x, case.pool_a, case.pool_b, case.slices, case.segments)
    assert (y.double() - case.oracle()).abs().max() < 1e-4
    assert (wide_y[:, case.y.shape[1] :] == 7).all()


def test_misuse_is_refused_before_anything_is_written(native: Any) -> None:
    case = make_case()
    good = case.segments

    def segments(**changes: list[int]) -> Segments:
        tables = {name: getattr(good, name) for name in ("rows", "row_starts", "pages", "page_starts")}
        tables |= {name: torch.tensor(values, dtype=torch.int32) for name, values in changes.items()}
        return Segments(**tables)

    misuses: list[tuple[Any, ...]] = [
        (case.x.double(), case.pool_a, case.pool_b, case.slices, good),
        (case.x[:, :-1], case.pool_a, case.pool_b, case.slices, good),
        (case.x[:-1], case.pool_a, case.pool_b, case.slices, good),
        (case.x, case.pool_a, case.pool_b[:, :, :-1], case.slices, good),
        (case.x, case.pool_a.double(), case.pool_b.double(), case.slices, good),
        (case.x, case.pool_a, case.pool_b, case.slices[:-1], good),
        (case.x, case.pool_a, case.pool_b, case.slices, segments(rows=[99] * good.rows.numel())),
        (case.x, case.pool_a, case.pool_b, case.slices, segments(rows=[-1] * good.rows.numel())),
        (case.x, case.pool_a, case.pool_b, case.slices, segments(pages=[99] * good.pages.numel())),
        (case.x, case.pool_a, case.pool_b, case.slices, segments(row_starts=[0] * good.row_starts.numel())),
    ]
    for arguments in misuses:
        y = case.y.clone()
        with pytest.raises(ValueError, match=r"."):
            native.add_lora_(y, *arguments)
        assert torch.equal(y, case.y)
