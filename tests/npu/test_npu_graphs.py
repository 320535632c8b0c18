"""Captured decode steps give the tokens of launched ones, replayed on what the capture recorded and nothing else."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu
from fake_executor import FakeTokenizer
from npu_ranks import npu_on_cpu
from npu_references import NPUOnCPU
from recorded_graphs import RecordedGraph, record_graph
from torch_npu.npu import graphs

from ray_lora.cluster.local import LocalExecutor
from ray_lora.config import EngineConfig
from ray_lora.engine.engine_core import EngineCore
from ray_lora.engine.executor import Executor
from ray_lora.request import GenerateRequest, SamplingParams
from tests.demo_tokens import FRANCE, ROOT, TEA, make_config
from tests.rank_processes import ProcessExecutor

SIZES = (1, 2, 4)
ARRIVALS: dict[int, list[tuple[list[int], str | None, int]]] = {
    0: [(FRANCE[:9], None, 14)],
    3: [(TEA[:7], "pirate", 3), (FRANCE[:5], "json", 9)],
    5: [(FRANCE[:4], "json", 5)],
    8: [(TEA[20:28], "emoji", 8)],
    10: [(TEA[:5], "pirate", 8), (FRANCE[:6], "emoji", 3)],
}
"""By step: prompt, adapter and tokens of the requests that come. Two adapters at a time have pages, so the third takes
those of one that has ended; rows grow from 1 over both larger sizes to 5, which no graph takes, and shrink again."""


def serve(config: EngineConfig, executor: Executor, unload_at: int = 7) -> list[list[int]]:
    """Greedy tokens of the requests of ARRIVALS; `pirate` is unloaded in between, and loaded again."""
    core = EngineCore(config, executor, FakeTokenizer())

    def load(name: str) -> None:
        manifest = executor.inspect_adapter(str(ROOT / "deployments" / "adapters" / name))
        executor.stage_adapter(manifest)
        core.adapters.register(name, manifest)

    for name in ("pirate", "json", "emoji"):
        load(name)
    groups = []
    for step in range(20):
        if step == unload_at:
            core.adapters.unregister("pirate")
            for version in core.adapters.take_dead():
                executor.drop_adapter(version)
            load("pirate")
        for prompt, name, max_tokens in ARRIVALS.get(step, ()):
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            groups.append(core.add(GenerateRequest(prompt=prompt, adapter=name, sampling_params=params)))
        core.step()
        core.adapters.check_integrity()
    assert not core.has_work
    executor.shutdown()
    return [group.completions[0].sequence.token_ids for group in groups]


def configured(store: Path, **args: Any) -> EngineConfig:
    return make_config(store, max_loras=2, cudagraph_capture_sizes=SIZES, **args)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_lora.cluster.worker.make_backend", lambda device: NPUOnCPU())


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Tokens without graphs."""
    config = configured(tmp_path_factory.mktemp("launched"), enforce_eager=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray_lora.cluster.worker.make_backend", lambda device: NPUOnCPU())
        return serve(config, LocalExecutor(config))


class Counting(NPUOnCPU):
    """Counts replays by rows and whether they have LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.replays: dict[tuple[int, bool], int] = {}

    def capture(self, step: Any, forward: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
        replay = super().capture(step, forward)
        key = len(step.token_ids), bool(step.segments)
        self.replays[key] = 0

        def count(other: Any) -> torch.Tensor:
            self.replays[key] += 1
            return replay(other)

        return count


def test_adapters_come_and_go_between_replays_of_every_size(
    tmp_path: Path, launched: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Counting()
    monkeypatch.setattr("ray_lora.cluster.worker.make_backend", lambda device: backend)
    config = configured(tmp_path)
    assert serve(config, LocalExecutor(config)) == launched
    assert set(backend.replays) == {(size, with_lora) for size in SIZES for with_lora in (False, True)}
    used = {key for key, count in backend.replays.items() if count}
    assert used >= {(1, False), (2, True), (4, True)}


def test_three_ranks_replay_their_all_reduces(tmp_path: Path, launched: list[list[int]]) -> None:
    config = configured(tmp_path, tensor_parallel_size=3)
    assert serve(config, ProcessExecutor(config, npu_on_cpu)) == launched


def test_every_decode_step_is_a_replay(tmp_path: Path, on_cpu: None) -> None:
    config = configured(tmp_path)
    executor = LocalExecutor(config)
    before = RecordedGraph.num_replays
    core = EngineCore(config, executor, FakeTokenizer())
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    core.add(GenerateRequest(prompt=FRANCE[:8], sampling_params=params))
    while core.has_work:
        core.step()
    assert RecordedGraph.num_replays == before + 4, "all but the prompt's step are replays"


def test_the_stand_in_takes_what_torch_npu_takes() -> None:
    for ours, real in ((record_graph, graphs.graph), (RecordedGraph, graphs.NPUGraph)):
        for name in ("__init__", "update", "replay"):
            if hasattr(real, name):
                assert (
                    inspect.signature(getattr(ours, name)).parameters.keys()
                    == inspect.signature(getattr(real, name)).parameters.keys()
                )
    handler = graphs._NPU_GRAPH_OP_HANDLERS["npu_fused_infer_attention_score.default"]
    updated = {key for _, _, key in handler.get_update_specs("npu_fused_infer_attention_score.out")}
    assert updated == {"actual_seq_lengths", "actual_seq_lengths_kv"}
    assert torch_npu.npu.graph is record_graph
