"""Callers and writers, many at a time."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from tests.soak.callers import Callers
from tests.soak.ledger import Ledger
from tests.soak.reference import Reference
from tests.soak.served_api import ServedApi
from tests.soak.writers import Writers

NUM_CALLERS, NUM_WRITERS = 12, 3


class Traffic:
    """`versions` of all contents, by content."""

    def __init__(self, api: ServedApi, ledger: Ledger, reference: Reference, versions: dict[str, str]) -> None:
        self.callers = Callers(api, ledger, reference, versions, random.Random(1))
        self._writers = Writers(api, ledger, reference, versions, random.Random(2))
        self._ledger = ledger
        self._rng = random.Random(3)

    async def run(self, seconds: float) -> None:
        callers, writers = self.callers, self._writers
        asks = {
            callers.ask: 12,
            callers.ask_within_limits: 3,
            callers.leave: 3,
            callers.ask_many: 1,
            callers.ask_badly: 1,
        }
        changes = {
            writers.point: 8,
            writers.unload: 3,
            writers.pin: 2,
            writers.look: 2,
            writers.validate: 1,
            writers.load_badly: 1,
        }
        until = time.monotonic() + seconds
        work = [self._repeat(asks, until) for _ in range(NUM_CALLERS)]
        await asyncio.gather(*work, *[self._repeat(changes, until) for _ in range(NUM_WRITERS)])

    async def _repeat(self, actions: dict[Callable[[], Awaitable[None]], int], until: float) -> None:
        while time.monotonic() < until:
            (action,) = self._rng.choices(list(actions), list(actions.values()))
            await self._ledger.watch(action)
