"""What is refused over HTTP has one line in the log, which says why and never what was asked."""

import logging
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Server
from fake_engine import make_info

from ray_lora.config import EngineConfig
from ray_lora.serve.request_log import logfmt
from ray_lora.tenant import hash_key

SECRET = "the secret of the sea"
ACME, OPERATOR = ({"Authorization": f"Bearer sk-{name}"} for name in ("acme", "operator"))
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def guarded(demo_dir: Path) -> Iterator[Server]:
    acme = {
        "name": "acme",
        "sha256": hash_key("sk-acme"),
        "adapters": ["acme-*"],
        "limits": {"max_concurrent_requests": 1},
    }
    operator = {"name": "operator", "sha256": hash_key("sk-operator"), "may_load": True}
    config = {"model": str(demo_dir), "served_model_name": "smollm2", "api_keys": [acme, operator]}
    server = Server(EngineConfig.parse(config | {"allow_runtime_lora_updating": True, "max_queued_requests": 2}))
    yield server
    server.stop()


@pytest.fixture
def server(guarded: Server) -> Server:
    guarded.engine.adapters = {"loaded": make_info("loaded", "v1", "/x")}
    return guarded


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those of requests, as they come."""
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("ray.serve"), "info", lambda form, *args: lines.append(form % args))
    return lines


def pairs(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(line)[1:])


@pytest.mark.parametrize(
    ("path", "headers", "body", "found"),
    [
        (COMPLETIONS, {}, {"prompt": SECRET}, {"status": "401", "error": "AuthenticationError: An API key"}),
        (COMPLETIONS, OPERATOR, {"prompt": SECRET, "max_tokens": 0}, {"error": "InvalidRequestError: max_tokens"}),
        (COMPLETIONS, OPERATOR, {"prompt": "a", "stop": [SECRET, ""]}, {"error": "InvalidRequestError: stop"}),
        (COMPLETIONS, ACME, {"prompt": SECRET, "model": "loaded"}, {"status": "404", "model": "loaded"}),
        (
            COMPLETIONS,
            ACME,
            {"prompt": SECRET, "n": 2},
            {"status": "429", "key_name": "acme", "error": "RateLimitError"},
        ),
        (COMPLETIONS, OPERATOR, {"prompt": SECRET, "n": 3}, {"status": "503", "error": "OverloadedError"}),
        ("/v1/load_lora_adapter", ACME, {"lora_name": "a", "lora_path": "/x"}, {"status": "403"}),
        ("/v1/load_lora_adapter", OPERATOR, {"lora_name": "a", "lora_path": "/none"}, {"error": "NotFoundError"}),
        ("/nothing", OPERATOR, {}, {"status": "404", "path": "/nothing", "method": "POST"}),
        ("/v1/models", OPERATOR, {}, {"status": "405"}),
    ],
)
def test_every_refusal_has_one_line_that_says_why(
    http: httpx.Client,
    lines: list[str],
    path: str,
    headers: dict[str, str],
    body: dict[str, Any],
    found: dict[str, str],
) -> None:
    status = http.post(path, json=body, headers=headers).status_code
    (line,) = lines
    said = pairs(line)
    assert said["status"] == str(status)
    assert said["path"] == path
    assert SECRET not in line
    for key, value in found.items():
        assert said[key].startswith(value)


def test_a_refused_request_has_the_id_that_its_caller_gave(http: httpx.Client, lines: list[str]) -> None:
    for body, headers in ({"request_id": "r7"}, {}), ({}, {"X-Request-Id": "r7"}):
        http.post(COMPLETIONS, json={"prompt": "a", "n": 3} | body, headers=OPERATOR | headers)
        assert pairs(lines[-1])["request_id"] == "cmpl-r7"


@pytest.mark.parametrize(("model", "status"), [("smollm2", 200), ("nobody", 404)])
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_replica_has_had_is_told_once_too(
    http: httpx.Client, lines: list[str], model: str, status: int, stream: bool
) -> None:
    body = {"prompt": "a", "model": model, "max_tokens": 1, "stream": stream}
    assert http.post(COMPLETIONS, json=body, headers=OPERATOR).status_code == status
    (line,) = lines
    assert pairs(line)["status"] == str(status)


def test_probes_have_no_lines(http: httpx.Client, server: Server, lines: list[str]) -> None:
    server.engine.is_dead = True
    assert [http.get(path).status_code for path in ("/health", "/ready")] == [503, 503]
    server.engine.is_dead = False
    assert lines == []


def test_a_bug_is_told_too(
    http: httpx.Client, server: Server, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.engine, "info", None)
    assert http.post("/detokenize", json={"tokens": [1]}, headers=OPERATOR).status_code == 500
    assert pairs(lines[-1]) | {"error": ""} == {
        "status": "500",
        "method": "POST",
        "path": "/detokenize",
        "key_name": "operator",
        "error": "",
    }


BAD_IDS = ["a\nrequest status=200", "a\r\nb", "a\x1b[31mb", "\x00", "\u2028", "\u202eb", "a" * 201]


@pytest.mark.parametrize("given", BAD_IDS)
def test_an_id_that_would_not_stay_in_its_line_is_refused(http: httpx.Client, lines: list[str], given: str) -> None:
    answer = http.post(COMPLETIONS, json={"prompt": "a", "request_id": given}, headers=OPERATOR)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
    (line,) = lines
    assert line.isprintable()
    assert given not in line


def test_a_header_that_is_no_good_id_is_refused_by_its_name(http: httpx.Client) -> None:
    headers = OPERATOR | {"X-Request-Id": "a" * 201}
    answer = http.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-id")


@pytest.mark.parametrize("path", ["/a%0Arequest%20status=200", "/%1b%5b31m", "/%e2%80%ae"])
def test_a_path_cannot_write_lines_of_its_own(http: httpx.Client, lines: list[str], path: str) -> None:
    assert http.get(path, headers=OPERATOR).status_code == 404
    (line,) = lines
    assert line.isprintable()
    assert pairs(line)["status"] == "404"


@pytest.mark.parametrize("value", [*BAD_IDS[:-1], "\x7f", "\x9b2J"])
def test_no_value_of_a_line_is_written_raw(value: str) -> None:
    assert logfmt({"request_id": value, "prompt": f"you: {value}"}).isprintable()


def test_words_of_any_language_stay_readable() -> None:
    assert logfmt({"model": "海盗 one"}) == 'model="海盗 one"'
