"""Run by `make test-npu-compile`, in the environment that has the Ascend compilers; elsewhere nothing is collected."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

IS_CHOSEN = find_spec("ascendnpuir") is not None and os.environ.get("TRITON_INTERPRET") != "1"
collect_ignore_glob = [] if IS_CHOSEN else [str(Path(__file__).parent / "test_*.py")]
sys.path.insert(0, str(Path(__file__).parents[2] / "kernels" / "triton"))
