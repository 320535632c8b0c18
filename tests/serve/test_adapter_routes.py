"""Models, adapters, health and metrics over HTTP, with vLLM's answers."""

import json
from pathlib import Path

import httpx
import pytest
from conftest import Server
from openai import OpenAI


def load(http: httpx.Client, path: Path, name: str = "pirate", inplace: bool = False) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), "load_inplace": inplace}
    return http.post("/v1/load_lora_adapter", json=body)


def test_a_loaded_adapter_is_listed_under_its_base(
    http: httpx.Client, openai_client: OpenAI, adapter_dir: Path
) -> None:
    answer = load(http, adapter_dir)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'pirate' added successfully.")
    base, adapter = openai_client.models.list().data
    assert (base.id, base.model_extra["parent"], base.model_extra["max_model_len"]) == ("smollm2", None, 64)
    assert (adapter.id, adapter.model_extra["parent"]) == ("pirate", "smollm2")
    assert (adapter.model_extra["root"], adapter.model_extra["version"]) == (str(adapter_dir), "v8")
    assert openai_client.models.retrieve("smollm2:pirate").id == "pirate"
    assert openai_client.models.retrieve("smollm2").id == "smollm2"


def test_an_adapter_is_shown_with_its_version_and_tier(http: httpx.Client, adapter_dir: Path) -> None:
    empty = http.get("/v1/adapters").json()
    assert (empty["object"], empty["data"], empty["tiers"][0]["device"]["num_bytes"]) == ("list", [], 0)
    load(http, adapter_dir)
    shown = http.get("/v1/adapters/pirate").json()
    listed = http.get("/v1/adapters").json()
    assert listed["data"] == [shown]
    use = {"num_adapters": 1, "max_adapters": 16, "num_bytes": 1000, "max_bytes": 24000}
    assert listed["tiers"] == [{"device": use}]
    assert shown == {
        "name": "pirate",
        "version": "v8",
        "source": str(adapter_dir),
        "rank": 8,
        "num_pages": 1,
        "num_bytes": 500,
        "tier": "device",
        "pinned": False,
        "weight": 1.0,
        "num_running": 0,
        "num_waiting": 0,
        "num_loads": 1,
        "num_page_ins": 1,
        "last_used": None,
    }
    answer = http.get("/v1/adapters/nobody")
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "name")


def test_an_adapter_is_pinned_and_unpinned(http: httpx.Client, adapter_dir: Path) -> None:
    load(http, adapter_dir)
    load(http, adapter_dir, "other")
    assert http.post("/v1/adapters/pirate/pin").json()["pinned"] is True
    refused = http.post("/v1/adapters/other/pin")
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "TooManyRequestsError")
    assert http.get("/v1/adapters/pirate").json()["pinned"] is True
    assert http.post("/v1/adapters/pirate/unpin").json()["pinned"] is False
    assert http.post("/v1/adapters/other/pin").status_code == 200
    assert http.post("/v1/adapters/nobody/pin").status_code == 404
    assert http.post("/v1/adapters/nobody/unpin").status_code == 404


def test_a_weight_is_set_and_shown(http: httpx.Client, adapter_dir: Path) -> None:
    load(http, adapter_dir)
    for weight in (2.5, 3):
        answer = http.post("/v1/adapters/pirate/weight", json={"weight": weight})
        assert (answer.status_code, answer.json()["weight"]) == (200, weight)
        assert http.get("/v1/adapters/pirate").json()["weight"] == weight
    assert http.post("/v1/adapters/nobody/weight", json={"weight": 2}).status_code == 404


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "weight"),
        ({"weight": 0}, "weight"),
        ({"weight": -1}, "weight"),
        ({"weight": 1001}, "weight"),
        ({"weight": "2"}, "weight"),
        ({"weight": None}, "weight"),
        ({"weigth": 2}, "weigth"),
    ],
)
def test_a_weight_that_is_none_is_refused_by_name(
    http: httpx.Client, adapter_dir: Path, body: dict[str, object], param: str
) -> None:
    load(http, adapter_dir)
    answer = http.post("/v1/adapters/pirate/weight", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert http.get("/v1/adapters/pirate").json()["weight"] == 1


def test_a_dry_run_tells_what_a_load_would_do_and_changes_nothing(http: httpx.Client, adapter_dir: Path) -> None:
    found = http.post("/v1/validate_lora_adapter", json={"lora_path": str(adapter_dir), "lora_name": "pirate"}).json()
    assert found == {
        "valid": True,
        "refusals": [],
        "version": "v8",
        "rank": 8,
        "modules": ["self_attn.q_proj"],
        "num_pages": 1,
        "num_bytes": 500,
        "device_bytes": 1000,
    }
    assert http.get("/v1/adapters").json()["data"] == []
    load(http, adapter_dir)
    taken = http.post("/v1/validate_lora_adapter", json={"lora_path": str(adapter_dir), "lora_name": "pirate"}).json()
    assert (taken["valid"], taken["refusals"]) == (False, [{"message": "the name is taken", "param": "lora_name"}])
    (adapter_dir / "adapter_config.json").write_text(json.dumps({"r": 8, "use_dora": True}))
    refused = http.post("/v1/validate_lora_adapter", json={"lora_path": str(adapter_dir)})
    assert refused.status_code == 200
    assert refused.json() == {
        "valid": False,
        "refusals": [{"message": "use_dora is not supported", "param": "use_dora"}],
    }
    missing = http.post("/v1/validate_lora_adapter", json={}).json()["error"]
    assert (missing["code"], missing["param"]) == (400, "lora_path")


def test_unloading_is_once_only(http: httpx.Client, adapter_dir: Path) -> None:
    load(http, adapter_dir)
    answer = http.post("/v1/unload_lora_adapter", json={"lora_name": "pirate"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'pirate' removed successfully.")
    answer = http.post("/v1/unload_lora_adapter", json={"lora_name": "pirate"})
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "NotFoundError"
    assert answer.json()["error"]["message"] == "The lora adapter 'pirate' cannot be found."
    assert http.post("/v1/completions", json={"model": "pirate", "prompt": "a"}).status_code == 404


def test_a_name_is_taken_unless_replaced_in_place(http: httpx.Client, server: Server, adapter_dir: Path) -> None:
    load(http, adapter_dir)
    assert load(http, adapter_dir).status_code == 200
    (adapter_dir / "adapter_config.json").write_text(json.dumps({"r": 16}))
    answer = load(http, adapter_dir)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "InvalidUserInput"
    assert "set 'load_inplace' to True" in answer.json()["error"]["message"]
    assert server.engine.adapters["pirate"].version == "v8"
    assert load(http, adapter_dir, inplace=True).status_code == 200
    assert server.engine.adapters["pirate"].version == "v16"


def test_of_two_writers_the_later_is_told(http: httpx.Client, server: Server, adapter_dir: Path) -> None:
    first = load(http, adapter_dir)
    assert first.headers["x-adapter-version"] == "v8"
    again = load(http, adapter_dir)
    assert (again.status_code, again.headers["x-adapter-version"]) == (200, "v8")
    assert again.text == "Success: LoRA adapter 'pirate' had this content already; nothing has changed."
    (adapter_dir / "adapter_config.json").write_text(json.dumps({"r": 16}))
    body = {"lora_name": "pirate", "lora_path": str(adapter_dir), "load_inplace": True}
    answer = http.post("/v1/load_lora_adapter", json={**body, "expected_version": "v7"})
    assert answer.status_code == 409
    assert (answer.json()["error"]["type"], answer.json()["error"]["param"]) == ("ConflictError", "expected_version")
    assert server.engine.adapters["pirate"].version == "v8"
    answer = http.post("/v1/load_lora_adapter", json={**body, "expected_version": "v8"})
    assert (answer.status_code, answer.headers["x-adapter-version"]) == (200, "v16")


@pytest.mark.parametrize("body", [{}, {"lora_name": "a"}, {"lora_path": "/a"}, {"lora_name": "", "lora_path": "/a"}])
def test_a_load_needs_name_and_path(http: httpx.Client, body: dict[str, str]) -> None:
    error = http.post("/v1/load_lora_adapter", json=body).json()["error"]
    assert (error["code"], error["type"]) == (400, "InvalidUserInput")
    assert error["message"] == "Both 'lora_name' and 'lora_path' must be provided."


def test_a_refused_adapter_names_the_field_of_its_config(http: httpx.Client, adapter_dir: Path) -> None:
    (adapter_dir / "adapter_config.json").write_text(json.dumps({"r": 8, "use_dora": True}))
    error = load(http, adapter_dir).json()["error"]
    assert (error["code"], error["type"], error["param"]) == (400, "InvalidUserInput", "use_dora")


def test_a_missing_path_is_not_found(http: httpx.Client, tmp_path: Path) -> None:
    error = load(http, tmp_path / "nowhere").json()["error"]
    assert (error["code"], error["type"], error["param"]) == (404, "NotFoundError", "lora_path")


def test_a_load_refuses_unknown_fields(http: httpx.Client, adapter_dir: Path) -> None:
    body = {"lora_name": "a", "lora_path": str(adapter_dir), "load_in_place": True}
    error = http.post("/v1/load_lora_adapter", json=body).json()["error"]
    assert error["message"] == "Unknown field 'load_in_place'; did you mean 'load_inplace'?"


def test_health_tells_of_a_dead_engine(http: httpx.Client, server: Server) -> None:
    assert (http.get("/health").status_code, http.get("/health").content) == (200, b"")
    server.engine.is_dead = True
    answer = http.get("/health")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "rank 1 is gone"


def test_ready_names_what_is_missing(http: httpx.Client, server: Server) -> None:
    answer = http.get("/ready")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "missing": []})
    server.engine.is_dead = True
    answer = http.get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "missing": ["rank 1 is gone"]})


def test_metrics_have_vllms_names(http: httpx.Client) -> None:
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#"))
    labels = '{engine="0",model_name="smollm2"}'
    assert float(lines[f"vllm:kv_cache_usage_perc{labels}"]) == 0.25
    assert float(lines[f"vllm:num_requests_running{labels}"]) == 0
    assert float(lines[f"vllm:num_requests_waiting{labels}"]) == 0
    assert float(lines[f"vllm:num_preemptions_total{labels}"]) == 3
    assert float(lines[f"vllm:prompt_tokens_total{labels}"]) == 40
    assert float(lines[f"vllm:generation_tokens_total{labels}"]) == 50
    assert float(lines[f"vllm:prefix_cache_queries_total{labels}"]) == 60
    assert f"vllm:prefix_cache_hits_total{labels}" in lines
    assert float(lines['vllm:request_success_total{engine="0",finished_reason="length",model_name="smollm2"}']) == 2
    info = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="pirate",waiting_lora_adapters=""}'
    assert float(lines[info]) > 1.7e9
    assert float(lines[f"ray_lora:lora_pages{labels}"]) == 24
    assert float(lines[f"ray_lora:lora_pages_free{labels}"]) == 20
