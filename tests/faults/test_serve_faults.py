"""A process of Ray Serve's dies under traffic, or the application is upgraded: no token is wrong, and all heals itself.

Nothing is lost but the streams that have begun on what dies, and with Serve's own HTTP side what is on its way there.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from ray_lora.config import EngineConfig
from tests.faults.served_app import App, deploy, processes, ranks, served, wait_for
from tests.faults.traffic import Question, Report, Traffic, learn
from tests.tiny import make_adapter, make_checkpoint, random_prompts

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

NAMES = ("a0", "a1", "a2")
NUM_TOKENS = 150
HEALED_S = 180.0

ONE = pytest.param((1, 1), id="one-replica")
TWO = pytest.param((2, 1), id="two-replicas")
TWO_OF_TWO = pytest.param((2, 2), id="two-replicas-of-two-ranks")
"""Replicas, and ranks of each."""

Tell = Callable[[object], None]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    directory = tmp_path_factory.mktemp("faults")
    checkpoint = make_checkpoint(directory / "model", "llama", num_attention_heads=4, num_key_value_heads=2)
    for seed, name in enumerate(NAMES):
        make_adapter(directory / name, checkpoint, seed)
    return EngineConfig(
        model=str(checkpoint),
        served_model_name="base",
        num_threads=1,
        kv_cache_memory_bytes=1 << 23,
        adapter_store_dir=str(directory / "store"),
        allow_runtime_lora_updating=True,
    )


@pytest.fixture(scope="module")
def app(request: pytest.FixtureRequest, config: EngineConfig) -> Iterator[App]:
    """With the adapters loaded at run time, so that nobody but the application itself can bring them back."""
    num_replicas, size = request.param
    registry = config.model_path.parent / "registry.db" if num_replicas == 1 else None
    changes = {"tensor_parallel_size": size, "lora_registry_path": registry and str(registry)}
    with served(config.model_copy(update=changes), num_replicas) as app:
        for name in NAMES:
            app.load(name, config.model_path.parent / name).raise_for_status()
        yield app


@pytest.fixture(scope="module")
def questions(app: App) -> list[Question]:
    return learn(app.url, ["base", *NAMES], random_prompts(2, 320, longest=30), NUM_TOKENS)


@pytest.fixture
def traffic(app: App, questions: list[Question]) -> Iterator[Traffic]:
    """That has begun."""
    with Traffic(app.url, questions) as traffic:
        traffic.wait_for_answers(16)
        yield traffic


def held() -> list[set[str]]:
    """The adapters of every replica, as it says itself."""
    try:
        answers = serve.get_deployment_handle("LLMReplica", "faults").broadcast("list_adapters").results(timeout_s=30)
    except (RayError, RayServeException, TimeoutError):  # one is dying, or none is there
        return []
    return [{info.name for info in infos} for infos in answers]


def replicas() -> list[psutil.Process]:
    return processes("ray::ServeReplica:faults:LLMReplica")


def num_retries(app: App) -> int:
    (line,) = re.findall(r"^ray_lora:request_retries_total{.*} (.*)$", app.get("/metrics").text, re.MULTILINE)
    return int(float(line))


def kill(process: psutil.Process, traffic: Traffic) -> None:
    traffic.mark_fault()
    os.kill(process.pid, signal.SIGKILL)


def see_through(app: App, traffic: Traffic, tell: Tell) -> Report:
    """Keep asking until every replica is there and has its adapters, and a while longer."""
    healed_s = wait_for(
        lambda: held() == [set(NAMES)] * app.num_replicas and app.get("/ready").status_code == 200, HEALED_S, "health"
    )
    traffic.wait_for_answers(32)
    traffic.wait_until_steady(HEALED_S)
    report = traffic.report
    tell(f"{report}; {num_retries(app)} retried so far; all replicas with all adapters {healed_s:.1f} s")
    assert report.num_wrong == 0
    return report


@pytest.mark.parametrize("app", [TWO, ONE], indirect=True)
def test_a_killed_replica_breaks_the_streams_that_have_begun_there_and_nothing_else(
    app: App, traffic: Traffic, tell: Tell
) -> None:
    kill(replicas()[0], traffic)
    report = see_through(app, traffic, tell)
    assert (report.num_lost, report.num_failed_unstreamed) == (0, 0)


@pytest.mark.parametrize("app", [TWO_OF_TWO], indirect=True)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_breaks_the_streams_of_its_replica_that_have_begun_and_nothing_else(
    app: App, traffic: Traffic, victim: int, tell: Tell
) -> None:
    kill(ranks()[victim], traffic)
    report = see_through(app, traffic, tell)
    assert (report.num_lost, report.num_failed_unstreamed) == (0, 0)


@pytest.mark.parametrize("app", [TWO], indirect=True)
@pytest.mark.parametrize("title", ["ray::ServeController", "ray::ServeReplica:faults:AdapterDirectory"])
def test_no_request_notices_that_the_controller_or_the_directory_is_killed(
    app: App, traffic: Traffic, title: str, tell: Tell
) -> None:
    (victim,) = processes(title)
    kill(victim, traffic)
    wait_for(lambda: processes(title) not in ([], [victim]), HEALED_S, "another one")
    report = see_through(app, traffic, tell)
    assert report.failures == {}


@pytest.mark.parametrize("app", [TWO], indirect=True)
@pytest.mark.parametrize("title", ["ray::ServeReplica:faults:Ingress", "ray::ProxyActor"])
def test_a_killed_http_side_loses_what_is_under_way_and_is_back(
    app: App, traffic: Traffic, title: str, tell: Tell
) -> None:
    (victim,) = processes(title)
    kill(victim, traffic)
    wait_for(lambda: processes(title) not in ([], [victim]), HEALED_S, "another one")
    see_through(app, traffic, tell)


@pytest.mark.parametrize("app", [TWO, ONE], indirect=True)
def test_no_request_notices_an_upgrade(app: App, traffic: Traffic, tell: Tell) -> None:
    """One replica alone takes its adapters with it, unless a file remembers them."""
    before = {process.pid for process in replicas()}
    traffic.mark_fault()
    begin = time.monotonic()
    deploy(app.config.model_copy(update={"max_num_seqs": 32}), app.num_replicas)
    tell(f"upgraded in {time.monotonic() - begin:.1f} s")
    wait_for(lambda: not before & {process.pid for process in replicas()}, HEALED_S, "the old replicas to end")
    report = see_through(app, traffic, tell)
    assert report.failures == {}
