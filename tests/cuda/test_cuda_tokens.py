"""The whole forward of the CUDA backend, on CPU tensors, gives the CPU backend's greedy tokens on the demo model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuda_references import CUDAOnCPU, cuda_on_cpu

from ray_lora.backends.base import Backend
from ray_lora.cluster.local import LocalExecutor
from tests.demo_tokens import FRANCE, MIXED, TEA, generate, make_config
from tests.rank_processes import ProcessExecutor

pytestmark = pytest.mark.filterwarnings("ignore:ray_lora's CPU kernels are not in use:RuntimeWarning")

MAX_TOKENS = 8

Run = Callable[..., list[list[int]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Tokens on one rank in this process: of a backend in place of the GPU's, or, without one, of the CPU's."""

    def run_on(backend: Backend | None, *args: Any, **config: Any) -> list[list[int]]:
        chosen = make_config(tmp_path, block_size=256, distributed_executor_backend="local", **config)
        with monkeypatch.context() as patch:
            if backend is not None:
                patch.setattr("ray_lora.cluster.worker.make_backend", lambda device: backend)
            return generate(chosen, LocalExecutor(chosen), *args)

    return run_on


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What the CPU backend gives for MIXED."""
    config = make_config(tmp_path_factory.mktemp("cpu"))
    tokens = generate(config, LocalExecutor(config), MIXED, MAX_TOKENS)
    assert len(set(map(tuple, tokens))) == len(MIXED), "every adapter must change something"
    return tokens


def test_three_adapters_mixed_and_prompts_in_chunks(run: Run, expected: list[list[int]]) -> None:
    assert run(CUDAOnCPU(), MIXED, MAX_TOKENS) == expected


def test_three_ranks(tmp_path: Path, expected: list[list[int]]) -> None:
    config = make_config(tmp_path, tensor_parallel_size=3, block_size=256)
    assert generate(config, ProcessExecutor(config, cuda_on_cpu), MIXED, MAX_TOKENS) == expected


def test_the_triton_kernels_interpreted_within_the_model(run: Run) -> None:
    requests = [(TEA[:20], "pirate"), (FRANCE[:4], "json"), (FRANCE[:6], None)]
    assert run(CUDAOnCPU(is_interpreted=True), requests, 2) == run(None, requests, 2)


def test_a_sequence_of_several_blocks(run: Run) -> None:
    requests = [(FRANCE * 8, "emoji"), (TEA, None)]
    args = {"max_model_len": 512}
    assert run(CUDAOnCPU(), requests, 4, **args) == run(None, requests, 4, **args)
