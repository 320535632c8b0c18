"""One huge body is refused with 413, whether it says its length or not, and is not kept in memory."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from conftest import Server
from starlette.types import Message, Receive, Scope, Send

from ray_lora.config import EngineConfig
from ray_lora.errors import RequestTooLargeError
from ray_lora.serve.body_limit import BodyLimit
from ray_lora.tenant import hash_key

LIMIT = 1 << 16
PART = b" " * (1 << 14)
KEY = {"Authorization": "Bearer sk-acme"}
BODY = b'{"prompt": "a", "max_tokens": 2}'


@pytest.fixture(scope="module")
def limited(demo_dir: Path) -> Iterator[Server]:
    key = {"name": "acme", "sha256": hash_key("sk-acme"), "may_load": True}
    config = {"model": str(demo_dir), "served_model_name": "smollm2", "api_keys": [key]}
    server = Server(EngineConfig.parse(config | {"max_request_body_bytes": LIMIT, "allow_runtime_lora_updating": True}))
    yield server
    server.stop()


def post(server: Server, content: bytes | Iterator[bytes], path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(server.url + path, content=content, headers=KEY)


def chunked(num_bytes: int) -> Iterator[bytes]:
    """A body of that many bytes, which does not say so."""
    yield BODY
    left = num_bytes - len(BODY)
    while left > 0:
        yield PART[:left]
        left -= len(PART)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/load_lora_adapter"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_over_the_limit_is_413_in_openais_format(limited: Server, path: str, is_chunked: bool) -> None:
    body = chunked(LIMIT + 1)
    answer = post(limited, body if is_chunked else b"".join(body), path)
    assert answer.status_code == 413
    assert answer.json()["error"] == {
        "message": f"The body is longer than max_request_body_bytes, {LIMIT} bytes.",
        "type": "RequestEntityTooLargeError",
        "param": None,
        "code": 413,
    }


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_of_just_the_limit_is_served(limited: Server, is_chunked: bool) -> None:
    body = chunked(LIMIT)
    answer = post(limited, body if is_chunked else b"".join(body))
    assert answer.status_code == 200, answer.text


def test_a_chunked_body_is_read_no_further_than_the_limit() -> None:
    num_read = 0

    async def receive() -> Message:
        nonlocal num_read
        num_read += len(PART)
        return {"type": "http.request", "body": PART, "more_body": True}

    async def read_all(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass

    async def send(_: Message) -> None:
        raise AssertionError("nothing is answered here")

    with pytest.raises(RequestTooLargeError):
        asyncio.run(BodyLimit(read_all, LIMIT)({"type": "http", "headers": []}, receive, send))
    assert num_read == LIMIT + len(PART)


def test_without_a_key_it_is_401_whatever_the_length(limited: Server) -> None:
    answer = httpx.post(f"{limited.url}/v1/completions", content=b"".join(chunked(LIMIT + 1)))
    assert answer.status_code == 401
