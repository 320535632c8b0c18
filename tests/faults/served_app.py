"""An application on a Ray of its own, whose processes are descendants of this one and can be found and harmed."""

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
import yaml
from ray import serve

from ray_lora.config import EngineConfig
from ray_lora.serve import app
from ray_lora.serve.replica import EngineStarter
from tests.faults.traffic import Report

REBUILT_S = 30.0
"""Until the service answers again after a fault, besides what the application took to start."""
DEPLOYMENT = Path(__file__).parents[2] / "deployments" / "llama.yaml"


@dataclass(frozen=True)
class App:
    """A served application."""

    url: str
    config: EngineConfig
    num_replicas: int
    start_s: float
    """How long it took from a running Ray to being ready: the model's load time, and more."""

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20)

    def load(self, name: str, source: object, **fields: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(source), **fields}
        return httpx.post(f"{self.url}/v1/load_lora_adapter", json=body, timeout=120)

    def unload(self, name: str) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=120)

    @property
    def adapters(self) -> set[str]:
        return {card["id"] for card in self.get("/v1/models").json()["data"] if card["parent"] is not None}

    def check_healed(self, report: Report) -> None:
        assert report.num_wrong == 0
        assert report.num_lost == 0, "everybody gets an answer or an error of ours"
        assert report.first_good_s is not None
        assert report.first_good_s < REBUILT_S + self.start_s


@contextmanager
def served(
    config: EngineConfig, num_replicas: int = 1, start: EngineStarter | None = None, num_cpus: int = 4
) -> Iterator[App]:
    """Serve it on a free port of loopback.

    Args:
        start: makes a replica's engine, in place of `start_engine`.
        num_cpus: as many as Ray believes to have.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ray.shutdown()
    ray.init(num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        options = yaml.safe_load(DEPLOYMENT.read_text())["controller_options"]
        serve.start(http_options={"host": "127.0.0.1", "port": port}, controller_options=options)
        begin = time.monotonic()
        deploy(config, num_replicas, start)
        yield App(f"http://127.0.0.1:{port}", config, num_replicas, time.monotonic() - begin)
        serve.shutdown()
    finally:
        ray.shutdown()


def deploy(config: EngineConfig, num_replicas: int, start: EngineStarter | None = None) -> None:
    """Also in place of what is served, as a Serve config file with other `args` does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "REPLICA", app.REPLICA.options(num_replicas=num_replicas))
        serve.run(app.bind_app(config, start), name="faults", route_prefix="/")


def processes(title: str) -> list[psutil.Process]:
    """Descendants of this process with such a command line, the oldest first."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if re.search(title, " ".join(each.cmdline())):
                found.append(each)
    return sorted(found, key=lambda each: each.create_time())


def ranks() -> list[psutil.Process]:
    return processes(r"ray::\w*Worker")


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> float:
    """Wait until this is true; how many seconds that took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout_s, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.05)
    return time.monotonic() - begin
