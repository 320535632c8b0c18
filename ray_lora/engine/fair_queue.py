"""Who is served next. Each adapter has a queue, and so has the base model; the one that was served least is next.

This is the Virtual Token Counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). A queue's
counter rises with the tokens that its requests are served, divided by its weight. While two queues both have requests
waiting, their counters differ by no more than the running requests of one can still be served, whatever comes when. A
queue that was empty starts from the lowest counter of those that are not: nobody saves up.

Within a queue, requests go by priority. But every fourth goes by turn, to the API key whose last turn is longest ago,
and of its requests to the one that came first. So with `k` older ones of its own key, and requests of `n` keys in the
queue, a request is no later than the `4 * n * (k + 1)`th to be admitted, whatever the others ask for.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from operator import attrgetter

from ray_lora.engine.sequence_state import SequenceState

INPUT_COST = 1
"""Of a prompt token that is computed."""
OUTPUT_COST = 2
"""Of a token that is generated."""

TURN = 4
"""Of so many requests that a queue has admitted, the last went by turn."""

_place = attrgetter("place")


class AdapterQueue:
    """The requests under one name that wait, and what those before them were served."""

    __slots__ = ("_due", "_last_turns", "_num_admitted", "begun", "counter", "num_bypassed", "num_running", "waiting")

    def __init__(self) -> None:
        self.waiting: list[SequenceState] = []
        """By priority, then first come, first served; those before all whose turn has come."""
        self.begun: SequenceState | None = None
        """The running one whose prompt is computed in chunks; the others wait for it."""
        self.num_running = 0
        self.counter = 0.0
        """Tokens served, by their cost, over the weight."""
        self.num_bypassed = 0
        """Requests for other adapters admitted while this one waited for pages."""
        self._num_admitted = 0
        self._last_turns: dict[str | None, int] = {}
        """By API key: how many had been admitted when it had its last turn, or came first."""
        self._due: SequenceState | None = None
        """Whose turn it is; None for priority's."""

    @property
    def next(self) -> SequenceState | None:
        """Whose prompt is to be computed next."""
        return self.begun or self._due or (self.waiting[0] if self.waiting else None)

    def push(self, sequence: SequenceState) -> None:
        self._last_turns.setdefault(sequence.key_name, self._num_admitted)
        insort(self.waiting, sequence, key=_place)
        if self._due is None:
            self._choose_due()

    def remove(self, sequence: SequenceState) -> None:
        del self.waiting[bisect_left(self.waiting, sequence.place, key=_place)]
        if sequence is self._due:
            self._choose_due()

    def admit(self, sequence: SequenceState) -> None:
        is_due = sequence is self._due
        self._num_admitted += 1
        self.remove(sequence)
        if is_due:
            sequence.priority = -math.inf  # so that it neither gives way to the urgent nor waits for another turn
            self._last_turns[sequence.key_name] = self._num_admitted
        self._choose_due()

    def _choose_due(self) -> None:
        is_turn = self._num_admitted % TURN == TURN - 1
        self._due = min(self.waiting, key=self._turn, default=None) if is_turn else None

    def _turn(self, sequence: SequenceState) -> tuple[int, int]:
        return self._last_turns[sequence.key_name], sequence.request_id


class FairQueue:
    """All requests that wait. Its length may be taken, and its requests listed, in another thread."""

    def __init__(self, weight_of: Callable[[str | None], float]) -> None:
        """
        Args:
            weight_of: of a name; None is the base model.
        """
        self._weight_of = weight_of
        self._queues: dict[str | None, AdapterQueue] = {}
        self._last = AdapterQueue()
        """The one that a request was last admitted from."""
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[SequenceState]:
        for queue in list(self._queues.values()):
            yield from list(queue.waiting)

    def queue_of(self, sequence: SequenceState) -> AdapterQueue:
        return self._queues[sequence.adapter_name]

    def turns(self) -> Iterator[AdapterQueue]:
        """Queues in fair order. One whose next request was taken comes again in its new place, if it has another.

        Of equal ones, those that run nothing go first; then the one whose next request came first, so that it is not
        overtaken for ever by others that have only just come.
        """
        heap = [_turn(queue, first) for queue in self._queues.values() if (first := queue.next) is not None]
        heapq.heapify(heap)
        while heap:
            *_, first, queue = heapq.heappop(heap)
            yield queue
            if (following := queue.next) is not None and following is not first:
                heapq.heappush(heap, _turn(queue, following))

    @property
    def num_active(self) -> int:
        """Queues with requests that wait or run."""
        return sum(queue.num_running > 0 or queue.next is not None for queue in self._queues.values())

    def most_served(self, more_than: float, at_least: float = -math.inf) -> AdapterQueue | None:
        """The queue that is furthest ahead.

        Args:
            more_than: of those that run more requests than this.
            at_least: of those whose counter is no less than this.
        """
        queues = self._queues.values()
        found = [queue for queue in queues if queue.num_running > more_than and queue.counter >= at_least]
        return max(found, key=attrgetter("counter"), default=None)

    def push(self, sequence: SequenceState) -> None:
        """A request waits: a new one, or one that has run and comes before all that are newer."""
        name = sequence.adapter_name
        if name not in self._queues:
            self._forget_idle()
            self._queues[name] = AdapterQueue()
        queue = self._queues[name]
        if queue.next is None:
            queue.counter = max(queue.counter, self._floor())
        queue.push(sequence)
        self._num_waiting += 1

    def remove(self, sequence: SequenceState) -> None:
        """A request waits no longer."""
        self.queue_of(sequence).remove(sequence)
        self._num_waiting -= 1

    def admit(self, sequence: SequenceState) -> None:
        """A waiting request runs."""
        queue = self._last = self.queue_of(sequence)
        queue.admit(sequence)
        self._num_waiting -= 1
        queue.num_running += 1
        queue.num_bypassed = 0

    def leave(self, sequence: SequenceState) -> None:
        """A running request runs no longer."""
        queue = self.queue_of(sequence)
        queue.num_running -= 1
        if queue.begun is sequence:
            queue.begun = None

    def grant(self, sequence: SequenceState, num_tokens: int) -> None:
        """The next `num_tokens` of a running request are computed in this step. A prompt token is charged for once."""
        queue, stop = self.queue_of(sequence), sequence.num_computed_tokens + num_tokens
        if stop < sequence.num_tokens:
            assert queue.begun in (None, sequence), "two prompts of one queue are begun"
            queue.begun = sequence
        elif queue.begun is sequence:
            queue.begun = None
        charged = max(sequence.num_computed_tokens, sequence.num_charged_tokens)
        stop = min(stop, sequence.num_prompt_tokens)
        if stop > charged:
            sequence.num_charged_tokens = stop
            self._charge(sequence, (stop - charged) * INPUT_COST)

    def charge_output(self, sequence: SequenceState) -> None:
        """A running request has got a token."""
        self._charge(sequence, OUTPUT_COST)

    def check_integrity(self, running: list[SequenceState]) -> None:
        """Assert that every request is in its queue, in its place, and is counted once."""
        assert len(list(self)) == len(self)
        assert sum(queue.num_running for queue in self._queues.values()) == len(running)
        for name, queue in self._queues.items():
            own = [sequence for sequence in running if sequence.adapter_name == name]
            assert queue.num_running == len(own)
            assert all(sequence.adapter_name == name for sequence in queue.waiting)
            assert queue.waiting == sorted(queue.waiting, key=_place)
            assert queue.begun is None or queue.begun in own
            assert queue._due is None or queue._due in queue.waiting

    def _charge(self, sequence: SequenceState, cost: int) -> None:
        self.queue_of(sequence).counter += cost / self._weight_of(sequence.adapter_name)

    def _floor(self) -> float:
        """Where a queue that was empty starts."""
        counters = (queue.counter for queue in self._queues.values() if queue.next is not None)
        return min(counters, default=self._last.counter)

    def _forget_idle(self) -> None:
        """Of a queue that would start from the floor again, nothing needs to be known."""
        floor = self._floor()
        for name, queue in list(self._queues.items()):
            if queue.next is None and queue.num_running == 0 and queue.counter <= floor:
                del self._queues[name]


def _turn(queue: AdapterQueue, first: SequenceState) -> tuple[float, bool, int, SequenceState, AdapterQueue]:
    return queue.counter, queue.num_running > 0, first.request_id, first, queue
