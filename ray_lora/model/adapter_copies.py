"""The order between copies of adapters to the device, which have a stream of their own, and the steps."""

from collections.abc import Iterable
from typing import Any, Protocol

from ray_lora.adapters.shard import AdapterShard
from ray_lora.backends.base import Streams
from ray_lora.step import AdapterPlan


class AdapterWriter(Protocol):
    """`AdapterPool`, as far as it is needed here."""

    def write(self, adapter: AdapterPlan, shard: AdapterShard) -> None: ...


class AdapterCopies:
    """A copy begins after the steps that were queued before it, for they may read what it overwrites; a step, after
    the copies of the adapters that it names, and of no others. All of it is for the device: the host never waits.
    """

    def __init__(self, pool: AdapterWriter, streams: Streams | None) -> None:
        """
        Args:
            streams: None where a copy is done when the call returns.
        """
        self._pool, self._streams = pool, streams
        self._copied: dict[str, Any] = {}
        """By version, the end of its copy, until a step has waited for it: later steps come after that one."""

    def page_in(self, adapter: AdapterPlan, shard: AdapterShard) -> None:
        """Copy an adapter into its pages and its slot."""
        if self._streams is None:
            self._pool.write(adapter, shard)
            return
        steps, copies = self._streams.steps, self._streams.copies
        copies.wait_event(steps.record_event())
        with self._streams.within(copies):
            self._pool.write(adapter, shard)
        self._copied[adapter.version] = copies.record_event()

    def wait_for(self, versions: Iterable[str]) -> None:
        """Let the steps' next work wait until these are there."""
        for version in versions:
            copied = self._copied.pop(version, None)
            if copied is not None and self._streams is not None:
                self._streams.steps.wait_event(copied)

    def forget(self, version: str) -> None:
        """No step will name it any more."""
        self._copied.pop(version, None)
