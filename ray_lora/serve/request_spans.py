"""A trace for every request that has ended, sent by OTLP; OpenTelemetry is imported only if that is configured.

The spans are made afterwards, from what the request's last chunk tells, so that nothing happens while it runs. Names
are vLLM's where it has them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray_lora.config import EngineConfig
from ray_lora.errors import ConfigError
from ray_lora.serve.request_record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

TRACE_HEADERS = ("traceparent", "tracestate")


def trace_headers(config: EngineConfig, headers: Mapping[str, str]) -> dict[str, str] | None:
    """What an HTTP request says of the trace that it belongs to; None if nobody wants to know."""
    if config.otlp_traces_endpoint is None:
        return None
    return {name: headers[name] for name in TRACE_HEADERS if name in headers}


class RequestTracer:
    """Makes `llm_request`, and in it `route`, `load_wait`, `queue`, `prefill` and `decode`.

    `route` is the rest: the way to the replica and back, laid before the others.
    """

    def __init__(self, base: str, processor: "SpanProcessor") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._base = base
        self._provider = TracerProvider(resource=Resource.create({"service.name": "ray_lora"}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("ray_lora")
        self._propagator = TraceContextTextMapPropagator()

    def trace(self, record: RequestRecord) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        context = self._propagator.extract(record.request.trace_headers or {})
        root = self._tracer.start_span(
            "llm_request", context, SpanKind.SERVER, self._attributes(record), start_time=record.begin_ns
        )
        if record.error is not None:
            root.set_status(Status(StatusCode.ERROR, str(record.error)))
        parent = set_span_in_context(root)
        begin = record.begin_ns
        for name, end in _stages(record):
            self._tracer.start_span(name, parent, start_time=begin).end(end)
            begin = end
        root.end(record.end_ns)

    def shutdown(self) -> None:
        """Send what has not been sent. Happens by itself when the process ends."""
        self._provider.shutdown()

    def _attributes(self, record: RequestRecord) -> dict[str, Any]:
        request, metrics = record.request, record.metrics
        attributes: dict[str, Any] = {
            "gen_ai.response.model": self._base,
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.n": request.sampling_params.n,
            "gen_ai.request.temperature": request.sampling_params.temperature,
            "gen_ai.request.top_p": request.sampling_params.top_p,
            "gen_ai.request.max_tokens": request.sampling_params.max_tokens,
            "gen_ai.usage.prompt_tokens": record.prompt_tokens,
            "gen_ai.usage.completion_tokens": record.completion_tokens,
            "http.response.status_code": record.status,
            "ray_lora.adapter": request.adapter,
            "ray_lora.adapter_version": record.adapter_version,
            "ray_lora.key_name": request.key_name,
            "ray_lora.retry_cause": record.retry_cause and str(record.retry_cause),
        }
        if metrics is not None:
            attributes |= {
                "gen_ai.latency.e2e": metrics.e2e_s,
                "gen_ai.latency.time_to_first_token": metrics.time_to_first_token_s,
                "gen_ai.latency.time_in_queue": metrics.queue_s,
                "gen_ai.latency.time_in_model_prefill": metrics.prefill_s,
                "gen_ai.latency.time_in_model_decode": metrics.decode_s,
                "gen_ai.latency.time_in_model_inference": metrics.prefill_s + metrics.decode_s,
            }
        return {name: value for name, value in attributes.items() if value is not None}


def _stages(record: RequestRecord) -> list[tuple[str, int]]:
    """When each stage ended, in nanoseconds since the epoch; nothing for a request that did not come to its end."""
    metrics = record.metrics
    if metrics is None:
        return []
    end = max(record.begin_ns, record.end_ns - int(metrics.e2e_s * 1e9))
    ends = [("route", end)]
    for name, seconds in (
        ("load_wait", metrics.load_wait_s),
        ("queue", metrics.queue_s),
        ("prefill", metrics.prefill_s),
        ("decode", metrics.decode_s),
    ):
        end += int(seconds * 1e9)
        ends.append((name, end))
    return ends


def check_tracing(config: EngineConfig) -> None:
    """
    Raises:
        ConfigError: traces are wanted, and the exporter is not installed.
    """
    if config.otlp_traces_endpoint is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ImportError:
        raise ConfigError("otlp_traces_endpoint: needs `pip install ray_lora[tracing]`") from None


def make_tracer(config: EngineConfig) -> RequestTracer | None:
    """None if no traces are wanted.

    Raises:
        ConfigError: the exporter is not installed.
    """
    if config.otlp_traces_endpoint is None:
        return None
    check_tracing(config)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(endpoint=config.otlp_traces_endpoint)
    return RequestTracer(config.base_model_name, BatchSpanProcessor(exporter))
