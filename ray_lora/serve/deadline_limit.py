"""How many requests may be under way, so that those who are let in are answered in time.

Nobody knows how fast the replicas are, how many they will be, and how long the answers; so it is learned from the
requests. One that was the 40th in line and took half of the time that it may says that it could have been the 80th.
What is late lowers the limit, and what is early raises it while others are refused.
"""

from collections import Counter
from dataclasses import dataclass

from ray_lora.config import EngineConfig
from ray_lora.errors import OverloadedError
from ray_lora.request import RequestMetrics

TARGET = 0.7
"""Of a deadline; what is left is for requests that take longer than others."""
DOWN, UP = 0.2, 0.05
"""How far one request moves the limit towards what it says. Most are to be early, not half of them."""
MAX_RAISE = 2.0
"""What one request may say at most, as a multiple of its place."""
RETRY_AFTER_S = 1.0
"""A place becomes free whenever one of the others ends."""


@dataclass(frozen=True, slots=True)
class Place:
    """A request's, when it was let in."""

    in_line: int
    """Its first completion would be the so manieth to be served."""
    num_refused: int
    """Requests until then."""


class DeadlineLimit:
    """There is no limit without `queue_timeout_s` and `request_timeout_s`.

    The line is as fair as the engine: before a request are no more of any other adapter than of its own. So a flood for
    one adapter has its own requests refused, and hardly those for others.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._queue_s, self._request_s = config.queue_timeout_s, config.request_timeout_s
        self._limit = float(config.max_num_seqs)
        self._num_open: Counter[str | None] = Counter()
        self._num_refused = 0

    def check(self, adapter: str | None) -> None:
        """Raise OverloadedError if one more request would not be answered in time."""
        within_s = self._queue_s or self._request_s
        if within_s is not None and self._in_line(adapter) > self._limit:
            self._num_refused += 1
            message = f"The server is overloaded: another request would not be answered within {within_s} s."
            raise OverloadedError(message, RETRY_AFTER_S)

    def enter(self, adapter: str | None, count: int) -> Place:
        """So many completions are under way."""
        place = Place(self._in_line(adapter), self._num_refused)
        self._num_open[adapter] += count
        return place

    def leave(self, adapter: str | None, count: int) -> None:
        """They are no longer."""
        self._num_open[adapter] -= count
        if not self._num_open[adapter]:
            del self._num_open[adapter]

    def learn(self, place: Place, metrics: RequestMetrics | None) -> None:
        """A request has ended; without metrics it was aborted on the way, for it took too long."""
        strain = (1.0 if metrics is None else self._share(metrics)) / TARGET
        says = place.in_line / max(strain, 1 / MAX_RAISE)
        if strain > 1:
            self._limit = max(1.0, self._limit + DOWN * min(0.0, says - self._limit))
        elif self._num_refused > place.num_refused:
            self._limit += UP * max(0.0, says - self._limit)

    def _share(self, metrics: RequestMetrics) -> float:
        """Of the time that a request may take, what it took; but for its adapter, which kept none of the others."""
        took_s = metrics.e2e_s - metrics.load_wait_s
        pairs = ((metrics.queue_s, self._queue_s), (took_s, self._request_s))
        return max((seconds / limit for seconds, limit in pairs if limit is not None), default=0.0)

    def _in_line(self, adapter: str | None) -> int:
        own = self._num_open[adapter] + 1
        return own + sum(min(own, count) for name, count in self._num_open.items() if name != adapter)
