"""A request whose replica dies runs again on another one, once, unless its caller has seen something of it."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from ray_lora.errors import EngineDeadError
from ray_lora.request import GenerateChunk


async def retried(
    run: Callable[[], AsyncGenerator[GenerateChunk, None]],
    is_streamed: bool,
    begin_again: Callable[[EngineDeadError], None],
) -> AsyncGenerator[GenerateChunk, None]:
    """The chunks of a request's first run that comes to an end, of two at most.

    A stream's chunks are passed on as they come, and the first one that has gone out rules out another run. All others
    are held back until the run has ended, so that of one that failed nothing is ever seen.

    Args:
        run: sends the request to a replica.
        begin_again: told why, before the second run.

    Raises:
        EngineDeadError: the replica died in the middle of the stream, or in the second run as well.
    """
    for may_run_again in (True, False):
        held_back: list[GenerateChunk] = []
        has_streamed = False
        try:
            async with aclosing(run()) as chunks:
                async for chunk in chunks:
                    if is_streamed:
                        has_streamed = True
                        yield chunk
                    else:
                        held_back.append(chunk)
        except EngineDeadError as error:
            if has_streamed:
                message = "The replica died in the middle of this stream, so the answer is incomplete; send it again"
                raise EngineDeadError(f"{message}. ({error})") from error
            if not may_run_again:
                raise
            begin_again(error)
        else:
            for chunk in held_back:
                yield chunk
            return
