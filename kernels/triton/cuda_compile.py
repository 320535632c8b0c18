"""Compiles a kernel for NVIDIA GPUs with Triton's own compiler and the ptxas in its wheel; needs no GPU."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from launch import Specialization

CAPABILITIES = (80, 90)


@dataclass(frozen=True, slots=True)
class CudaResources:
    """What the compiled kernel takes."""

    registers: int
    """Of a thread."""
    local_bytes: int
    """Of a thread's stack and local memory, where registers are spilled to."""
    shared_bytes: int
    """Of a block."""


def compile_for_cuda(spec: Specialization, capability: int) -> CudaResources:
    """Raises what Triton or ptxas raise."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.knobs import nvidia

    hints = {(index,): [["tt.divisibility", 16]] for index in spec.multiples_of_16}
    source = ASTSource(spec.kernel, spec.signature, spec.constants, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        Path(cubin.name).write_bytes(compiled.asm["cubin"])
        command = [nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(size) for name, size in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    return CudaResources(used["REG"], used["STACK"] + used["LOCAL"], compiled.metadata.shared)
