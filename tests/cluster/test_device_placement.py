"""Ranks on NPUs and GPUs ask Ray for one each, on one node, and each sees its own alone."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from ray_lora.backends.cpu import CPUBackend
from ray_lora.cluster import worker as worker_module
from ray_lora.cluster.ray_tp import RayTPExecutor
from ray_lora.config import EngineConfig
from ray_lora.errors import ConfigError
from ray_lora.step import ModelInfo
from tests.tiny import make_checkpoint

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


VISIBLE = {"NPU": "ASCEND_RT_VISIBLE_DEVICES", "GPU": "CUDA_VISIBLE_DEVICES"}


class PlacedWorker(worker_module.Worker):
    """A rank that Ray places as one of its backend, and that computes on the CPU."""

    def start(self, init_method: str | None = None) -> ModelInfo:
        vars(worker_module)["make_backend"] = lambda device: CPUBackend()
        return super().start(init_method)

    def placement(self) -> tuple[str, dict[str, str | None]]:
        visible = {resource: os.environ.get(variable) for resource, variable in VISIBLE.items()}
        return ray.get_runtime_context().get_node_id(), visible


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("npu") / "model", "llama", num_attention_heads=8, num_key_value_heads=2
    )


def make_config(checkpoint: Path, **args: Any) -> EngineConfig:
    store = str(checkpoint.parent / "store")
    settings = {"model": str(checkpoint), "device": "npu", "kv_cache_memory_bytes": 1 << 22, "adapter_store_dir": store}
    return EngineConfig.parse(settings | args)


def wait_for_free(resource: str, count: int) -> None:
    """What Ray says of resources lags behind."""
    deadline = time.monotonic() + 20
    while ray.available_resources().get(resource, 0) != count:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(("device", "resource"), [("npu", "NPU"), ("cuda", "GPU")])
@pytest.mark.parametrize("tp_size", [1, 4])
def test_each_rank_sees_one_device_of_its_own(device: str, resource: str, tp_size: int, checkpoint: Path) -> None:
    config = make_config(checkpoint, device=device, tensor_parallel_size=tp_size)
    assert config.uses_ray
    executor = RayTPExecutor(config, PlacedWorker)
    try:
        nodes, visible = zip(*executor._call_all("placement", "health"), strict=True)
        devices = [of_rank[resource] for of_rank in visible]
        assert len(set(nodes)) == 1
        assert len(set(devices)) == tp_size
        assert all(device in map(str, range(8)) for device in devices)
        assert placement_group_table(executor._group)["strategy"] == "STRICT_PACK"
        wait_for_free(resource, 8 - tp_size)
    finally:
        executor.shutdown()
    wait_for_free(resource, 8)


def test_another_strategy_is_taken_only_where_it_is_named(checkpoint: Path) -> None:
    config = make_config(checkpoint, tensor_parallel_size=2, placement_group_strategy="PACK")
    executor = RayTPExecutor(config, PlacedWorker)
    try:
        assert placement_group_table(executor._group)["strategy"] == "PACK"
    finally:
        executor.shutdown()


def test_too_few_npus_are_an_error_that_says_so(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_lora.cluster.ray_tp.PLACEMENT_TIMEOUT_S", 1)
    others = placement_group([{"NPU": 7}])
    assert others.wait(10)
    try:
        with pytest.raises(ConfigError, match=r"no room for 2 ranks of 0\.1 CPU and 1 NPU \(STRICT_PACK\)"):
            RayTPExecutor(make_config(checkpoint, tensor_parallel_size=2), PlacedWorker)
    finally:
        remove_placement_group(others)
