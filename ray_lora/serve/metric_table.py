"""Every metric: its name, its kind, its labels, what it means, and where in a replica's counters it is.

METRICS.md shows this table. What begins with `vllm:` has vLLM's names, labels, buckets and meaning, so that dashboards
and routers made for it work unchanged.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from ray_lora.request import RequestMetrics
from ray_lora.stats import EngineStats

Kind = Literal["gauge", "counter", "histogram", "summary"]
Samples = Iterator[tuple[tuple[str, ...], Any]]
"""Values of the labels; and a number, a `Histogram`, or for a summary `(count, total)`."""


@dataclass(frozen=True, slots=True)
class MetricEntry:
    """A metric; if it is of one replica, labels of the model and the replica come on top."""

    kind: Kind
    name: str
    """Without the `_total` that Prometheus adds to a counter."""
    labels: tuple[str, ...]
    path: str
    """From `EngineStats`, with `*` for each key of a mapping, which is the value of the next label. Empty for a metric
    of the whole application."""
    meaning: str
    of_request: Callable[[RequestMetrics], float] | None = None
    """A finished request's value, where Ray's exporter is told as well."""

    def samples(self, stats: EngineStats) -> Samples:
        return _walk(stats, self.path.split("."), ())


def _walk(value: Any, path: list[str], keys: tuple[str, ...]) -> Samples:
    if not path:
        yield keys, value
    elif path[0] == "*":
        for key, inner in value.items():
            yield from _walk(inner, path[1:], (*keys, *((key,) if isinstance(key, str) else key)))
    else:
        yield from _walk(getattr(value, path[0]), path[1:], keys)


def _gauge(name: str, path: str, meaning: str, *labels: str) -> MetricEntry:
    return MetricEntry("gauge", name, labels, path, meaning)


def _counter(name: str, path: str, meaning: str, *labels: str) -> MetricEntry:
    return MetricEntry("counter", name, labels, path, meaning)


def _histogram(name: str, path: str, meaning: str, *labels: str, of_request: str | None = None) -> MetricEntry:
    get = None if of_request is None else attrgetter(of_request)
    return MetricEntry("histogram", name, labels, path, meaning, get)


VLLM_METRICS = (
    _gauge("vllm:num_requests_running", "num_requests_running", "Requests in the running batch"),
    _gauge("vllm:num_requests_waiting", "num_requests_waiting", "Requests that wait for room"),
    _gauge("vllm:kv_cache_usage_perc", "kv_cache_usage", "Share of KV blocks in use; 1 is all"),
    _gauge("vllm:cache_config_info", "cache_config.*", "Always 1", "block_size", "num_gpu_blocks"),
    _counter("vllm:num_preemptions", "num_preemptions", "Requests set back because KV blocks ran out"),
    _counter("vllm:prompt_tokens", "all.prompt_tokens", "Prompt tokens of accepted requests"),
    _counter("vllm:generation_tokens", "all.generation_tokens", "Tokens generated"),
    _counter("vllm:prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked for in the prefix cache"),
    _counter("vllm:prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found there"),
    _counter("vllm:request_success", "all.finished.*", "Completions that ended", "finished_reason"),
    _histogram(
        "vllm:time_to_first_token_seconds",
        "all.time_to_first_token",
        "From arrival to the first token",
        of_request="time_to_first_token_s",
    ),
    _histogram("vllm:inter_token_latency_seconds", "all.inter_token_latency", "From one token to the next"),
    _histogram(
        "vllm:request_time_per_output_token_seconds",
        "requests.time_per_output_token",
        "Mean time of a completion's tokens after the first",
        of_request="time_per_output_token_s",
    ),
    _histogram(
        "vllm:e2e_request_latency_seconds",
        "requests.e2e_latency",
        "From arrival to the last token",
        of_request="e2e_s",
    ),
    _histogram(
        "vllm:request_queue_time_seconds",
        "all.queue_time",
        "From when the adapter is in host memory to the first step",
        of_request="queue_s",
    ),
    _histogram(
        "vllm:request_prefill_time_seconds",
        "requests.prefill_time",
        "From the first step to the first token",
        of_request="prefill_s",
    ),
    _histogram(
        "vllm:request_decode_time_seconds",
        "requests.decode_time",
        "From the first token to the last",
        of_request="decode_s",
    ),
    _histogram(
        "vllm:request_inference_time_seconds", "requests.inference_time", "From the first step to the last token"
    ),
    _histogram("vllm:request_prompt_tokens", "requests.prompt_tokens", "Prompt tokens of a completion"),
    _histogram("vllm:request_generation_tokens", "requests.generation_tokens", "Tokens of a completion"),
)

ADAPTER_METRICS = (
    _counter(
        "ray_lora:adapter_requests",
        "by_adapter.*.finished.*",
        "Completions that ended",
        "adapter",
        "finished_reason",
    ),
    _counter("ray_lora:adapter_prompt_tokens", "by_adapter.*.prompt_tokens", "Prompt tokens", "adapter"),
    _counter("ray_lora:adapter_generation_tokens", "by_adapter.*.generation_tokens", "Tokens generated", "adapter"),
    _histogram(
        "ray_lora:adapter_time_to_first_token_seconds",
        "by_adapter.*.time_to_first_token",
        "From arrival to the first token",
        "adapter",
    ),
    _histogram(
        "ray_lora:adapter_inter_token_latency_seconds",
        "by_adapter.*.inter_token_latency",
        "From one token to the next",
        "adapter",
    ),
    _histogram(
        "ray_lora:adapter_queue_time_seconds",
        "by_adapter.*.queue_time",
        "From when it is in host memory to a request's first step",
        "adapter",
    ),
    _counter(
        "ray_lora:adapter_refusals",
        "by_adapter.*.refused.*",
        "Requests that the engine did not accept, by the class of the error",
        "adapter",
        "reason",
    ),
    _gauge("ray_lora:adapter_tier", "adapter_tiers.*", "Where it is: 0 disk, 1 host memory, 2 device", "adapter"),
    _counter(
        "ray_lora:adapter_evictions",
        "by_adapter.*.evictions.*",
        "How often it left `host` or `device` to make room for another",
        "adapter",
        "tier",
    ),
    MetricEntry(
        "summary",
        "ray_lora:adapter_load_seconds",
        ("adapter", "stage"),
        "by_adapter.*.loads.*",
        "Loads to host memory: `fetch` from a URL, `parse`, `stage` on the ranks, their `barrier`, `commit`",
    ),
)

REPLICA_METRICS = (
    _counter(
        "ray_lora:adapter_load_failures", "load_failures.*", "Loads that failed, by the class of the error", "reason"
    ),
    _histogram(
        "ray_lora:request_load_wait_seconds",
        "requests.load_wait",
        "From arrival until the adapter is in host memory",
        of_request="load_wait_s",
    ),
    _gauge("ray_lora:adapters", "num_adapters.*", "Registered adapters", "tier"),
    _gauge("ray_lora:adapter_labels", "num_adapter_labels", "Adapters that have a label"),
    _gauge("ray_lora:adapter_labels_max", "max_adapter_labels", "How many may have one: `max_adapter_labels`"),
    _gauge("ray_lora:lora_pages", "num_lora_pages", "Adapter pages of 16 ranks on the device"),
    _gauge("ray_lora:lora_pages_free", "num_free_lora_pages", "Adapter pages that hold no adapter"),
    _gauge("ray_lora:last_step_age_seconds", "last_step_age_s", "Since a step last went through every rank"),
)

METRICS = (*VLLM_METRICS, *ADAPTER_METRICS, *REPLICA_METRICS)

LORA_INFO = MetricEntry(
    "gauge",
    "vllm:lora_requests_info",
    ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    "",
    "Adapters of running and of waiting requests; the value is the time",
)
LIMIT_REFUSALS = MetricEntry(
    "counter",
    "ray_lora:limit_refusals",
    ("model_name", "adapter", "reason"),
    "",
    "Requests over a limit of their key, of their adapter or of the server",
)
RETRIES = MetricEntry(
    "counter",
    "ray_lora:request_retries",
    ("model_name",),
    "",
    "Requests that ran again because their replica had died",
)
APPLICATION_METRICS = (LORA_INFO, LIMIT_REFUSALS, RETRIES)
"""Of all replicas together, with these labels alone."""
