"""Finding and loading the shared library of native CPU kernels that was built beside this file."""

import ctypes
import functools
import warnings
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ray_lora.backends.cpu_kernels import CPUKernels
from ray_lora.ops import library
from ray_lora.ops.lora import Segments


@functools.cache
def load_cpu_kernels() -> CPUKernels | None:
    """The kernels that were built beside this file; None, and one warning, where they were not."""
    built = sorted(Path(__file__).parent.glob("_cpu_kernels*.so"), key=lambda path: path.stat().st_mtime)
    reason = "they are not built"
    if built:
        try:
            kernels = CPUKernels(ctypes.CDLL(str(built[-1])))
            _register(kernels)
            return kernels
        except (OSError, AttributeError) as error:
            reason = f"they cannot be loaded ({error})"
    warnings.warn(
        f"ray_lora's CPU kernels are not in use, {reason}; the slow references serve instead. "
        "Install g++ and run `pip install .` again, or `python setup.py build_ext --inplace` in a checkout.",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _register(kernels: CPUKernels) -> None:
    """Make these the kernels of `torch.ops.ray_lora` on CPUs."""

    @library.add_lora_.register_kernel("cpu")
    def add_lora_(
        y: Tensor, x: Tensor, pool_a: Tensor, pool_b: Tensor, slices: Sequence[int], *segments: Tensor
    ) -> None:
        kernels.add_lora_(y, x, pool_a, pool_b, tuple(slices), Segments(*segments))
