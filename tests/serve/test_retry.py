"""Requests over HTTP whose replica dies, in place of which a fake engine says that it does."""

import logging
import re
from typing import Any

import httpx
import pytest
from conftest import Server
from prometheus_client.parser import text_string_to_metric_families
from test_http_api import events

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5], "max_tokens": 4, "return_token_ids": True},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4, "return_token_ids": True},
}


def tokens_of(answer: httpx.Response) -> list[list[int]]:
    """By choice."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [choice["token_ids"] for choice in answer.json()["choices"]]
    tokens: dict[int, list[int]] = {}
    for event in events(answer.text)[:-1]:
        for choice in event["choices"]:
            tokens.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
    return [tokens[index] for index in sorted(tokens)]


def num_retries(http: httpx.Client) -> float:
    families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
    (sample,) = families["ray_lora:request_retries"].samples
    return sample.value


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("stream", "dies_at"), [(False, 0), (False, 2), (True, 0)])
def test_a_request_of_which_nothing_was_seen_runs_again_and_is_right(
    path: str, stream: bool, dies_at: int, server: Server, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    body = BODIES[path] | {"stream": stream, "request_id": "r7"}
    expected = tokens_of(http.post(path, json=body))
    before = num_retries(http)
    server.engine.requests.clear()
    server.engine.deaths = [dies_at]
    caplog.clear()
    with caplog.at_level(logging.INFO, "ray.serve"):
        assert tokens_of(http.post(path, json=body)) == expected
    assert num_retries(http) == before + 1
    first, second = server.engine.requests
    assert first == second
    (line,) = [line for line in caplog.messages if line.startswith("request ")]
    assert re.search(
        r'request_id=\w+-r7 status=200 .* completion_tokens=4 .* retries=1 retry_cause="rank 1 is gone"', line
    )


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_that_breaks_says_so_and_ends_and_does_not_run_again(
    path: str, server: Server, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.deaths = [2]
    with caplog.at_level(logging.INFO, "ray.serve"):
        *told, last, done = events(http.post(path, json=BODIES[path] | {"stream": True}).text)
    assert done == "[DONE]"
    assert last["error"] == {
        "message": "The replica died in the middle of this stream, so the answer is incomplete; send it again. "
        "(rank 1 is gone)",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
    assert sum(len(choice.get("token_ids", ())) for event in told for choice in event["choices"]) == 2
    assert len(server.engine.requests) == 1
    assert any("status=503" in line and "retries" not in line for line in caplog.messages)


@pytest.mark.parametrize("stream", [False, True])
def test_of_several_prompts_those_that_died_run_again(stream: bool, server: Server, http: httpx.Client) -> None:
    body = {"prompt": [[5], [50], [500]], "n": 2, "max_tokens": 3, "return_token_ids": True, "stream": stream}
    expected = tokens_of(http.post("/v1/completions", json=body))
    server.engine.requests.clear()
    server.engine.deaths = [9, 0]
    assert tokens_of(http.post("/v1/completions", json=body)) == expected
    assert [len(tokens) for tokens in expected] == [3] * 6
    assert sorted(request.prompt[0] for request in server.engine.requests) == [5, 50, 50, 500]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_runs_twice_at_most(stream: bool, server: Server, http: httpx.Client) -> None:
    server.engine.deaths = [0, 0]
    answer = http.post("/v1/completions", json=BODIES["/v1/completions"] | {"stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["message"] == "rank 1 is gone"
    assert len(server.engine.requests) == 2


@pytest.mark.parametrize(
    ("fields", "status"), [({"seed": -1}, 500), ({"seed": -3}, 429), ({"model": "nobody"}, 404), ({"prompt": []}, 400)]
)
def test_no_other_failure_runs_again(fields: dict[str, Any], status: int, server: Server, http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json=BODIES["/v1/completions"] | fields)
    assert answer.status_code == status
    assert len(server.engine.requests) <= 1
