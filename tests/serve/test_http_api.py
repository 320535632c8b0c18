"""Chat and completions through the real OpenAI client and over plain HTTP."""

import json
import re
import time
from typing import Any

import httpx
import pytest
from conftest import Server
from openai import OpenAI

from ray_lora.serve.tokenizer import Tokenizer
from ray_lora.structured_outputs import StructuredOutputsParams

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def events(text: str) -> list[Any]:
    """The data of a stream of server-sent events."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_a_chat_is_rendered_and_answered(openai_client: OpenAI, server: Server, tokenizer: Tokenizer) -> None:
    answer = openai_client.chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=3, temperature=0)
    prompt = tokenizer.encode(tokenizer.render_chat(MESSAGES), add_special_tokens=False)
    choice = answer.choices[0]
    assert choice.message.content == tokenizer.decode([prompt[-1] + 1, prompt[-1] + 2, prompt[-1] + 3])
    assert (choice.finish_reason, choice.message.role, answer.model) == ("length", "assistant", "smollm2")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 3)
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert list(server.engine.requests[-1].prompt) == prompt
    assert server.engine.requests[-1].request_id == answer.id


def test_a_streamed_chat_adds_up_to_the_whole_one(openai_client: OpenAI) -> None:
    whole = openai_client.chat.completions.create(model="smollm2", messages=MESSAGES, max_tokens=5)
    stream = openai_client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices] == [None] * 5 + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(c.usage is None for c in chunks[:-1])


def test_events_are_what_the_openai_api_sends(http: httpx.Client) -> None:
    body = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 2, "stream": True}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    first, second, third, done = events(answer.text)
    assert done == "[DONE]"
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert set(second["choices"][0]["delta"]) == {"content"}
    assert (third["choices"][0]["finish_reason"], third["choices"][0]["stop_reason"]) == ("length", None)
    assert first["id"] == second["id"] == third["id"]
    assert "usage" not in first


def test_without_max_tokens_a_chat_fills_the_context_and_a_completion_has_sixteen(openai_client: OpenAI) -> None:
    chat = openai_client.chat.completions.create(model="smollm2", messages=MESSAGES)
    text = openai_client.completions.create(model="smollm2", prompt="a")
    assert chat.usage is not None
    assert text.usage is not None
    assert chat.usage.total_tokens == 64
    assert text.usage.completion_tokens == 16


def test_chat_logprobs_have_openais_shape(openai_client: OpenAI, tokenizer: Tokenizer) -> None:
    answer = openai_client.chat.completions.create(
        model="smollm2", messages=MESSAGES, max_tokens=1, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    (entry,) = answer.choices[0].logprobs.content
    assert entry.token == answer.choices[0].message.content
    assert bytes(entry.bytes or []).decode() == entry.token
    assert entry.logprob == -1.5
    assert [(top.token, top.logprob) for top in entry.top_logprobs] == [
        (tokenizer.token_text(101), -0.5),
        (entry.token, -1.5),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_have_the_legacy_shape(http: httpx.Client, tokenizer: Tokenizer, stream: bool) -> None:
    prompt = tokenizer.encode("Hello world")
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 2, "logprobs": 1, "echo": True, "stream": stream}
    answer = http.post("/v1/completions", json=body)
    choices = [e["choices"][0] for e in events(answer.text)[:-1]] if stream else [answer.json()["choices"][0]]
    got: dict[str, list[Any]] = {}
    for choice in choices:
        for name, values in choice["logprobs"].items():
            got[name] = got.get(name, []) + values
    tokens = [tokenizer.token_text(token) for token in [*prompt, prompt[-1] + 1, prompt[-1] + 2]]
    assert "".join(choice["text"] for choice in choices) == "".join(tokens)
    assert got["tokens"] == tokens
    assert got["token_logprobs"] == [None, -1.5, -1.5, -1.5]
    assert got["text_offset"] == [0, 5, 11, 11 + len(tokens[2])]
    assert got["top_logprobs"][0] is None
    assert got["top_logprobs"][1] == {tokens[1]: -1.5, tokenizer.token_text(101): -0.5}


def test_echo_of_no_tokens_gives_the_prompt_alone(openai_client: OpenAI) -> None:
    answer = openai_client.completions.create(model="smollm2", prompt="Hello", max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == "Hello"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["Hello"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize(
    "prompt",
    ["ab", ["ab", "cd e"], [2005, 2006], [[2005, 2006, 2007], [2008]]],
    ids=["text", "texts", "ids", "lists of ids"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_form_of_prompt_gives_n_choices_each(
    openai_client: OpenAI, tokenizer: Tokenizer, prompt: Any, stream: bool
) -> None:
    texts: dict[int, str] = {}
    answer: Any = openai_client.completions.create(
        model="smollm2", prompt=prompt, n=2, max_tokens=3, stream=stream, echo=False
    )
    for item in answer if stream else [answer]:
        for choice in item.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    parts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    lasts = [(tokenizer.encode(part) if isinstance(part, str) else part)[-1] for part in parts]
    assert texts == {
        2 * index + n: tokenizer.decode([last + 100 * n + i for i in (1, 2, 3)])
        for index, last in enumerate(lasts)
        for n in (0, 1)
    }


def test_sampling_fields_reach_the_engine(http: httpx.Client, server: Server) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": 4,
        "stop": ["x"],
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 1,
        "max_tokens": 2,
        "skip_special_tokens": False,
    }
    body = {"prompt": "a", "logit_bias": {"5": -3}, "user": "me", "metadata": {"a": "b"}, **fields}
    assert http.post("/v1/completions", json=body).status_code == 200
    params = server.engine.requests[-1].sampling_params
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.logit_bias == {5: -3}


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"a": 1}, "strict": True},
                }
            },
            StructuredOutputsParams(json={"a": 1}),
        ),
        (
            {"structured_outputs": {"json": {"a": 1}, "regex": None, "disable_any_whitespace": True}},
            StructuredOutputsParams(json={"a": 1}, disable_any_whitespace=True),
        ),
        (
            {"structured_outputs": {"choice": ["a", "b"], "disable_fallback": True}},
            StructuredOutputsParams(choice=["a", "b"]),
        ),
    ],
    ids=str,
)
def test_the_wanted_structure_reaches_the_engine(
    http: httpx.Client, server: Server, body: dict[str, Any], wanted: StructuredOutputsParams
) -> None:
    assert http.post("/v1/completions", json={"prompt": "a", **body}).status_code == 200
    assert server.engine.requests[-1].sampling_params.structured_outputs == wanted


@pytest.mark.parametrize(("given", "told"), [({}, 0), ({"priority": None}, 0), ({"priority": -3}, -3)])
def test_a_priority_reaches_the_engine(
    http: httpx.Client, server: Server, given: dict[str, int | None], told: int
) -> None:
    messages = [{"role": "user", "content": "a"}]
    assert http.post("/v1/completions", json={"prompt": ["a", "b"], **given}).status_code == 200
    assert http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2, **given}).status_code == 200
    assert [request.priority for request in server.engine.requests] == [told] * 3


def test_token_ids_and_prompt_logprobs_are_given_when_asked_for(http: httpx.Client, tokenizer: Tokenizer) -> None:
    body = {"prompt": [5, 6], "max_tokens": 1, "return_token_ids": True, "prompt_logprobs": 0}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], [7])
    assert choice["prompt_logprobs"] == [
        None,
        {"6": {"logprob": -1.5, "rank": 2, "decoded_token": tokenizer.token_text(6)}},
    ]
    body = {"prompt": [5, 6], "max_tokens": 1, "return_token_ids": True, "stream": True}
    first, second, _ = events(http.post("/v1/completions", json=body).text)
    assert first["choices"][0]["prompt_token_ids"] == [5, 6]
    assert second["choices"][0]["token_ids"] == [7]


def test_an_adapter_is_named_alone_or_behind_the_base(http: httpx.Client, server: Server, adapter_dir: Any) -> None:
    http.post("/v1/load_lora_adapter", json={"lora_name": "pirate", "lora_path": str(adapter_dir)})
    for model in ("pirate", "smollm2:pirate"):
        answer = http.post("/v1/completions", json={"model": model, "prompt": [5], "max_tokens": 1, "stream": True})
        assert answer.headers["x-adapter-version"] == "v8"
        assert events(answer.text)[0]["model"] == model
        assert server.engine.requests[-1].adapter == "pirate"
    answer = http.post("/v1/completions", json={"model": "smollm2", "prompt": [5], "max_tokens": 1})
    assert "x-adapter-version" not in answer.headers


def test_a_caller_who_leaves_a_stream_cancels_it(openai_client: OpenAI, server: Server) -> None:
    server.engine.step_s = 0.02
    stream = openai_client.chat.completions.create(model="smollm2", messages=MESSAGES, stream=True)
    next(stream)
    stream.close()
    deadline = time.monotonic() + 5
    while server.engine.num_running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.engine.num_running == 0
    assert len(server.engine.cancelled) == 1


def test_the_callers_request_id_is_used(http: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert http.post("/v1/completions", json=body, headers={"X-Request-Id": "r7"}).json()["id"] == "cmpl-r7"
    assert http.post("/v1/completions", json={**body, "request_id": "r8"}).json()["id"] == "cmpl-r8"


def test_tokenize_and_detokenize_undo_each_other(http: httpx.Client, tokenizer: Tokenizer) -> None:
    body = {"model": "smollm2", "prompt": "Hello <|im_end|>", "return_token_strs": True}
    answer = http.post("/tokenize", json=body).json()
    assert answer["tokens"] == tokenizer.encode("Hello <|im_end|>")
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 64)
    assert answer["token_strs"][0] == "Hello"
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "Hello <|im_end|>"}
    chat = http.post("/tokenize", json={"messages": MESSAGES}).json()
    assert chat["tokens"] == tokenizer.encode(tokenizer.render_chat(MESSAGES), add_special_tokens=False)


def test_a_final_message_can_be_continued(http: httpx.Client, tokenizer: Tokenizer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Hello the"}]
    body = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    assert tokenizer.decode(tokens).endswith("Hello the")


def test_the_schema_is_documented(http: httpx.Client) -> None:
    answer = http.get("/openapi.json")
    operation = answer.json()["paths"]["/v1/chat/completions"]["post"]
    fields = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert "messages" in fields
    assert "include_usage" in fields["stream_options"]["anyOf"][0]["properties"]
    referred = set(re.findall(r'"\$ref":"#/components/schemas/(\w+)"', answer.text))
    assert answer.text.count('"$ref"') == answer.text.count('"$ref":"#/components/schemas/')
    assert referred <= answer.json()["components"]["schemas"].keys()
