"""How long one request may wait to begin, and how long it may take."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from ray_lora.config import EngineConfig
from ray_lora.engine.completion import RequestGroup
from ray_lora.errors import OverloadedError, RayLoraError, RequestTimeoutError

Tell = Callable[[RayLoraError], None]
"""Puts an error in a request's stream."""


class Deadlines:
    """Both count from the request's arrival. Belongs to one event loop; a request is told by an error in its stream.

    Args:
        waited_s: how long ago that was.
    """

    def __init__(self, config: EngineConfig, waited_s: float) -> None:
        self._config = config
        self._loop = asyncio.get_running_loop()
        self._arrived = self._loop.time() - waited_s
        self._timers: list[asyncio.TimerHandle] = []

    @asynccontextmanager
    async def while_waiting(self) -> AsyncGenerator[None, None]:
        """Around what comes before the scheduler knows the request.

        Raises:
            OverloadedError: it took longer than `queue_timeout_s`.
            RequestTimeoutError: it took longer than `request_timeout_s`, and the other is not set.
        """
        limit_s = self._config.queue_timeout_s or self._config.request_timeout_s
        scope = asyncio.timeout_at(None if limit_s is None else self._arrived + limit_s)
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise (self._timed_out() if self._config.queue_timeout_s is None else self._overloaded()) from None

    def watch_start(self, group: RequestGroup, tell: Tell) -> None:
        """From here on, until `close`."""

        def check_started() -> None:
            if not group.started:
                tell(self._overloaded())

        if self._config.queue_timeout_s is not None:
            self._timers.append(self._loop.call_at(self._arrived + self._config.queue_timeout_s, check_started))

    def watch_end(self, tell: Tell) -> None:
        """From here on, until `close`."""
        if self._config.request_timeout_s is not None:
            end_at = self._arrived + self._config.request_timeout_s
            self._timers.append(self._loop.call_at(end_at, tell, self._timed_out()))

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _overloaded(self) -> OverloadedError:
        return OverloadedError(f"The server is overloaded: nothing became free in {self._config.queue_timeout_s} s.")

    def _timed_out(self) -> RequestTimeoutError:
        return RequestTimeoutError(f"The request was aborted: it took more than {self._config.request_timeout_s} s.")
