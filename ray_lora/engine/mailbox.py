"""How other threads and coroutines reach the one thread that steps the engine."""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ray_lora.errors import RayLoraError

T = TypeVar("T")
Message = tuple[Callable[[], None], Callable[[BaseException], None]]
"""What to run, and whom to tell if that will not be."""


class Mailbox:
    """Functions that its owner, a thread, runs in the order in which they came, until it is closed.

    Args:
        loop: where those who await a result live.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.error: RayLoraError | None = None
        """Why it is closed."""
        self._loop = loop
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        return self._messages.empty()

    def call(self, function: Callable[[], T]) -> "asyncio.Future[T]":
        """Have the owner run a function, after all that came before this call; the future has its result.

        Raises:
            RayLoraError: in the future; what it was closed with, or what the function raised.
        """
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                value = function()
            except BaseException as error:
                fail(error)
            else:
                self._loop.call_soon_threadsafe(_tell, future, future.set_result, value)

        def fail(error: BaseException) -> None:
            self._loop.call_soon_threadsafe(_tell, future, future.set_exception, error)

        self.post(run, fail)
        return future

    def post(self, run: Callable[[], None], fail: Callable[[BaseException], None] = lambda _: None) -> None:
        """Have the owner run a function that nobody waits for."""
        with self._lock:
            if self.error is None:
                self._messages.put((run, fail))
            else:
                fail(self.error)

    def stop(self) -> None:
        """Let the owner find that it is to end."""
        self._messages.put(None)

    def run_next(self, patience_s: float | None) -> bool:
        """By the owner: run one function; false if it is to end.

        Args:
            patience_s: how long to wait for one; None is not at all.

        Raises:
            queue.Empty: none has come.
        """
        message = self._messages.get(block=patience_s is not None, timeout=patience_s)
        if message is None:
            return False
        run, _ = message
        run()
        return True

    def close(self, error: RayLoraError) -> None:
        """By the owner: fail all that waits, and all that is still to come."""
        with self._lock:
            self.error = error
            while not self._messages.empty():
                message = self._messages.get()
                if message is not None:
                    message[1](error)


def _tell(future: "asyncio.Future[Any]", tell: Callable[[T], None], what: T) -> None:
    if not future.done():
        tell(what)
