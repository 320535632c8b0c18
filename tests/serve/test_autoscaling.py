"""Replicas that come and go with the load, on a real Ray Serve over fake engines: no request is lost on the way."""

import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_engine
import httpx
import pytest
import ray
from ray import cloudpickle, serve
from ray.serve.handle import DeploymentHandle

from ray_lora.config import EngineConfig
from ray_lora.engine.adapter_resolver import AdapterResolver
from ray_lora.request import GenerateChunk, GenerateRequest, SamplingParams
from ray_lora.serve import app
from ray_lora.stats import EngineStats

PORT = 8399
APP = "scaled"
NUM_TOKENS = 50
BIG = 7
"""The first token of a prompt that fills three tenths of a KV cache."""
SMALL = 9

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]


class Engine(fake_engine.FakeEngine):
    num_big = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        is_big = request.prompt[0] == BIG
        self.num_big += is_big
        try:
            async for chunk in super().generate(request):
                yield chunk
        finally:
            self.num_big -= is_big

    def stats(self) -> EngineStats:
        return replace(super().stats(), kv_cache_usage=min(1.0, 0.3 * self.num_big))


async def start(config: EngineConfig, resolvers: Sequence[AdapterResolver] = ()) -> Engine:
    return Engine(config, 0.05)


class Callers:
    """Threads that ask again as soon as they have an answer, which must be whole."""

    def __init__(self, handle: DeploymentHandle[Any], count: int, first: int) -> None:
        self._handle, self._first = handle, first
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]
        self.num_answers = 0
        self.failures: list[object] = []
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Once all have their answers."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(60)
        assert self.failures == []
        assert self.num_answers >= len(self._threads)

    def _run(self) -> None:
        params = SamplingParams(max_tokens=NUM_TOKENS)
        while not self._is_over.is_set():
            request = GenerateRequest(prompt=[self._first], sampling_params=params)
            try:
                chunks = list(self._handle.options(stream=True).generate.remote(request))
            except Exception as error:
                self.failures.append(error)
                return
            tokens = [token for chunk in chunks for token in chunk.outputs[0].token_ids]
            if tokens != [self._first + 1 + step for step in range(NUM_TOKENS)]:
                self.failures.append(tokens)
            self.num_answers += 1


@contextmanager
def deployed(config: EngineConfig, **scaling: Any) -> Iterator[DeploymentHandle[Any]]:
    autoscaling = {
        "policy": {"policy_function": "ray_lora.serve.scaling_policy:scale_by_load"},
        "look_back_period_s": 10.1,
        "upscale_delay_s": 1.0,
        "downscale_delay_s": 2.0,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "REPLICA", app.REPLICA.options(autoscaling_config=autoscaling | scaling))
        serve.run(app.bind_app(config, start), name=APP, route_prefix="/")
    try:
        yield serve.get_app_handle(APP)
    finally:
        serve.delete(APP)


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    for who in ("REPLICA", "HANDLE"):
        os.environ[f"RAY_SERVE_{who}_AUTOSCALING_METRIC_PUSH_INTERVAL_S"] = "0.5"
    ray.shutdown()  # one that runs already would not pass them on
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    for module in (fake_engine, sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    yield
    for module in (fake_engine, sys.modules[__name__]):
        cloudpickle.unregister_pickle_by_value(module)
    serve.shutdown()
    ray.shutdown()
    for who in ("REPLICA", "HANDLE"):
        del os.environ[f"RAY_SERVE_{who}_AUTOSCALING_METRIC_PUSH_INTERVAL_S"]


def replica_states() -> dict[Any, int]:
    return dict(serve.status().applications[APP].deployments["LLMReplica"].replica_states)


def num_replicas(state: str = "RUNNING") -> int:
    return replica_states().get(state, 0)


def wait_for(condition: Callable[[], bool], timeout_s: float = 90) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def test_replicas_follow_the_load_and_no_request_is_lost(config: EngineConfig) -> None:
    config = config.model_copy(update={"max_num_seqs": 8})
    with deployed(config, min_replicas=1, max_replicas=2) as handle:
        few = Callers(handle, 2, SMALL)
        for first, count in ((BIG, 3), (SMALL, 12)):
            assert num_replicas() == 1
            many = Callers(handle, count, first)
            wait_for(lambda: num_replicas() == 2)
            many.stop()
            wait_for(lambda: num_replicas() == 1 and num_replicas("STOPPING") > 0)
            wait_for(lambda: num_replicas("STOPPING") == 0)
        few.stop()


def test_from_zero_and_back_to_it_with_what_was_loaded(config: EngineConfig, adapter_dir: Path) -> None:
    with (
        deployed(config, min_replicas=0, max_replicas=1, downscale_to_zero_delay_s=12.0) as handle,
        httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60) as http,
    ):
        load = {"lora_name": "a", "lora_path": str(adapter_dir)}
        for call in (lambda: http.post("/v1/load_lora_adapter", json=load), lambda: ask(http, "a")):
            assert num_replicas() == num_replicas("STARTING") == 0
            probes = [http.get(path) for path in ("/health", "/ready", "/metrics")]
            assert [probe.status_code for probe in probes] == [200] * 3
            assert probes[1].json() == {"ready": True, "missing": []}
            assert num_replicas("STARTING") == 0, "probes start nothing"
            assert call().status_code == 200
            assert num_replicas() == 1
            assert [http.get(path).status_code for path in ("/health", "/ready", "/metrics")] == [200] * 3
            wait_for(lambda: sum(replica_states().values()) == 0)
        callers = Callers(handle, 4, SMALL)
        callers.stop()


def ask(http: httpx.Client, model: str) -> httpx.Response:
    return http.post("/v1/completions", json={"model": model, "prompt": [SMALL], "max_tokens": 3})
