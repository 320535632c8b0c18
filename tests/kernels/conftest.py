"""The implementations of `ops/` that this machine has."""

from collections.abc import Iterator

import pytest

from ray_lora.backends.base import Backend
from ray_lora.backends.cpu_kernels import CPUKernels
from ray_lora.backends.cpu_library import load_cpu_kernels

NATIVE = load_cpu_kernels()
IMPLEMENTATIONS = ("reference", *(() if NATIVE is None else NATIVE.levels))


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request: pytest.FixtureRequest) -> Iterator[Backend | CPUKernels]:
    """The references, then the native kernels at every instruction set of this machine."""
    if request.param == "reference":
        yield Backend()
        return
    assert NATIVE is not None
    NATIVE.set_level(request.param)
    yield NATIVE
    NATIVE.set_level(NATIVE.levels[-1])


@pytest.fixture(params=() if NATIVE is None else NATIVE.levels)
def native(request: pytest.FixtureRequest) -> Iterator[CPUKernels]:
    """The native kernels alone, for what the references do not promise: bit-equal rows, and checks of every index."""
    assert NATIVE is not None
    NATIVE.set_level(request.param)
    yield NATIVE
    NATIVE.set_level(NATIVE.levels[-1])
