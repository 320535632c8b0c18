"""What a replica tells an ingress: batches, epochs, and the codec between them."""

import asyncio

import pytest

from ray_lora.errors import InvalidRequestError
from ray_lora.request import CompletionDelta, GenerateChunk, Logprob
from ray_lora.serve import outbox as outbox_module
from ray_lora.serve.outbox import Item, Outbox, decode, encode

FIRST = GenerateChunk("r1", (CompletionDelta(0, "a", (5,)),), (1, 2), (None, {2: Logprob(-1.0, 1, "x")}), 16, "v1")
LAST = GenerateChunk("r1", (CompletionDelta(0, "b", (6,), ({6: Logprob(-0.5, None, "b")},), "stop", "END"),))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "IDLE_S", 0.05)


def test_items_survive_the_codec() -> None:
    items: list[tuple[int, Item]] = [(7, FIRST), (8, LAST), (7, None)]
    assert decode(encode(items)) == items
    ((key, error),) = decode(encode([(9, InvalidRequestError("bad", "prompt"))]))
    assert key == 9
    assert isinstance(error, InvalidRequestError)
    assert error.param == "prompt"


def test_what_comes_in_one_step_is_one_batch() -> None:
    async def main() -> list[list[tuple[int, Item]]]:
        outbox = Outbox()

        async def steps() -> None:
            for _ in range(3):
                await asyncio.sleep(0.01)
                for key in range(4):
                    outbox.put(key, LAST)

        task = asyncio.create_task(steps())
        batches = [decode(batch) async for batch in outbox.batches()]
        await task
        return batches

    assert [[key for key, _ in batch] for batch in asyncio.run(main())] == [[0, 1, 2, 3]] * 3


def test_steps_that_come_fast_share_a_batch() -> None:
    async def main() -> int:
        outbox = Outbox()

        async def steps() -> None:
            for _ in range(100):
                await asyncio.sleep(0)
                outbox.put(0, LAST)

        task = asyncio.create_task(steps())
        sizes = [len(decode(batch)) async for batch in outbox.batches()]
        await task
        assert sum(sizes) == 100
        return len(sizes)

    assert asyncio.run(main()) < 20


def test_it_stays_open_while_there_are_requests_and_starts_a_new_epoch_when_it_closes() -> None:
    async def main() -> None:
        outbox = Outbox()
        first = outbox.epoch
        outbox.num_requests = 1
        outbox.put(0, FIRST)
        batches = outbox.batches()
        assert decode(await anext(batches)) == [(0, FIRST)]
        waiting = asyncio.ensure_future(anext(batches, None))
        await asyncio.sleep(0.15)
        assert (waiting.done(), outbox.is_open, outbox.epoch) == (False, True, first)
        outbox.num_requests = 0
        assert await waiting is None
        assert not outbox.is_open
        assert first < outbox.epoch < Outbox().epoch
        outbox.put(1, LAST)
        assert decode(await anext(outbox.batches())) == [(1, LAST)]

    asyncio.run(main())


def test_what_comes_just_as_the_outbox_would_close_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        outbox = Outbox()

        async def wait() -> None:
            outbox.put(7, None)
            raise TimeoutError

        monkeypatch.setattr(outbox._arrived, "wait", wait)
        batches = outbox.batches()
        assert decode(await anext(batches)) == [(7, None)]
        await batches.aclose()

    asyncio.run(main())
