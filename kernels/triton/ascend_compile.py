"""Compiles a kernel for Ascend with the vendor's compiler, up to `hivmc`, the code generator that only CANN has.

Triton IR -> linalg (`triton-adapter-opt`, in triton-ascend) -> HFusion, HIVM, memory planning, synchronisation
(`bishengir-compile`, in ascendnpu-ir). Needs neither an NPU nor CANN: a stand-in for `hivmc` lets the pipeline end and
keeps its last IR. An access pattern that cannot be lowered, or buffers that do not fit, fail as on a real machine.
"""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import Specialization


@dataclass(frozen=True, slots=True)
class Target:
    """A chip, and what its code is compiled with."""

    chip: str
    executable: str = "bishengir-compile"
    is_a5: bool = False


TARGETS = {"A2": Target("Ascend910B3"), "A3": Target("Ascend910_9382")}
A5 = Target("Ascend950PR_9589", "bishengir-compile-a5", is_a5=True)
FLAGS = (
    "--enable-auto-multi-buffer=true",
    "--enable-auto-bind-sub-block=true",
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
)
"""Those that triton-ascend passes for A2 and A3."""
HIVMC_NAMES = ("hivmc", "hivmc-a5")
HIVMC = '#!/bin/sh\n[ "$1" = --version ] && echo "hivmc 1.2.0"\nexit 0\n'


class AscendCompileError(Exception):
    """The compiler refused the kernel."""


@dataclass(frozen=True, slots=True)
class Compiled:
    ir: str
    """`module.hivm.opt.mlir`: the IR with every buffer placed, as `hivmc` gets it."""
    log: str

    @property
    def retried(self) -> bool:
        """Whether double buffers did not fit: the compiler then says so, and tries again with less."""
        return "retrying compilation" in self.log


def compile_for_ascend(spec: Specialization, target: Target) -> Compiled:
    """Raises AscendCompileError, with what the compiler said."""
    return run_bishengir(to_linalg(spec, target), target)


def to_linalg(spec: Specialization, target: Target) -> str:
    """The kernel as linalg IR, in the form that `bishengir-compile` reads."""
    from triton._C.libtriton import ir
    from triton.backends.ascend.compiler import AscendBackend, make_ttir, ttir_to_linalg
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend = AscendBackend(GPUTarget("npu", target.chip, 0))
    options = backend.parse_options({"compile_on_910_95": target.is_a5})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    attributes = backend.get_attrs_descriptor(None, None).from_hints(dict.fromkeys(spec.multiples_of_16, 16))
    source = ASTSource(spec.kernel, spec.signature, spec.constants, attributes)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata: dict[str, Any] = {**vars(options), "hash": str(spec)}
    try:
        linalg = ttir_to_linalg(make_ttir(module, metadata, options), metadata, options, named_ops=True)
    except subprocess.CalledProcessError as error:
        raise AscendCompileError(error.stderr.decode()) from error
    return re.sub(r', mix_mode\s*=\s*"[^"]*"', "", linalg)


def run_bishengir(linalg: str, target: Target) -> Compiled:
    """Raises AscendCompileError if the compiler does not come to an end."""
    import ascendnpuir

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in HIVMC_NAMES:
            (folder / name).write_text(HIVMC)
            (folder / name).chmod(0o755)
        (folder / "kernel.mlir").write_text(linalg)
        done = subprocess.run(
            [
                *(Path(ascendnpuir.__file__).parent / "bin" / target.executable, "kernel.mlir"),
                *(f"--target={target.chip}", *FLAGS, f"--save-temps={folder}", "-o", "kernel"),
            ],
            cwd=folder,
            env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        log = done.stdout + done.stderr
        if done.returncode:
            raise AscendCompileError(f"exit status {done.returncode}: {log}")
        return Compiled((folder / "module.hivm.opt.mlir").read_text(), log)
