"""What one replica has to tell one ingress, all requests together: the reason that streaming is cheap.

A stream of a Serve handle costs half a millisecond of CPU per item, on both sides together. Sixteen requests that gain
a token in the same step would be sixteen items; through an outbox they are one.
"""

import asyncio
import itertools
import pickle
from collections.abc import AsyncGenerator
from typing import Any

from ray_lora.errors import RayLoraError
from ray_lora.request import CompletionDelta, GenerateChunk

Item = GenerateChunk | RayLoraError | None
"""Something new for a request, the error that ended it, or None for its good end."""

IDLE_S = 1.0
"""An outbox without requests closes after this, so that it never holds up the shutdown of a replica."""
MIN_INTERVAL_S = 0.003
"""Batches are no closer than this; when steps are shorter, several become one batch."""


_epochs = itertools.count()


class Outbox:
    """Items wait here until the ingress's stream takes them, however many have come.

    The ingress opens a stream when a request tells it an epoch that it has not opened yet; a stream that ends for want
    of requests ends its epoch, and what comes later waits for the next stream. Epochs rise over all outboxes of the
    process: an ingress whose outbox was dropped meanwhile must not take the next one's stream for one that it has.
    """

    def __init__(self) -> None:
        self.epoch = next(_epochs)
        self.num_requests = 0
        self.is_open = False
        self._items: list[tuple[int, Item]] = []
        self._arrived = asyncio.Event()

    def put(self, key: int, item: Item) -> None:
        """Add something for the request that the ingress calls `key`."""
        self._items.append((key, item))
        self._arrived.set()

    def take(self, key: int) -> bytes:
        """One request's items alone, for another way to the ingress."""
        taken = [item for item in self._items if item[0] == key]
        self._items = [item for item in self._items if item[0] != key]
        return encode(taken)

    async def batches(self) -> AsyncGenerator[bytes, None]:
        """Everything, until there has been no request for a while."""
        self.is_open = True
        try:
            while await self._has_items():
                items, self._items = self._items, []
                yield encode(items)
                await asyncio.sleep(MIN_INTERVAL_S)
            self.epoch = next(_epochs)
        finally:
            self.is_open = False

    async def _has_items(self) -> bool:
        """Wait for items; false if none came and there is no request that could give any."""
        while not self._items:
            self._arrived.clear()
            try:
                async with asyncio.timeout(IDLE_S):
                    await self._arrived.wait()
            except TimeoutError:
                if self.num_requests == 0 and not self._items:  # they may have come with the timeout
                    return False
        return True


def encode(items: list[tuple[int, Item]]) -> bytes:
    """Plain tuples are pickled ten times faster than dataclasses."""
    return pickle.dumps([(key, _pack(item) if isinstance(item, GenerateChunk) else item) for key, item in items], 5)


def decode(batch: bytes) -> list[tuple[int, Item]]:
    """The items of a batch. Batches come from our own replicas, over Ray."""
    return [(key, _unpack(item) if isinstance(item, tuple) else item) for key, item in pickle.loads(batch)]


def _pack(chunk: GenerateChunk) -> tuple[Any, ...]:
    outputs = [
        (delta.index, delta.text, delta.token_ids, delta.logprobs, delta.finish_reason, delta.stop_reason)
        for delta in chunk.outputs
    ]
    head = (chunk.request_id, outputs)
    if chunk.prompt_token_ids is None and chunk.metrics is None:
        return head
    prompt = (chunk.prompt_token_ids, chunk.prompt_logprobs, chunk.num_cached_tokens, chunk.adapter_version)
    return (*head, *prompt, chunk.metrics)


def _unpack(packed: tuple[Any, ...]) -> GenerateChunk:
    request_id, outputs, *rest = packed
    return GenerateChunk(request_id, tuple([CompletionDelta(*delta) for delta in outputs]), *rest)
