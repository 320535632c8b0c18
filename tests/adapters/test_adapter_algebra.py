import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lora.adapters.adapter_algebra import (
    LowRankDelta,
    TruncatedSVD,
    add_deltas,
    frobenius_norm,
    rank_for_energy,
    singular_values,
)

sizes = st.integers(1, 24)


@st.composite
def low_rank_deltas(draw: st.DrawFn, shape: tuple[int, int] | None = None) -> LowRankDelta:
    """Also ranks above the sizes, ranks that are not used, and directions of very different strength."""
    out_features, in_features = shape or (draw(sizes), draw(sizes))
    rank = draw(sizes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    strengths = torch.tensor(draw(st.lists(st.sampled_from([0.0, 1e-6, 1.0, 30.0]), min_size=rank, max_size=rank)))
    lora_a = torch.randn(rank, in_features, generator=generator, dtype=torch.float64)
    lora_b = torch.randn(out_features, rank, generator=generator, dtype=torch.float64) * strengths
    return LowRankDelta(lora_a, lora_b)


def dense(delta: LowRankDelta) -> torch.Tensor:
    return delta.lora_b @ delta.lora_a


@given(low_rank_deltas())
def test_singular_values_and_norm_are_those_of_the_dense_delta(delta: LowRankDelta) -> None:
    expected = torch.linalg.svdvals(dense(delta))
    found = singular_values(delta)
    torch.testing.assert_close(found, expected[: len(found)], rtol=1e-10, atol=1e-10)
    assert expected[len(found) :].sum() < 1e-10
    assert frobenius_norm(delta) == pytest.approx(float(dense(delta).norm()), rel=1e-12, abs=1e-12)


@given(low_rank_deltas(), st.floats(0.01, 1.0))
def test_the_rank_for_an_energy_keeps_it_and_no_smaller_rank_does(delta: LowRankDelta, energy: float) -> None:
    svd = TruncatedSVD(delta)
    rank = rank_for_energy(svd.values, energy)
    total = float(dense(delta).square().sum())
    lost = [float((dense(delta) - dense(svd.at_rank(kept))).square().sum()) for kept in (rank, rank - 1)]
    assert lost[0] <= (1 - energy + 1e-12) * total
    assert rank == 1 or lost[1] >= (1 - energy - 1e-12) * total


@given(low_rank_deltas(), st.data())
def test_a_truncation_is_the_best_of_its_rank(delta: LowRankDelta, data: st.DataObject) -> None:
    svd = TruncatedSVD(delta)
    rank = data.draw(st.integers(1, svd.max_rank))
    u, values, v_t = torch.linalg.svd(dense(delta))
    best = (u[:, :rank] * values[:rank]) @ v_t[:rank]
    cut = svd.at_rank(rank)
    assert cut.rank == rank
    error = float((dense(delta) - dense(cut)).norm())
    assert error == pytest.approx(float((dense(delta) - best).norm()), rel=1e-9, abs=1e-9)
    assert frobenius_norm(delta - cut) == pytest.approx(error, rel=1e-6, abs=1e-9)


@given(low_rank_deltas())
def test_the_full_rank_loses_nothing_and_is_balanced(delta: LowRankDelta) -> None:
    svd = TruncatedSVD(delta)
    whole = svd.at_rank(svd.max_rank)
    torch.testing.assert_close(dense(whole), dense(delta), rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(whole.lora_a.norm(dim=1), whole.lora_b.norm(dim=0), rtol=1e-9, atol=1e-9)


@settings(max_examples=50)
@given(st.data(), sizes, sizes, st.lists(st.floats(-3, 3), min_size=1, max_size=4))
def test_a_weighted_sum_is_exact(
    data: st.DataObject, out_features: int, in_features: int, weights: list[float]
) -> None:
    deltas = [data.draw(low_rank_deltas((out_features, in_features))) for _ in weights]
    total = add_deltas([delta * weight for delta, weight in zip(deltas, weights, strict=True)])
    expected = sum(dense(delta) * weight for delta, weight in zip(deltas, weights, strict=True))
    assert total.rank == sum(delta.rank for delta in deltas)
    torch.testing.assert_close(dense(total), expected, rtol=1e-12, atol=1e-10)


@given(low_rank_deltas())
def test_a_delta_less_itself_is_nothing(delta: LowRankDelta) -> None:
    assert frobenius_norm(delta - delta) <= 1e-13 * float(delta.lora_a.norm() * delta.lora_b.norm())


def test_a_delta_of_zeros_keeps_one_rank() -> None:
    nothing = LowRankDelta(torch.zeros(4, 3, dtype=torch.float64), torch.zeros(5, 4, dtype=torch.float64))
    svd = TruncatedSVD(nothing)
    assert rank_for_energy(svd.values, 0.99) == 1
    assert torch.equal(dense(svd.at_rank(1)), torch.zeros(5, 3, dtype=torch.float64))
