"""From a word in the configuration to a backend. A backend's libraries are imported only when it is asked for."""

from ray_lora.backends.base import Backend
from ray_lora.errors import ConfigError


def make_backend(device: str) -> Backend:
    """The backend for `cpu` or `auto`.

    Raises:
        ConfigError: no such backend here.
    """
    if device in ("auto", "cpu"):
        from ray_lora.backends.cpu import CPUBackend

        return CPUBackend()
    raise ConfigError(f"device {device!r} is not supported; supported are 'auto' and 'cpu'")
