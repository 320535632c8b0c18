"""`python -m ray_lora.serve deployments/llama.yaml`: `serve run`, checked first, with a line to paste when it is ready.

`serve run` alone does the same. But a port that is taken it reports in several traces, before any of our code runs.
"""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from ray_lora.config import EngineConfig
from ray_lora.errors import ConfigError
from ray_lora.serve.startup_checks import check_files, resolve_paths

IMPORT_PATH = "ray_lora.serve.app:build_app"
POLL_S = 1.0


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m ray_lora.serve CONFIG.yaml", file=sys.stderr)
        return 2
    try:
        url, model = check(Path(argv[0]))
    except ConfigError as error:
        print(f"ray_lora cannot start: {error}", file=sys.stderr)
        return 1
    serve_command = str(Path(sys.executable).parent / "serve")
    process = subprocess.Popen([serve_command, "run", argv[0]], process_group=0)
    for sign in (signal.SIGINT, signal.SIGTERM):  # in a group of its own, it gets the terminal's interrupt from here
        signal.signal(sign, lambda *_: process.send_signal(signal.SIGINT))
    threading.Thread(target=_announce, args=(process, url, model), daemon=True).start()
    return process.wait()


def check(file: Path) -> tuple[str, str]:
    """The URL and the base's name that a Serve config file will serve.

    Raises:
        ConfigError: it cannot be served, in one line.
    """
    try:
        config = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {' '.join(str(error).split())}") from None
    applications = config.get("applications", []) if isinstance(config, dict) else []
    ours = [app for app in applications if app.get("import_path") == IMPORT_PATH]
    if not ours:
        raise ConfigError(f"{file} has no application with import_path {IMPORT_PATH}")
    engines = [resolve_paths(EngineConfig.parse(app.get("args") or {})) for app in ours]
    for engine in engines:
        check_files(engine)
    http: dict[str, Any] = config.get("http_options") or {}
    host, port = http.get("host") or "127.0.0.1", http.get("port") or 8000
    _check_port(host, port)
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    prefix = (ours[0].get("route_prefix") or "/").rstrip("/")
    return f"http://{host}:{port}{prefix}", engines[0].base_model_name


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"http_options: {host}:{port}: {error.strerror or error}") from None


def _announce(process: "subprocess.Popen[bytes]", url: str, model: str) -> None:
    """Tell how to call the model, once it answers."""
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                break
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
    else:
        return
    body = {"model": model, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    print(
        f"\nReady at {url}\n\n"
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'\n",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
