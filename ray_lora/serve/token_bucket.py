"""Tokens a minute."""

from collections.abc import Callable


class TokenBucket:
    """Fills steadily, with `per_minute` tokens a minute, and holds as many; may be drawn on beyond what it has.

    Who has used more than there was waits until the debt is paid, so that over a long time the rate is exact, though
    nobody knows beforehand how long an answer will be.

    Args:
        clock: seconds from any moment, never going back.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled_at = clock()

    @property
    def is_full(self) -> bool:
        self._fill()
        return self._level == self.per_minute

    @property
    def wait_s(self) -> float:
        """Seconds until a token is there to be drawn; 0 if one is there now."""
        self._fill()
        return max(0.0, (1 - self._level) * 60 / self.per_minute)

    def draw(self, num_tokens: int) -> None:
        """Take tokens out, or with a negative number give them back."""
        self._fill()
        self._level = min(self.per_minute, self._level - num_tokens)

    def _fill(self) -> None:
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._filled_at) * self.per_minute / 60)
        self._filled_at = now
