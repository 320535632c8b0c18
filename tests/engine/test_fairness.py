"""Between adapters, service is shared by weight, whoever comes with how much and in which order."""

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_scheduler import Harness, output, spans

from ray_lora.engine.fair_queue import INPUT_COST, OUTPUT_COST
from ray_lora.engine.sequence_state import SequenceState

Name = str | None


class Meter(Harness):
    """Counts from the plans alone what every name was served: each prompt token once, and each token generated."""

    def __init__(self, names: str = "ab", **limits: Any) -> None:
        limits = {"num_blocks": 400, "num_pages": len(names), "max_loras": len(names), "max_num_seqs": 4} | limits
        super().__init__(**{"enable_prefix_caching": False} | limits)
        for name in names:
            self.register(name)
        self.service: dict[Name, float] = defaultdict(float)
        self._sequences: dict[int, SequenceState] = {}
        self._num_counted: dict[int, int] = defaultdict(int)

    def add(self, *args: Any, **params: Any) -> SequenceState:
        sequence = super().add(*args, **params)
        self._sequences[sequence.request_id] = sequence
        return sequence

    def step(self) -> Any:
        plan = super().step()
        for planned in plan.sequences:
            sequence = self._sequences[planned.request_id]
            counted = max(planned.start, self._num_counted[planned.request_id])
            stop = min(planned.start + len(planned.token_ids), sequence.num_prompt_tokens)
            self._num_counted[planned.request_id] = max(stop, counted)
            self.service[sequence.adapter_name] += INPUT_COST * max(0, stop - counted) + OUTPUT_COST * planned.sample
        return plan

    def is_waiting(self, name: Name) -> bool:
        return any(sequence.adapter_name == name for sequence in self.scheduler.waiting)

    def steps_to_first_token(self, sequence: SequenceState) -> int:
        for num_steps in range(1, 1000):
            self.step()
            if sequence.num_output_tokens:
                return num_steps
        raise AssertionError("it starves")


def bound(max_num_seqs: int, longest_prompt: int, longest: int, *weights: float) -> float:
    """The paper's, on how far the service of two queues, over their weights, can differ while both wait."""
    return 2 * max(INPUT_COST * longest_prompt, OUTPUT_COST * max_num_seqs * longest) / min(weights)


# A flood


@pytest.mark.parametrize("prompt_len", [1, 20, 50, 100])
@pytest.mark.parametrize("budget", [16, 32])
def test_one_who_asks_now_and_then_does_not_feel_a_flood(prompt_len: int, budget: int) -> None:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": budget, "max_model_len": 128}
    alone = Meter(**limits)
    num_steps_alone = alone.steps_to_first_token(alone.add(prompt_len, "b"))
    flooded = Meter(**limits)
    flood = [flooded.add(12, "a", max_tokens=20) for _ in range(200)]
    for _ in range(12):
        for _ in range(20):
            flooded.step()
        assert flooded.is_waiting("a")
        assert flooded.steps_to_first_token(flooded.add(prompt_len, "b", max_tokens=4)) <= 2 * num_steps_alone
    flooded.run()
    for sequence in flood:
        assert output(sequence) == flooded.expected(sequence)


@pytest.mark.parametrize("num_blocks", [40, 400])
def test_the_flood_gives_way_once_for_each_request_that_needs_its_room(num_blocks: int) -> None:
    meter = Meter(max_num_seqs=8, num_blocks=num_blocks, max_num_batched_tokens=64, max_model_len=128)
    for _ in range(50):
        meter.add(16, "a", max_tokens=20)
    for _ in range(3):
        meter.step()
    before = meter.scheduler.num_preemptions
    other = meter.add(8, "b", max_tokens=10)
    assert meter.steps_to_first_token(other) == 1
    assert meter.scheduler.num_preemptions == before + 1
    while other in meter.scheduler.running:
        meter.step()
        assert other.block_ids or other.finish_reason, "it does not give way to the flood in turn"
    meter.run()


def test_the_one_that_gives_way_is_the_least_urgent_then_the_youngest() -> None:
    meter = Meter("abcde", max_num_seqs=6, max_num_batched_tokens=64)
    flood = [meter.add(4, "a", max_tokens=20, priority=priority) for priority in (0, -1, 0, -1, 0)]
    meter.add(4, "b", max_tokens=20)
    meter.step()
    for name, victim in (("c", 4), (None, 0), ("d", 3)):  # the fourth of them, 2, had its turn
        meter.add(4, name, max_tokens=20)
        meter.step()
        assert flood[victim] in meter.scheduler.waiting
    last = meter.add(4, "e", max_tokens=20)
    meter.step()
    assert last in meter.scheduler.waiting, "what is left is no flood"
    meter.run()


def test_who_was_served_more_waits_for_room() -> None:
    meter = Meter(max_num_seqs=4, max_model_len=128)
    served = [meter.add(2, "a", max_tokens=20) for _ in range(4)]
    meter.step()
    ahead = meter.add(2, "b")
    queue = meter.scheduler.waiting.queue_of(ahead)
    queue.counter += 30
    for _ in range(4):
        meter.step()
        assert meter.scheduler.running == served
    meter.step()
    assert ahead in meter.scheduler.running, "until the others have caught up"
    meter.run()


def test_who_takes_a_place_in_the_step_takes_its_token_too() -> None:
    meter = Meter(max_num_seqs=4, max_num_batched_tokens=8)
    for _ in range(4):
        meter.add(2, "a", max_tokens=20)
    meter.step()
    other = meter.add(8, "b")
    assert spans(meter.step())[other.request_id] == (0, 5)
    meter.run()


def test_with_a_room_for_each_nobody_gives_way_however_far_ahead() -> None:
    meter = Meter("abcd", max_num_seqs=3)
    for name in "abc":
        for _ in range(3):
            meter.add(4, name, max_tokens=20)
    meter.step()
    meter.add(4, "d")
    for _ in range(10):
        meter.step()
    assert meter.scheduler.num_preemptions == 0
    meter.run()


def test_where_blocks_run_out_the_flood_gives_way_and_not_the_youngest_of_all() -> None:
    meter = Meter(num_blocks=14, max_num_seqs=4, max_num_batched_tokens=64)
    flood = [meter.add(8, "a", max_tokens=20) for _ in range(3)]
    meter.step()
    young = meter.add(8, "b", max_tokens=20)
    meter.step()
    while young.finish_reason is None:
        assert young in meter.scheduler.running
        meter.step()
    assert meter.scheduler.num_preemptions > 0
    meter.run()
    for sequence in (*flood, young):
        assert output(sequence) == meter.expected(sequence)


# A long prompt


def test_a_long_prompt_leaves_others_their_part_of_every_step() -> None:
    meter = Meter(max_num_batched_tokens=16, num_blocks=100, max_model_len=400)
    long = meter.add(320, "a", max_tokens=2)
    assert spans(meter.step()) == {long.request_id: (0, 16)}
    short = [meter.add(6, "b", max_tokens=2) for _ in range(2)]
    plans = [spans(meter.step()) for _ in range(3)]
    assert plans[0] == {short[0].request_id: (0, 6), long.request_id: (16, 10)}
    assert plans[1] == {short[0].request_id: (6, 1), short[1].request_id: (0, 6), long.request_id: (26, 9)}
    assert plans[2] == {short[1].request_id: (6, 1), long.request_id: (35, 15)}
    meter.run()


def test_two_long_prompts_of_different_adapters_are_computed_by_turns() -> None:
    meter = Meter(max_num_batched_tokens=16, num_blocks=100, max_model_len=400)
    first = meter.add(64, "a")
    meter.step()
    second = meter.add(64, "b")
    lens = [{number: length for number, (_, length) in spans(meter.step()).items()} for _ in range(5)]
    a, b = first.request_id, second.request_id
    assert lens == [{b: 16}, {a: 16}, {a: 16}, {b: 16}, {a: 16}]


def test_two_long_prompts_of_one_adapter_are_computed_one_after_the_other() -> None:
    meter = Meter(max_num_batched_tokens=16, num_blocks=100, max_model_len=400)
    first, second = meter.add(40, "a"), meter.add(40, "a")
    lens = [{number: length for number, (_, length) in spans(meter.step()).items()} for _ in range(4)]
    a, b = first.request_id, second.request_id
    assert lens == [{a: 16}, {a: 16}, {a: 8, b: 8}, {a: 1, b: 15}]


# Order


def test_within_an_adapter_the_urgent_come_first_and_between_adapters_that_means_nothing() -> None:
    meter = Meter(max_num_seqs=1)
    requests = [("a", 0), ("a", 5), ("a", -5), ("a", 0), ("b", 5), ("b", 5)]
    sequences = [meter.add(4, name, max_tokens=1, priority=priority) for name, priority in requests]
    meter.run()
    began = [start.request_id for plan in meter.executor.plans for start in plan.starts]
    assert [sequences.index(meter._sequences[number]) for number in began] == [2, 4, 0, 5, 3, 1]


def test_two_names_of_one_content_have_a_queue_each() -> None:
    meter = Meter("ab", max_num_seqs=1)
    meter.register("alias", "a")
    flood = [meter.add(4, "a", max_tokens=1) for _ in range(5)]
    other = meter.add(4, "alias", max_tokens=1)
    meter.step()
    meter.step()
    assert other.finish_reason == "length"
    assert flood[1].finish_reason is None
    meter.run()


def test_names_that_come_for_the_first_time_overtake_nobody_for_ever() -> None:
    names = [f"n{number}" for number in range(60)]
    meter = Meter("ab", num_pages=62, max_loras=62, max_num_seqs=1)
    meter.add(4, "a", max_tokens=1)
    waiting = meter.add(4, "b", max_tokens=1)
    for number, name in enumerate(names):
        meter.register(name)
        meter.add(4, name, max_tokens=1)
        meter.step()
        assert number < 2 or waiting.finish_reason is not None
    meter.run()


def test_nobody_saves_up_while_idle_and_nobody_loses_a_debt() -> None:
    meter = Meter("abc", max_num_seqs=2, max_num_batched_tokens=64)
    queue_of = meter.scheduler.waiting.queue_of
    flood = [meter.add(10, "a", max_tokens=20) for _ in range(20)]
    for _ in range(100):
        meter.step()
    b = meter.add(60, "b", max_tokens=1)
    assert queue_of(b).counter == queue_of(flood[0]).counter > 0
    while b.finish_reason is None:
        meter.step()
    debt = queue_of(b).counter
    assert debt > queue_of(flood[0]).counter
    meter.add(1, "c", max_tokens=1)
    assert queue_of(meter.add(1, "b")).counter == debt
    meter.run()


# What is charged


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "budget", "cost"),
    [(1, 1, 16, 3), (10, 1, 16, 12), (10, 5, 16, 20), (40, 3, 16, 46), (17, 1, 16, 19), (5, 2, 1, 9)],
)
def test_each_prompt_token_costs_one_and_each_output_token_two(
    prompt_len: int, max_tokens: int, budget: int, cost: int
) -> None:
    meter = Meter(max_num_batched_tokens=budget)
    sequence = meter.add(prompt_len, "a", max_tokens=max_tokens)
    meter.run()
    assert meter.scheduler.waiting.queue_of(sequence).counter == meter.service["a"] == cost


def test_what_the_prefix_cache_has_costs_nothing() -> None:
    meter = Meter(enable_prefix_caching=True)
    first = meter.add(list(range(10)), "a", max_tokens=1)
    meter.run()
    counter = meter.scheduler.waiting.queue_of(first).counter
    again = meter.add(list(range(10)), "a", max_tokens=1)
    meter.run()
    assert again.num_cached_tokens == 8
    assert meter.scheduler.waiting.queue_of(again).counter == counter + 2 + OUTPUT_COST


@pytest.mark.parametrize("is_begun", [True, False])
def test_what_is_computed_again_after_a_preemption_costs_nothing(is_begun: bool) -> None:
    meter = Meter(max_num_batched_tokens=16)
    sequence = meter.add(24, "a", max_tokens=4)
    for _ in range(1 if is_begun else 3):
        meter.step()
    meter.scheduler._preempt(sequence)
    meter.run()
    assert meter.scheduler.waiting.queue_of(sequence).counter == 24 * INPUT_COST + 4 * OUTPUT_COST


@pytest.mark.parametrize("name", ["a", None])
def test_a_weight_divides_the_charge_from_the_next_token_on(name: Name) -> None:
    meter = Meter()
    sequence = meter.add(8, name, max_tokens=3)
    meter.step()
    if name is None:
        meter.adapters.base_weight = 4.0
    else:
        meter.adapters.set_weight(name, 4.0)
    meter.run()
    assert meter.scheduler.waiting.queue_of(sequence).counter == 8 + OUTPUT_COST + 2 * OUTPUT_COST / 4


def test_of_queues_that_owe_nothing_more_nothing_is_kept() -> None:
    meter = Meter("a", num_pages=1, max_loras=1)
    for number in range(300):
        meter.register(f"n{number}", "a")
        meter.add(1, f"n{number}", max_tokens=1)
        meter.add(50, "a", max_tokens=1)
        meter.run()
    assert len(meter.scheduler.waiting._queues) < 10


# Any trace

REQUESTS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(1, 12), st.integers(1, 8), st.integers(0, 60)),
    max_size=60,
)
"""Name, prompt tokens, output tokens, the step that it comes at."""


@given(
    requests=REQUESTS,
    weights=st.tuples(*[st.sampled_from([1.0, 1.0, 2.0, 3.0])] * 3),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(8, 24),
    num_blocks=st.integers(6, 40),
    caching=st.booleans(),
)
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_whoever_waits_is_served_as_much_as_others_who_wait(
    requests: list[tuple[Name, int, int, int]],
    weights: tuple[float, ...],
    max_num_seqs: int,
    budget: int,
    num_blocks: int,
    caching: bool,
) -> None:
    meter = Meter(
        "abc",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=20,
        num_blocks=num_blocks,
        enable_prefix_caching=caching,
    )
    weight: dict[Name, float] = {None: 1.0, **dict(zip("abc", weights, strict=True))}
    for name in "abc":
        meter.adapters.set_weight(name, weight[name])
    arrivals = [*((name, 6, 4, 0) for name in "ab" for _ in range(20)), *requests]
    limit = bound(max_num_seqs, 12, 20, *weight.values())
    pairs = [("a", "b"), ("a", "c"), ("b", None)]
    lead: dict[tuple[Name, Name], list[float]] = {pair: [] for pair in pairs}
    for now in range(2000):
        for name, prompt_len, max_tokens, at in arrivals:
            if at == now:
                meter.add(prompt_len, name, max_tokens=max_tokens)
        if not meter.scheduler.has_work:
            if now > 60:
                break
            continue
        waited = {name: meter.is_waiting(name) for name in weight}
        before = dict(meter.service)
        meter.step()
        for first, second in pairs:
            if all(waited[name] and meter.is_waiting(name) for name in (first, second)):
                gains = [(meter.service[name] - before.get(name, 0)) / weight[name] for name in (first, second)]
                leads = lead[first, second] = lead[first, second] or [0.0]
                leads.append(leads[-1] + gains[0] - gains[1])
                assert max(leads) - min(leads) <= limit
            else:
                lead[first, second] = []
    else:
        raise AssertionError("somebody starves")


@pytest.mark.parametrize(
    ("weights", "max_num_seqs"), [((1, 1), 4), ((1, 3), 4), ((3, 1), 1), ((0.5, 2), 3), ((10, 1), 2)]
)
@pytest.mark.parametrize("is_mixed", [True, False])
def test_two_who_always_wait_get_shares_by_weight(
    weights: tuple[float, float], max_num_seqs: int, is_mixed: bool
) -> None:
    meter = Meter(max_num_seqs=max_num_seqs)
    for name, weight in zip("ab", weights, strict=True):
        meter.adapters.set_weight(name, weight)
    names = "ab" * 100 if is_mixed else "a" * 100 + "b" * 100
    for number, name in enumerate(names):
        meter.add(4 + number % 9, name, max_tokens=1 + number % 7)
    while meter.is_waiting("a") and meter.is_waiting("b"):
        meter.step()
    a, b = (meter.service[name] / weight for name, weight in zip("ab", weights, strict=True))
    assert abs(a - b) <= bound(max_num_seqs, 12, 19, *weights)
    assert a == pytest.approx(b, rel=0.1)
