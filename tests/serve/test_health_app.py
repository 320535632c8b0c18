"""`/health` and `/ready` of an application whose one replica has two ranks, before and after one of them is killed."""

import os
import signal
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest
import ray
from ray import serve

from ray_lora.config import EngineConfig
from ray_lora.serve.app import bind_app
from tests.tiny import make_checkpoint

PORT = 8393
NOTICED_S = 5.0

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    directory = tmp_path_factory.mktemp("app")
    config = EngineConfig(
        model=str(make_checkpoint(directory / "model", "llama", num_attention_heads=4, num_key_value_heads=2)),
        served_model_name="tiny",
        tensor_parallel_size=2,
        kv_cache_memory_bytes=1 << 23,
        adapter_store_dir=str(directory / "store"),
    )
    starts_ray = not ray.is_initialized()
    if starts_ray:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(bind_app(config), name="tiny", route_prefix="/")
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=20) as client:
        yield client
    serve.shutdown()
    if starts_ray:
        ray.shutdown()


def ranks() -> list[psutil.Process]:
    """The processes of the ranks, all of them descendants of this one."""
    return [each for each in psutil.Process().children(recursive=True) if "ray::Worker" in " ".join(each.cmdline())]


def wait_for(http: httpx.Client, path: str, status: int, timeout_s: float) -> list[httpx.Response]:
    """All answers up to the first with this status."""
    deadline = time.monotonic() + timeout_s
    answers = [http.get(path)]
    while answers[-1].status_code != status:
        assert time.monotonic() < deadline, f"{path} is still {answers[-1].text}"
        time.sleep(0.1)
        answers.append(http.get(path))
    return answers


def test_a_killed_rank_of_an_idle_replica_turns_health_and_ready_and_the_replica_is_rebuilt(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/ready").json() == {"ready": True, "missing": []}
    processes = ranks()
    assert len(processes) == 2
    begin = time.monotonic()
    os.kill(processes[1].pid, signal.SIGKILL)
    error = wait_for(http, "/health", 503, NOTICED_S)[-1].json()["error"]
    assert error["type"] == "ServiceUnavailableError"
    answer = wait_for(http, "/ready", 503, NOTICED_S)[-1].json()
    assert time.monotonic() - begin < NOTICED_S
    assert answer["ready"] is False
    assert len(answer["missing"]) == 1
    reasons = {reason for answer in wait_for(http, "/ready", 200, 120) for reason in answer.json()["missing"]}
    assert "no replica is running: the engine is starting, or could not start" in reasons
    completion = http.post("/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True})
    assert completion.json()["usage"]["completion_tokens"] == 4
