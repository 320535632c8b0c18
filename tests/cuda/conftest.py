"""Run by `make test-cuda`, in the environment that has triton, twice; elsewhere nothing is collected.

With Triton's interpreter the backend runs on CPU tensors; without, `test_cuda_gpu.py` runs it on a GPU if one is here.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
HAS_TRITON = all(find_spec(name) is not None for name in ("triton", "torch")) and find_spec("ascendnpuir") is None
ON_GPU = "test_cuda_gpu.py"
collect_ignore_glob = [str(HERE / "*.py")]
if HAS_TRITON:
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    ignored = [path.name for path in HERE.glob("test_*.py") if (path.name == ON_GPU) == is_interpreted]
    collect_ignore_glob = [str(HERE / name) for name in ignored]
    sys.path[:0] = [str(HERE), str(HERE.parent / "engine")]
