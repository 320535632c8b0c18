"""Steps and copies of adapters: whatever a device does at its own pace, none reads what another is writing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lora.adapters.shard import AdapterShard, ShardHeader
from ray_lora.backends.base import Streams
from ray_lora.model.adapter_copies import AdapterCopies
from ray_lora.step import AdapterPlan

NUM_PAGES = 4


class Device:
    """Two queues whose entries happen in order, and events: what must come before what, and nothing else.

    `before[i]` are the entries that have ended when entry i begins.
    """

    def __init__(self) -> None:
        self.steps, self.copies = Queue(self), Queue(self)
        self.current = self.steps
        self.before: list[frozenset[int]] = []

    @contextmanager
    def within(self, queue: Any) -> Iterator[None]:
        outer, self.current = self.current, queue
        yield
        self.current = outer

    def work(self) -> int:
        """Queue something; its number."""
        entry = len(self.before)
        self.before.append(self.current.ended)
        self.current.ended |= {entry}
        return entry


class Queue:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.ended = frozenset[int]()
        """What has ended when the next entry begins."""

    def record_event(self) -> frozenset[int]:
        return self.ended

    def wait_event(self, event: frozenset[int]) -> None:
        self.ended |= event


class Pages:
    """In place of the pool: who wrote a page last, and who has read it since."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.writes: list[list[int]] = [[] for _ in range(NUM_PAGES)]
        self.reads: list[list[int]] = [[] for _ in range(NUM_PAGES)]

    def write(self, adapter: AdapterPlan, shard: AdapterShard) -> None:
        for _ in range(2):  # to the device, and there into the pages
            entry = self._device.work()
            assert entry in self._device.copies.ended, "a copy is queued with the steps"
        for page in adapter.pages:
            earlier = {*self.writes[page], *self.reads[page]}
            assert earlier <= self._device.before[entry], "a page is overwritten while something reads or writes it"
            self.writes[page].append(entry)

    def read(self, adapter: AdapterPlan) -> int:
        entry = self._device.work()
        for page in adapter.pages:
            assert set(self.writes[page]) <= self._device.before[entry], "a step overtakes the copy of its pages"
            self.reads[page].append(entry)
        return entry


SHARD = AdapterShard(ShardHeader("v", "float32", ()), torch.empty(0, dtype=torch.uint8))
PLANS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 3)), max_size=2), st.sets(st.sampled_from("abcde"))
    ),
    max_size=25,
)
"""Each plan's page-ins, an adapter and how many pages it takes, and the adapters that it would name."""


@settings(max_examples=300, deadline=None)
@given(plans=PLANS, start=st.integers(0, NUM_PAGES - 1))
def test_no_step_and_no_copy_meet_on_a_page(plans: list[Any], start: int) -> None:
    device = Device()
    pages = Pages(device)
    copies = AdapterCopies(pages, Streams(device.steps, device.copies, device.within))
    resident: dict[str, AdapterPlan] = {}
    next_page = start
    for page_ins, named in plans:
        new: set[str] = set()
        for name, count in page_ins:
            taken = tuple((next_page + index) % NUM_PAGES for index in range(count))
            if any(set(resident[other].pages) & set(taken) for other in new) or name in new:
                continue  # a plan pages in no two adapters to one place
            next_page += count
            for other in [other for other, plan in resident.items() if set(plan.pages) & set(taken) or other == name]:
                del resident[other]
                if other != name:
                    copies.forget(other)
            resident[name] = AdapterPlan(name, taken, 0)
            new.add(name)
            copies.page_in(resident[name], SHARD)
        used = [resident[name] for name in sorted(named) if name in resident]
        copies.wait_for(adapter.version for adapter in used)
        for adapter in used:
            pages.read(adapter)
        if not used:
            device.work()


def test_a_step_waits_for_no_copy_of_another_adapter() -> None:
    device = Device()
    pages = Pages(device)
    copies = AdapterCopies(pages, Streams(device.steps, device.copies, device.within))
    one, other = AdapterPlan("one", (0,), 0), AdapterPlan("other", (1,), 1)
    copies.page_in(one, SHARD)
    copies.wait_for(["one"])
    pages.read(one)
    copies.page_in(other, SHARD)
    copies.wait_for(["one"])
    step = pages.read(one)
    assert not set(pages.writes[1]) & device.before[step]
    assert set(pages.writes[0]) <= device.before[step]
    with pytest.raises(AssertionError, match="overtakes"):
        pages.read(other)


def test_a_copy_without_streams_is_done_at_once() -> None:
    written: list[str] = []

    class Pool:
        def write(self, adapter: AdapterPlan, shard: AdapterShard) -> None:
            written.append(adapter.version)

    copies = AdapterCopies(Pool(), None)
    copies.page_in(AdapterPlan("a", (0,), 0), SHARD)
    copies.wait_for(["a"])
    assert written == ["a"]
