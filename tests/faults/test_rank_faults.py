"""A rank dies, stops or runs out of memory under traffic: no token is wrong, and the service heals by itself."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.conftest import NUM_TOKENS, TP_SIZE
from tests.faults.served_app import App, ranks, wait_for
from tests.faults.traffic import Traffic, learn
from tests.tiny import expected_tokens, make_adapter

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

NOTICED_S = 5.0
STOPPED_S = 20.0
PROMPT = [5, 6, 7]

Tell = Callable[[object], None]


def test_a_rank_that_stops_turns_health_and_ready_and_is_replaced_or_goes_on(
    app: App, traffic: Traffic, tell: Tell
) -> None:
    victim = ranks()[1]
    traffic.mark_fault()
    victim.suspend()
    goes_on = threading.Timer(STOPPED_S, lambda: victim.is_running() and victim.resume())
    goes_on.start()

    def turn(path: str) -> float:
        return wait_for(lambda: app.get(path).status_code == 503, 30, "a 503")

    with ThreadPoolExecutor(2) as pool:
        health_s, ready_s = pool.map(turn, ("/health", "/ready"))
    tell(f"/health turned after {health_s:.1f} s, /ready after {ready_s:.1f} s")
    goes_on.join()
    traffic.wait_until_steady(120)
    tell("the ranks were replaced" if victim not in ranks() else "the ranks went on")
    tell(traffic.report)
    app.check_healed(traffic.report)
    assert max(health_s, ready_s) < NOTICED_S


def test_a_rank_that_runs_out_of_memory_in_a_step_is_replaced(
    app: App, store: Path, traffic: Traffic, tell: Tell
) -> None:
    traffic.mark_fault()
    (store / "fault").write_text("1 step out-of-memory")
    traffic.wait_until_steady(120)
    tell(traffic.report)
    app.check_healed(traffic.report)
    assert "MemoryError: no room" in (traffic.report.last_message or "")


@pytest.mark.parametrize("point", ["0 read", "1 prepare", "0 barrier", "1 check", "1 commit"])
def test_a_rank_killed_while_an_adapter_is_loaded_is_replaced_and_the_load_did_happen_or_did_not(
    point: str, app: App, store: Path, checkpoint: Path, traffic: Traffic, tell: Tell, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "new", checkpoint, 7)
    traffic.mark_fault()
    (store / "fault").write_text(f"{point} {'die-soon' if 'commit' in point else 'die'}")
    loaded = app.load("new", adapter)
    traffic.wait_until_steady(120)
    tell(traffic.report)
    app.check_healed(traffic.report)
    tell(f"the load was answered with {loaded.status_code}")
    assert loaded.status_code in (200, 503), loaded.text
    if loaded.status_code == 503:
        assert loaded.json()["error"]["type"] == "ServiceUnavailableError"
        assert "new" not in app.adapters
        app.load("new", adapter).raise_for_status()
    assert tokens_of(app, "new") == expected_tokens(checkpoint, adapter, [PROMPT], NUM_TOKENS)[0]
    app.unload("new").raise_for_status()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("0 inspect out-of-memory", "rank 0 could not read the adapter: MemoryError: no room"),
        ("0 read out-of-memory", "rank 0 could not read the adapter: MemoryError: no room"),
        ("1 prepare fail", "rank 1 cannot hold it"),
        ("1 check fail", "rank 1 MemoryError: no room"),
    ],
)
def test_a_rank_without_memory_for_a_load_refuses_it_and_goes_on(
    fault: str, reason: str, app: App, store: Path, checkpoint: Path, traffic: Traffic, tell: Tell, tmp_path: Path
) -> None:
    before = ranks()
    adapter = make_adapter(tmp_path / "new", checkpoint, 7)
    traffic.mark_fault()
    (store / "fault").write_text(fault)
    loaded = app.load("new", adapter)
    traffic.wait_until_steady(60)
    message = loaded.json()["error"]["message"]
    tell(f"the load was answered with {loaded.status_code}: {message}; {traffic.report}")
    assert reason in message
    app.check_healed(traffic.report)
    assert traffic.report.num_answered == traffic.report.num_sent, "nobody else is touched"
    assert ranks() == before
    app.load("new", adapter).raise_for_status()
    app.unload("new").raise_for_status()


@pytest.mark.parametrize("victim", range(TP_SIZE))
def test_a_rank_killed_while_decoding_is_replaced(victim: int, app: App, traffic: Traffic, tell: Tell) -> None:
    traffic.mark_fault()
    os.kill(ranks()[victim].pid, signal.SIGKILL)
    traffic.wait_until_steady(120)
    tell(traffic.report)
    app.check_healed(traffic.report)


def tokens_of(app: App, model: str) -> list[int]:
    (question,) = learn(app.url, [model], [PROMPT], NUM_TOKENS)
    return question.tokens
