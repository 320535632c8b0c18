"""The whole forward of the Ascend backend, on CPU tensors, gives the CPU backend's greedy tokens on the demo model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import npu_references
import pytest
from fake_executor import FakeTokenizer
from npu_ranks import ProcessExecutor
from npu_references import NPUOnCPU

from ray_lora.backends.base import Backend
from ray_lora.cluster.local import LocalExecutor
from ray_lora.config import EngineConfig
from ray_lora.engine.engine_core import EngineCore
from ray_lora.engine.executor import Executor
from ray_lora.request import GenerateRequest, SamplingParams

MODEL = Path("~/.cache/ray_lora/SmolLM2-135M-Instruct").expanduser()
ROOT = Path(__file__).parents[2]
ADAPTERS = ("pirate", "json", "emoji")
FRANCE = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2),
    *(198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
]
"""What is the capital of France? In the model's chat template."""
TEA = [*FRANCE[:24], 2020, 536, 339, 919, 7188, 47, *FRANCE[31:]]
"""How do I make tea?"""

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:ray_lora's CPU kernels are not in use:RuntimeWarning"),
]


def make_config(store: Path, **args: Any) -> EngineConfig:
    settings = {
        "model": str(MODEL),
        "dtype": "float32",
        "max_model_len": 256,
        "block_size": 16,
        "kv_cache_memory_bytes": 1 << 26,
        "adapter_store_dir": str(store),
        "max_loras": 3,
        "max_lora_rank": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 48,
        "num_threads": 1,
        "cudagraph_capture_sizes": (2, 8),
    }
    return EngineConfig.parse(settings | args)


def generate(
    config: EngineConfig, executor: Executor, requests: list[tuple[list[int], str | None]], max_tokens: int
) -> list[list[int]]:
    """Greedy tokens of requests that run together, each with its adapter."""
    core = EngineCore(config, executor, FakeTokenizer())
    for name in sorted({name for _, name in requests if name is not None}):
        manifest = executor.inspect_adapter(str(ROOT / "deployments" / "adapters" / name))
        executor.stage_adapter(manifest)
        core.adapters.register(name, manifest)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    groups = [
        core.add(GenerateRequest(prompt=prompt, adapter=name, sampling_params=params)) for prompt, name in requests
    ]
    while core.has_work:
        core.step()
    executor.shutdown()
    return [group.completions[0].sequence.token_ids[-max_tokens:] for group in groups]


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
MIXED = [(prompt, name) for prompt in (FRANCE, TEA) for name in (None, *ADAPTERS)]


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
    assert generate(config, ProcessExecutor(config), MIXED, MAX_TOKENS) == expected


def test_the_triton_kernels_interpreted_within_the_model(run: Run) -> None:
    requests = [(TEA[:20], "pirate"), (FRANCE[:4], "json"), (FRANCE[:6], None)]
    backend = NPUOnCPU(is_interpreted=True)
    assert run(backend, requests, 2, enforce_eager=True) == run(None, requests, 2)


def test_blocks_of_128(run: Run) -> None:
    requests = [(FRANCE * 4, "emoji"), (TEA, None)]
    args = {"block_size": 128, "max_model_len": 512}
    assert run(NPUOnCPU(), requests, 6, **args) == run(None, requests, 6, **args)
