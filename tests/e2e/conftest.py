"""The demo model and its adapters behind a real `serve run`, on a free port of loopback."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

MODEL = Path("~/.cache/ray_lora/SmolLM2-135M-Instruct").expanduser()
ADAPTERS = Path(__file__).parents[2] / "deployments" / "adapters"
NAMES = tuple(sorted(path.parent.name for path in ADAPTERS.glob("*/adapter_config.json")))
START_TIMEOUT_S = 180


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base URL of the running server."""
    directory = tmp_path_factory.mktemp("server")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    args = {
        "model": str(MODEL),
        "served_model_name": "smollm2",
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 1 << 28,
        "max_lora_pages": 6,
        "max_loras": 6,
        "lora_modules": {name: str(ADAPTERS / name) for name in NAMES},
        "adapter_store_dir": str(directory / "store"),
    }
    application = {"name": "llama", "route_prefix": "/", "import_path": "ray_lora.serve.app:build_app", "args": args}
    config = directory / "llama.yaml"
    config.write_text(
        yaml.safe_dump({"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]})
    )
    log = directory / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("ray-lora")), "serve", str(config)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")
