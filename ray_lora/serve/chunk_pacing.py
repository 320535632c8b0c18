"""Streams for callers by handle, in which chunks that come close together are one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from ray_lora.request import CompletionDelta, GenerateChunk

MIN_INTERVAL_S = 0.01
"""Items of one stream are no closer than this; each costs half a millisecond of CPU on the way."""


async def paced(chunks: AsyncGenerator[GenerateChunk, None]) -> AsyncGenerator[GenerateChunk, None]:
    """The same text in fewer chunks. Closing this closes `chunks`."""
    queue: asyncio.Queue[GenerateChunk | BaseException | None] = asyncio.Queue()

    async def pump() -> None:
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    queue.put_nowait(chunk)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    task = asyncio.create_task(pump())
    try:
        while True:
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            found = [item for item in items if isinstance(item, GenerateChunk)]
            if found:
                yield merge(found)
            last = items[-1]
            if isinstance(last, BaseException):
                raise last
            if last is None:
                return
            await asyncio.sleep(MIN_INTERVAL_S)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def merge(chunks: Sequence[GenerateChunk]) -> GenerateChunk:
    """Consecutive chunks of one request as one: at most one delta for each completion."""
    if len(chunks) == 1:
        return chunks[0]
    deltas: dict[int, CompletionDelta] = {}
    for chunk in chunks:
        for delta in chunk.outputs:
            before = deltas.get(delta.index)
            deltas[delta.index] = delta if before is None else _append(before, delta)
    return replace(chunks[0], outputs=tuple(deltas.values()), metrics=chunks[-1].metrics)


def _append(before: CompletionDelta, after: CompletionDelta) -> CompletionDelta:
    logprobs = None
    if before.logprobs is not None or after.logprobs is not None:
        logprobs = (before.logprobs or ()) + (after.logprobs or ())
    return CompletionDelta(
        index=after.index,
        text=before.text + after.text,
        token_ids=before.token_ids + after.token_ids,
        logprobs=logprobs,
        finish_reason=after.finish_reason,
        stop_reason=after.stop_reason,
    )
