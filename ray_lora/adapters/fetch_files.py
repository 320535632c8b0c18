"""One file of a remote adapter, through fsspec."""

from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import fsspec
from fsspec.callbacks import Callback

from ray_lora.adapters.peft_config import reject
from ray_lora.names import url_scheme

TIMEOUT_S = 30.0
"""Longest wait for a connection, and for the next bytes."""


def download_file(source: str, directory: Path, name: str, max_bytes: int) -> None:
    """Download `<source>/<name>` to `<directory>/<name>`, which appears complete or not at all.

    Raises:
        AdapterRejectedError: there are more than `max_bytes`; `param` is `name`.
        ImportError: the scheme's driver is not installed.
        Exception: whatever the driver raises; see `failure_of`.
    """
    partial = directory / f"{name}.partial"
    progress = _Limited(name, max_bytes)
    driver = filesystem(url_scheme(source) or "", TIMEOUT_S)
    driver.get_file(_file_url(source, name), str(partial), callback=progress)
    num_bytes = partial.stat().st_size
    if num_bytes < (progress.size or 0):
        raise ConnectionError(f"{num_bytes} of {progress.size} bytes came")
    partial.rename(directory / name)


@cache
def filesystem(scheme: str, timeout_s: float) -> Any:
    """The driver of a scheme, which is untyped. It keeps no listings: an adapter may be replaced at any time."""
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)
        options["client_kwargs"] = {"timeout": timeout}
    elif scheme == "s3":
        options["config_kwargs"] = {"connect_timeout": timeout_s, "read_timeout": timeout_s}
    return fsspec.filesystem(scheme, **options)


def _file_url(source: str, name: str) -> str:
    """A query, such as a signature, stays behind the name."""
    parts = urlsplit(source)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{name}"))


class _Limited(Callback):  # type: ignore[misc]  # fsspec is untyped
    """Is told how much has come, and ends the download when that is too much."""

    def __init__(self, name: str, max_bytes: int) -> None:
        super().__init__()
        self._name = name
        self._max_bytes = max_bytes

    def call(self, hook_name: str | None = None, **kwargs: Any) -> None:
        if max(self.value, self.size or 0) > self._max_bytes:
            reject(self._name, f"{self._name} has more than the {self._max_bytes} bytes that are accepted")
