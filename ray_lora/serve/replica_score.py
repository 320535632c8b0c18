"""How well a replica suits a request: a cost in units of one replica's whole capacity, the lowest wins.

| cost | |
| --- | --- |
| requests under way / requests in one step | 1 is a full replica, more is a queue |
| where its adapter is | nothing on the device, more for each place farther away |
| another replica is the adapter's home | so that an adapter has one home, and goes elsewhere only from a full one |
| KV cache in use, above half | a replica whose cache is full will preempt |
| share of all homes that it has | so that adapters which are nowhere yet are spread evenly |
| another replica holds its prefix | a saving of prefill, worth less than an adapter |

Leaving a home that loads an adapter, for a replica that would load it too, costs 1: the burst for a cold adapter goes
to one replica until that is full. Leaving for one that has it costs half of that, which brings a hot adapter to a
second replica and back.
"""

from dataclasses import dataclass
from typing import Literal

Place = Literal["device", "host", "loading", "disk"]
"""Where a replica has an adapter; `loading` is on its way from disk."""

DISTANCE: dict[Place, float] = {"device": 0.0, "host": 0.15, "loading": 0.3, "disk": 0.8}
AWAY = 0.5
CROWD = 0.5
PREFIX = 0.25


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of one replica when a request comes."""

    load: float
    """Requests under way, as a share of those in one step."""
    kv_cache_usage: float = 0.0
    place: Place | None = "disk"
    """Of the request's adapter; None for the base model, which is everywhere."""
    is_away: bool = False
    """Another replica is where this adapter's requests go."""
    share_of_homes: float = 0.0
    """Of all adapters, those whose home it is; 0 for one that has a home, or is somewhere."""
    lacks_prefix: bool = False
    """Another replica has computed how this prompt begins."""


def cost(candidate: Candidate) -> float:
    """What a request costs there."""
    return (
        candidate.load
        + max(0.0, 2 * candidate.kv_cache_usage - 1)
        + (0.0 if candidate.place is None else DISTANCE[candidate.place])
        + AWAY * candidate.is_away
        + CROWD * candidate.share_of_homes
        + PREFIX * candidate.lacks_prefix
    )
