"""Several requests at once, as one stream: the prompts of a completion."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from ray_lora.request import GenerateChunk, GenerateRequest, RequestOutput

Generate = Callable[[GenerateRequest], AsyncGenerator[GenerateChunk, None]]
Numbered = tuple[int, GenerateChunk]
"""A chunk, and the index of its request."""


async def stream_requests(generate: Generate, requests: Sequence[GenerateRequest]) -> AsyncGenerator[Numbered, None]:
    """Every request's chunks as they come. If one fails, or the stream is closed, all are cancelled."""
    if len(requests) == 1:
        async with aclosing(generate(requests[0])) as chunks:
            async for chunk in chunks:
                yield 0, chunk
        return
    queue: asyncio.Queue[Numbered | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(generate, request, index, queue)) for index, request in enumerate(requests)]
    try:
        num_running = len(tasks)
        while num_running:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gather_requests(
    generate: Generate, requests: Sequence[GenerateRequest], texts: Sequence[str | None]
) -> list[RequestOutput]:
    """Every request's whole output, in their order."""
    outputs = [
        RequestOutput(request.request_id, text, adapter=request.adapter, n=request.sampling_params.n)
        for request, text in zip(requests, texts, strict=True)
    ]
    async with aclosing(stream_requests(generate, requests)) as chunks:
        async for index, chunk in chunks:
            outputs[index].append(chunk)
    return outputs


async def _pump(
    generate: Generate,
    request: GenerateRequest,
    index: int,
    queue: "asyncio.Queue[Numbered | BaseException | None]",
) -> None:
    try:
        async with aclosing(generate(request)) as chunks:
            async for chunk in chunks:
                queue.put_nowait((index, chunk))
    except Exception as error:
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)
