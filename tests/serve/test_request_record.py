"""What is told of a request once it has ended: a line in the log, and spans that an OTLP collector gets."""

import asyncio
import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from ray_lora.config import EngineConfig
from ray_lora.errors import CapacityError, ConfigError, EngineDeadError
from ray_lora.request import CompletionDelta, GenerateChunk, GenerateRequest, RequestMetrics, SamplingParams
from ray_lora.serve.request_log import log_request, logfmt
from ray_lora.serve.request_observer import RequestObserver
from ray_lora.serve.request_record import RequestRecord
from ray_lora.serve.request_spans import RequestTracer, check_tracing, trace_headers

TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
REQUEST = GenerateRequest(
    prompt=[5, 6, 7],
    sampling_params=SamplingParams(max_tokens=2),
    adapter="pirate",
    request_id="cmpl-1",
    key_name="team a",
    trace_headers=TRACE,
)
METRICS = RequestMetrics(0.5, 0.25, 0.125, 1.0, prompt_tokens=3, generation_tokens=2)
CHUNKS = (
    GenerateChunk("cmpl-1", (CompletionDelta(0, "a", (8,)),), (5, 6, 7), num_cached_tokens=1, adapter_version="f" * 64),
    GenerateChunk("cmpl-1", (CompletionDelta(0, "b", (9,), finish_reason="length"),), metrics=METRICS),
)


def config(**args: Any) -> EngineConfig:
    return EngineConfig.parse({"model": "/models/base", **args})


def record(*chunks: GenerateChunk, error: BaseException | None = None) -> RequestRecord:
    """A request that got these chunks, and 2 s after it came ended with the error, if there is one."""
    told: list[RequestRecord] = []
    try:
        with RequestRecord(REQUEST, told.append) as made:
            for chunk in chunks:
                made.add(chunk)
            if error is not None:
                raise error
    except BaseException as caught:
        assert caught is error  # noqa: PT017
    assert told == [made]
    made.begin_ns, made.end_ns = 10**18, 10**18 + 2 * 10**9
    return made


def line_of(made: RequestRecord, caplog: pytest.LogCaptureFixture, **args: Any) -> str:
    with caplog.at_level(logging.INFO, "ray.serve"):
        log_request(made, "base", **args)
    return caplog.messages[-1]


def test_a_finished_request_is_one_line_of_pairs_without_its_prompt(caplog: pytest.LogCaptureFixture) -> None:
    assert line_of(record(*CHUNKS), caplog) == (
        'request request_id=cmpl-1 status=200 model=base adapter=pirate adapter_version=ffffffffffff key_name="team a" '
        "finish_reason=length prompt_tokens=3 cached_tokens=1 completion_tokens=2 e2e_s=2.0000 load_wait_s=0.5000 "
        "queue_s=0.2500 ttft_s=0.8750"
    )


@pytest.mark.parametrize(
    ("error", "status", "named"),
    [
        (CapacityError("the queue is full"), 429, 'error="CapacityError: the queue is full"'),
        (ZeroDivisionError("x = 0"), 500, 'error="ZeroDivisionError: x = 0"'),
        (GeneratorExit(), 499, "e2e_s"),
        (asyncio.CancelledError(), 499, "e2e_s"),
    ],
)
def test_a_failed_request_tells_its_status_and_how_far_it_came(
    error: BaseException, status: int, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    line = line_of(record(CHUNKS[0], error=error), caplog)
    assert f"status={status} " in line
    assert "completion_tokens=1 " in line
    assert named in line
    assert "queue_s" not in line


def test_a_retried_request_is_told_of_as_it_ran_the_last_time_and_why_it_did_not_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with RequestRecord(REQUEST, lambda _: None) as made:
        made.add(CHUNKS[0])
        made.begin_again(EngineDeadError("rank 1 is gone"))
        for chunk in CHUNKS:
            made.add(chunk)
    line = line_of(made, caplog)
    assert "status=200 " in line
    assert " completion_tokens=2 " in line
    assert line.endswith(' retries=1 retry_cause="rank 1 is gone"')
    assert spans_of(made)["llm_request"].attributes["ray_lora.retry_cause"] == "rank 1 is gone"


def test_prompts_are_logged_on_demand_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    for args in ({}, {"enable_log_requests": True}):
        with RequestObserver(config(**args), lambda ids: f'he said\n"{ids}"').watch(REQUEST):
            pass
    silent, telling = caplog.messages
    assert "prompt=" not in silent
    assert r'prompt="he said\n\"[5, 6, 7]\""' in telling
    params = json.loads(re.search(r' sampling_params=(".*")$', telling)[1])  # type: ignore[index]
    assert json.loads(params)["max_tokens"] == 2


def test_logfmt_quotes_what_a_reader_would_split() -> None:
    assert logfmt({"a": 1, "b": None, "c": "", "d": 'x "y"', "e": "a=b"}) == r'a=1 d="x \"y\"" e="a=b"'


def spans_of(made: RequestRecord) -> dict[str, Any]:
    exporter = InMemorySpanExporter()
    RequestTracer("base", SimpleSpanProcessor(exporter)).trace(made)
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_trace_goes_on_from_the_callers_and_its_stages_fill_the_request() -> None:
    spans = spans_of(record(*CHUNKS))
    root = spans.pop("llm_request")
    assert f"{root.parent.trace_id:032x}-{root.parent.span_id:016x}" in TRACE["traceparent"]
    assert (root.end_time - root.start_time) / 1e9 == 2.0
    assert {name: (span.end_time - span.start_time) / 1e9 for name, span in spans.items()} == {
        "route": 0.125,
        "load_wait": 0.5,
        "queue": 0.25,
        "prefill": 0.125,
        "decode": 1.0,
    }
    ordered = list(spans.values())
    assert ordered[0].start_time == root.start_time
    assert ordered[-1].end_time == root.end_time
    for before, after in pairwise(ordered):
        assert before.end_time == after.start_time
    assert all(span.parent.span_id == root.context.span_id for span in ordered)
    assert root.attributes["gen_ai.latency.time_to_first_token"] == 0.875
    assert root.attributes["gen_ai.usage.completion_tokens"] == 2
    assert root.attributes["ray_lora.adapter"] == "pirate"


def test_the_trace_of_a_failed_request_is_one_span_that_says_why() -> None:
    spans = spans_of(record(error=CapacityError("full")))
    assert list(spans) == ["llm_request"]
    assert (spans["llm_request"].status.is_ok, spans["llm_request"].status.description) == (False, "full")


def test_a_caller_who_does_not_sample_is_not_traced() -> None:
    made = record(*CHUNKS)
    made.request = GenerateRequest(prompt=[1], trace_headers={"traceparent": TRACE["traceparent"][:-2] + "00"})
    assert spans_of(made) == {}


def test_headers_are_kept_only_if_traces_are_sent() -> None:
    headers = {**TRACE, "authorization": "Bearer secret"}
    assert trace_headers(config(), headers) is None
    assert trace_headers(config(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces"), headers) == TRACE


def test_traces_without_an_exporter_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    check_tracing(config())
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint: needs `pip install ray_lora\[tracing\]`"):
        check_tracing(config(otlp_traces_endpoint="http://127.0.0.1:1/v1/traces"))


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """The URL of an OTLP collector, and what it got."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", received
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_collector_gets_the_spans(collector: tuple[str, list[ExportTraceServiceRequest]]) -> None:
    url, received = collector
    observer = RequestObserver(config(otlp_traces_endpoint=url), str)
    with observer.watch(REQUEST) as made:
        for chunk in CHUNKS:
            made.add(chunk)
    assert observer._tracer is not None
    observer._tracer.shutdown()
    scopes = [scope for batch in received for part in batch.resource_spans for scope in part.scope_spans]
    spans = [span for scope in scopes for span in scope.spans]
    assert {span.name for span in spans} == {"llm_request", "route", "load_wait", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in spans} == {TRACE["traceparent"].split("-")[1]}
