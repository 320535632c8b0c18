"""Calls of other deployments, whose errors are ours."""

import asyncio
import contextvars
from collections.abc import Awaitable
from typing import Any, TypeVar

from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle

from ray_lora.errors import CapacityError, EngineDeadError, NotFoundError, RayLoraError
from ray_lora.names import url_scheme

T = TypeVar("T")

RETRY_S = 0.2
"""A replica that dies during a call is gone from the next one after about this long."""
NUM_TRIES = 5


def call(handle: DeploymentHandle[Any], *args: object) -> Any:
    """Call a handle's method as a request of its own, and not as a part of the one that this runs in.

    Serve gives all parts of a request one id, by which a router of ours finds those again that wait for a replica: of
    two that wait at the same time it would lose one, and look for a place for it for ever.
    """
    return contextvars.Context().run(handle.remote, *args)


async def told(work: Awaitable[T]) -> T | RayLoraError:
    """Errors are returned, not raised, so that Serve does not log a caller's mistake as a failure."""
    try:
        return await work
    except RayLoraError as error:
        return error


async def answer(response: Awaitable[Any]) -> Any:
    """What one replica says, or the error that it tells of."""
    try:
        result = await response
    except Exception as error:
        raise as_ours(error) from None
    if isinstance(result, RayLoraError):
        raise result
    return result


async def answer_of_any(handle: DeploymentHandle[Any], method: str, source: str, *args: object) -> Any:
    """What one replica says of an adapter's source, or whichever can: a local path may lie on one node alone."""
    try:
        return await answer(call(getattr(handle, method), source, *args))
    except NotFoundError:
        if url_scheme(source) is None:
            for each in await every_answer(handle, method, source, *args):
                if not isinstance(each, RayLoraError):
                    return each
        raise


async def every_answer(handle: DeploymentHandle[Any], method: str, *args: object) -> list[Any]:
    """What every running replica says, in no order; an error that one tells of is its answer.

    The call must be one that may be made twice: if a replica dies, all others are called again. None may be running.

    Raises:
        RayLoraError: some cannot be reached, again and again.
    """
    for tries_left in reversed(range(NUM_TRIES)):
        try:
            return list(await handle.broadcast(method, *args).results_async())
        except DeploymentUnavailableError:
            return []
        except RayActorError as error:
            if not tries_left:
                raise as_ours(error) from None
        except Exception as error:
            raise as_ours(error) from None
        await asyncio.sleep(RETRY_S)
    raise AssertionError("unreachable")


def as_ours(error: Exception) -> RayLoraError:
    """What an error of Ray or of Serve means to a caller."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RayLoraError):
        return cause
    if isinstance(error, BackPressureError):
        return CapacityError(str(error))
    if isinstance(error, (TaskCancelledError, RequestCancelledError)):
        return RayLoraError("the request was cancelled")
    if isinstance(error, (RayError, RayServeException)):
        return EngineDeadError(f"the replica is not available: {_first_line(cause)}")
    return RayLoraError(_first_line(cause))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
