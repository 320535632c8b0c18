"""Adapters that nobody loaded, found by name in a directory that the operator fills."""

from pathlib import Path

from ray_lora.errors import InvalidRequestError
from ray_lora.names import check_adapter_name

FILES = ("adapter_config.json", "adapter_model.safetensors")


class AdapterResolver:
    """Knows the folders directly in `directory`, each an adapter of that name."""

    def __init__(self, directory: Path, base_model_name: str) -> None:
        self._directory = directory.expanduser()
        self._base_model_name = base_model_name

    def find(self, name: str) -> str | None:
        """The folder of an adapter, None if there is none. Neither a name nor a link leads out of the directory."""
        try:
            check_adapter_name(name, self._base_model_name)
            root = self._directory.resolve(strict=True)
            paths = [root / name / file for file in FILES]
            inside = all(path.resolve(strict=True).is_relative_to(root) for path in paths)
        except (InvalidRequestError, OSError):
            return None
        return str(root / name) if inside else None
