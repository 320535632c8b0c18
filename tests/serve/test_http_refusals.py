"""What the API refuses: each with a status, OpenAI's error object, and the field at fault."""

import json
from typing import Any

import httpx
import openai
import pytest
from conftest import Server
from openai import OpenAI
from test_http_api import events

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT = {"prompt": "a", "max_tokens": 4}


def post(http: httpx.Client, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code
    return answer.status_code, error


BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({**TEXT, "temperature": "hot"}, "temperature"),
    ({**TEXT, "temperature": -1}, "temperature"),
    ({**TEXT, "max_tokens": "5"}, "max_tokens"),
    ({**TEXT, "max_tokens": 0}, "max_tokens"),
    ({**TEXT, "n": 0}, "n"),
    ({**TEXT, "n": 1.5}, "n"),
    ({**TEXT, "logprobs": 21}, "logprobs"),
    ({**TEXT, "logprobs": 21, "echo": True}, "logprobs"),
    ({**TEXT, "logprobs": True}, "logprobs"),
    ({**TEXT, "stop": [""]}, "stop"),
    ({**TEXT, "logit_bias": {"x": 1}}, "logit_bias"),
    ({**TEXT, "logit_bias": {"1": 101}}, "logit_bias"),
    ({**TEXT, "prompt": []}, "prompt"),
    ({**TEXT, "prompt": ["a", 1]}, "prompt"),
    ({**TEXT, "prompt": ""}, "prompt"),
    ({**TEXT, "prompt": "a " * 200}, "prompt"),
    ({**TEXT, "best_of": 2}, "best_of"),
    ({**TEXT, "suffix": "x"}, "suffix"),
    ({**TEXT, "stream_options": {"include_usage": True}}, "stream_options"),
    ({**TEXT, "stream": True, "stream_options": {"include_usages": True}}, "stream_options.include_usages"),
    ({**TEXT, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({**TEXT, "guided_json": {}}, "guided_json"),
    ({**TEXT, "priority": "high"}, "priority"),
    ({**CHAT, "priority": 1.5}, "priority"),
    ({**CHAT, "messages": []}, "messages"),
    ({**CHAT, "messages": "hi"}, "messages"),
    ({**CHAT, "messages": [{"role": "user"}]}, "messages[0].content"),
    ({**CHAT, "messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    ({**CHAT, "messages": [{"role": "user", "content": "a", "colour": 1}]}, "messages[0].colour"),
    ({**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ({**CHAT, "messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({**CHAT, "messages": [{"role": "user", "content": "a " * 200}]}, "messages"),
    ({**CHAT, "max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens"),
    ({**CHAT, "max_completion_tokens": 9}, "max_completion_tokens"),
    ({**CHAT, "top_logprobs": 2}, "top_logprobs"),
    ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({**CHAT, "tools": [{"type": "function"}]}, "tools"),
    ({**CHAT, "tool_choice": "required"}, "tool_choice"),
    ({**CHAT, "functions": [{}]}, "functions"),
    ({**CHAT, "parallel_tool_calls": True}, "parallel_tool_calls"),
    ({**CHAT, "response_format": {"type": "yaml"}}, "response_format.type"),
    ({**CHAT, "response_format": {"type": "json_schema"}}, "response_format"),
    ({**CHAT, "response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format"),
    (
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
    ),
    ({**CHAT, "structured_outputs": {}}, "structured_outputs"),
    ({**CHAT, "structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({**CHAT, "structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    ({**CHAT, "structured_outputs": {"regex": "a", "structural_tag": "b"}}, "structured_outputs.structural_tag"),
    ({**CHAT, "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({**CHAT, "structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens"),
    ({**TEXT, "structured_outputs": {"json": True}}, "structured_outputs.json"),
    ({**CHAT, "audio": {}}, "audio"),
    ({**CHAT, "modalities": ["audio"]}, "modalities"),
    ({**CHAT, "chat_template": "x"}, "chat_template"),
    ({**CHAT, "store": True}, "store"),
    ({**CHAT, "service_tier": "priority"}, "service_tier"),
    ({**CHAT, "continue_final_message": True}, "continue_final_message"),
]


@pytest.mark.parametrize(("body", "param"), BAD_FIELDS, ids=[f"{i}-{param}" for i, (_, param) in enumerate(BAD_FIELDS)])
def test_a_bad_field_is_named(http: httpx.Client, server: Server, body: dict[str, Any], param: str) -> None:
    status, error = post(http, body)
    assert (status, error["param"], error["type"]) == (400, param, "BadRequestError")
    assert server.engine.num_running == 0


HARMLESS = [
    {"user": "me"},
    {"metadata": {"a": "b"}},
    {"store": False},
    {"service_tier": "auto"},
    {"response_format": {"type": "text"}},
    {"response_format": None, "structured_outputs": None},
    {"tools": [{"type": "function"}], "tool_choice": "none"},
    {"tools": [], "tool_choice": "auto"},
    {"n": 1, "temperature": None, "stop": None, "stream_options": None},
    {"modalities": ["text"]},
    {"seed": 7},
]


@pytest.mark.parametrize("fields", HARMLESS, ids=[next(iter(fields)) for fields in HARMLESS])
def test_a_field_that_changes_nothing_is_accepted(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert http.post("/v1/chat/completions", json={**CHAT, **fields}).status_code == 200


def test_an_unknown_field_is_refused_with_the_nearest_known_one(http: httpx.Client) -> None:
    status, error = post(http, {**TEXT, "max_token": 5})
    assert (status, error["param"]) == (400, "max_token")
    assert error["message"] == "Unknown field 'max_token'; did you mean 'max_tokens'?"


def test_messages_may_hold_text_parts_and_what_clients_send_back(http: httpx.Client, server: Server) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answered = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}
    for messages in (
        [{"role": "developer", "content": parts}, answered, {"role": "user", "content": "hi"}],
        [{"role": "system", "content": "a\nb"}, {"role": "assistant", "content": "x"}, CHAT["messages"][0]],  # type: ignore[index]
    ):
        assert http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).status_code == 200
    first, second = server.engine.requests
    assert first.prompt == second.prompt


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "must be a JSON object, not an array"),
        (b'{"prompt": NaN}', "NaN"),
        (b"", "JSON"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(http: httpx.Client, raw: bytes, text: str) -> None:
    answer = http.post("/v1/completions", content=raw)
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]


def test_an_unknown_model_has_vllms_answer(http: httpx.Client, openai_client: OpenAI) -> None:
    for body in ({**TEXT, "model": "x"}, {**CHAT, "model": "x"}, {**CHAT, "model": "x", "stream": True}):
        status, error = post(http, body)
        assert status == 404
        assert error == {
            "message": "The model `x` does not exist.",
            "type": "NotFoundError",
            "param": "model",
            "code": 404,
        }
    assert http.post("/tokenize", json={"model": "x", "prompt": "a"}).status_code == 404
    with pytest.raises(openai.NotFoundError):
        openai_client.models.retrieve("x")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v2/models", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)],
)
def test_a_wrong_path_or_method_has_the_same_format(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == status
    assert path in answer.json()["error"]["message"]


@pytest.mark.parametrize(("seed", "status", "retry_after"), [(-1, 500, None), (-2, 503, "1"), (-3, 429, "3")])
def test_an_engines_error_has_its_status(http: httpx.Client, seed: int, status: int, retry_after: str | None) -> None:
    answer = http.post("/v1/completions", json={**TEXT, "seed": seed})
    assert answer.status_code == answer.json()["error"]["code"] == status
    assert answer.headers.get("retry-after") == retry_after


def test_an_error_in_the_middle_of_a_stream_is_an_event(http: httpx.Client, openai_client: OpenAI) -> None:
    answer = http.post("/v1/completions", json={**TEXT, "seed": -1, "stream": True})
    assert answer.status_code == 200
    *chunks, error, done = events(answer.text)
    assert len(chunks) == 2
    assert error == {
        "error": {
            "message": "the logits are not finite",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }
    }
    assert done == "[DONE]"
    with pytest.raises(openai.APIError, match="not finite"):
        list(openai_client.completions.create(model="smollm2", prompt="a", seed=-1, stream=True))


def test_one_bad_prompt_of_several_cancels_the_others(http: httpx.Client, server: Server) -> None:
    server.engine.step_s = 0.005
    status, error = post(http, {"prompt": [[2000], [2000] * 64], "max_tokens": 50})
    assert (status, error["param"]) == (400, "prompt")
    assert server.engine.num_running == 0
    assert len(server.engine.cancelled) == 1


@pytest.mark.parametrize("token", [-1, 49152, "a"])
def test_detokenize_refuses_what_is_no_token(http: httpx.Client, token: Any) -> None:
    answer = http.post("/detokenize", content=json.dumps({"tokens": [token]}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("tokens")
