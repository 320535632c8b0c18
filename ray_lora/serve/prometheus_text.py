"""`/metrics`: the engines' counters under vLLM's names, so that its dashboards and routers work unchanged."""

import time
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ray_lora.stats import EngineStats

GAUGES = {
    "vllm:num_requests_running": ("num_requests_running", "Requests in the running batch."),
    "vllm:num_requests_waiting": ("num_requests_waiting", "Requests that wait for room."),
    "vllm:kv_cache_usage_perc": ("kv_cache_usage", "Share of KV blocks in use; 1 is all."),
    "ray_lora:lora_pages": ("num_lora_pages", "Adapter pages of 16 ranks on the device."),
    "ray_lora:lora_pages_free": ("num_free_lora_pages", "Adapter pages that hold no adapter."),
}
COUNTERS = {
    "vllm:num_preemptions": ("num_preemptions", "Requests set back because KV blocks ran out."),
    "vllm:prompt_tokens": ("prompt_tokens", "Prompt tokens computed or found in the prefix cache."),
    "vllm:generation_tokens": ("generation_tokens", "Tokens generated."),
    "vllm:prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "vllm:prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
}
"""Metric name -> field of `EngineStats`; Prometheus adds `_total` to counters."""

LABELS = ("model_name", "engine")


def metrics_text(model_name: str, max_loras: int, stats: Sequence[EngineStats]) -> bytes:
    """The whole answer.

    Args:
        stats: one entry per replica, told apart by the label `engine`.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatsCollector(model_name, max_loras, stats))
    return generate_latest(registry)


class _StatsCollector(Collector):
    def __init__(self, model_name: str, max_loras: int, stats: Sequence[EngineStats]) -> None:
        self._model_name = model_name
        self._max_loras = max_loras
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        for name, (attribute, help_text) in GAUGES.items():
            yield self._family(GaugeMetricFamily(name, help_text, labels=LABELS), attribute)
        for name, (attribute, help_text) in COUNTERS.items():
            yield self._family(CounterMetricFamily(name, help_text, labels=LABELS), attribute)
        yield self._successes()
        yield self._adapters()

    def _family(self, family: Metric, attribute: str) -> Metric:
        assert isinstance(family, GaugeMetricFamily | CounterMetricFamily)
        for labels, stats in self._labelled():
            family.add_metric(labels, getattr(stats, attribute))
        return family

    def _successes(self) -> Metric:
        help_text = "Requests that ended, by reason."
        family = CounterMetricFamily("vllm:request_success", help_text, labels=(*LABELS, "finished_reason"))
        for labels, stats in self._labelled():
            for reason in ("stop", "length"):
                family.add_metric([*labels, reason], stats.requests_succeeded.get(reason, 0))
        return family

    def _adapters(self) -> Metric:
        """Exactly the labels that routers parse, over all replicas."""
        names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters at work; the value is the time.", labels=names)
        running = sorted({name for stats in self._stats for name in stats.running_adapters})
        waiting = sorted({name for stats in self._stats for name in stats.waiting_adapters})
        family.add_metric([str(self._max_loras), ",".join(running), ",".join(waiting)], time.time())
        return family

    def _labelled(self) -> Iterable[tuple[list[str], EngineStats]]:
        return (([self._model_name, str(index)], stats) for index, stats in enumerate(self._stats))
