"""Within an adapter the urgent come first, and yet nobody waits for ever, whatever comes when, and from whom."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from test_fairness import Meter

from ray_lora.engine.fair_queue import TURN, FairQueue
from ray_lora.engine.sequence_state import SequenceState
from ray_lora.request import SamplingParams

KEYS = ("acme", "globex", None)


class Line:
    """One adapter's queue."""

    def __init__(self) -> None:
        self.queue = FairQueue(lambda name: 1.0)
        self.waiting: list[SequenceState] = []
        self._next_id = 0

    def come(self, key: str | None = None, priority: int = 0) -> SequenceState:
        self._next_id += 1
        params = SamplingParams(max_tokens=1)
        sequence = SequenceState(self._next_id, [1], params, 0, (), None, key_name=key, priority=priority)
        self.queue.push(sequence)
        self.waiting.append(sequence)
        return sequence

    def admit(self) -> SequenceState:
        sequence = next(iter(self.queue.turns())).next
        assert sequence is not None
        self.queue.admit(sequence)
        self.waiting.remove(sequence)
        return sequence

    def leave(self, sequence: SequenceState) -> None:
        """A request that waits is cancelled."""
        self.queue.remove(sequence)
        self.waiting.remove(sequence)


def test_three_of_four_go_by_priority_and_the_fourth_is_the_one_that_came_first() -> None:
    line = Line()
    old = [line.come(priority=5) for _ in range(2)]
    urgent = [line.come(priority=-number) for number in range(8)]
    assert [line.admit() for _ in range(8)] == [*urgent[:4:-1], old[0], *urgent[4:1:-1], old[1]]


def test_the_fourth_goes_by_turns_to_the_keys_that_wait() -> None:
    line = Line()
    flood = [line.come("acme", priority=-9) for _ in range(20)]
    others = [line.come("globex"), line.come("globex"), line.come(None)]
    by_turn = [[line.admit() for _ in range(TURN)][-1] for _ in range(5)]
    assert by_turn[1] is others[0]
    assert by_turn[2] is others[2]
    assert by_turn[4] is others[1]
    assert [each in flood for each in by_turn] == [True, False, False, True, False]


def test_a_key_that_comes_for_the_first_time_goes_behind_those_that_wait_for_their_turn() -> None:
    line = Line()
    waiting = line.come("old", priority=9)
    for number in range(3 * TURN):
        line.come(f"new-{number}", priority=-number)
        if line.admit() is waiting:
            break
    assert number == TURN - 1


def test_without_priorities_and_with_one_key_first_come_is_first_served() -> None:
    line = Line()
    coming = [line.come() for _ in range(30)]
    assert [line.admit() for _ in range(30)] == coming


def test_one_whose_turn_has_come_does_not_give_way_to_the_urgent() -> None:
    meter = Meter("ab", max_num_seqs=TURN, max_num_batched_tokens=64)
    old = meter.add(4, "a", max_tokens=20, priority=9)
    urgent = [meter.add(4, "a", max_tokens=20, priority=-9) for _ in range(2 * TURN)]
    meter.step()
    assert meter.scheduler.running == [*urgent[: TURN - 1], old]
    meter.add(4, "b", max_tokens=20)
    meter.step()
    assert old in meter.scheduler.running
    assert urgent[TURN - 2] in meter.scheduler.waiting
    meter.run()


@given(
    events=st.lists(
        st.one_of(
            st.tuples(st.just("come"), st.sampled_from(KEYS), st.integers(-(10**12), 10**12)),
            st.tuples(st.just("leave"), st.integers(0, 30)),
            st.just(("admit",)),
        ),
        max_size=120,
    )
)
@settings(max_examples=300)
def test_whatever_comes_a_request_is_admitted_before_too_many_others(events: list[Any]) -> None:
    line = Line()
    latest: dict[SequenceState, int] = {}
    """By request, which admission is its own at the latest."""
    num_admitted = 0
    for event in [*events, *[("admit",)] * len(events)]:
        if event[0] == "come":
            num_older = sum(each.key_name == event[1] for each in line.waiting)
            latest[line.come(*event[1:])] = num_admitted + TURN * len(KEYS) * (num_older + 1)
        elif event[0] == "leave" and event[1] < len(line.waiting):
            line.leave(line.waiting[event[1]])
        elif event[0] == "admit" and line.waiting:
            num_admitted += 1
            assert latest[line.admit()] >= num_admitted
            assert all(latest[each] > num_admitted for each in line.waiting)
