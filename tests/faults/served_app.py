"""An application on a Ray of its own, whose processes are descendants of this one and can be found and harmed."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import psutil
import pytest
import ray
from ray import serve

from ray_lora.config import EngineConfig
from ray_lora.serve import app
from ray_lora.serve.replica import EngineStarter

NUM_CPUS = 4


@contextmanager
def served(config: EngineConfig, num_replicas: int = 1, start: EngineStarter | None = None) -> Iterator[str]:
    """Serve it on a free port of loopback; gives the URL once it is ready.

    Args:
        start: makes a replica's engine, in place of `start_engine`.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ray.shutdown()
    ray.init(num_cpus=NUM_CPUS, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(app, "REPLICA", app.REPLICA.options(num_replicas=num_replicas))
            serve.run(app.bind_app(config, start), name="faults", route_prefix="/")
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


def processes(title: str) -> list[psutil.Process]:
    """Descendants whose command line has this in it, such as `ray::Worker` for ranks, the oldest first."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if title in " ".join(each.cmdline()):
                found.append(each)
    return sorted(found, key=lambda each: each.create_time())


def ranks() -> list[psutil.Process]:
    return processes("ray::Worker")


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> float:
    """Wait until this is true; how many seconds that took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout_s, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.05)
    return time.monotonic() - begin


def status(url: str, path: str) -> int:
    return httpx.get(url + path, timeout=20).status_code


def load(url: str, name: str, source: str, **fields: Any) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/load_lora_adapter", json={"lora_name": name, "lora_path": source, **fields}, timeout=90
    )
