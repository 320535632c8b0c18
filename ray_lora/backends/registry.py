"""From a word in the configuration to a backend. A backend's libraries are imported only when it is asked for."""

from ray_lora.backends.base import Backend
from ray_lora.errors import ConfigError


def make_backend(device: str) -> Backend:
    """The backend for `cpu` (also `auto`) or `npu`.

    Raises:
        ConfigError: no such backend here.
    """
    if device in ("auto", "cpu"):
        from ray_lora.backends.cpu import CPUBackend

        return CPUBackend()
    if device == "npu":
        try:
            from ray_lora.backends.npu import NPUBackend
        except (ImportError, OSError) as error:
            raise ConfigError(
                f"device 'npu' needs CANN, torch_npu and triton-ascend; `ray-lora doctor` says what is missing: {error}"
            ) from None
        return NPUBackend()
    raise ConfigError(f"device {device!r} is not supported; supported are 'auto', 'cpu' and 'npu'")
