"""Adapters that nobody loaded, found by their names."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ray_lora.errors import InvalidRequestError
from ray_lora.names import check_adapter_name

FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class Candidate:
    """Where an adapter can be loaded from."""

    path: str
    version: str | None = None
    """The content that it must have, if that is known."""


class AdapterResolver(Protocol):
    """Called from any thread."""

    def find(self, name: str) -> Candidate | None:
        """The adapter of this name, None if there is none."""


class DirectoryResolver:
    """Knows the folders directly in `directory`, which the operator fills: each is an adapter of that name."""

    def __init__(self, directory: Path, base_model_name: str) -> None:
        self._directory = directory.expanduser()
        self._base_model_name = base_model_name

    def find(self, name: str) -> Candidate | None:
        """Neither a name nor a link leads out of the directory."""
        try:
            check_adapter_name(name, self._base_model_name)
            root = self._directory.resolve(strict=True)
            paths = [root / name / file for file in FILES]
            inside = all(path.resolve(strict=True).is_relative_to(root) for path in paths)
        except (InvalidRequestError, OSError):
            return None
        return Candidate(str(root / name)) if inside else None
