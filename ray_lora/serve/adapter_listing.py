"""The adapters of several replicas as one list."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ray_lora.adapter import AdapterInfo, Tier

_TIERS: tuple[Tier, ...] = ("device", "host", "disk")


def merged(replicas: Iterable[Sequence[AdapterInfo]]) -> list[AdapterInfo]:
    """Every name once, in the order of the first replica that has it: its nearest tier, and the sum of its use."""
    infos: dict[str, AdapterInfo] = {}
    for replica in replicas:
        for info in replica:
            infos[info.name] = _both(infos[info.name], info) if info.name in infos else info
    return list(infos.values())


def _both(one: AdapterInfo, other: AdapterInfo) -> AdapterInfo:
    return replace(
        one,
        tier=min(one.tier, other.tier, key=_TIERS.index),
        num_running=one.num_running + other.num_running,
        num_waiting=one.num_waiting + other.num_waiting,
        num_loads=one.num_loads + other.num_loads,
        num_page_ins=one.num_page_ins + other.num_page_ins,
        last_used=max((each.last_used for each in (one, other) if each.last_used is not None), default=None),
    )
