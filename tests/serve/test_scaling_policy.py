"""Replicas are as many as the load of all of them needs."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig

from ray_lora.serve.scaling_policy import TARGET_LOAD, load, scale_by_load


@pytest.mark.parametrize(
    ("loads", "wanted"), [([], 0.0), ([0.0], 0.0), ([TARGET_LOAD] * 2, 2.0), ([2.8], 4.0), ([0.1, 0.25], 0.5)]
)
def test_the_load_of_all_is_brought_to_the_target(loads: list[float], wanted: float) -> None:
    context: Any = SimpleNamespace(aggregated_metrics={"load": dict(enumerate(loads))} if loads else {})
    assert scale_by_load(context) == (pytest.approx(wanted), {})


def test_a_replica_is_full_when_its_rows_or_its_cache_are() -> None:
    assert load(32, 64, 0.1) == 0.5
    assert load(1, 64, 0.9) == 0.9
    assert load(128, 64, 1.0) == 2.0


def test_serve_finds_the_policy_that_the_documentation_names() -> None:
    policy: Any = {"policy_function": "ray_lora.serve.scaling_policy:scale_by_load"}
    config = AutoscalingConfig(min_replicas=0, max_replicas=4, policy=policy)
    assert config.policy.get_policy().__name__ == "scale_by_load"
