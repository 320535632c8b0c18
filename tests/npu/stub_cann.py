"""Lets torch_npu be imported where CANN is not: empty libraries, whose functions all fail, in place of CANN's.

What such a library must define is read off torch_npu's own: all that they leave undefined and nothing here defines.
With the stand-ins loaded, schemas, meta kernels and Python functions of torch_npu are the real ones. What would ask a
device fails, and `torch.npu.is_available()` ends the process.
"""

import ctypes
import os
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

CANN_LIBRARIES = (
    "libascendcl.so",
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libatb.so",
)
SYSTEM_LIBRARIES = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2")
FAILURE = 507899
"""CANN's code for an internal error of a driver."""


def load_stub_cann() -> None:
    """Build the stand-ins and load them into this process, before torch is imported in it."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # else torch would import torch_npu, and that torch
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "stubs.c")
        source.write_text("".join(f"int {name}() {{ return {FAILURE}; }}\n" for name in missing_symbols()))
        for index, library in enumerate(CANN_LIBRARIES):
            built = Path(folder, library)
            command = ["cc", "-w", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname,{library}", "-o", str(built)]
            subprocess.run([*command, str(source)] if index == 0 else [*command, "-x", "c", os.devnull], check=True)
            ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)


def missing_symbols() -> list[str]:
    """What torch_npu needs of CANN."""
    libraries = list(package_folder("torch_npu").rglob("*.so"))
    here = [*libraries, *(package_folder("torch") / "lib").glob("*.so"), *map(system_library, SYSTEM_LIBRARIES)]
    needed = set[str]().union(*(symbols(library, "U") for library in libraries))
    defined = set[str]().union(*(symbols(library, "BbDdRTtVvWui") for library in here))
    return sorted(name for name in needed - defined if not name.startswith(("Py", "_Py")))


def symbols(library: Path, kinds: str) -> set[str]:
    """Names of a library's dynamic symbols of these kinds, as nm has them."""
    listed = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True).stdout
    entries = [line.split()[-2:] for line in listed.splitlines()]
    return {name.split("@")[0] for kind, name in entries if kind in kinds}


def package_folder(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def system_library(name: str) -> Path:
    found = subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return Path(found.stdout.strip())
