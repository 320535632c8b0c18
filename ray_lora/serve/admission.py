"""Who may start now: what is under way, counted for everybody together, by API key and by adapter.

Nothing waits here. A request that would exceed a limit is refused at once, before work is spent on it, and the engine
decides in which order the others run. The counts are those of one ingress: exact as long as there is one, however many
replicas are behind it. Each of several ingresses has its own, and lets in as much as one alone.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ray_lora.config import EngineConfig
from ray_lora.engine.engine_metrics import OTHER
from ray_lora.errors import CapacityError, OverloadedError, RateLimitError, RequestTimeoutError
from ray_lora.request import GenerateChunk, GenerateRequest
from ray_lora.serve.deadline_limit import DeadlineLimit
from ray_lora.serve.token_bucket import TokenBucket
from ray_lora.tenant import Limits, Tenant

RETRY_AFTER_S = 1.0
"""When to try again where nobody knows how long the others will take."""

NO_LIMITS = Limits()

EACH_ADAPTER = "*"
"""In `adapter_limits`, every adapter that is not named there."""


class Usage:
    """What one subject of limits has under way; the limits are the same as long as it has anything.

    Args:
        subject: what errors call it.
        clock: as for `TokenBucket`.
        error: what exceeding a number of requests is.
    """

    def __init__(
        self,
        subject: str,
        limits: Limits,
        clock: Callable[[], float],
        error: Callable[[str, float], CapacityError] = RateLimitError,
    ) -> None:
        self.num_open = 0
        self.num_waiting = 0
        self.bucket = None if limits.tokens_per_minute is None else TokenBucket(limits.tokens_per_minute, clock)
        self._subject = subject
        self._limits = limits
        self._error = error

    @property
    def is_idle(self) -> bool:
        """Whether a new one would be the same."""
        return self.num_open == 0 and (self.bucket is None or self.bucket.is_full)

    def check(self, count: int) -> None:
        """Raise CapacityError if `count` more completions are too many now."""
        limits = self._limits
        for limit, num_now, what in (
            (limits.max_concurrent_requests, self.num_open, "requests at once"),
            (limits.max_queued_requests, self.num_waiting, "waiting requests"),
        ):
            if limit is not None and num_now + count > limit:
                asked = f"; this asks for {count}" if count > 1 else ""
                raise self._error(f"{self._subject} is limited to {limit} {what}{asked}.", RETRY_AFTER_S)
        if self.bucket is not None and (wait_s := self.bucket.wait_s) > 0:
            limit = limits.tokens_per_minute
            message = f"{self._subject} is limited to {limit} tokens per minute; try again in {wait_s:.1f} s."
            raise RateLimitError(message, wait_s, "tokens")


class Ticket:
    """A request that was let in. Told every chunk and the end, it keeps the counts."""

    def __init__(self, usages: list[Usage], line: DeadlineLimit, request: GenerateRequest) -> None:
        self._usages = usages
        self._line = line
        self._adapter = request.adapter
        self._buckets = [usage.bucket for usage in usages if usage.bucket is not None]
        self._num_open = request.sampling_params.n
        self._num_prompt_tokens = len(request.prompt)
        self._num_output_tokens = 0
        self._is_waiting = True
        self._place = line.enter(self._adapter, self._num_open)
        self._draw(self._num_prompt_tokens)
        for usage in usages:
            usage.num_open += self._num_open
            usage.num_waiting += self._num_open

    def count(self, chunk: GenerateChunk) -> None:
        if self._is_waiting:
            self._stop_waiting()
        if self._buckets:
            num_tokens = sum(len(delta.token_ids) for delta in chunk.outputs)
            self._num_output_tokens += num_tokens
            self._draw(num_tokens)
        if chunk.metrics is not None:
            self._line.learn(self._place, chunk.metrics)

    def begin_again(self) -> None:
        """The request has no token yet: those that were counted are lost, and nobody's."""
        self._draw(-self._num_output_tokens)
        self._num_output_tokens = 0
        if not self._is_waiting:
            self._is_waiting = True
            for usage in self._usages:
                usage.num_waiting += self._num_open

    def cut_off(self) -> None:
        """It took longer than it may. One that never began may have waited for its adapter alone."""
        if not self._is_waiting:
            self._line.learn(self._place, None)

    def close(self) -> None:
        """The request has ended; if nothing came of it, it has used no tokens."""
        if self._is_waiting:
            self._stop_waiting()
            self._draw(-self._num_prompt_tokens)
        for usage in self._usages:
            usage.num_open -= self._num_open
        self._line.leave(self._adapter, self._num_open)

    def _draw(self, num_tokens: int) -> None:
        for bucket in self._buckets:
            bucket.draw(num_tokens)

    def _stop_waiting(self) -> None:
        self._is_waiting = False
        for usage in self._usages:
            usage.num_waiting -= self._num_open


class Admission:
    """Lets requests in, or refuses them.

    Args:
        clock: as for `TokenBucket`.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._base = config.base_model_name
        self._adapter_limits = config.adapter_limits
        self._clock = clock
        whole = Limits(max_queued_requests=config.max_queued_requests)
        self._server = Usage("The server", whole, clock, OverloadedError)
        self._line = DeadlineLimit(config)
        self._usages: dict[tuple[str, Limits], Usage] = {}
        """Of keys and adapters that have limits, unless they are idle."""
        self.refusals: dict[tuple[str, str], int] = {}
        """By adapter and by the class of the error; the first `max_adapter_labels` adapters apart, others together."""
        self._max_labels = config.max_adapter_labels

    def check(self, tenant: Tenant, adapter: str | None, count: int) -> None:
        """Refuse what could not start now or not end in time, before work is spent on it.

        Raises:
            RateLimitError: `count` more completions are too many for the tenant or the adapter.
            OverloadedError: they are too many for the server, or the first would not be answered in time.
        """
        with self._counting_refusals(adapter):
            self._check_limits(tenant, adapter, count)
            self._line.check(adapter)

    @contextmanager
    def enter(self, tenant: Tenant, request: GenerateRequest) -> Iterator[Ticket]:
        """Count a request, which was checked, as long as it is under way.

        Of the prompts of one body, the first do not keep out the last: only numbers are checked again, as others may
        have come meanwhile.

        Raises:
            RateLimitError, OverloadedError: they have.
        """
        with self._counting_refusals(request.adapter):
            self._check_limits(tenant, request.adapter, request.sampling_params.n)
        subjects = self._subjects(tenant, request.adapter)
        usages = [self._usages.setdefault(subject, self._usage(*subject)) for subject in subjects]
        ticket = Ticket([self._server, *usages], self._line, request)
        try:
            yield ticket
        except RequestTimeoutError:
            ticket.cut_off()
            raise
        finally:
            ticket.close()
            for subject, usage in zip(subjects, usages, strict=True):
                if usage.is_idle:
                    self._usages.pop(subject, None)

    def _subjects(self, tenant: Tenant, adapter: str | None) -> list[tuple[str, Limits]]:
        """Whose limits count, and what they are."""
        named = self._adapter_limits.get(self._base if adapter is None else adapter)
        each = None if adapter is None else self._adapter_limits.get(EACH_ADAPTER)
        return [
            (subject, limits)
            for subject, limits in (
                (f"The API key '{tenant.name}'", tenant.limits),
                (f"The model '{adapter or self._base}'", named or each or NO_LIMITS),
            )
            if limits != NO_LIMITS
        ]

    def _check_limits(self, tenant: Tenant, adapter: str | None, count: int) -> None:
        for subject in self._subjects(tenant, adapter):
            self._usage(*subject).check(count)
        self._server.check(count)

    @contextmanager
    def _counting_refusals(self, adapter: str | None) -> Iterator[None]:
        try:
            yield
        except CapacityError as error:
            self._count_refusal(adapter, error)
            raise

    def _count_refusal(self, adapter: str | None, error: CapacityError) -> None:
        label = self._base if adapter is None else adapter
        labels = {label for label, _ in self.refusals} - {self._base, OTHER}
        if label not in labels and label != self._base and len(labels) >= self._max_labels:
            label = OTHER
        key = (label, type(error).__name__)
        self.refusals[key] = self.refusals.get(key, 0) + 1

    def _usage(self, subject: str, limits: Limits) -> Usage:
        return self._usages.get((subject, limits)) or Usage(subject, limits, self._clock)
