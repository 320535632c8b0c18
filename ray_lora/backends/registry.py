"""From a word in the configuration to a backend. A backend's libraries are imported only when it is asked for."""

from ray_lora.backends.base import Backend
from ray_lora.errors import ConfigError

LIBRARIES = {"cuda": "torch and triton", "npu": "CANN, torch_npu and triton-ascend"}


def make_backend(device: str) -> Backend:
    """The backend for `cpu` (also `auto`), `cuda` or `npu`.

    Raises:
        ConfigError: no such backend here.
    """
    if device in ("auto", "cpu"):
        from ray_lora.backends.cpu import CPUBackend

        return CPUBackend()
    try:
        if device == "cuda":
            from ray_lora.backends.cuda import CUDABackend

            return CUDABackend()
        if device == "npu":
            from ray_lora.backends.npu import NPUBackend

            return NPUBackend()
    except (ImportError, OSError) as error:
        needed = f"{LIBRARIES[device]}; `ray-lora doctor {device}` says what is missing"
        raise ConfigError(f"device {device!r} needs {needed}: {error}") from None
    raise ConfigError(f"device {device!r} is not supported; supported are 'auto', 'cpu', 'cuda' and 'npu'")
