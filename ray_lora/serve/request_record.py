"""What became of one request, as the process that sent it to a replica saw it."""

import asyncio
import time
from collections.abc import Callable

from ray_lora.errors import RayLoraError
from ray_lora.request import GenerateChunk, GenerateRequest, RequestMetrics
from ray_lora.serve.http_errors import status_of

CLIENT_CLOSED_REQUEST = 499
"""The status of a request whose caller did not wait for its end, as nginx has it."""


class RequestRecord:
    """A context manager around a request's chunks. `tell` gets the record once they have ended."""

    def __init__(self, request: GenerateRequest, tell: Callable[["RequestRecord"], None]) -> None:
        self._tell = tell
        self.request = request
        self.begin_ns = time.time_ns()
        """Since the epoch, as is `end_ns`; what lies between them does not depend on that clock."""
        self._began_ns = time.monotonic_ns()
        self.end_ns = self.begin_ns
        self.status = CLIENT_CLOSED_REQUEST
        """As over HTTP, also in the middle of a stream and for callers by handle."""
        self.error: BaseException | None = None
        self.retry_cause: RayLoraError | None = None
        """What ended its first run, if there was a second, of which all that follows tells."""
        self._clear()

    def _clear(self) -> None:
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.completion_tokens = 0
        self.adapter_version: str | None = None
        self.finish_reasons: list[str] = []
        self.metrics: RequestMetrics | None = None
        """None unless it came to its end."""

    def begin_again(self, cause: RayLoraError) -> None:
        """The request runs anew, on another replica."""
        self.retry_cause = cause
        self._clear()

    def add(self, chunk: GenerateChunk) -> None:
        for delta in chunk.outputs:
            self.completion_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self.finish_reasons.append(delta.finish_reason)
        if chunk.prompt_token_ids is not None:
            self.prompt_tokens = len(chunk.prompt_token_ids)
            self.cached_tokens = chunk.num_cached_tokens
            self.adapter_version = chunk.adapter_version
        if chunk.metrics is not None:
            self.metrics, self.status = chunk.metrics, 200

    def __enter__(self) -> "RequestRecord":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end_ns = self.begin_ns + time.monotonic_ns() - self._began_ns
        if error is not None and not isinstance(error, GeneratorExit | asyncio.CancelledError):
            self.error = error
            self.status = status_of(error) if isinstance(error, RayLoraError) else 500
        self._tell(self)
