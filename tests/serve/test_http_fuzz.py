"""Whatever a body holds is answered, or refused with a 4xx in OpenAI's format."""

import json
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lora.errors import InvalidRequestError
from ray_lora.serve.openai_types import (
    AdapterWeightRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadLoraRequest,
    TokenizeRequest,
    UnloadLoraRequest,
    ValidateLoraRequest,
)
from ray_lora.serve.request_body import RequestBody, parse_body
from tests.arbitrary_json import EFFORTS, JSON, mutated, nested

SAMPLING = {
    "model": "smollm2",
    "max_tokens": 3,
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 1,
    "stop": ["x"],
    "stop_token_ids": [1],
    "logit_bias": {"5": 1.0},
    "stream": False,
}
CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", 1]}}, "required": ["a"]}
ROUTES: dict[str, tuple[type[RequestBody], dict[str, Any]]] = {
    "/v1/chat/completions": (
        ChatCompletionRequest,
        {
            **SAMPLING,
            "messages": CHAT,
            "logprobs": True,
            "top_logprobs": 2,
            "chat_template_kwargs": {"a": [1]},
            "prompt_logprobs": 1,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
            "tools": [],
            "tool_choice": "none",
            "priority": 1,
            "min_tokens": 1,
            "repetition_penalty": 1.1,
        },
    ),
    "/v1/completions": (CompletionRequest, {**SAMPLING, "prompt": ["Hi", "Ho"], "logprobs": 2, "echo": True}),
    "/v1/completions?streamed": (
        CompletionRequest,
        {
            **SAMPLING,
            "prompt": [[5, 6], [7]],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True},
            "cache_salt": "s",
            "request_id": "r",
            "presence_penalty": 0.1,
            "return_token_ids": True,
        },
    ),
    "/tokenize": (TokenizeRequest, {"prompt": "Hi", "return_token_strs": True}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1, 2, 3]}),
    "/v1/load_lora_adapter": (LoadLoraRequest, {"lora_name": "a", "lora_path": "/nowhere", "load_inplace": True}),
    "/v1/validate_lora_adapter": (ValidateLoraRequest, {"lora_name": "a", "lora_path": "/nowhere"}),
    "/v1/adapters/a/weight": (AdapterWeightRequest, {"weight": 2.0}),
    "/v1/unload_lora_adapter": (UnloadLoraRequest, {"lora_name": "a"}),
}

TEXT = [{"role": "user", "content": "Hi"}]
FOUND: list[tuple[str, Any]] = [
    ("/v1/completions", {"\ud800": 1}),
    ("/v1/completions", {"prompt": "\ud800"}),
    ("/v1/completions", {"prompt": "Hi", "model": "\ud800"}),
    ("/v1/completions", {"prompt": "Hi", "stop": ["\ud800"]}),
    ("/v1/completions", {"prompt": [-5], "echo": True}),
    ("/v1/completions", {"prompt": [[1], [2**70]], "echo": True}),
    ("/v1/chat/completions", {"messages": [{**TEXT[0], "\ud800": 1}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "\ud800"}]}]}),
    ("/v1/chat/completions", {"messages": TEXT, "chat_template_kwargs": {"\ud800": 1}}),
    ("/tokenize", {"prompt": "\ud800"}),
]
"""Bodies that were once answered with 500, and their like."""


@pytest.mark.parametrize(("path", "body"), FOUND, ids=str)
def test_what_was_found_is_refused(path: str, body: Any, http: httpx.Client) -> None:
    answer = http.post(path, content=json.dumps(body))
    check_answer(answer)
    assert answer.status_code == 400


def test_a_whole_character_may_be_written_as_two_escapes(http: httpx.Client) -> None:
    answer = http.post("/tokenize", content=r'{"prompt": "\ud83d\ude00 \\ud800", "return_token_strs": true}')
    assert answer.status_code == 200
    assert http.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"] == "😀 \\ud800"


def bodies(model: type[RequestBody], good: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Anything; the good one with any fields replaced or added; the good one changed anywhere."""
    names = st.sampled_from([*model.model_fields, *model.REFUSED])
    extra = st.dictionaries(names, JSON, max_size=4)
    return JSON | extra | extra.map(lambda fields: {**good, **fields}) | mutated(good, names)


def check_answer(answer: httpx.Response) -> None:
    if answer.is_success:
        assert "event-stream" not in answer.headers["content-type"] or answer.text.endswith("data: [DONE]\n\n")
        assert '"code":5' not in answer.text
        return
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert error["message"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] == answer.status_code


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("path", ROUTES)
def test_any_body_is_answered_or_refused(
    path: str, effort: settings, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fake_engine.TROUBLE", {})

    @effort
    @given(bodies(*ROUTES[path]))
    def check(body: Any) -> None:
        check_answer(http.post(path, content=json.dumps(body)))

    check()


@pytest.mark.parametrize("path", ROUTES)
def test_no_depth_of_nesting_is_too_much(path: str, http: httpx.Client) -> None:
    for depth in (*range(850, 1000, 3), 100_000):
        for field in ("messages", "prompt", "chat_template_kwargs", "zzz"):
            check_answer(http.post(path, content=f'{{"{field}": {nested(depth)}}}'))


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("path", ROUTES)
def test_any_bytes_are_a_body_or_refused(path: str, effort: settings) -> None:
    model, good = ROUTES[path]
    raw = json.dumps(good).encode()

    @effort
    @given(
        st.binary()
        | st.builds(lambda at, new: raw[:at] + new + raw[at + len(new) :], st.integers(0, len(raw)), st.binary())
    )
    def check(body: bytes) -> None:
        with suppress(InvalidRequestError):
            assert isinstance(parse_body(model, body), model)

    check()
