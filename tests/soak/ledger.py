"""What callers know: where names may point, what was answered how often, and when the server was not whole."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

OUTAGE_S = 8.0
"""How long after the server is whole again callers may still hear that it was not."""
STALE_S = 3.0
"""How long after that a new replica may have missed a change."""
AS_LOST = (0, 200, 503, 504)
"""Statuses of what a lost rank takes along; 0 is no answer, 200 a stream that breaks off."""


class WrongAnswerError(Exception):
    """The server has said what is not so."""


@dataclass(slots=True)
class Name:
    """An adapter's name: what it has pointed to, and since when it can only be the later of those."""

    name: str
    versions: list[str | None] = field(default_factory=lambda: [None])
    first: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def possible(self) -> list[str | None]:
        return self.versions[self.first :]

    @asynccontextmanager
    async def becoming(self, version: str | None) -> AsyncIterator[Callable[[bool], None]]:
        """A change under way: requests may see it or not, until it is said whether it has happened."""
        before, was_certain = self.versions[-1], self.first == len(self.versions) - 1
        self.versions.append(version)

        def settle(has_happened: bool) -> None:
            if not has_happened:
                self.versions.append(before)
            if has_happened or was_certain:
                self.first = len(self.versions) - 1

        yield settle


class Ledger:
    """Shared by all callers of one server."""

    def __init__(self, names: list[str]) -> None:
        self.names = {name: Name(name) for name in names}
        self.tally: dict[str, Counter[str]] = defaultdict(Counter)
        """By kind of request, how often it ended how."""
        self.wrong: list[str] = []
        self.is_broken, self.whole_at = True, 0.0
        """Whether not all replicas are there and well, as at the start; when that last became untrue."""

    async def watch(self, action: Callable[[], Awaitable[None]]) -> None:
        """Note what is wrong, and go on."""
        try:
            await action()
        except WrongAnswerError as error:
            self.wrong.append(f"{time.strftime('%T')} {error}")

    def is_outage(self, after_s: float) -> bool:
        return self.is_broken or time.monotonic() < self.whole_at + after_s

    def begin(self, name: str) -> int:
        """From where on in its history a name may point to what a request finds that starts now."""
        return 0 if self.is_outage(STALE_S) else self.names[name].first

    def judge(self, kind: str, status: int, right: set[int], about: str) -> None:
        if status in right:
            self.tally[kind][f"{status} as it should be"] += 1
        else:
            self.failed(kind, status, False, f"{kind}: {status}, not {right}: {about}")

    def failed(self, kind: str, status: int, has_begun: bool, about: str) -> None:
        """Which is allowed while a rank is lost."""
        if not self.is_outage(OUTAGE_S) or status not in AS_LOST:
            raise WrongAnswerError(f"a failure without a cause: {about}")
        self.tally[kind]["broke off" if has_begun else "failed before its first token"] += 1
