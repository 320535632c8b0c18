"""Every kernel that can be launched, compiled for NVIDIA GPUs: no register is spilled."""

import pytest
from cuda_compile import CAPABILITIES, compile_for_cuda
from launch import Specialization, served

from ray_lora.backends.lora_blocks import Blocks


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("spec", served("cuda"), ids=str)
def test_a_kernel_spills_no_register(spec: Specialization, capability: int) -> None:
    resources = compile_for_cuda(spec, capability)
    assert resources.local_bytes == 0, resources


def test_a_spill_is_seen() -> None:
    spec = Specialization("prefill", "cuda", "bf16", 32, Blocks(64, 128, 128))
    assert compile_for_cuda(spec, 80).local_bytes > 0
