"""The two process groups: which library each is of, in what order they are made, and how long each waits."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ray_lora.backends.base import Backend
from ray_lora.cluster.rank_groups import join_ranks, meeting_point
from ray_lora.config import EngineConfig


class Elsewhere(Backend):
    """A device whose ranks another library joins."""

    collective = "hccl"
    gathers_to_all = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, timedelta]]]:
    """The groups that are made, gloo's all of them, with the library that was asked for and the timeout."""
    calls: list[tuple[str, timedelta]] = []
    init, new = dist.init_process_group, dist.new_group

    def record_init(backend: str, *, timeout: timedelta, **rest: Any) -> None:
        calls.append((backend, timeout))
        init("gloo", timeout=timeout, **rest)

    def record_new(*, backend: str, timeout: timedelta) -> Any:
        calls.append((backend, timeout))
        return new(backend=backend, timeout=timeout)

    monkeypatch.setattr(dist, "init_process_group", record_init)
    monkeypatch.setattr(dist, "new_group", record_new)
    yield calls
    dist.destroy_process_group()


def test_the_device_joins_the_ranks_for_steps_and_gloo_for_loads(made: list[tuple[str, timedelta]]) -> None:
    config = EngineConfig.parse({"model": "m", "step_timeout_s": 7, "adapter_load_timeout_s": 5})
    parallel, adapter_group = join_ranks(config, 0, meeting_point("127.0.0.1"), Elsewhere())
    assert made == [("hccl", timedelta(seconds=7)), ("gloo", timedelta(seconds=5))]
    assert parallel.group is dist.group.WORLD
    assert adapter_group is not parallel.group
    assert parallel.gathers_to_all
    assert parallel.shared_reduce is None
    assert parallel.smallest(3, torch.device("cpu")) == 3
