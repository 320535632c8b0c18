"""What makes the Ascend backend in a rank that is a process of its own: CANN's stand-ins come before torch."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray_lora.backends.base import Backend


def npu_on_cpu() -> "Backend":
    from stub_cann import load_stub_cann

    load_stub_cann()
    from npu_references import NPUOnCPU

    return NPUOnCPU()
