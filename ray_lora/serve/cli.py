"""`ray-lora serve CONFIG`: `serve run` for one machine, on loopback, that says what is wrong and when it is ready."""

import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import click
import ray
import yaml
from ray import serve
from ray.serve.schema import ApplicationStatus
from ray.serve.scripts import run as serve_run

from ray_lora.config import EngineConfig
from ray_lora.errors import ConfigError
from ray_lora.serve.startup_checks import check_exposure, check_files, resolve_paths

POLL_S = 0.5


@click.command("serve")
@click.argument("config_file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def serve_command(config_file: Path) -> None:
    """Serve CONFIG_FILE, once it is checked.

    As `serve run` does, on a Ray of its own on loopback or on the one at RAY_ADDRESS.
    """
    try:
        config, host, port = check(config_file)
    except ConfigError as error:
        sys.exit(f"ray-lora: {config_file}: {error}")
    if "RAY_ADDRESS" not in os.environ:
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray would let every other process go first
        ray.init(_node_ip_address="127.0.0.1", include_dashboard=False, namespace="serve")
    threading.Thread(target=_announce, args=(config, f"http://{host}:{port}"), daemon=True).start()
    serve_run.main([str(config_file)], standalone_mode=True)


def check(config_file: Path) -> tuple[EngineConfig, str, int]:
    """What can be known before anything is started: the configuration of the first application, and its address.

    Raises:
        ConfigError: it cannot be served, in one line.
    """
    try:
        content: dict[str, Any] = yaml.safe_load(config_file.read_text())
        args = content["applications"][0]["args"]
    except (yaml.YAMLError, KeyError, IndexError, TypeError):
        raise ConfigError("not a Serve config file with applications and args") from None
    config = resolve_paths(EngineConfig.parse(args))
    options = content.get("http_options") or {}
    host, port = options.get("host", "127.0.0.1"), options.get("port", 8000)
    check_exposure(config, host)
    check_files(config)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"http_options: cannot listen on {host}:{port}: {error.strerror}") from None
    return config, host, port


def _announce(config: EngineConfig, url: str) -> None:
    """Tell when the first application is ready, with a line to paste; end the process if it cannot be."""
    while True:
        time.sleep(POLL_S)
        applications = list(serve.status().applications.values()) if ray.is_initialized() else []
        if any(application.status == ApplicationStatus.DEPLOY_FAILED for application in applications):
            click.echo(f"ray-lora: cannot start: {_reason(applications[0].message)}", err=True)
            serve.shutdown()
            os._exit(1)
        if applications and all(application.status == ApplicationStatus.RUNNING for application in applications):
            break
    names = [config.base_model_name, *(module.name for module in config.lora_modules)]
    body = f'{{"model": "{names[-1]}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
    click.echo(f"\nServing {', '.join(names)} at {url}")
    click.echo("Whoever calls needs an API key." if config.needs_api_key else "No API keys: whoever calls is served.")
    key = " -H 'Authorization: Bearer KEY'" if config.needs_api_key else ""
    click.echo(f"Try:\n\n  curl -s {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'\n")


def _reason(message: str) -> str:
    """The last line of a trace that says something."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    named = [line for line in lines if "ConfigError" in line]
    return (named or lines or ["unknown reason"])[-1]
