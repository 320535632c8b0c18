"""Decode steps padded for graphs: the tokens of unpadded ones, and nothing written that is not theirs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_lora.architecture import read_architecture
from ray_lora.backends.base import Backend
from ray_lora.config import EngineConfig
from ray_lora.errors import ConfigError
from ray_lora.model.memory_plan import graph_bytes, kv_cache_bytes
from ray_lora.model.model_runner import ModelRunner
from ray_lora.model.tensor_parallel import TensorParallel
from ray_lora.request import SamplingParams
from ray_lora.step import SequencePlan, SequenceStart, StepPlan
from tests.tiny import make_checkpoint

BLOCK_SIZE, NUM_BLOCKS = 16, 12
GIB = 1 << 30


class Padding(Backend):
    """Captures by launching again; keeps what it was given."""

    captures = True

    def __init__(self) -> None:
        super().__init__()
        self.captured: list[tuple[int, bool]] = []
        self.replayed: list[Any] = []

    def capture(self, step: Any, forward: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        self.captured.append((len(step.token_ids), bool(step.segments)))
        forward(step)

        def replay(other: Any) -> Tensor:
            self.replayed.append(other)
            return forward(other)

        return replay

    def device_memory(self) -> tuple[int, int] | None:
        return 3 * GIB, 4 * GIB


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("graphs") / "model", "llama")


def make_config(checkpoint: Path, **args: Any) -> EngineConfig:
    bytes_per_block = 2 * 3 * 3 * BLOCK_SIZE * 16 * 4
    settings = {
        "model": str(checkpoint),
        "dtype": "float32",
        "max_model_len": 64,
        "block_size": BLOCK_SIZE,
        "kv_cache_memory_bytes": NUM_BLOCKS * bytes_per_block,
        "max_loras": 0,
        "max_num_seqs": 40,
    }
    return EngineConfig.parse(settings | args)


def decode(step_id: int, tokens: list[int]) -> StepPlan:
    """Sequence i decodes its first token at position 2 of block i, after a prompt of two."""
    sequences = [SequencePlan(i, (token,), 2, (i,), -1, True, 0) for i, token in enumerate(tokens)]
    return StepPlan(step_id, tuple(sequences))


def run(runner: ModelRunner, num_sequences: int) -> list[int]:
    params = SamplingParams(temperature=0)
    starts = tuple(SequenceStart(i, (5 + i, 9), params, 0, ()) for i in range(num_sequences))
    prompts = tuple(SequencePlan(i, (5 + i, 9), 0, (i,), -1, True, 0) for i in range(num_sequences))
    first = runner.execute(StepPlan(1, prompts, starts=starts))
    assert first is not None
    second = runner.execute(decode(2, [sampled.token_id for sampled in first.sampled]))
    assert second is not None
    return [sampled.token_id for sampled in second.sampled]


@pytest.mark.parametrize("num_sequences", [1, 3, 5, 8, 9])
def test_padded_steps_sample_the_same_tokens(checkpoint: Path, num_sequences: int) -> None:
    backend = Padding()
    padded = ModelRunner(make_config(checkpoint, cudagraph_capture_sizes=(8, 1, 4)), TensorParallel(), backend)
    assert backend.captured == [(8, False), (4, False), (1, False)], "the largest first, without LoRA"
    launched = ModelRunner(make_config(checkpoint, enforce_eager=True), TensorParallel(), Backend())
    assert run(padded, num_sequences) == run(launched, num_sequences)
    sizes = [len(step.token_ids) for step in backend.replayed]
    assert sizes == {1: [1], 3: [4], 5: [8], 8: [8], 9: []}[num_sequences], "nine are more than any size"


def test_padding_rows_write_to_blocks_that_no_request_can_have(checkpoint: Path) -> None:
    backend = Padding()
    caches: list[Tensor] = []
    allocate = backend.allocate_kv_cache

    def keep(*args: Any) -> tuple[Tensor, Tensor]:
        caches.extend(allocate(*args))
        return caches[-2], caches[-1]

    backend.allocate_kv_cache = keep  # type: ignore[method-assign]
    runner = ModelRunner(make_config(checkpoint, cudagraph_capture_sizes=(20,)), TensorParallel(), backend)
    assert {len(cache) for cache in caches} == {runner.info.num_kv_blocks + 2}, "20 rows in blocks of 16"
    for cache in caches:
        cache[:NUM_BLOCKS] = 7
    run(runner, 3)
    (step,) = backend.replayed
    assert len(step.token_ids) == 20
    assert len(step.tables.slot_mapping.unique()) == 20, "an NPU does not say which of two writes to a slot is the last"
    for cache in caches:
        written = (cache[:NUM_BLOCKS] != 7).any(dim=-1).any(dim=1).nonzero().tolist()
        assert written == [[block, offset] for block in range(3) for offset in range(3)]


def test_the_shape_of_a_padded_step_depends_on_its_size_alone(checkpoint: Path) -> None:
    backend = Padding()
    config = make_config(checkpoint, cudagraph_capture_sizes=(4,))
    for num_sequences in (3, 4):
        run(ModelRunner(config, TensorParallel(), backend), num_sequences)
    shapes = {
        (
            tuple(step.token_ids.shape),
            *(tuple(getattr(step.tables, name).shape) for name in ("block_tables", "positions")),
        )
        for step in backend.replayed
    }
    assert shapes == {((4,), (4, 4), (4,))}
    assert all(step.tables.query_starts.tolist() == [0, 1, 2, 3, 4] for step in backend.replayed)


def test_the_memory_plan_leaves_room_for_graphs(checkpoint: Path) -> None:
    config = make_config(checkpoint, kv_cache_memory_bytes=None, cudagraph_capture_sizes=(1, 32))
    arch = read_architecture(checkpoint)
    args = (arch, TensorParallel(), torch.float32, torch.float32, Padding())
    graphs = graph_bytes(config, arch, TensorParallel(), torch.float32)
    assert graphs > 32 * 4 * (2 * 96 + 96 + 12 * 16 + 96 + 2 * 144 + 144 + 96), "the tensors of a layer"
    eager = config.model_copy(update={"enforce_eager": True})
    assert graph_bytes(eager, arch, TensorParallel(), torch.float32) == 0
    assert kv_cache_bytes(eager, *args) - kv_cache_bytes(config, *args) == graphs


def test_sizes_are_vllms_unless_given() -> None:
    config = EngineConfig.parse({"model": "m", "max_num_seqs": 20})
    assert config.graph_sizes == (1, 2, 4, 8, 16, 20)
    assert config.model_copy(update={"cudagraph_capture_sizes": (8, 2, 8)}).graph_sizes == (2, 8)
    assert EngineConfig.parse({"model": "m", "max_num_seqs": 300}).graph_sizes[-4:] == (256, 272, 288, 300)
    with pytest.raises(ConfigError, match=r"cudagraph_capture_sizes \[4, 21\] are not all within 1 and 20"):
        EngineConfig.parse({"model": "m", "max_num_seqs": 20, "cudagraph_capture_sizes": [4, 21]})
