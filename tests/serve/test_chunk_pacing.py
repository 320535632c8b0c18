"""Chunks that come close together are merged, and nothing is lost."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from ray_lora.errors import NumericsError
from ray_lora.request import CompletionDelta, GenerateChunk, Logprob, RequestOutput
from ray_lora.serve.chunk_pacing import merge, paced


def chunk(index: int, token: int, reason: str | None = None, first: bool = False) -> GenerateChunk:
    delta = CompletionDelta(index, f"{token} ", (token,), ({token: Logprob(-1.0, 1, "")},), reason)  # type: ignore[arg-type]
    return GenerateChunk("r", (delta,), (9, 9) if first else None, None, 3 if first else 0, "v" if first else None)


def test_a_merged_chunk_appends_as_its_parts_do() -> None:
    parts = [chunk(0, 1, first=True), chunk(1, 2), chunk(0, 3), chunk(1, 4, "stop"), chunk(0, 5, "length")]
    one, all_at_once = RequestOutput("r", None), RequestOutput("r", None)
    for part in parts:
        one.append(part)
    merged = merge(parts)
    all_at_once.append(merged)
    assert one == all_at_once
    assert len(merged.outputs) == 2
    assert merge(parts[:1]) is parts[0]


def test_a_fast_stream_has_few_items_and_all_tokens() -> None:
    async def source() -> AsyncGenerator[GenerateChunk, None]:
        for token in range(200):
            yield chunk(0, token, first=token == 0)
            await asyncio.sleep(0)

    async def main() -> list[GenerateChunk]:
        return [item async for item in paced(source())]

    items = asyncio.run(main())
    assert [token for item in items for token in item.outputs[0].token_ids] == list(range(200))
    assert len(items) < 20


def test_an_error_comes_after_what_was_before_it() -> None:
    async def source() -> AsyncGenerator[GenerateChunk, None]:
        yield chunk(0, 1)
        raise NumericsError("not finite")

    async def main() -> None:
        items = paced(source())
        assert (await anext(items)).outputs[0].token_ids == (1,)
        with pytest.raises(NumericsError):
            await anext(items)

    asyncio.run(main())


def test_closing_closes_the_source() -> None:
    closed = []

    async def source() -> AsyncGenerator[GenerateChunk, None]:
        try:
            while True:
                yield chunk(0, 1)
                await asyncio.sleep(0.001)
        finally:
            closed.append(True)

    async def main() -> None:
        items = paced(source())
        await anext(items)
        await items.aclose()

    asyncio.run(main())
    assert closed == [True]
