"""The API over a fake engine, on a real socket of this process; see `fake_engine.py` for what it answers."""

import json
import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from fake_engine import FakeClient, FakeEngine
from openai import OpenAI

from ray_lora.config import EngineConfig
from ray_lora.serve.http_api import build_api
from ray_lora.serve.served_model import ServedModel
from ray_lora.serve.tokenizer import Tokenizer

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401  its own models use a deprecated spelling of pydantic's Field

DEMO = Path("~/.cache/ray_lora/SmolLM2-135M-Instruct").expanduser()


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    if not (DEMO / "tokenizer.json").is_file():
        pytest.skip("the demo model is not prepared: make install")
    return DEMO


@pytest.fixture(scope="session")
def tokenizer(demo_dir: Path) -> Tokenizer:
    return Tokenizer(demo_dir)


@pytest.fixture(scope="session")
def config(demo_dir: Path) -> EngineConfig:
    return EngineConfig(model=str(demo_dir), served_model_name="smollm2", max_loras=4, allow_runtime_lora_updating=True)


class Server:
    """An ASGI application on a port of this machine, in a thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = FakeEngine(config)
        self.app = build_api(ServedModel(config, self.engine.tokenizer, FakeClient(self.engine)))
        settings = uvicorn.Config(self.app, host="127.0.0.1", port=0, log_level="critical", lifespan="off", ws="none")
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture(scope="session")
def running_server(config: EngineConfig) -> Iterator[Server]:
    server = Server(config)
    yield server
    server.stop()


@pytest.fixture
def server(running_server: Server) -> Server:
    """The running server with nothing loaded and nothing asked yet."""
    engine = running_server.engine
    engine.adapters.clear()
    engine.requests.clear()
    engine.cancelled.clear()
    engine.deaths.clear()
    engine.is_dead = False
    engine.step_s = 0.0
    return running_server


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield client


@pytest.fixture
def openai_client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def adapter_dir(tmp_path: Path) -> Path:
    """A directory that the fake engine takes for an adapter of rank 8."""
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 8}))
    return tmp_path
