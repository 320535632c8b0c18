"""The wall clock may jump, forward and back. It tells people when something was; nothing waits or ends by it."""

import ast
import time
from pathlib import Path

import pytest

from ray_lora.adapter import AdapterManifest
from ray_lora.config import EngineConfig
from ray_lora.engine.adapter_manager import AdapterManager
from ray_lora.errors import RateLimitError
from ray_lora.request import GenerateRequest
from ray_lora.serve.admission import Admission
from ray_lora.serve.request_record import RequestRecord
from ray_lora.tenant import Limits, Tenant

PACKAGE = Path(__file__).parents[1] / "ray_lora"
DAY_S = 24 * 3600.0

READS_IT_FOR = {
    "adapters/store.py": "the age of an abandoned download of another process, whose clock is not known",
    "engine/adapter_manager.py": "when an adapter was last used, as it is listed and remembered between runs",
    "serve/adapter_registry.py": "a file's name",
    "serve/openai_answers.py": "`created`",
    "serve/prometheus_text.py": "the value of `vllm:lora_requests_info`, which is a date",
    "serve/request_record.py": "where a trace's spans lie",
    "serve/served_model.py": "`created`",
}


def test_no_other_file_reads_the_wall_clock() -> None:
    readers = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case (
                    ast.Attribute(value=ast.Name(id="time"), attr="time" | "time_ns")
                    | ast.Attribute(attr="now" | "utcnow" | "today")
                    | ast.ImportFrom(module="time" | "datetime", names=[ast.alias(name="time" | "time_ns" | "date")])
                ):
                    readers.add(str(path.relative_to(PACKAGE)))
    assert readers == set(READS_IT_FOR)


@pytest.fixture(params=[DAY_S, -DAY_S], ids=["forward", "back"])
def jumps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a day each time that somebody looks."""
    num_looks = 0

    def jumped() -> float:
        nonlocal num_looks
        num_looks += 1
        return 1.7e9 + num_looks * float(request.param)

    monkeypatch.setattr(time, "time", jumped)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumped() * 1e9))


@pytest.mark.usefixtures("jumps")
def test_a_request_takes_as_long_as_it_takes() -> None:
    told: list[RequestRecord] = []
    with RequestRecord(GenerateRequest(prompt=[5]), told.append):
        time.sleep(0.01)
    assert 0.01 <= (told[0].end_ns - told[0].begin_ns) / 1e9 < DAY_S / 2


@pytest.mark.usefixtures("jumps")
def test_the_tokens_of_a_minute_come_back_with_time_and_not_with_a_date() -> None:
    tenant = Tenant(name="acme", limits=Limits(tokens_per_minute=60))
    admission = Admission(EngineConfig(model="/m/base"))
    request = GenerateRequest(prompt=[5] * 90)
    with admission.enter(tenant, request):
        for _ in range(3):
            with pytest.raises(RateLimitError) as caught:
                admission.check(tenant, None, 1)
            assert caught.value.retry_after == pytest.approx(30, abs=2)


@pytest.mark.usefixtures("jumps")
def test_the_least_recently_used_adapter_gives_way_whatever_the_date_of_its_use() -> None:
    adapters = AdapterManager(num_pages=2, max_resident=2, max_rank=16, now=time.time)
    for name in ("a", "b", "c"):
        manifest = AdapterManifest(name, "/", "/", 16, ("q_proj",), 1, 1)
        adapters.register(name, manifest)
    for name in ("a", "b", "a", "c"):
        version = adapters.get(name)
        adapters.mark_used(name)
        adapters.hold(version)
        adapters.activate(version)
        adapters.deactivate(version)
        adapters.let_go(version)
    assert adapters.resident == ("a", "c")
