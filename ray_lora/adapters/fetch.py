"""Remote adapters: their two files, downloaded to a directory of their own or not at all.

`s3://`, `gs://`, `http://` and `https://` through fsspec; `hf://owner/repository[@revision][/folder]` through the
Hugging Face hub. Nothing but `adapter_config.json` and `adapter_model.safetensors` is asked for. Credentials come from
the drivers' own places (environment, files, instance roles), or stand in the URL; messages show neither.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

from ray_lora.adapters.fetch_errors import failure_of, rejection
from ray_lora.adapters.fetch_files import download_file
from ray_lora.adapters.fetch_hub import download_from_hub
from ray_lora.adapters.peft_config import CONFIG_FILE
from ray_lora.adapters.store import DISK_FULL, MAX_CONFIG_BYTES, WEIGHTS_FILE
from ray_lora.errors import CapacityError, InvalidRequestError, RayLoraError
from ray_lora.names import url_scheme, without_credentials

DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "http": "aiohttp", "https": "aiohttp", "hf": "huggingface_hub"}
"""Scheme -> the package that reads it."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0


def fetch(source: str, directory: Path, max_adapter_bytes: int, retries: int) -> None:
    """Download an adapter into an empty directory. Blocks.

    Transient failures are tried again, `retries` times at most, after pauses that double from `FIRST_PAUSE_S`.

    Raises:
        NotFoundError: there is no such adapter; `param` is `lora_path`.
        InvalidRequestError: the scheme is unknown, its driver is not installed, access is denied, or there is no
            answer; `param` is `lora_path`.
        AdapterRejectedError: the weights are missing, or larger than `max_adapter_bytes`; `param` is the file.
        CapacityError: the disk is full.
    """
    shown, scheme = without_credentials(source), url_scheme(source)
    if scheme not in DRIVERS:
        raise InvalidRequestError(
            f"lora_path {shown!r}: {scheme}:// is not supported; give a local directory or {', '.join(DRIVERS)}://",
            "lora_path",
        )
    limits = {CONFIG_FILE: MAX_CONFIG_BYTES, WEIGHTS_FILE: max_adapter_bytes}
    if scheme == "hf":
        _with_retries(lambda: download_from_hub(shown, directory, limits), shown, scheme, retries)
        return
    for name, max_bytes in limits.items():
        _with_retries(_download(source, directory, name, max_bytes), f"{shown.rstrip('/')}/{name}", scheme, retries)


def _download(source: str, directory: Path, name: str, max_bytes: int) -> Callable[[], None]:
    return lambda: download_file(source, directory, name, max_bytes)


def _with_retries(attempt: Callable[[], None], shown: str, scheme: str, retries: int) -> None:
    for number in range(retries + 1):
        try:
            return attempt()
        except RayLoraError:
            raise
        except ImportError:
            raise _not_installed(scheme) from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise CapacityError("no space left in adapter_store_dir") from None
            failure = failure_of(error)
            if not failure.is_transient or number == retries:
                raise rejection(failure, shown, number + 1) from None
        time.sleep(min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0))


def _not_installed(scheme: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"lora_path: {scheme}:// needs the package {DRIVERS[scheme]}, which is not installed on the server: "
        f"pip install {DRIVERS[scheme]}, or ray_lora[remote]",
        "lora_path",
    )
