"""`/metrics`: the counters of every replica as Prometheus reads them."""

import time
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from ray_lora.serve.metric_table import LIMIT_REFUSALS, LORA_INFO, METRICS, RETRIES, MetricEntry
from ray_lora.stats import EngineStats, Histogram

LABELS = ("model_name", "engine")
"""vLLM's. The second is the replica's id."""


Refusals = Mapping[tuple[str, str], int]
"""How many, by adapter and reason."""


def metrics_text(
    model_name: str, max_loras: int, stats: Mapping[str, EngineStats], refusals: Refusals, num_retries: int
) -> bytes:
    """The whole answer.

    Args:
        stats: by the id of the replica, which the label `engine` tells.
        refusals: for limits that the application keeps.
        num_retries: requests that ran again.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatsCollector(model_name, max_loras, stats, refusals, num_retries))
    return generate_latest(registry)


class _StatsCollector(Collector):
    def __init__(
        self, model_name: str, max_loras: int, stats: Mapping[str, EngineStats], refusals: Refusals, num_retries: int
    ) -> None:
        self._model_name = model_name
        self._max_loras = max_loras
        self._stats = stats
        self._refusals = refusals
        self._num_retries = num_retries

    def collect(self) -> Iterator[Metric]:
        for entry in METRICS:
            yield self._family(entry)
        yield self._adapters()
        yield self._limit_refusals()
        yield self._retries()

    def _family(self, entry: MetricEntry) -> Metric:
        family: Metric = _FAMILIES[entry.kind](entry.name, entry.meaning, labels=(*LABELS, *entry.labels))
        for engine, stats in self._stats.items():
            for keys, value in entry.samples(stats):
                labels = (self._model_name, engine, *keys)
                match family:
                    case HistogramMetricFamily():
                        family.add_metric(labels, _buckets(value), value.total)
                    case SummaryMetricFamily():
                        family.add_metric(labels, *value)
                    case GaugeMetricFamily() | CounterMetricFamily():
                        family.add_metric(labels, value)
        return family

    def _adapters(self) -> Metric:
        family = GaugeMetricFamily(LORA_INFO.name, LORA_INFO.meaning, labels=LORA_INFO.labels)
        running = sorted({name for stats in self._stats.values() for name in stats.running_adapters})
        waiting = sorted({name for stats in self._stats.values() for name in stats.waiting_adapters})
        family.add_metric([str(self._max_loras), ",".join(running), ",".join(waiting)], time.time())
        return family

    def _limit_refusals(self) -> Metric:
        family = CounterMetricFamily(LIMIT_REFUSALS.name, LIMIT_REFUSALS.meaning, labels=LIMIT_REFUSALS.labels)
        for keys, count in self._refusals.items():
            family.add_metric((self._model_name, *keys), count)
        return family

    def _retries(self) -> Metric:
        family = CounterMetricFamily(RETRIES.name, RETRIES.meaning, labels=RETRIES.labels)
        family.add_metric((self._model_name,), self._num_retries)
        return family


_FAMILIES: dict[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
    "summary": SummaryMetricFamily,
}


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Upper bounds and how many values are not above them."""
    return list(zip([*map(str, histogram.bounds), "+Inf"], accumulate(histogram.counts), strict=True))
