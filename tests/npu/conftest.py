"""Run by `make test-npu`, in the environment that has torch_npu and triton-ascend; elsewhere nothing is collected."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
IS_CHOSEN = find_spec("torch_npu") is not None and os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if IS_CHOSEN else [str(HERE / "*.py")]
if IS_CHOSEN:
    sys.path[:0] = [str(HERE), str(HERE.parent / "engine")]
    from stub_cann import load_stub_cann

    load_stub_cann()
