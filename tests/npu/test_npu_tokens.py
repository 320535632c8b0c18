"""The whole forward of the Ascend backend, on CPU tensors, gives the CPU backend's greedy tokens on the demo model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import npu_references
import pytest
from npu_ranks import npu_on_cpu
from npu_references import NPUOnCPU

from ray_lora.backends.base import Backend
from ray_lora.cluster.local import LocalExecutor
from tests.demo_tokens import FRANCE, MIXED, TEA, generate, make_config
from tests.rank_processes import ProcessExecutor

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:ray_lora's CPU kernels are not in use:RuntimeWarning"),
]


Run = Callable[..., list[list[int]]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Tokens on one rank in this process, with a backend."""

    def run_on(backend: Backend | None, *args: Any, **config: Any) -> list[list[int]]:
        with monkeypatch.context() as patch:
            if backend is not None:
                patch.setattr("ray_lora.cluster.worker.make_backend", lambda device: backend)
            chosen = make_config(tmp_path, **config)
            return generate(chosen, LocalExecutor(chosen), *args)

    return run_on


MAX_TOKENS = 8


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What the CPU backend gives for MIXED."""
    config = make_config(tmp_path_factory.mktemp("cpu"))
    tokens = generate(config, LocalExecutor(config), MIXED, MAX_TOKENS)
    assert len(set(map(tuple, tokens))) == len(MIXED), "every adapter must change something"
    return tokens


def test_three_adapters_mixed_and_prompts_in_chunks(run: Run, expected: list[list[int]]) -> None:
    npu_references.CALLED.clear()
    assert run(NPUOnCPU(), MIXED, MAX_TOKENS) == expected
    assert sorted(npu_references.CALLED) == [
        "npu_add_rms_norm_v2",
        "npu_fused_infer_attention_score",
        "npu_rms_norm",
        "npu_rotary_mul",
        "npu_scatter_pa_kv_cache",
        "npu_swiglu",
    ]


def test_three_ranks(tmp_path: Path, expected: list[list[int]]) -> None:
    config = make_config(tmp_path, tensor_parallel_size=3)
    assert generate(config, ProcessExecutor(config, npu_on_cpu), MIXED, MAX_TOKENS) == expected


def test_the_triton_kernels_interpreted_within_the_model(run: Run) -> None:
    requests = [(TEA[:20], "pirate"), (FRANCE[:4], "json"), (FRANCE[:6], None)]
    backend = NPUOnCPU(is_interpreted=True)
    assert run(backend, requests, 2, enforce_eager=True) == run(None, requests, 2)


def test_blocks_of_128(run: Run) -> None:
    requests = [(FRANCE * 4, "emoji"), (TEA, None)]
    args = {"block_size": 128, "max_model_len": 512}
    assert run(NPUOnCPU(), requests, 6, **args) == run(None, requests, 6, **args)
