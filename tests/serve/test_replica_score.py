"""Where a request goes, case by case: the first of each pair is cheaper."""

import pytest

from ray_lora.serve.replica_score import AWAY, DISTANCE, Candidate, cost

IDLE = Candidate(load=0.0)

CASES = {
    "the adapter is nearer": (Candidate(0.1, place="device"), Candidate(0.1, place="host")),
    "host memory is nearer than a load under way": (Candidate(0.1, place="host"), Candidate(0.1, place="loading")),
    "a load under way is joined": (Candidate(0.1, place="loading"), Candidate(0.1, place="disk")),
    "resident and half full, or idle": (Candidate(0.5, place="device"), IDLE),
    "resident with a queue, or idle": (IDLE, Candidate(1.5, place="device")),
    "a base request takes the shorter queue": (Candidate(0.2, place=None), Candidate(0.3, place=None)),
    "a burst stays where it was sent first": (Candidate(0.9, place="loading"), Candidate(0.0, is_away=True)),
    "home is full, so a hot adapter spreads": (
        Candidate(0.2, place="disk", is_away=True),
        Candidate(1.6, place="device"),
    ),
    "home has cooled down, so it comes back": (
        Candidate(0.4, place="device"),
        Candidate(0.0, place="device", is_away=True),
    ),
    "an adapter without a home goes to whom few live with": (
        Candidate(0.3, share_of_homes=0.3),
        Candidate(0.2, share_of_homes=0.7),
    ),
    "the cache is full": (Candidate(0.5, kv_cache_usage=0.2), Candidate(0.2, kv_cache_usage=0.95)),
    "a half empty cache does not matter": (Candidate(0.1, kv_cache_usage=0.5), Candidate(0.2, kv_cache_usage=0.1)),
    "the prefix is there": (Candidate(0.2, place=None), Candidate(0.1, place=None, lacks_prefix=True)),
    "a prefix is worth less than a place": (
        Candidate(0.1, place="device", lacks_prefix=True),
        Candidate(0.1, place="loading"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_cheaper_of_two_replicas(name: str) -> None:
    better, worse = CASES[name]
    assert cost(better) < cost(worse)


def test_a_request_leaves_home_only_for_as_much_as_it_saves() -> None:
    bound = AWAY + DISTANCE["disk"]
    away = cost(Candidate(load=0.0, is_away=True))
    assert (
        cost(Candidate(load=bound - 0.01, place="device")) < away < cost(Candidate(load=bound + 0.01, place="device"))
    )
