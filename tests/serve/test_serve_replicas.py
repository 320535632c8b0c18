"""Two replicas on a real Ray Serve, over fake engines."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_engine
import httpx
import pytest
import ray
from ray import cloudpickle, serve
from ray.serve.handle import DeploymentHandle

from ray_lora.config import EngineConfig
from ray_lora.request import GenerateRequest, SamplingParams
from ray_lora.serve import app

PORT = 8398
NUM_STREAMS = 6

pytestmark = pytest.mark.ray


def deploy(config: EngineConfig, num_replicas: int) -> DeploymentHandle[Any]:
    """Again with another number changes the number alone, as with a Serve config file."""
    fixed: dict[str, Any] = {"version": "1", "_internal": True}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("INGRESS", "DIRECTORY"):
            patch.setattr(app, name, getattr(app, name).options(**fixed))
        patch.setattr(app, "REPLICA", app.REPLICA.options(num_replicas=num_replicas, **fixed))
        serve.run(app.bind_app(config, fake_engine.start_fake), name="several", route_prefix="/")
    return serve.get_app_handle("several")


@pytest.fixture(scope="module")
def handle(config: EngineConfig) -> Iterator[DeploymentHandle[Any]]:
    os.environ["FAKE_STEP_S"] = "0.05"
    ray.shutdown()  # one that runs already would not pass it on
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    cloudpickle.register_pickle_by_value(fake_engine)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    yield deploy(config, 2)
    cloudpickle.unregister_pickle_by_value(fake_engine)
    serve.shutdown()
    ray.shutdown()
    del os.environ["FAKE_STEP_S"]


def held() -> list[dict[str, str]]:
    """Versions by name, one dictionary a replica."""
    return [{info.name: info.version for info in infos} for infos in on_each_replica("list_adapters")]


def on_each_replica(method: str) -> list[Any]:
    replicas = serve.get_deployment_handle("LLMReplica", "several")
    return replicas.broadcast(method).results(timeout_s=30)


def wait_for(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def request(adapter: str | None, max_tokens: int) -> GenerateRequest:
    return GenerateRequest(prompt=[5], adapter=adapter, sampling_params=SamplingParams(max_tokens=max_tokens))


def load(http: httpx.Client, name: str, directory: Path, rank: int = 8, **fields: Any) -> httpx.Response:
    (directory / "adapter_config.json").write_text(json.dumps({"r": rank}))
    return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(directory), **fields})


def test_loads_by_http_reach_both_replicas_also_after_the_directory_has_died(
    handle: DeploymentHandle[Any], adapter_dir: Path
) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=60) as http:
        assert load(http, "a", adapter_dir).status_code == 200
        assert held() == [{"a": "v8"}] * 2
        actors = ray.util.list_named_actors(all_namespaces=True)
        (directory,) = [actor for actor in actors if "AdapterDirectory" in actor["name"]]
        ray.kill(ray.get_actor(**directory))
        assert handle.generate.remote(request("a", 2)).result(timeout_s=30).finished
        wait_for(lambda: load(http, "b", adapter_dir, 9).status_code == 200)
        assert load(http, "a", adapter_dir, 10, expected_version="v7", load_inplace=True).status_code == 409
        assert load(http, "a", adapter_dir, 10, expected_version="v8", load_inplace=True).status_code == 200
        assert held() == [{"a": "v10", "b": "v9"}] * 2
        listed = [[model["id"] for model in http.get("/v1/models").json()["data"]] for _ in range(4)]
        assert listed == [["smollm2", "a", "b"]] * 4


def test_a_burst_for_one_adapter_goes_to_one_replica(handle: DeploymentHandle[Any], adapter_dir: Path) -> None:
    (adapter_dir / "adapter_config.json").write_text(json.dumps({"r": 20}))
    handle.load_adapter.remote("burst", str(adapter_dir)).result(timeout_s=30)
    answers = [handle.generate.remote(request("burst", 4)) for _ in range(NUM_STREAMS)]
    assert all(answer.result(timeout_s=30).adapter_version == "v20" for answer in answers)
    counts = [
        next(info.num_page_ins for info in infos if info.name == "burst") for infos in on_each_replica("list_adapters")
    ]
    assert sorted(counts) == [1, 1 + NUM_STREAMS]


def test_a_replica_that_stops_finishes_its_streams(handle: DeploymentHandle[Any], config: EngineConfig) -> None:
    streams = [handle.options(stream=True).generate.remote(request(None, 60)) for _ in range(NUM_STREAMS)]
    first = [next(stream) for stream in streams]
    assert all(stats.num_requests_running > 0 for _, stats in on_each_replica("stats")), "some are on each"
    deploy(config, 1)
    tokens = [list(chunk.outputs[0].token_ids) for chunk in first]
    for got, stream in zip(tokens, streams, strict=True):
        for chunk in stream:
            got.extend(chunk.outputs[0].token_ids)
    assert tokens == [[6 + step for step in range(60)]] * NUM_STREAMS
    wait_for(lambda: len(held()) == 1)
    assert handle.generate.remote(request("a", 2)).result(timeout_s=30).finished
