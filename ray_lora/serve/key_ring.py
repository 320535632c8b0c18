"""The API keys that are known now."""

import hmac
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ray_lora.config import EngineConfig, first_fault
from ray_lora.errors import ConfigError
from ray_lora.tenant import ApiKey, hash_key

logger = logging.getLogger("ray.serve")

Stamp = tuple[int, int, int]
"""Changes whenever a file does."""


class KeyRing:
    """Keys of the configuration and of its file, which is read again when it changes: a key can be added or revoked
    while others are served. A change that cannot be read is told in the log, and the keys before it stay.

    Raises:
        ConfigError: the file cannot be read, or two keys have the same name or hash; one line that says where.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.is_needed = config.needs_api_key
        self._given = config.api_keys
        self._file = None if config.api_keys_file is None else Path(config.api_keys_file).expanduser()
        self._stamp = self._find_stamp()
        self._keys = self._read()

    def find(self, key: str) -> ApiKey | None:
        """Whose key it is. The time that takes does not depend on how much of it is right."""
        self._refresh()
        digest = hash_key(key)
        found = None
        for known, owner in self._keys:
            if hmac.compare_digest(digest, known):
                found = owner
        return found

    def _refresh(self) -> None:
        stamp = self._find_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = self._read()
        except ConfigError as error:
            logger.error("the API keys stay what they were: %s", error)

    def _find_stamp(self) -> Stamp | None:
        try:
            stat = None if self._file is None else self._file.stat()
        except OSError:
            return None
        return stat and (stat.st_mtime_ns, stat.st_ino, stat.st_size)

    def _read(self) -> list[tuple[str, ApiKey]]:
        owners = [*self._given, *(() if self._file is None else read_keys(self._file))]
        _check_distinct("name", [owner.name for owner in owners])
        keys = [(digest, owner) for owner in owners for digest in owner.sha256]
        _check_distinct("sha256", [digest for digest, _ in keys])
        return keys


def read_keys(file: Path) -> list[ApiKey]:
    """The keys of a file.

    Raises:
        ConfigError: it is not a list of keys; one line that says where.
    """
    try:
        content: Any = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise ConfigError(f"api_keys_file: {file} cannot be read: {reason}") from None
    if not isinstance(content or [], list):
        raise ConfigError(f"api_keys_file: {file} is not a list of keys")
    keys = []
    for index, item in enumerate(content or []):
        try:
            keys.append(ApiKey.model_validate(item))
        except ValidationError as error:
            raise ConfigError(f"api_keys_file: {file}: key {index + 1}: {first_fault(error)}") from None
    return keys


def _check_distinct(field: str, values: list[str]) -> None:
    for value, count in Counter(values).items():
        if count > 1:
            raise ConfigError(f"api_keys: the {field} {value!r} is given twice")
