"""The router over replicas that are only what they tell of themselves."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve.request_router import RequestRouter

from ray_lora.request import GenerateRequest
from ray_lora.serve.replica_router import ReplicaRouter, RoutingStats

DEPLOYMENT = DeploymentID("LLMReplica", "llama")


class Replicas:
    """A router whose replicas are told by index; what is under way is counted as Serve does."""

    def __init__(self, num: int) -> None:
        self.router = ReplicaRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
        self.all = [SimpleNamespace(replica_id=ReplicaID(f"r{i}", DEPLOYMENT), routing_stats={}) for i in range(num)]
        self.keep(range(num))

    def keep(self, indices: Any) -> None:
        replicas: Any = {self.all[i].replica_id: self.all[i] for i in indices}
        self.router._replicas = replicas

    def tell(self, index: int, **stats: Any) -> None:
        told: RoutingStats = {"max_num_seqs": 4, **stats}  # type: ignore[typeddict-item]
        self.all[index].routing_stats = told

    def under_way(self, index: int, number: int) -> None:
        self.router.replica_queue_len_cache.update(self.all[index].replica_id, number)

    def choose(self, *args: Any, method: str = "submit", dead: tuple[str, ...] = ()) -> list[int]:
        """The order in which replicas are tried."""
        args = (*args, "ingress", 0, dead) if method == "submit" else args
        pending: Any = SimpleNamespace(args=args, metadata=SimpleNamespace(call_method=method))
        candidates: Any = list(self.router.curr_replicas.values())
        ranks = asyncio.run(self.router.choose_replicas(candidates, pending))
        return [self.all.index(replica) for rank in ranks for replica in rank]

    def send(self, adapter: str | None, prompt: tuple[int, ...] = (1, 2)) -> int:
        """Where a request is sent."""
        index = self.choose(GenerateRequest(prompt=prompt, adapter=adapter))[0]
        self.router.on_send_request(self.all[index].replica_id)
        return index


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> Replicas:
    monkeypatch.setattr(RequestRouter, "_update_router_queue_len_gauge", lambda *_, **__: None)
    replicas = Replicas(2)
    for index in range(2):
        replicas.tell(index)
    return replicas


def test_a_request_goes_where_its_adapter_is(replicas: Replicas) -> None:
    replicas.tell(1, device=["a"], host=["b"])
    replicas.tell(0, device=["c"], loading=["d"])
    assert [replicas.choose(GenerateRequest(prompt=(1,), adapter=name))[0] for name in "abcd"] == [1, 1, 0, 0]


def test_a_burst_for_a_cold_adapter_goes_to_one_replica(replicas: Replicas) -> None:
    assert len({replicas.send("cold") for _ in range(4)}) == 1


def test_a_hot_adapter_spreads_and_comes_back(replicas: Replicas) -> None:
    home = replicas.send("hot")
    chosen = Counter(replicas.send("hot", (number,)) for number in range(12))
    assert chosen[1 - home] > 2
    for index in range(2):
        replicas.under_way(index, 1)
        replicas.tell(index, device=["hot"])
    assert {replicas.send("hot", (100 + number,)) for number in range(2)} == {home}


def test_adapters_are_spread_evenly(replicas: Replicas) -> None:
    for number in range(64):
        replicas.send(f"adapter{number}", (number,))
        replicas.under_way(0, 0)
        replicas.under_way(1, 0)
    assert set(Counter(replicas.router._homes.values()).values()) == {32}


def test_the_home_of_an_adapter_may_die(replicas: Replicas) -> None:
    home = replicas.send("a")
    replicas.keep([1 - home])
    assert replicas.send("a") == 1 - home


def test_base_requests_take_the_shorter_queue_unless_the_prefix_is_near(replicas: Replicas) -> None:
    replicas.under_way(0, 2)
    prompt = tuple(range(40))
    assert replicas.send(None, prompt) == 1
    replicas.under_way(0, 0)
    replicas.under_way(1, 0)
    assert {replicas.choose(GenerateRequest(prompt=(*prompt, number)))[0] for number in range(20)} == {1}
    assert {replicas.choose(GenerateRequest(prompt=(number, *prompt)))[0] for number in range(20)} == {0, 1}
    assert {replicas.choose(GenerateRequest(prompt=prompt[:10]))[0] for _ in range(20)} == {0, 1}


def test_a_request_waits_rather_than_going_to_a_replica_whose_engine_is_dead(replicas: Replicas) -> None:
    replicas.tell(0, device=["a"])
    asked = GenerateRequest(prompt=(1,), adapter="a")
    assert replicas.choose(asked, dead=("r9",)) == [0, 1]
    assert replicas.choose(asked, dead=("r0",)) == [1]
    assert replicas.choose(asked, dead=("r0", "r1")) == []


def test_an_outbox_is_the_one_that_was_named(replicas: Replicas) -> None:
    assert replicas.choose("r1", "ingress", method="outbox") == [1]
    replicas.keep([0])
    assert replicas.choose("r1", "ingress", method="outbox") == [0], "it has stopped, and the call must end"


def test_replicas_that_have_told_nothing_yet_are_chosen_from(replicas: Replicas) -> None:
    replicas.all[0].routing_stats = replicas.all[1].routing_stats = {}
    assert sorted(replicas.choose(GenerateRequest(prompt=(1,), adapter="a"))) == [0, 1]
    assert sorted(replicas.choose("/path", method="inspect_adapter")) == [0, 1]
