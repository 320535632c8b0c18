"""Whoever is let in is answered in time, and nobody is refused without need. The clock is simulated."""

import random
from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest

from ray_lora.config import EngineConfig
from ray_lora.errors import OverloadedError
from ray_lora.request import RequestMetrics
from ray_lora.serve.deadline_limit import DeadlineLimit, Place

TICK_S = 0.05
RATE = 448.0
"""Tokens per second of all rows together."""
SHORTEST, LONGEST = 32, 96
CAPACITY = RATE / (SHORTEST + LONGEST) * 2
"""Requests per second."""


def limit_of(**args: Any) -> DeadlineLimit:
    return DeadlineLimit(EngineConfig.parse({"model": "/m/base", "max_num_seqs": 4} | args))


def metrics(queue_s: float, run_s: float, load_wait_s: float = 0.0) -> RequestMetrics:
    return RequestMetrics(load_wait_s, queue_s, 0.0, run_s, 1, 1)


def let_in(limit: DeadlineLimit, adapter: str | None = None, most: int = 1000) -> list[Place]:
    """As many as come in."""
    places = []
    for _ in range(most):
        try:
            limit.check(adapter)
        except OverloadedError:
            break
        places.append(limit.enter(adapter, 1))
    return places


@dataclass
class Job:
    arrived: float
    num_left: float
    place: Place
    began: float = 0.0


def serve(limit: DeadlineLimit, factor: float, deadline_s: float, num_rows: int, seconds: float = 120) -> list[float]:
    """What there is of the capacity in good answers, in refusals, and in requests that were let in and were too late.

    A server computes `num_rows` requests at once, first come, first served, and aborts what is late.
    """
    rng = random.Random(0)
    waiting: deque[Job] = deque()
    running: list[Job] = []
    num_good = num_refused = num_late = 0
    now, next_at = 0.0, 0.0
    while now < seconds:
        now += TICK_S
        while next_at < now:
            next_at += rng.expovariate(factor * CAPACITY)
            places = let_in(limit, most=1)
            num_refused += not places
            waiting.extend(Job(now, rng.randint(SHORTEST, LONGEST), place) for place in places)
        while waiting and len(running) < num_rows:
            running.append(waiting.popleft())
            running[-1].began = now
        for job in list(running):
            job.num_left -= RATE / num_rows * TICK_S
            is_late = now - job.arrived > deadline_s
            if is_late or job.num_left <= 0:
                running.remove(job)
                limit.leave(None, 1)
                limit.learn(job.place, None if is_late else metrics(job.began - job.arrived, now - job.began))
                num_good, num_late = num_good + (not is_late), num_late + is_late
        while waiting and now - waiting[0].arrived > deadline_s:
            waiting.popleft()
            limit.leave(None, 1)
            num_late += 1
    return [count / seconds / CAPACITY for count in (num_good, num_refused, num_late)]


@pytest.mark.parametrize("factor", [1.2, 2.0, 5.0, 20.0])
@pytest.mark.parametrize(("deadline_s", "num_rows"), [(6.0, 16), (10.0, 16), (10.0, 4), (30.0, 32)])
def test_under_overload_all_rows_are_used_and_hardly_anybody_is_late(
    factor: float, deadline_s: float, num_rows: int
) -> None:
    limit = limit_of(max_num_seqs=num_rows, request_timeout_s=deadline_s)
    good, _, late = serve(limit, factor, deadline_s, num_rows)
    assert good > 0.9
    assert late < 0.02


def test_more_rows_than_can_be_served_in_time_are_not_all_used() -> None:
    """64 at once would take 9 s each, and so all of them be late."""
    limit = limit_of(max_num_seqs=64, request_timeout_s=6)
    good, _, late = serve(limit, 5.0, 6.0, 16)
    assert good > 0.9
    assert late < 0.06


@pytest.mark.parametrize("factor", [0.1, 0.5, 0.8])
def test_without_overload_hardly_anybody_is_refused(factor: float) -> None:
    good, refused, late = serve(limit_of(max_num_seqs=16, request_timeout_s=10), factor, 10.0, 16)
    assert good > 0.9 * factor
    assert refused < 0.01
    assert late == 0


def test_without_a_deadline_there_is_no_limit() -> None:
    assert len(let_in(limit_of())) == 1000


@pytest.mark.parametrize("deadline", ["request_timeout_s", "queue_timeout_s"])
def test_a_refusal_names_the_deadline_and_says_when_to_come_again(deadline: str) -> None:
    limit = limit_of(**{deadline: 7})
    assert len(let_in(limit)) == 4
    with pytest.raises(OverloadedError, match=r"within 7\.0 s") as caught:
        limit.check(None)
    assert caught.value.retry_after == 1.0


def test_a_flood_for_one_adapter_keeps_out_its_own_and_not_others() -> None:
    limit = limit_of(max_num_seqs=8, request_timeout_s=10)
    assert len(let_in(limit, "flooded")) == 8
    assert len(let_in(limit, "other")) == 4, "half of the line is its own"
    assert len(let_in(limit, None)) == 2, "and then a third"
    for _ in range(8):
        limit.leave("flooded", 1)
    assert len(let_in(limit, "flooded")) == 3


def test_many_adapters_with_one_request_each_are_a_line_too() -> None:
    limit = limit_of(request_timeout_s=10)
    assert [len(let_in(limit, f"adapter{number}", most=1)) for number in range(6)] == [1, 1, 1, 1, 0, 0]


def test_a_request_of_many_completions_is_let_in_by_its_first() -> None:
    limit = limit_of(request_timeout_s=10)
    limit.check(None)
    limit.enter(None, 100)
    with pytest.raises(OverloadedError):
        limit.check(None)
    limit.leave(None, 100)
    limit.check(None)
    assert limit._num_open == {}


def test_one_who_is_early_raises_the_limit_only_if_others_were_refused() -> None:
    limit = limit_of(request_timeout_s=10)
    first, _, _, last = let_in(limit, most=4)
    limit.learn(last, metrics(0.0, 1.0))
    assert limit._limit == 4
    assert let_in(limit) == []
    limit.learn(first, metrics(0.0, 1.0))
    assert limit._limit == 4, "the first in line says nothing about a fifth"
    limit.learn(last, metrics(0.0, 1.0))
    assert limit._limit > 4


def test_the_wait_for_an_adapter_is_not_overload() -> None:
    limit = limit_of(request_timeout_s=10)
    limit.learn(let_in(limit)[-1], metrics(0.1, 1.0, load_wait_s=8.0))
    assert limit._limit >= 4


@pytest.mark.parametrize(("queue_s", "run_s"), [(1.9, 1.0), (0.1, 9.8)])
def test_either_deadline_lowers_the_limit(queue_s: float, run_s: float) -> None:
    limit = limit_of(queue_timeout_s=2, request_timeout_s=10)
    limit.learn(let_in(limit)[-1], metrics(queue_s, run_s))
    assert limit._limit < 4


def test_a_limit_lets_one_in_whatever_happens() -> None:
    limit = limit_of(request_timeout_s=10)
    for _ in range(100):
        place, *_ = let_in(limit, most=1)
        limit.learn(place, None)
        limit.leave(None, 1)
    assert limit._limit == 1
    assert len(let_in(limit)) == 1
