"""On a GPU: attention, the LoRA kernels and the demo model's tokens, with nothing in anything's place."""

from pathlib import Path

import pytest
import torch
from step_check import check_step

from ray_lora.backends.cuda import PROGRAMS, CUDABackend
from ray_lora.backends.triton_lora import TritonLora
from ray_lora.cluster.local import LocalExecutor
from ray_lora.ops.step_tables import moved
from tests.demo_tokens import MIXED, generate, make_config
from tests.kernels.test_add_lora import TOLERANCE, WORKLOADS, make_case

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore:ray_lora's CPU kernels are not in use:RuntimeWarning"),
]

CHUNKS = {"decode": [(1, 0), (1, 255), (1, 256), (1, 700)], "mixed": [(1, 40), (33, 500), (130, 0), (17, 255)]}


@pytest.mark.parametrize("dtype", CUDABackend.dtypes, ids=str)
@pytest.mark.parametrize("window", [None, 1, 300])
@pytest.mark.parametrize(("group", "size"), [(1, 64), (4, 128), (3, 72)])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_a_step_writes_and_attends_as_the_references_do(
    chunks: str, group: int, size: int, window: int | None, dtype: torch.dtype
) -> None:
    check_step(CUDABackend(), CHUNKS[chunks], group, 2, size, window, dtype)


@pytest.mark.parametrize("dtype", CUDABackend.dtypes, ids=str)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_lora_kernels_equal_the_oracle(workload: str, dtype: torch.dtype) -> None:
    case = make_case(workload, 60, ranks=(16, 5, 33), dtype=dtype)
    kernels, gpu = TritonLora("cuda", PROGRAMS, PROGRAMS), torch.device("cuda")
    y, x, pool_a, pool_b = (part.clone().to(gpu) for part in (case.y, case.x, case.pool_a, case.pool_b))
    plan = kernels.plan(moved(case.segments, gpu), [0, 1, 2, 3, 40, 50, 60])
    kernels.add_lora_(y, x, pool_a, pool_b, case.slices, plan)
    error = (y.cpu().double() - case.oracle()).abs().max() / case.oracle().abs().max()
    assert error < TOLERANCE[dtype]


def test_three_adapters_mixed_give_the_tokens_of_a_cpu(tmp_path: Path) -> None:
    """In float16, which tells the first tokens of these answers apart as surely as float32."""
    on_cpu = make_config(tmp_path)
    expected = generate(on_cpu, LocalExecutor(on_cpu), MIXED, 8)
    on_gpu = make_config(tmp_path, device="cuda", distributed_executor_backend="local", dtype="float16", block_size=256)
    assert generate(on_gpu, LocalExecutor(on_gpu), MIXED, 8) == expected
