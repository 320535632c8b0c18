"""The sampler against formulas in float64 that share no code with it."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lora.model.sampler import Sampler, SamplingState, draw, token_logprobs, uniform
from ray_lora.request import SamplingParams
from ray_lora.step import SampledToken, SequencePlan, SequenceStart

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def make_start(
    request_id: int = 0, prompt: Sequence[int] = (), seed: int = 0, stops: Sequence[int] = (), **params: Any
) -> SequenceStart:
    return SequenceStart(request_id, tuple(prompt), SamplingParams(**{"max_tokens": None} | params), seed, tuple(stops))


def make_plan(request_id: int = 0, index: int = 0, allowed: bytes | None = None) -> SequencePlan:
    return SequencePlan(request_id, (0,), 0, (0,), -1, True, index, allowed=allowed)


def sample_one(start: SequenceStart, logits: torch.Tensor, index: int = 0) -> SampledToken:
    sampler = Sampler()
    sampler.start(start)
    (sampled,) = sampler.sample([make_plan(start.request_id, index)], logits.unsqueeze(0))
    return sampled


class OnDevice:
    """Logits that are elsewhere: before `cpu`, which is counted, only `max` gives numbers."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self.num_copies = 0

    def float(self) -> "OnDevice":
        return self

    def max(self, dim: int) -> Any:
        return self._logits.max(dim=dim)

    def __getitem__(self, row: int) -> None:
        pass

    def cpu(self) -> torch.Tensor:
        self.num_copies += 1
        return self._logits


@pytest.mark.parametrize(
    ("params", "index", "num_copies"),
    [
        ({"temperature": 0}, 0, 0),
        ({"temperature": 1, "top_k": 1}, 0, 0),
        ({"temperature": 0, "min_tokens": 2}, 2, 0),
        ({"temperature": 0, "min_tokens": 2}, 1, 1),
        ({"temperature": 0, "logprobs": 0}, 0, 1),
        ({"temperature": 0, "logit_bias": {3: 1.0}}, 0, 1),
        ({"temperature": 0, "presence_penalty": 0.5}, 0, 1),
        ({"temperature": 1}, 0, 1),
    ],
)
def test_logits_leave_their_device_only_if_more_than_the_best_is_wanted(
    params: dict[str, Any], index: int, num_copies: int
) -> None:
    logits = normal(50, 1).expand(2, -1)
    sampler, elsewhere = Sampler(), OnDevice(logits)
    sampler.start(make_start(0, temperature=0))
    sampler.start(make_start(1, **params))
    sampled = sampler.sample([make_plan(0), make_plan(1, index)], elsewhere)  # type: ignore[arg-type]
    assert elsewhere.num_copies == num_copies
    assert sampled[0].token_id == int(logits[0].argmax())


def normal(size: int, seed: int, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def probabilities(logits: torch.Tensor, params: SamplingParams) -> Floats:
    """The distribution that the parameters ask for: temperature, then min_p, then top_k, then top_p."""
    weights = softmax(logits.double().numpy() / params.temperature)
    weights = np.where(weights >= params.min_p * weights.max(), weights, 0.0)
    order = np.argsort(-weights, kind="stable")
    if params.top_k > 0:
        weights[order[params.top_k :]] = 0.0
    weights /= weights.sum()
    before = np.concatenate(([0.0], np.cumsum(weights[order])[:-1]))
    weights[order[before >= params.top_p]] = 0.0
    return weights / weights.sum()


def draws(logits: torch.Tensor, params: SamplingParams, num: int) -> Counter[int]:
    """How often each token is drawn for evenly spaced numbers."""
    scaled = logits / params.temperature
    return Counter(draw(scaled, params, (i + 0.5) / num) for i in range(num))


PARAMS = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 40},
    {"top_k": 1000},
    {"top_k": -1},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.93},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 0.5},
    {"min_p": 1.0},
    {"top_k": 7, "top_p": 0.8},
    {"top_p": 0.9, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.85, "min_p": 0.02},
    {"temperature": 2.0, "top_k": 20, "min_p": 0.2},
]


@pytest.mark.parametrize("fields", PARAMS, ids=str)
def test_each_token_is_drawn_as_often_as_its_probability_says(fields: dict[str, Any]) -> None:
    """Evenly spaced numbers fall into an interval of length p exactly `p * num` times, rounded up or down."""
    params, logits, num = SamplingParams(**fields), normal(40, seed=1), 500
    expected = probabilities(logits, params) * num
    counts = draws(logits, params, num)
    for token_id in range(len(logits)):
        assert abs(counts[token_id] - expected[token_id]) < 1.0001
        assert counts[token_id] == 0 or expected[token_id] > 0


@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"top_p": 0.2}, {"top_p": 0.97, "min_p": 0.1}], ids=str)
def test_a_nucleus_of_thousands_of_tokens_is_exact(fields: dict[str, Any]) -> None:
    params, logits, num = SamplingParams(**fields), normal(3000, seed=2, scale=0.3), 100
    expected = probabilities(logits, params)
    counts = draws(logits, params, num)
    assert all(expected[token_id] > 0 for token_id in counts)
    order = np.argsort(-expected, kind="stable")
    drawn = np.cumsum([counts[int(token_id)] for token_id in order]) / num
    assert np.abs(drawn - np.cumsum(expected[order])).max() <= 1 / num


def test_many_requests_follow_the_distribution() -> None:
    num, logits, params = 4000, normal(12, seed=3, scale=1.0), {"temperature": 0.8, "top_k": 10}
    sampler = Sampler()
    for request_id in range(num):
        sampler.start(make_start(request_id, seed=request_id, **params))
    plans = [make_plan(request_id) for request_id in range(num)]
    counts = Counter(sampled.token_id for sampled in sampler.sample(plans, logits.expand(num, -1)))
    expected = probabilities(logits, SamplingParams(**params)) * num
    chi_square = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in range(12) if expected[i] > 0)
    assert sum(counts[i] for i in range(12) if expected[i] > 0) == num
    assert chi_square < 27.9, "beyond the 99.9 % quantile of 9 degrees of freedom"


@pytest.mark.parametrize("fields", PARAMS, ids=str)
@pytest.mark.parametrize("number", [0.0, 2.0**-60, 1 - 2.0**-53, 1.0])
def test_the_ends_of_the_interval_give_tokens_that_can_be_drawn(fields: dict[str, Any], number: float) -> None:
    params, logits = SamplingParams(**fields), normal(40, seed=4)
    logits[[0, 1, 38, 39]] = float("-inf")
    token_id = draw(logits / params.temperature, params, number)
    assert probabilities(logits, params)[token_id] > 0


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1e-6}, {"top_k": 1}], ids=str)
def test_greedy_takes_the_most_likely_token_whatever_the_seed(fields: dict[str, Any]) -> None:
    for seed in range(20):
        logits = normal(50, seed)
        assert sample_one(make_start(seed=seed, **fields), logits).token_id == int(np.argmax(logits.numpy()))


# Seeds


def test_uniform_numbers_are_uniform_and_each_of_its_own() -> None:
    numbers = sorted(uniform(seed, index) for seed in range(-5, 15) for index in range(100))
    assert len(set(numbers)) == 2000
    assert numbers[0] >= 0
    assert numbers[-1] < 1
    distance = max(abs(number - (i + 0.5) / 2000) for i, number in enumerate(numbers))
    assert distance < 1.95 / math.sqrt(2000), "beyond the 99.9 % quantile of the Kolmogorov distribution"


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1, 2**63, 2**63 + 127])
def test_every_seed_that_a_completion_may_have_gives_a_number(seed: int) -> None:
    assert 0 <= uniform(seed, 0) < 1
    assert uniform(seed, 0) != uniform(seed + 1, 0)


def random_fields(chooser: np.random.Generator) -> dict[str, Any]:
    choices: dict[str, list[Any]] = {
        "temperature": [0, 0.5, 1.0, 2.0],
        "top_k": [0, 5],
        "top_p": [1.0, 0.8],
        "min_p": [0.0, 0.05],
        "repetition_penalty": [1.0, 1.3],
        "presence_penalty": [0.0, 0.5],
        "frequency_penalty": [0.0, 0.2],
        "logit_bias": [None, {3: 2.0}],
        "logprobs": [None, 3],
    }
    return {name: values[chooser.integers(len(values))] for name, values in choices.items()}


def test_a_request_gets_the_same_tokens_whatever_shares_its_batches() -> None:
    chooser = np.random.default_rng(5)
    num, num_steps = 12, 8
    starts = [make_start(i, prompt=[i, 2 * i], seed=100 + i, **random_fields(chooser)) for i in range(num)]
    logits = [normal(60 * num, seed=step).view(num, 60) for step in range(num_steps)]

    def run(order: list[int], batch_size: int) -> list[list[SampledToken]]:
        sampler = Sampler()
        for start in starts:
            sampler.start(start)
        found: list[list[SampledToken]] = [[] for _ in range(num)]
        for step in range(num_steps):
            for first in range(0, num, batch_size):
                members = order[first : first + batch_size]
                plans = [make_plan(i, step) for i in members]
                for sampled in sampler.sample(plans, logits[step][members]):
                    found[sampled.request_id].append(sampled)
        return found

    alone = run(list(range(num)), 1)
    assert run(list(range(num)), num) == alone
    assert run([int(i) for i in chooser.permutation(num)], 5) == alone


def test_a_token_depends_on_the_seed_and_on_its_place() -> None:
    logits = torch.zeros(1000)
    places = [sample_one(make_start(seed=7), logits, index).token_id for index in range(20)]
    seeds = [sample_one(make_start(seed=seed), logits).token_id for seed in range(20)]
    assert len(set(places)) > 15
    assert len(set(seeds)) > 15
    assert places == [sample_one(make_start(seed=7), logits, index).token_id for index in range(20)]


def test_a_request_that_continues_elsewhere_draws_what_it_would_have_drawn() -> None:
    """The place alone counts, not what the sampler drew before."""
    sampler, logits = Sampler(), normal(500, seed=6, scale=0.5)
    sampler.start(make_start(seed=9))
    stream = [sampler.sample([make_plan(index=index)], logits.unsqueeze(0))[0].token_id for index in range(10)]
    assert stream[7] == sample_one(make_start(seed=9), logits, index=7).token_id


# Penalties, bias, min_tokens


def adjusted(
    logits: torch.Tensor, prompt: list[int], output: list[int], stops: list[int], params: SamplingParams
) -> Floats:
    """vLLM's and OpenAI's definitions, token by token."""
    values = logits.double().numpy().copy()
    for token_id, bias in (params.logit_bias or {}).items():
        values[token_id] += bias
    if len(output) < params.min_tokens:
        values[stops] = -np.inf
    for token_id in range(len(values)):
        count = output.count(token_id)
        if count or token_id in prompt:
            factor = params.repetition_penalty
            values[token_id] = values[token_id] / factor if values[token_id] > 0 else values[token_id] * factor
        values[token_id] -= params.frequency_penalty * count
        values[token_id] -= params.presence_penalty * (count > 0)
    return values


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    prompt=st.lists(st.integers(0, 19), min_size=1, max_size=12),
    output=st.lists(st.integers(0, 19), max_size=12),
    stops=st.lists(st.integers(0, 19), max_size=3, unique=True),
    repetition=st.sampled_from([1.0, 0.5, 1.2, 3.0]),
    frequency=st.sampled_from([0.0, -2.0, 0.3, 2.0]),
    presence=st.sampled_from([0.0, -1.0, 0.7, 2.0]),
    bias=st.dictionaries(st.integers(0, 19), st.floats(-100, 100, width=32), max_size=4),
    min_tokens=st.integers(0, 12),
)
def test_logits_are_adjusted_as_vllm_and_openai_define_it(
    seed: int,
    prompt: list[int],
    output: list[int],
    stops: list[int],
    repetition: float,
    frequency: float,
    presence: float,
    bias: dict[int, float],
    min_tokens: int,
) -> None:
    start = make_start(
        prompt=prompt,
        stops=stops,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=bias,
        min_tokens=min_tokens,
    )
    state, logits = SamplingState(start), normal(20, seed)
    state.output_counts.update(output)
    expected = adjusted(logits, prompt, output, stops, start.sampling_params)
    state.adjust_(logits, make_plan(index=len(output)))
    np.testing.assert_allclose(logits.double().numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"frequency_penalty": 0.6},
        {"presence_penalty": 1.1},
        {"repetition_penalty": 1.4},
        {"frequency_penalty": 0.2, "presence_penalty": 0.4, "repetition_penalty": 1.1, "logit_bias": {4: 1.5, 9: -3.0}},
        {"min_tokens": 6, "frequency_penalty": 0.3},
    ],
    ids=str,
)
def test_penalties_follow_the_tokens_that_were_drawn(fields: dict[str, Any]) -> None:
    prompt, stops, logits = [3, 3, 8], [1, 2], normal(12, seed=11)
    start = make_start(prompt=prompt, stops=stops, temperature=0, **fields)
    sampler = Sampler()
    sampler.start(start)
    output: list[int] = []
    for index in range(25):
        expected = adjusted(logits, prompt, output, stops, start.sampling_params)
        (sampled,) = sampler.sample([make_plan(index=index)], logits.unsqueeze(0))
        assert sampled.token_id == int(np.argmax(expected))
        output.append(sampled.token_id)
    assert len(set(output)) > 1


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_stop_tokens_are_forbidden_until_min_tokens_are_out(temperature: float) -> None:
    logits = torch.zeros(10)
    logits[[4, 5]] = 50.0
    start = make_start(stops=[4, 5], min_tokens=3, temperature=temperature)
    tokens = [sample_one(start, logits, index).token_id for index in range(5)]
    assert not {4, 5} & set(tokens[:3])
    assert set(tokens[3:]) <= {4, 5}


def test_a_bias_of_100_forces_a_token_and_one_of_minus_100_forbids_it() -> None:
    logits = normal(50, seed=12)
    assert sample_one(make_start(logit_bias={17: 100}), logits).token_id == 17
    best = int(logits.argmax())
    tokens = {sample_one(make_start(logit_bias={best: -100}, seed=seed), logits).token_id for seed in range(50)}
    assert best not in tokens


def test_the_models_logits_are_left_as_they_were() -> None:
    logits = normal(20, seed=13).unsqueeze(0)
    before = logits.clone()
    start = make_start(prompt=[1], logit_bias={2: 5.0}, repetition_penalty=2.0, temperature=0.5, min_p=0.1, logprobs=1)
    sample_one(start, logits[0])
    assert torch.equal(logits, before)


# Logprobs


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_are_those_of_the_model_before_any_adjustment(num_top: int) -> None:
    logits = normal(30, seed=14)
    expected = np.log(softmax(logits.double().numpy()))
    order = np.argsort(-expected, kind="stable")
    fields = {"temperature": 0.2, "logit_bias": {int(order[9]): 100.0}, "top_k": 3, "frequency_penalty": 1.0}
    entry = sample_one(make_start(logprobs=num_top, **fields), logits).logprobs
    assert entry is not None
    assert (entry.token_id, entry.rank) == (order[9], 10)
    assert entry.logprob == pytest.approx(expected[order[9]], abs=1e-5)
    assert [token_id for token_id, _ in entry.top] == order[:num_top].tolist()
    assert [value for _, value in entry.top] == pytest.approx(expected[order[:num_top]].tolist(), abs=1e-5)


def test_logprobs_are_given_only_to_those_who_asked() -> None:
    sampler = Sampler()
    sampler.start(make_start(0, logprobs=2))
    sampler.start(make_start(1))
    first, second = sampler.sample([make_plan(0), make_plan(1)], normal(20, seed=15).view(2, 10))
    assert first.logprobs is not None
    assert first.logprobs.token_id == first.token_id
    assert second.logprobs is None


def test_equally_likely_tokens_share_a_rank() -> None:
    entries = [token_logprobs(torch.tensor([1.0, 3.0, 3.0, 0.0]), token_id, 0) for token_id in range(4)]
    assert [entry.rank for entry in entries] == [3, 1, 1, 4]


# Rows that are not finite


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_told_and_the_others_are_as_without_it(value: float) -> None:
    logits = normal(60, seed=16).view(3, 20)
    starts = [make_start(i, seed=i, temperature=0.9) for i in range(3)]
    expected = [sample_one(start, row) for start, row in zip(starts, logits, strict=True)]
    logits[1, 13] = value
    sampler = Sampler()
    for start in starts:
        sampler.start(start)
    first, broken, last = sampler.sample([make_plan(i) for i in range(3)], logits)
    assert [first, last] == [expected[0], expected[2]]
    assert broken.request_id == 1
    assert broken.error is not None
    assert "not finite" in broken.error


def test_a_row_without_a_possible_token_is_not_finite() -> None:
    assert sample_one(make_start(), torch.full((9,), float("-inf"))).error is not None


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((50,), float("-inf"))
    logits[[7, 30]] = torch.tensor([0.0, 1.0])
    for fields in PARAMS:
        assert sample_one(make_start(**fields), logits).token_id in (7, 30)


def test_a_request_that_forbids_every_token_harms_nobody() -> None:
    sampler, logits = Sampler(), normal(10, seed=17).view(2, 5)
    fields: dict[str, Any]
    for fields in ({}, {"temperature": 0}, {"top_p": 0.5}, {"top_k": 2, "min_p": 0.1}):
        sampler.start(make_start(0, stops=range(5), min_tokens=1, **fields))
        sampler.start(make_start(1))
        first, second = sampler.sample([make_plan(0), make_plan(1)], logits)
        assert 0 <= first.token_id < 5
        assert second == sample_one(make_start(1), logits[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_may_come_in_any_float_type(dtype: torch.dtype) -> None:
    logits = normal(40, seed=18).to(dtype)
    assert sample_one(make_start(seed=3), logits) == sample_one(make_start(seed=3), logits.float())


def test_what_is_known_of_a_request_ends_with_it() -> None:
    sampler, logits = Sampler(), torch.tensor([[0.0, 1.0]])
    sampler.start(make_start(5, prompt=[1, 2], temperature=0, frequency_penalty=2.0, prompt_logprobs=3))
    assert (sampler.prompt(5), sampler.num_prompt_logprobs(5)) == ((1, 2), 3)
    assert [sampler.sample([make_plan(5, i)], logits)[0].token_id for i in range(2)] == [1, 0]
    sampler.finish(5)
    with pytest.raises(KeyError):
        sampler.prompt(5)
    sampler.start(make_start(5, temperature=0, frequency_penalty=2.0))
    assert sampler.sample([make_plan(5)], logits)[0].token_id == 1
    assert sampler.num_prompt_logprobs(5) == 0


@given(
    tokens=st.sets(st.integers(0, 49), min_size=1),
    padding=st.integers(0, 5),
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.2]),
)
def test_only_what_is_allowed_is_sampled(
    tokens: set[int], padding: int, seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    allowed = sum(1 << token for token in tokens).to_bytes(7 + padding, "little")
    start = make_start(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, logprobs=3)
    logits = normal(50, seed)
    sampler = Sampler()
    sampler.start(start)
    (sampled,) = sampler.sample([make_plan(allowed=allowed)], logits.unsqueeze(0))
    best = max(tokens, key=lambda token: float(logits[token]))
    assert sampled.token_id in tokens
    if temperature == 0 or top_k == 1:
        assert sampled.token_id == best
    assert sampled.logprobs == token_logprobs(logits, sampled.token_id, 3), "logprobs are the model's own"
