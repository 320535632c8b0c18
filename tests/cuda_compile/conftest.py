"""Run by `make test-cuda-compile`, in the environment that has upstream Triton; elsewhere nothing is collected."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

IS_CHOSEN = find_spec("triton") is not None and find_spec("ascendnpuir") is None
collect_ignore_glob = [] if IS_CHOSEN else [str(Path(__file__).parent / "test_*.py")]
sys.path.insert(0, str(Path(__file__).parents[2] / "kernels" / "triton"))
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
