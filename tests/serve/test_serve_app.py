"""The application on a real Ray Serve, over a fake engine: handles, HTTP, cancellation, errors between actors."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fake_engine
import httpx
import pytest
import ray
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from ray import cloudpickle, serve
from ray.serve.handle import DeploymentHandle
from test_http_api import events

from ray_lora.config import EngineConfig
from ray_lora.errors import InvalidRequestError, NotFoundError, NumericsError, RateLimitError
from ray_lora.request import CompletionOutput, GenerateChunk, GenerateRequest, RequestOutput, SamplingParams
from ray_lora.serve.app import bind_app, http_host
from ray_lora.serve.tokenizer import Tokenizer
from ray_lora.tenant import Limits

PORT = 8397
URL = f"http://127.0.0.1:{PORT}"

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def handle(config: EngineConfig) -> Iterator[DeploymentHandle]:
    starts_ray = not ray.is_initialized()
    if starts_ray:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    cloudpickle.register_pickle_by_value(fake_engine)
    serve.start(
        http_options={"host": "127.0.0.1", "port": PORT},
        controller_options={"runtime_env": {"env_vars": {"RAY_SERVE_PROXY_USE_GRPC": "1"}}},
    )
    limits = {"limited": Limits.model_validate({"max_concurrent_requests": 1})}
    limited = config.model_copy(update={"adapter_limits": limits})
    serve.run(bind_app(limited, fake_engine.start_fake), name="llama", route_prefix="/")
    yield serve.get_app_handle("llama")
    cloudpickle.unregister_pickle_by_value(fake_engine)
    serve.shutdown()
    if starts_ray:
        ray.shutdown()


@pytest.fixture
def http(handle: DeploymentHandle) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=URL, timeout=20) as client:
        yield client


def request(prompt: str | list[int] = "Hello", max_tokens: int = 4, **fields: Any) -> GenerateRequest:
    return GenerateRequest(prompt=prompt, sampling_params=SamplingParams(max_tokens=max_tokens, **fields))


def metric(http: httpx.Client, name: str) -> float:
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
    return float(lines[0].rsplit(" ", 1)[1])


def wait_for(condition: Callable[[], bool], timeout_s: float = 8) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def test_a_handle_call_gives_the_whole_output(handle: DeploymentHandle, tokenizer: Tokenizer) -> None:
    output = handle.generate.remote(request("Hello", n=2)).result(timeout_s=30)
    prompt = tokenizer.encode("Hello")
    assert isinstance(output, RequestOutput)
    assert (output.prompt, output.prompt_token_ids, output.finished) == ("Hello", prompt, True)
    assert output.outputs[0] == CompletionOutput(
        0, tokenizer.decode(output.outputs[0].token_ids), [prompt[-1] + i for i in (1, 2, 3, 4)], finish_reason="length"
    )
    assert output.outputs[1].index == 1
    assert output.request_id.startswith("gen-")


def test_the_same_method_streams_if_the_handle_says_so(handle: DeploymentHandle) -> None:
    whole = handle.generate.remote(request([2000], 20)).result(timeout_s=30)
    streamed = RequestOutput(whole.request_id, None)
    chunks = list(handle.options(stream=True).generate.remote(request([2000], 20)))
    assert all(isinstance(chunk, GenerateChunk) for chunk in chunks)
    assert len(chunks) > 3
    for chunk in chunks:
        streamed.append(chunk)
    assert streamed.outputs == whole.outputs


def test_many_streams_at_once_keep_apart(handle: DeploymentHandle) -> None:
    async def one(first: int) -> list[int]:
        tokens: list[int] = []
        async for chunk in handle.options(stream=True).generate.remote(request([first], 15)):
            tokens.extend(chunk.outputs[0].token_ids)
        return tokens

    async def main() -> list[list[int]]:
        return await asyncio.gather(*[one(1000 * i) for i in range(1, 13)])

    assert asyncio.run(main()) == [[1000 * i + 1 + step for step in range(15)] for i in range(1, 13)]


@pytest.mark.parametrize("stream", [False, True])
def test_errors_keep_their_class_and_param_between_actors(handle: DeploymentHandle, stream: bool) -> None:
    def call(asked: GenerateRequest) -> None:
        response: Any = handle.options(stream=stream).generate.remote(asked)
        list(response) if stream else response.result(timeout_s=30)

    with pytest.raises(InvalidRequestError) as bad:
        call(request([1] * 64))
    assert bad.value.param == "prompt"
    with pytest.raises(NotFoundError):
        call(GenerateRequest(prompt="a", adapter="nobody"))
    with pytest.raises(NumericsError, match="not finite"):
        call(request(seed=-1))


def test_adapters_by_handle(handle: DeploymentHandle, adapter_dir: Path) -> None:
    info = handle.load_adapter.remote("legal", str(adapter_dir)).result(timeout_s=30)
    assert (info.name, info.version) == ("legal", "v8")
    assert [a.name for a in handle.list_adapters.remote().result(timeout_s=30)] == ["legal"]
    output = handle.generate.remote(GenerateRequest(prompt=[5], adapter="legal")).result(timeout_s=30)
    assert (output.outputs[0].token_ids[0], output.adapter, output.adapter_version) == (1006, "legal", "v8")
    handle.unload_adapter.remote("legal").result(timeout_s=30)
    with pytest.raises(NotFoundError):
        handle.unload_adapter.remote("legal").result(timeout_s=30)


def test_an_adapters_limit_holds_for_handles_and_for_http_together(
    handle: DeploymentHandle, http: httpx.Client, adapter_dir: Path
) -> None:
    handle.load_adapter.remote("limited", str(adapter_dir)).result(timeout_s=30)
    asked = GenerateRequest(prompt=[5], adapter="limited", sampling_params=SamplingParams(max_tokens=50))
    running = handle.options(stream=True).generate.remote(asked)
    next(running)
    with pytest.raises(RateLimitError) as caught:
        handle.generate.remote(asked).result(timeout_s=30)
    assert caught.value.retry_after == 1
    answer = http.post("/v1/completions", json={"model": "limited", "prompt": [5], "max_tokens": 1})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert handle.generate.remote(request([5])).result(timeout_s=30).finished
    list(running)
    assert handle.generate.remote(asked).result(timeout_s=30).finished
    handle.unload_adapter.remote("limited").result(timeout_s=30)


def test_where_an_application_is_built_it_is_known_what_serve_listens_on(handle: DeploymentHandle) -> None:
    assert ray.get(ray.remote(http_host).remote()) == "127.0.0.1"


def test_the_openai_client_chats_streams_and_loads(http: httpx.Client, adapter_dir: Path) -> None:
    load = {"lora_name": "pirate", "lora_path": str(adapter_dir)}
    assert http.post("/v1/load_lora_adapter", json=load).status_code == 200
    client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=20)

    def chat(model: str) -> tuple[str, str]:
        fields: Any = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
        whole = client.chat.completions.create(**fields)
        stream = client.chat.completions.create(stream=True, **fields)
        return whole.choices[0].message.content or "", "".join(c.choices[0].delta.content or "" for c in stream)

    with client, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(chat, ["smollm2", "pirate", "smollm2:pirate"] * 2))
        assert [model.id for model in client.models.list()] == ["smollm2", "pirate"]
    assert all(whole == streamed for whole, streamed in answers)
    assert answers[0] == answers[3] != answers[1] == answers[2] == answers[4] == answers[5]
    http.post("/v1/unload_lora_adapter", json={"lora_name": "pirate"})


def test_statuses_and_headers_survive_the_proxy(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={"model": "x", "prompt": "a"}).status_code == 404
    assert http.post("/v1/completions", json={"prompt": "a", "seed": -3}).headers["retry-after"] == "3"
    assert http.post("/v1/completions", json={"prompt": "a", "n": 0}).json()["error"]["param"] == "n"
    assert http.get("/nothing").json()["error"]["code"] == 404
    assert http.get("/health").status_code == 200
    assert http.get("/ready").json() == {"ready": True, "missing": []}
    answer = http.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "r7"})
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("r7", "cmpl-r7")
    answer = http.post("/v1/completions", json={"prompt": "a", "seed": -1, "stream": True})
    assert events(answer.text)[-2]["error"]["code"] == 500


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_is_cancelled_in_the_engine(http: httpx.Client, stream: bool) -> None:
    before = metric(http, "vllm:prefix_cache_hits_total")
    body = {"prompt": [2000], "max_tokens": 60, "stream": stream}
    with httpx.Client(base_url=URL, timeout=httpx.Timeout(20, read=0.3)) as leaving:
        if stream:
            with leaving.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post("/v1/completions", json=body)
    wait_for(lambda: metric(http, "vllm:num_requests_running") == 0, 1)
    assert metric(http, "vllm:prefix_cache_hits_total") == before + 1


def test_every_prompt_of_one_request_finds_a_replica(http: httpx.Client) -> None:
    for _ in range(3):
        body = {"prompt": [[1000 * i] for i in range(1, 41)], "max_tokens": 2, "return_token_ids": True}
        choices = http.post("/v1/completions", json=body).json()["choices"]
        assert [choice["token_ids"] for choice in choices] == [[1000 * i + 1, 1000 * i + 2] for i in range(1, 41)]


def test_a_client_that_goes_away_takes_nobody_elses_stream_along(http: httpx.Client) -> None:
    """The first one after a pause opens the stream between ingress and replica, which is for all."""
    time.sleep(1.5)
    body = {"prompt": [2000], "max_tokens": 60, "stream": True, "return_token_ids": True}
    with ExitStack() as staying, httpx.Client(base_url=URL, timeout=20) as leaving:
        with leaving.stream("POST", "/v1/completions", json=body) as first:
            next(first.iter_lines())
            second = staying.enter_context(http.stream("POST", "/v1/completions", json=body))
        told = events(second.read().decode())
    assert [token for event in told[:-1] for token in event["choices"][0].get("token_ids", ())] == list(
        range(2001, 2061)
    )


def test_a_cancelled_handle_call_is_cancelled_in_the_engine(handle: DeploymentHandle, http: httpx.Client) -> None:
    before = metric(http, "vllm:prefix_cache_hits_total")
    stream = handle.options(stream=True).generate.remote(request([2000], 60))
    next(stream)
    stream.cancel()
    plain = handle.generate.remote(request([2000], 60))
    time.sleep(0.2)
    plain.cancel()
    wait_for(lambda: metric(http, "vllm:prefix_cache_hits_total") == before + 2, 1)


def test_streaming_goes_on_after_a_pause(handle: DeploymentHandle) -> None:
    """The stream between ingress and replica closes when idle, and opens again."""
    for _ in range(2):
        assert len(handle.generate.remote(request([2000], 5)).result(timeout_s=30).outputs[0].token_ids) == 5
        time.sleep(1.3)


def test_rays_exporter_has_the_metrics_too(handle: DeploymentHandle) -> None:
    handle.generate.remote(request([2000], 5)).result(timeout_s=30)
    exporter = f"http://127.0.0.1:{ray.nodes()[0]['MetricsExportPort']}/metrics"
    labels = {"model_name": "smollm2", "application": "llama", "deployment": "LLMReplica"}

    def value_of(name: str) -> float | None:
        for family in text_string_to_metric_families(httpx.get(exporter, timeout=20).text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        return None

    wait_for(lambda: (value_of("ray_vllm_e2e_request_latency_seconds_count") or 0) > 0, 40)
    assert value_of("ray_vllm_kv_cache_usage_perc") == 0.25
    assert value_of("ray_vllm_generation_tokens_total") == 50


def test_when_a_replica_dies_a_stream_that_has_begun_breaks_and_all_else_runs_again_on_the_next_replica(
    handle: DeploymentHandle, http: httpx.Client
) -> None:
    body = {"prompt": [2000], "max_tokens": 60, "return_token_ids": True}
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.Client(base_url=URL, timeout=60) as other,
        http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer,
    ):
        whole = pool.submit(other.post, "/v1/completions", json=body)
        by_handle = handle.generate.remote(request([2000], 60))
        lines = answer.iter_lines()
        next(lines)
        wait_for(lambda: metric(http, "vllm:num_requests_running") == 3)
        actor = next(a for a in ray.util.list_named_actors(all_namespaces=True) if "LLMReplica" in a["name"])
        ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
        rest = [line for line in lines if line]
        error = json.loads(rest[-2].removeprefix("data: "))["error"]
        tokens = list(range(2001, 2061))
        assert whole.result().json()["choices"][0]["token_ids"] == tokens
        assert by_handle.result(timeout_s=60).outputs[0].token_ids == tokens
    assert error["code"] == 503
    assert error["message"].startswith("The replica died in the middle of this stream")
    assert metric(http, "ray_lora:request_retries_total") == 2
