"""`ray-lora adapter list`, `load`, `unload`, `pin`, `weight` and more: a running server's adapters, over HTTP."""

import json
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import click
import httpx

from ray_lora.text_table import text_table

TIMEOUT_S = 600.0
"""Of a load, which may have to fetch the adapter first."""
HEADS = (
    *("name", "version", "rank", "pages", "bytes", "tier", "pinned", "weight"),
    *("running", "waiting", "loads", "last used"),
)


class Server:
    """One server's HTTP API; what it refuses ends the command with its words."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            answer = httpx.request(method, self._url + path, json=body, headers=self._headers, timeout=TIMEOUT_S)
        except httpx.HTTPError as error:
            sys.exit(f"ray-lora: {self._url}: {error}")
        if answer.is_error:
            sys.exit(f"ray-lora: {_message(answer)}")
        return answer


def command(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """A command whose first argument is the server that its options name."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @click.command(name)
        @click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Of the server.")
        @click.option("--api-key", envvar="RAY_LORA_API_KEY", show_envvar=True, help="If the server wants one.")
        @wraps(function)
        def run(url: str, api_key: str | None, **arguments: Any) -> None:
            function(Server(url, api_key), **arguments)

        return run

    return decorate


@command("list")
@click.option("--json", "as_json", is_flag=True, help="The server's own answer.")
def list_command(server: Server, as_json: bool) -> None:
    """Show what is registered, and in which tier.

    And how it is used.
    """
    answer = server.call("GET", "/v1/adapters").json()
    if as_json:
        click.echo(json.dumps(answer, indent=2))
        return
    click.echo(text_table(HEADS, [_row(info) for info in answer["data"]]))
    for number, tiers in enumerate(answer.get("tiers", [])):
        for tier, use in tiers.items():
            most = f" of {use['max_bytes']:,}" if use["max_bytes"] is not None else ""
            click.echo(
                f"replica {number}, {tier}: {use['num_adapters']} of {use['max_adapters']} adapters, "
                f"{use['num_bytes']:,}{most} bytes a rank"
            )


@command("load")
@click.argument("name")
@click.argument("path")
@click.option("--inplace", is_flag=True, help="Also in place of other content of that name.")
@click.option("--expected-version", help="Only if NAME points to this version now.")
def load_command(server: Server, name: str, path: str, inplace: bool, expected_version: str | None) -> None:
    """Load the adapter at PATH under NAME.

    PATH is a directory of the server's, or a URL.
    """
    body = {"lora_name": name, "lora_path": path, "load_inplace": inplace, "expected_version": expected_version}
    click.echo(server.call("POST", "/v1/load_lora_adapter", body).text)


@command("unload")
@click.argument("name")
def unload_command(server: Server, name: str) -> None:
    """Forget NAME; requests on it finish."""
    click.echo(server.call("POST", "/v1/unload_lora_adapter", {"lora_name": name}).text)


@command("pin")
@click.argument("name")
def pin_command(server: Server, name: str) -> None:
    """Keep NAME in host memory.

    And on the device, from its next request on.
    """
    server.call("POST", f"/v1/adapters/{name}/pin")


@command("unpin")
@click.argument("name")
def unpin_command(server: Server, name: str) -> None:
    """Let NAME give way to others again."""
    server.call("POST", f"/v1/adapters/{name}/unpin")


@command("weight")
@click.argument("name")
@click.argument("value", type=float)
def weight_command(server: Server, name: str, value: float) -> None:
    """Set the share of NAME.

    It is served VALUE times as many tokens as an adapter of weight 1, while requests for both wait.
    """
    server.call("POST", f"/v1/adapters/{name}/weight", {"weight": value})


@command("validate")
@click.argument("path")
@click.option("--name", help="Under which it would be loaded.")
def validate_command(server: Server, path: str, name: str | None) -> None:
    """Tell what loading PATH would do.

    The exit status is 1 if it would be refused.
    """
    found = server.call("POST", "/v1/validate_lora_adapter", {"lora_path": path, "lora_name": name}).json()
    for refusal in found["refusals"]:
        click.echo(f"refused: {refusal['message']}")
    if "version" in found:
        click.echo(
            f"version {found['version'][:12]}, rank {found['rank']}, {found['num_pages']} pages; on each rank "
            f"{found['num_bytes']:,} bytes of host memory and {found['device_bytes']:,} of the device's"
        )
        click.echo(f"changes {', '.join(found['modules'])}")
    if not found["valid"]:
        sys.exit(1)


def _row(info: dict[str, Any]) -> tuple[str, ...]:
    numbers = ("num_running", "num_waiting", "num_loads")
    return (
        info["name"],
        info["version"][:12],
        f"{info['rank']}",
        f"{info['num_pages']}",
        f"{info['num_bytes']:,}",
        info["tier"],
        "yes" if info["pinned"] else "no",
        f"{info['weight']:g}",
        *(f"{info[number]}" for number in numbers),
        "never" if info["last_used"] is None else time.strftime("%F %T", time.localtime(info["last_used"])),
    )


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code} {answer.reason_phrase}: {answer.text[:200]}"
