"""Several tenants on a real server with the demo model, as OpenAI's own client sees it."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from click.testing import CliRunner
from openai import OpenAI

from benchmarks.server import serving
from ray_lora.__main__ import main
from tests.e2e.conftest import ADAPTERS, MODEL

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
LONG = "The sea, the ship, the captain and the crew. " * 20


class Tenants:
    """A server, and keys made for it by the command that makes them."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "keys.yaml"
        self.file.touch()
        self.url = ""
        self._keys: dict[str, str] = {}

    def add(self, name: str, *options: str, **limits: int) -> None:
        result = CliRunner().invoke(main, ["key", "new", name, *options])
        assert result.exit_code == 0
        (entry,) = yaml.safe_load(result.stdout)
        entries = yaml.safe_load(self.file.read_text()) or []
        self.file.write_text(yaml.safe_dump([*entries, entry | {"limits": limits}]))
        self._keys[name] = re.findall(r"sk-\S+", result.stderr)[0]

    def remove(self, name: str) -> None:
        entries = yaml.safe_load(self.file.read_text())
        self.file.write_text(yaml.safe_dump([entry for entry in entries if entry["name"] != name]))

    def client(self, name: str) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=self._keys.get(name, name), max_retries=0, timeout=60)

    def post(self, name: str, path: str, **body: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self._keys[name]}"}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    directory = tmp_path_factory.mktemp("tenants")
    tenants = Tenants(directory)
    tenants.add("operator", "--may-load")
    tenants.add("acme", "--adapters", "pirate,acme-*", "--may-load")
    tenants.add("globex", "--adapters", "json")
    tenants.add("busy", max_concurrent_requests=2)
    tenants.add("poor", tokens_per_minute=100)
    with serving(
        directory,
        model=str(MODEL),
        served_model_name="smollm2",
        max_model_len=1024,
        max_num_seqs=4,
        kv_cache_memory_bytes=1 << 28,
        lora_modules={name: str(ADAPTERS / name) for name in ("json", "pirate")},
        adapter_store_dir=str(directory / "store"),
        api_keys_file=str(tenants.file),
        max_queued_requests=12,
        request_timeout_s=30,
        queue_timeout_s=10,
    ) as url:
        tenants.url = url
        yield tenants


def ask(client: OpenAI, model: str) -> str:
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_completion_tokens=12)
    return answer.choices[0].message.content or ""


def test_without_a_known_key_there_is_nothing(tenants: Tenants) -> None:
    for call in (lambda client: ask(client, "smollm2"), lambda client: client.models.list()):
        with tenants.client("sk-wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
            call(client)
        assert (caught.value.code, caught.value.type) == ("invalid_api_key", "invalid_request_error")
    assert httpx.get(f"{tenants.url}/v1/models").status_code == 401
    assert httpx.get(f"{tenants.url}/metrics").status_code == 401


def test_each_tenant_lists_and_uses_its_own(tenants: Tenants) -> None:
    seen = {}
    for name in ("operator", "acme", "globex"):
        with tenants.client(name) as client:
            seen[name] = [model.id for model in client.models.list()]
            answers = {model: ask(client, model) for model in seen[name]}
            assert len(set(answers.values())) == len(answers)
    assert seen == {
        "operator": ["smollm2", "json", "pirate"],
        "acme": ["smollm2", "pirate"],
        "globex": ["smollm2", "json"],
    }


def test_a_foreign_adapter_and_an_unknown_one_get_the_same_answer(tenants: Tenants) -> None:
    bodies = []
    with tenants.client("acme") as client:
        for model in ("json", "nobody", "acme-none"):
            with pytest.raises(openai.NotFoundError) as caught:
                ask(client, model)
            bodies.append((caught.value.status_code, str(caught.value.body).replace(model, "NAME")))
            with pytest.raises(openai.NotFoundError):
                client.models.retrieve(model)
    assert bodies[0] == bodies[1] == bodies[2]


def test_only_a_key_that_may_load_does_and_only_under_its_names(tenants: Tenants) -> None:
    path = str(ADAPTERS / "emoji")
    assert tenants.post("globex", "/v1/load_lora_adapter", lora_name="json2", lora_path=path).status_code == 403
    for name in ("json", "nobody"):
        refused = tenants.post("acme", "/v1/load_lora_adapter", lora_name=name, lora_path=path)
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "PermissionDeniedError")
    assert tenants.post("acme", "/v1/load_lora_adapter", lora_name="acme-emoji", lora_path=path).status_code == 200
    with tenants.client("acme") as client:
        assert [model.id for model in client.models.list()] == ["smollm2", "pirate", "acme-emoji"]
    with tenants.client("globex") as client:
        assert [model.id for model in client.models.list()] == ["smollm2", "json"]
    assert tenants.post("acme", "/v1/unload_lora_adapter", lora_name="acme-emoji").status_code == 200


def test_what_one_tenant_has_asked_is_not_cached_for_another(tenants: Tenants) -> None:
    def num_cached(name: str, **fields: Any) -> int:
        answer = tenants.post(name, "/v1/completions", model="smollm2", prompt=LONG, max_tokens=1, **fields)
        details = answer.json()["usage"]["prompt_tokens_details"]
        return details["cached_tokens"] if details else 0

    assert num_cached("acme") == 0
    assert num_cached("acme") > 100
    assert num_cached("globex") == 0
    assert num_cached("globex", cache_salt="acme") == 0
    assert num_cached("acme", cache_salt="pepper") == 0
    assert num_cached("acme", cache_salt="pepper") > 100


def test_a_key_over_its_limits_gets_429_while_others_are_served(tenants: Tenants) -> None:
    fields: dict[str, Any] = {"model": "smollm2", "prompt": "Count:", "max_tokens": 300}
    with tenants.client("busy") as busy, tenants.client("acme") as other:
        running = [busy.completions.create(**fields, stream=True, extra_body={"ignore_eos": True}) for _ in range(2)]
        for stream in running:
            next(iter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            ask(busy, "smollm2")
        assert (caught.value.type, caught.value.code) == ("requests", "rate_limit_exceeded")
        assert caught.value.response.headers["retry-after"] == "1"
        assert ask(other, "smollm2").startswith("The capital of France is Paris")
        for stream in running:
            assert list(stream)[-1].choices[0].finish_reason == "length"
        assert ask(busy, "smollm2")


def test_a_flood_is_refused_at_once_beyond_what_is_in_time_and_harms_nobody(tenants: Tenants) -> None:
    def flood(index: int) -> httpx.Response:
        return tenants.post(
            "acme", "/v1/completions", model="smollm2", prompt=[index + 5], max_tokens=40, ignore_eos=True
        )

    with ThreadPoolExecutor(60) as pool:
        answers = list(pool.map(flood, range(60)))
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 503]
    assert len(served) + len(refused) == 60
    assert len(served) >= 4, "as many as run at once"
    assert refused
    assert all(answer.headers["retry-after"] == "1" for answer in refused)
    assert all(answer.json()["usage"]["completion_tokens"] == 40 for answer in served)
    assert httpx.get(f"{tenants.url}/health").status_code == 200
    with tenants.client("acme") as client:
        assert ask(client, "smollm2").startswith("The capital of France is Paris")


def test_tokens_of_a_minute_run_out_and_come_back(tenants: Tenants) -> None:
    with tenants.client("poor") as client:
        client.completions.create(model="smollm2", prompt=[5] * 95, max_tokens=10)
        with pytest.raises(openai.RateLimitError) as caught:
            ask(client, "smollm2")
        assert (caught.value.type, caught.value.code) == ("tokens", "rate_limit_exceeded")
        time.sleep(int(caught.value.response.headers["retry-after"]))
        assert ask(client, "smollm2")


def test_a_key_is_added_and_revoked_while_the_server_runs(tenants: Tenants) -> None:
    tenants.add("late")
    with tenants.client("late") as client:
        assert "pirate" in [model.id for model in client.models.list()]
        tenants.remove("late")
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
