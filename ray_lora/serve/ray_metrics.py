"""The same metrics through Ray's own exporter, so that a cluster which scrapes Ray's nodes has them too.

Ray takes single values, not counts, and each costs microseconds. So gauges and counters are handed on every few
seconds, histograms once for every finished request, and those of single tokens not at all. A colon is not allowed in a
name there: `vllm:num_requests_running` is `ray_vllm_num_requests_running`.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from ray.serve.metrics import Counter, Gauge, Histogram

from ray_lora.request import RequestMetrics
from ray_lora.serve.metric_table import METRICS, MetricEntry
from ray_lora.stats import EngineStats

PERIOD_S = 5.0


class RayMetrics:
    """One replica's. Ray adds the labels `application`, `deployment` and `replica`."""

    def __init__(self, model_name: str, stats: EngineStats) -> None:
        """
        Args:
            stats: of the replica, for the buckets of its histograms.
        """
        self._tags = {"model_name": model_name}
        self._gauges = [(entry, _make(Gauge, entry)) for entry in METRICS if entry.kind == "gauge"]
        self._counters = [(entry, _make(Counter, entry)) for entry in METRICS if entry.kind == "counter"]
        self._histograms = [
            (entry.of_request, _make(Histogram, entry, boundaries=list(histogram.bounds)))
            for entry in METRICS
            if entry.of_request is not None
            for _, histogram in entry.samples(stats)
        ]
        self._told: dict[tuple[str, ...], float] = {}

    def observe(self, request: RequestMetrics) -> None:
        """A request has come to its end."""
        for of_request, histogram in self._histograms:
            histogram.observe(of_request(request), self._tags)

    def publish(self, stats: EngineStats) -> None:
        for entry, gauge in self._gauges:
            for keys, value in entry.samples(stats):
                gauge.set(value, self._labels(entry, keys))
        for entry, counter in self._counters:
            for keys, value in entry.samples(stats):
                told = self._told.get((entry.name, *keys), 0)
                if value > told:
                    counter.inc(value - told, self._labels(entry, keys))
                self._told[(entry.name, *keys)] = value

    async def publish_for_ever(self, read: Callable[[], EngineStats]) -> None:
        while True:
            self.publish(read())
            await asyncio.sleep(PERIOD_S)

    def _labels(self, entry: MetricEntry, keys: tuple[str, ...]) -> dict[str, str]:
        return self._tags | dict(zip(entry.labels, keys, strict=True))


def _make(kind: Any, entry: MetricEntry, **args: Any) -> Any:
    name = entry.name.replace(":", "_")
    return kind(name, description=entry.meaning, tag_keys=("model_name", *entry.labels), **args)
