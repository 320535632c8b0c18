"""Work that several callers want at the same time is done once."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SharedCalls(Generic[T]):
    """Calls under way, by key. They are carried through even if every caller goes away."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[T]] = {}

    async def run(self, key: Hashable, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result, or the error, of the call that is under way for `key`; if there is none, it starts."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.ensure_future(call())
            task.add_done_callback(lambda done: self._finish(key, done))
        return await asyncio.shield(task)

    def _finish(self, key: Hashable, task: "asyncio.Task[T]") -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # seen, even if every caller has gone away
