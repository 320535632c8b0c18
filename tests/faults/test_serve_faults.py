"""A process of Ray Serve's dies under traffic, or the application is upgraded: no token is wrong, and all heals itself.

Nothing is lost but the streams that have begun on what dies, and with Serve's own HTTP side what is on its way there.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from ray import serve

from ray_lora.config import EngineConfig
from tests.faults.served_app import App, deploy, processes, ranks, served, wait_for
from tests.faults.traffic import Question, Report, Traffic, learn
from tests.tiny import make_adapter, make_checkpoint, random_prompts

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

NAMES = ("a0", "a1", "a2")
NUM_TOKENS = 60
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
    with served(config.model_copy(update={"tensor_parallel_size": size}), num_replicas) as app:
        for name in NAMES:
            app.load(name, config.model_path.parent / name).raise_for_status()
        yield app


@pytest.fixture(scope="module")
def questions(app: App) -> list[Question]:
    return learn(app.url, ["base", *NAMES], random_prompts(2, 320, longest=30), NUM_TOKENS)


@pytest.fixture
def traffic(app: App, questions: list[Question]) -> Iterator[Traffic]:
    """That has begun; afterwards everything is as before."""
    before = held()
    with Traffic(app.url, questions) as traffic:
        traffic.wait_for_answers(16)
        yield traffic
    wait_for(lambda: app.get("/ready").status_code == 200 and held() == before, HEALED_S, "all to be as before")


def held() -> list[set[str]]:
    """The adapters of every replica, as it says itself."""
    try:
        answers = serve.get_deployment_handle("LLMReplica", "faults").broadcast("list_adapters").results(timeout_s=30)
    except Exception:
        return []
    return [{info.name for info in infos} for infos in answers]


def replicas() -> list[psutil.Process]:
    return processes("ray::ServeReplica:faults:LLMReplica")


def kill(process: psutil.Process, traffic: Traffic) -> None:
    traffic.mark_fault()
    os.kill(process.pid, signal.SIGKILL)


def check(report: Report, tell: Tell) -> None:
    tell(report)
    assert report.num_wrong == 0
    assert report.num_lost == 0
    assert report.num_failed_unstreamed == 0


@pytest.mark.parametrize("app", [TWO, ONE], indirect=True)
def test_a_killed_replica_breaks_the_streams_that_have_begun_there_and_nothing_else(
    app: App, traffic: Traffic, tell: Tell
) -> None:
    kill(replicas()[0], traffic)
    traffic.wait_until_steady(HEALED_S)
    check(traffic.report, tell)


@pytest.mark.parametrize("app", [TWO_OF_TWO], indirect=True)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_breaks_the_streams_of_its_replica_that_have_begun_and_nothing_else(
    app: App, traffic: Traffic, victim: int, tell: Tell
) -> None:
    kill(ranks()[victim], traffic)
    traffic.wait_until_steady(HEALED_S)
    check(traffic.report, tell)


@pytest.mark.parametrize("app", [TWO], indirect=True)
def test_a_killed_controller_harms_no_request(app: App, traffic: Traffic, tell: Tell) -> None:
    (controller,) = processes("ray::ServeController")
    kill(controller, traffic)
    wait_for(lambda: processes("ray::ServeController"), HEALED_S, "a controller")
    traffic.wait_until_steady(HEALED_S)
    check(traffic.report, tell)
    assert traffic.report.num_broken == 0


@pytest.mark.parametrize("app", [TWO], indirect=True)
def test_a_killed_directory_harms_no_request(app: App, traffic: Traffic, tell: Tell) -> None:
    kill(processes("ray::ServeReplica:faults:AdapterDirectory")[0], traffic)
    traffic.wait_until_steady(HEALED_S)
    check(traffic.report, tell)
    assert traffic.report.num_broken == 0


@pytest.mark.parametrize("app", [TWO], indirect=True)
@pytest.mark.parametrize("title", ["ray::ServeReplica:faults:Ingress", "ray::ProxyActor"])
def test_a_killed_http_side_loses_what_is_under_way_and_is_back(
    app: App, traffic: Traffic, title: str, tell: Tell
) -> None:
    kill(processes(title)[0], traffic)
    traffic.wait_until_steady(HEALED_S)
    tell(traffic.report)
    assert traffic.report.num_wrong == 0


@pytest.mark.parametrize("app", [TWO], indirect=True)
def test_a_rolling_upgrade_harms_no_request(app: App, traffic: Traffic, config: EngineConfig, tell: Tell) -> None:
    before = {process.pid for process in replicas()}
    traffic.mark_fault()
    begin = time.monotonic()
    deploy(config.model_copy(update={"max_num_seqs": 32}), num_replicas=2)
    tell(f"upgraded in {time.monotonic() - begin:.1f} s")
    traffic.wait_until_steady(HEALED_S)
    wait_for(lambda: not before & {process.pid for process in replicas()}, HEALED_S, "the old replicas to end")
    check(traffic.report, tell)
    assert traffic.report.num_broken == 0
