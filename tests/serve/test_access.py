"""Who may do what over HTTP, and that nobody learns more than that."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from conftest import Server
from fake_engine import make_info
from openai import OpenAI

from ray_lora.config import EngineConfig
from ray_lora.serve.access import OPEN_PATHS
from ray_lora.tenant import hash_key

KEYS: dict[str, dict[str, Any]] = {
    "operator": {"may_load": True},
    "acme": {"adapters": ["acme-*", "shared"], "may_load": True},
    "reader": {"adapters": ["shared"]},
    "small": {"limits": {"max_concurrent_requests": 2, "tokens_per_minute": 1000}},
    "poor": {"limits": {"tokens_per_minute": 60}},
}
"""Every key is called `sk-` and its name."""

LOADED = ("acme-legal", "shared", "globex-tax")

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"prompt": [5, 6], "max_tokens": 2}


def make_config(demo_dir: Path, **fields: Any) -> EngineConfig:
    keys = [{"name": name, "sha256": hash_key(f"sk-{name}"), **permissions} for name, permissions in KEYS.items()]
    return EngineConfig.parse(
        {"model": str(demo_dir), "served_model_name": "smollm2", "max_loras": 4, "api_keys": keys} | fields
    )


@pytest.fixture(scope="module")
def guarded(demo_dir: Path) -> Iterator[Server]:
    limits = {"shared": {"max_concurrent_requests": 3}}
    server = Server(
        make_config(demo_dir, allow_runtime_lora_updating=True, adapter_limits=limits, max_queued_requests=20)
    )
    yield server
    server.stop()


@pytest.fixture
def server(guarded: Server) -> Server:
    """In place of the one without keys."""
    engine = guarded.engine
    engine.adapters = {name: make_info(name, f"v-{name}", "/x") for name in LOADED}
    engine.requests.clear()
    engine.cancelled.clear()
    engine.step_s = 0.0
    return guarded


def headers(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{name}"}


@pytest.fixture
def acme(http: httpx.Client) -> httpx.Client:
    http.headers.update(headers("acme"))
    return http


@pytest.fixture
def openai_client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="sk-acme", max_retries=0, timeout=20) as client:
        yield client


# Who it is


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "is needed"),
        ("", "is needed"),
        ("Bearer", "is needed"),
        ("Basic sk-acme", "is needed"),
        ("sk-acme", "is needed"),
        ("Bearer sk-acm", "not known"),
        ("Bearer sk-acmee", "not known"),
        (f"Bearer {hash_key('sk-acme')}", "not known"),
        (b"Bearer sk-\xff", "not known"),
    ],
)
def test_nobody_is_served_without_a_known_key(http: httpx.Client, value: str | bytes | None, message: str) -> None:
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("POST", "/tokenize"),
        ("GET", "/metrics"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/nothing"),
    ):
        answer = http.request(method, path, headers={} if value is None else [("Authorization", value)])
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        error = answer.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, "invalid_api_key")
        assert message in error["message"]


@pytest.mark.parametrize("value", ["Bearer sk-acme", "bearer sk-acme", "BEARER   sk-acme"])
def test_a_known_key_is_served(http: httpx.Client, value: str) -> None:
    assert http.get("/v1/models", headers={"Authorization": value}).status_code == 200


def test_probes_need_no_key(http: httpx.Client) -> None:
    assert sorted(OPEN_PATHS) == ["/health", "/ready"]
    assert http.get("/health").status_code == 200
    assert http.get("/healthy").status_code == 401


def test_openais_client_is_told_in_its_own_words(openai_client: OpenAI) -> None:
    assert openai_client.chat.completions.create(model="smollm2", **CHAT).choices
    with pytest.raises(openai.AuthenticationError) as unknown:
        openai_client.with_options(api_key="sk-nobody").chat.completions.create(model="smollm2", **CHAT)
    assert unknown.value.code == "invalid_api_key"


# What it sees


@pytest.mark.parametrize(
    ("name", "seen"), [("operator", LOADED), ("acme", ("acme-legal", "shared")), ("reader", ("shared",))]
)
def test_a_tenant_sees_the_base_and_its_own_adapters(
    http: httpx.Client, openai_client: OpenAI, name: str, seen: tuple[str, ...]
) -> None:
    models = openai_client.with_options(api_key=f"sk-{name}").models.list()
    assert [model.id for model in models] == ["smollm2", *seen]
    adapters = http.get("/v1/adapters", headers=headers(name)).json()["data"]
    assert [adapter["name"] for adapter in adapters] == list(seen)


def test_metrics_are_for_those_who_see_everything(http: httpx.Client) -> None:
    assert http.get("/metrics", headers=headers("operator")).status_code == 200
    for name in ("acme", "reader"):
        answer = http.get("/metrics", headers=headers(name))
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "PermissionDeniedError")


REQUESTS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("POST", "/v1/chat/completions", {**CHAT, "model": "NAME"}),
    ("POST", "/v1/chat/completions", {**CHAT, "model": "smollm2:NAME", "stream": True}),
    ("POST", "/v1/completions", {**TEXT, "model": "NAME"}),
    ("POST", "/v1/completions", {**TEXT, "model": "NAME", "prompt": ["a", "b"], "stream": True}),
    ("POST", "/tokenize", {"model": "NAME", "prompt": "a"}),
    ("POST", "/detokenize", {"model": "NAME", "tokens": [5]}),
    ("GET", "/v1/models/NAME", None),
    ("GET", "/v1/models/smollm2:NAME", None),
    ("GET", "/v1/adapters/NAME", None),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "NAME", "lora_path": "/nowhere"}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "NAME"}),
]


def ask(http: httpx.Client, method: str, path: str, body: dict[str, Any] | None, name: str) -> tuple[Any, ...]:
    """All that an answer tells, with the name taken out."""
    content = None if body is None else json.dumps(body).replace("NAME", name)
    answer = http.request(method, path.replace("NAME", name), content=content)
    told = {key: value for key, value in answer.headers.items() if key not in ("date", "content-length")}
    return answer.status_code, answer.text.replace(name, "NAME"), told


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS, ids=[f"{i}-{r[1]}" for i, r in enumerate(REQUESTS)])
def test_an_adapter_of_somebody_else_is_as_one_that_does_not_exist(
    server: Server, acme: httpx.Client, method: str, path: str, body: dict[str, Any] | None
) -> None:
    foreign = ask(acme, method, path, body, "globex-tax")
    assert foreign == ask(acme, method, path, body, "globex-xyz")
    assert foreign[0] == (403 if "load" in path else 404)
    assert server.engine.requests == [], "whether it exists is not even asked"
    if foreign[0] == 404 and "adapters" not in path:
        assert foreign == ask(acme, method, path, body, "acme-none")
    assert set(server.engine.adapters) == set(LOADED)


def test_the_document_says_where_a_key_is_needed(server: Server) -> None:
    document = httpx.get(f"{server.url}/openapi.json", headers=headers("operator")).json()
    assert document["security"] == [{"key": []}]
    free = {path for path, operations in document["paths"].items() if operations.get("get", {}).get("security") == []}
    assert free == {"/health", "/ready"}


# What it may change


def changing_routes(server: Server) -> list[tuple[str, str]]:
    paths = server.app.openapi()["paths"]
    return [
        (method.upper(), path)
        for path, operations in paths.items()
        for method in operations
        if "adapter" in path and method not in ("get", "head")
    ]


def test_no_adapter_can_be_changed_unless_the_server_allows_it(demo_dir: Path, adapter_dir: Path) -> None:
    closed = Server(make_config(demo_dir))
    try:
        routes = changing_routes(closed)
        assert len(routes) >= 2
        body = {"lora_name": "acme-new", "lora_path": str(adapter_dir)}
        for method, path in routes:
            answer = httpx.request(method, f"{closed.url}{path}", json=body, headers=headers("operator"))
            assert answer.status_code == 403
            for name in ("allow_runtime_lora_updating", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
                assert name in answer.json()["error"]["message"]
        assert closed.engine.adapters == {}
        assert httpx.get(f"{closed.url}/v1/adapters", headers=headers("operator")).status_code == 200
    finally:
        closed.stop()


def test_a_key_that_may_not_load_changes_nothing(server: Server, http: httpx.Client, adapter_dir: Path) -> None:
    body = {"lora_name": "shared", "lora_path": str(adapter_dir), "load_inplace": True}
    for method, path in changing_routes(server):
        answer = http.request(method, path.replace("{name}", "shared"), json=body, headers=headers("reader"))
        assert answer.status_code == 403
        assert answer.json()["error"]["message"] == "API key 'reader' may not change adapters: it has no 'may_load'."
    assert set(server.engine.adapters) == set(LOADED)


def test_a_key_loads_and_unloads_under_its_own_names_only(
    server: Server, acme: httpx.Client, adapter_dir: Path
) -> None:
    def load(name: str) -> httpx.Response:
        return acme.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(adapter_dir)})

    assert load("acme-new").status_code == 200
    assert acme.post("/v1/completions", json={**TEXT, "model": "acme-new"}).status_code == 200
    refused = load("globex-new")
    assert refused.status_code == 403
    assert refused.json()["error"]["message"] == (
        "API key 'acme' may not change an adapter named 'globex-new'; its adapters are acme-*, shared."
    )
    assert acme.post("/v1/unload_lora_adapter", json={"lora_name": "acme-new"}).status_code == 200
    assert set(server.engine.adapters) == set(LOADED)


def test_a_share_of_the_service_is_for_those_to_set_who_see_whom_it_is_taken_from(
    server: Server, http: httpx.Client
) -> None:
    for name in ("shared", "acme-nobody"):
        refused = http.post(f"/v1/adapters/{name}/weight", json={"weight": 9}, headers=headers("acme"))
        assert refused.status_code == 403
        assert refused.json()["error"]["message"] == ("API key 'acme' may not set weights: it is not for all adapters.")
    answer = http.post("/v1/adapters/shared/weight", json={"weight": 9}, headers=headers("operator"))
    assert (answer.status_code, server.engine.adapters["shared"].weight) == (200, 9)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'{"lora_name": 5}', b'{"lora_path": "/x"}'])
def test_a_bad_body_is_told_as_ever(acme: httpx.Client, raw: bytes) -> None:
    answer = acme.post("/v1/load_lora_adapter", content=raw)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "InvalidUserInput")


# What the engine is told


def test_the_engine_is_told_the_key_and_the_salt(server: Server, http: httpx.Client) -> None:
    http.post("/v1/completions", json={**TEXT, "cache_salt": "s1"}, headers=headers("acme"))
    http.post("/v1/chat/completions", json={**CHAT, "cache_salt": "s2"}, headers=headers("reader"))
    http.post("/v1/chat/completions", json=CHAT, headers=headers("reader"))
    told = [(request.key_name, request.cache_salt) for request in server.engine.requests]
    assert told == [("acme", "s1"), ("reader", "s2"), ("reader", None)]


@pytest.mark.parametrize("salt", ["", 5, "x" * 1025])
def test_a_salt_is_a_text_that_is_not_empty(acme: httpx.Client, salt: Any) -> None:
    answer = acme.post("/v1/completions", json={**TEXT, "cache_salt": salt})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")


# Limits


def refusal(answer: httpx.Response) -> tuple[int, str, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["type"], error["code"], answer.headers["retry-after"]


def test_over_its_limit_a_key_is_refused_and_others_are_not(
    server: Server, http: httpx.Client, openai_client: OpenAI
) -> None:
    server.engine.step_s = 0.05
    body = {"prompt": [5], "max_tokens": 40, "stream": True}
    http.headers.update(headers("small"))
    with http.stream("POST", "/v1/completions", json=body), http.stream("POST", "/v1/completions", json=body):
        for stream in (False, True):
            answer = http.post("/v1/completions", json={**TEXT, "stream": stream})
            assert refusal(answer) == (429, "requests", "rate_limit_exceeded", "1")
        with pytest.raises(openai.RateLimitError) as caught:
            openai_client.with_options(api_key="sk-small").chat.completions.create(model="smollm2", **CHAT)
        assert caught.value.code == "rate_limit_exceeded"
        assert http.post("/v1/completions", json=TEXT, headers=headers("acme")).status_code == 200
    assert len(server.engine.requests) == 3, "what is refused never reaches the engine"
    server.engine.step_s = 0.0
    while server.engine.num_running:
        time.sleep(0.01)
    answers = [http.post("/v1/completions", json=TEXT) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3


def test_all_prompts_and_completions_of_a_call_count(server: Server, http: httpx.Client) -> None:
    http.headers.update(headers("small"))
    for body in ({**TEXT, "prompt": ["a", "b", "c"]}, {**TEXT, "n": 3}):
        answer = http.post("/v1/completions", json=body)
        assert refusal(answer)[:3] == (429, "requests", "rate_limit_exceeded")
        assert "limited to 2 requests at once; this asks for 3" in answer.json()["error"]["message"]
    assert server.engine.requests == []
    assert http.post("/v1/completions", json={**TEXT, "prompt": ["a", "b"]}).status_code == 200


def test_an_adapter_is_limited_whoever_calls(server: Server, http: httpx.Client) -> None:
    body = {**TEXT, "n": 4}
    for name in ("acme", "reader"):
        answer = http.post("/v1/completions", json={**body, "model": "shared"}, headers=headers(name))
        assert refusal(answer)[:3] == (429, "requests", "rate_limit_exceeded")
        assert "The model 'shared' is limited to 3 requests at once" in answer.json()["error"]["message"]
    assert (
        http.post("/v1/completions", json={**body, "model": "acme-legal"}, headers=headers("acme")).status_code == 200
    )


def test_a_full_server_refuses_at_once_and_says_when_to_come_again(server: Server, http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={**TEXT, "n": 21}, headers=headers("operator"))
    assert answer.status_code == answer.json()["error"]["code"] == 503
    assert answer.headers["retry-after"] == "1"
    assert server.engine.requests == []


def test_tokens_of_a_minute_run_out_and_the_answer_says_for_how_long(server: Server, http: httpx.Client) -> None:
    http.headers.update(headers("poor"))
    assert http.post("/v1/completions", json={"prompt": [5] * 33, "max_tokens": 30}).status_code == 200
    status, kind, code, retry_after = refusal(http.post("/v1/completions", json=TEXT))
    assert (status, kind, code) == (429, "tokens", "rate_limit_exceeded")
    assert 1 <= int(retry_after) <= 4
    assert http.get("/v1/models").status_code == 200
