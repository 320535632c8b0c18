"""Every kernel that can be launched, compiled for NVIDIA GPUs: next to no register is spilled."""

import pytest
from cuda_compile import CAPABILITIES, compile_for_cuda
from launch import Specialization, served

from ray_lora.backends.lora_blocks import Blocks

SPILLED_BYTES = 16
"""Of a thread."""


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("spec", served("cuda"), ids=str)
def test_a_kernel_spills_four_registers_at_most(spec: Specialization, capability: int) -> None:
    """As many as ptxas gives up for one more warp, where there are registers left."""
    resources = compile_for_cuda(spec, capability)
    assert resources.local_bytes <= SPILLED_BYTES, resources


def test_a_spill_is_seen() -> None:
    spec = Specialization("prefill", "cuda", "bf16", 32, Blocks(64, 128, 128))
    assert compile_for_cuda(spec, 80).local_bytes > SPILLED_BYTES
