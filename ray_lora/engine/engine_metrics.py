"""What is counted while requests run: plain numbers, changed by the engine's thread alone, without a lock.

A token costs two additions to histograms; whoever wants the numbers takes them when it wants, and pays for that itself.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ray_lora.engine.timeline import Timeline
from ray_lora.errors import RayLoraError
from ray_lora.request import RequestMetrics
from ray_lora.stats import LOAD_FAILURES, REFUSALS, AdapterStats, RequestStats

OTHER = "(other)"
"""The label of all adapters that have none of their own; no adapter can have this name."""


class EngineMetrics:
    """Counts for all, and for each adapter apart as far as there are labels.

    An adapter gets a label with its first load or request, while there are fewer than `max_labels`; when there is none
    left, one that is no longer registered gives up its own, and its numbers are then only in those of all.
    """

    def __init__(self, base_name: str, max_labels: int, is_registered: Callable[[str], bool]) -> None:
        self.all = AdapterStats()
        self.requests = RequestStats()
        self.by_adapter = {base_name: AdapterStats()}
        self.load_failures = dict.fromkeys(LOAD_FAILURES, 0)
        self._base_name = base_name
        self.max_labels = max_labels
        self._is_registered = is_registered

    def of(self, adapter: str | None) -> AdapterStats:
        """Where an adapter's numbers go; None is the base model."""
        name = self._base_name if adapter is None else adapter
        stats = self.by_adapter.get(name)
        if stats is None:
            if not (self._is_registered(name) and self._has_room()):
                name = OTHER
            stats = self.by_adapter.setdefault(name, AdapterStats())
        return stats

    def added(self, stats: AdapterStats, prompt_tokens: int) -> None:
        """A request was accepted."""
        for each in (self.all, stats):
            each.prompt_tokens += prompt_tokens

    def refused(self, adapter: str | None, error: RayLoraError) -> None:
        for stats in (self.all, self.of(adapter)):
            stats.refused[_nearest(error, REFUSALS)] += 1

    def sampled(self, stats: AdapterStats, timeline: Timeline, now: float) -> None:
        """A completion has one more token; `now` is the same for all tokens of a step."""
        everyone = self.all
        stats.generation_tokens += 1
        everyone.generation_tokens += 1
        if timeline.first_token_at:
            interval = now - timeline.last_token_at
            stats.inter_token_latency.observe(interval)
            everyone.inter_token_latency.observe(interval)
        else:
            timeline.first_token_at = now
            for each in (everyone, stats):
                each.queue_time.observe(timeline.scheduled_at - timeline.queued_at)
                each.time_to_first_token.observe(now - timeline.arrived_at)
        timeline.last_token_at = now

    def ended(self, stats: AdapterStats, reason: str) -> None:
        """A completion has ended, for one of `FINISH_REASONS`."""
        for each in (self.all, stats):
            each.finished[reason] += 1

    def finished(self, metrics: RequestMetrics) -> None:
        """A completion has come to its end."""
        requests = self.requests
        requests.e2e_latency.observe(metrics.e2e_s)
        requests.load_wait.observe(metrics.load_wait_s)
        requests.prefill_time.observe(metrics.prefill_s)
        requests.decode_time.observe(metrics.decode_s)
        requests.inference_time.observe(metrics.prefill_s + metrics.decode_s)
        requests.time_per_output_token.observe(metrics.time_per_output_token_s)
        requests.prompt_tokens.observe(metrics.prompt_tokens)
        requests.generation_tokens.observe(metrics.generation_tokens)

    def loaded(self, name: str, stages: Mapping[str, float]) -> None:
        """An adapter has come to host memory, after so many seconds in each stage."""
        for stats in (self.all, self.of(name)):
            stats.num_loads += 1
            for stage, seconds in stages.items():
                stats.load_seconds[stage] += seconds

    def evicted(self, name: str | None, tier: str) -> None:
        """An adapter has left a tier to make room; None if it has no name any more."""
        for stats in (self.all, self.of(name or OTHER)):
            stats.evictions[tier] += 1

    @contextmanager
    def counting_failed_loads(self) -> Iterator[None]:
        """Counts the error of a load. Used in the loader's thread alone."""
        try:
            yield
        except RayLoraError as error:
            self.load_failures[_nearest(error, LOAD_FAILURES)] += 1
            raise

    def _has_room(self) -> bool:
        """Whether one more adapter may have a label, after others have given up theirs if need be."""
        named = [name for name in self.by_adapter if name not in (self._base_name, OTHER)]
        if len(named) < self.max_labels:
            return True
        for name in named:
            if not self._is_registered(name):
                del self.by_adapter[name]
                return True
        return False


def _nearest(error: RayLoraError, names: tuple[str, ...]) -> str:
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in names)
