"""A real `serve run` on a free port of loopback, for benchmarks and end-to-end tests."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

START_TIMEOUT_S = 180


@contextmanager
def serving(directory: Path, num_replicas: int = 1, **args: Any) -> Iterator[str]:
    """Serve with these `args`, writing the config and the log to `directory`; gives the URL once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    args = {"allow_runtime_lora_updating": True} | args
    application = {
        "name": "llama",
        "route_prefix": "/",
        "import_path": "ray_lora.serve.app:build_app",
        "args": args,
        "deployments": [{"name": "LLMReplica", "num_replicas": num_replicas}],
    }
    config: dict[str, Any] = yaml.safe_load(Path(__file__).parents[1].joinpath("deployments/llama.yaml").read_text())
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    config["applications"] = [application]
    (directory / "llama.yaml").write_text(yaml.safe_dump(config))
    log = directory / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("ray-lora")), "serve", str(directory / "llama.yaml")],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(url, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-4000:]}")
