import pytest

from ray_lora.serve.token_bucket import TokenBucket


class Clock:
    """Stands still unless it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


EVENTS: list[tuple[list[tuple[str, float]], float]] = [
    ([], 0),
    ([("draw", 59)], 0),
    ([("draw", 60)], 1),
    ([("draw", 60), ("pass", 1)], 0),
    ([("draw", 60), ("pass", 0.25)], 0.75),
    ([("draw", 300)], 241),
    ([("draw", 300), ("pass", 200)], 41),
    ([("draw", 300), ("draw", -300)], 0),
    ([("draw", 30), ("draw", 30), ("pass", 30), ("draw", 30)], 1),
    ([("pass", 3600), ("draw", 60)], 1),
    ([("draw", 60), ("pass", 3600), ("draw", 61)], 2),
    ([("draw", -500), ("draw", 60)], 1),
]
"""What happens to a bucket of 60 tokens a minute, and the seconds until there is a token."""


@pytest.mark.parametrize(("events", "wait_s"), EVENTS)
def test_a_token_is_there_after_what_has_been_drawn_is_filled_up(
    events: list[tuple[str, float]], wait_s: float
) -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    for event, amount in events:
        if event == "pass":
            clock.now += amount
        else:
            bucket.draw(int(amount))
    assert bucket.wait_s == pytest.approx(wait_s)


def test_waiting_for_as_long_as_it_says_is_enough_and_less_is_not() -> None:
    clock = Clock()
    bucket = TokenBucket(7000, clock)
    bucket.draw(123_456)
    wait_s = bucket.wait_s
    clock.now += wait_s - 0.001
    assert bucket.wait_s > 0
    clock.now += 0.002
    assert bucket.wait_s == 0


def test_who_draws_whenever_it_may_gets_the_rate_in_the_long_run() -> None:
    clock = Clock()
    bucket = TokenBucket(600, clock)
    drawn = 0
    while clock.now < 1000 + 3600:
        if bucket.wait_s == 0:
            bucket.draw(450)
            drawn += 450
        clock.now += 0.5
    assert 60 * 600 <= drawn <= 61 * 600 + 450


def test_a_bucket_is_full_when_it_is_as_it_began() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    assert bucket.is_full
    bucket.draw(1)
    assert not bucket.is_full
    clock.now += 1
    assert bucket.is_full
