"""Private copies of adapters, named by their content: what happens to the source afterwards cannot hurt.

A copy is made in a directory of its own, hashed as it is written, checked, and only then renamed to
`<store>/<version>`. Renaming is atomic, so threads and processes may share a store: the first to arrive wins, and the
others find the same bytes.

The version is the SHA-256 of what the configuration means (`PeftConfig.canonical`) and of the bytes of the weights
file. Fields that cannot change the result, such as `inference_mode` or `base_model_name_or_path`, do not make a new
version; nor does the order in which PEFT happened to write a set of names.
"""

import errno
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ray_lora.adapters.peft_config import CONFIG_FILE, read_peft_config, reject
from ray_lora.errors import AdapterRejectedError, CapacityError, ConfigError, InvalidRequestError, NotFoundError

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
MAX_CONFIG_BYTES = 1 << 20
MAX_WEIGHTS_BYTES = 32 << 30
"""Rank 512 on every projection of a 70B model, in float32, is 27 GB."""
_CHUNK_BYTES = 1 << 20
_INCOMING = ".incoming-"
_ABANDONED_S = 24 * 3600.0


class AdapterStore:
    """Content-addressed copies under one directory, which is created if need be.

    Raises:
        ConfigError: the directory cannot be created.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.expanduser()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"adapter_store_dir: cannot create {self.directory}: {error.strerror}") from None
        for leftover in self.directory.glob(f"{_INCOMING}*"):
            if _age_s(leftover) > _ABANDONED_S:
                shutil.rmtree(leftover, ignore_errors=True)

    def add(self, source: Path, check: Callable[[Path], None] | None = None) -> Path:
        """Copy an adapter into the store and return the copy's directory, whose name is the version.

        `check` sees the private copy before anyone else; if it raises, the copy is dropped.

        Raises:
            NotFoundError: `source` does not exist.
            InvalidRequestError: `source` is not a directory, or may not be read.
            AdapterRejectedError: files are missing, too large, not regular, or changed meanwhile; the weights are a
                pickle; a field of the configuration cannot be honoured.
            CapacityError: the store's disk is full.
        """
        _check_source(source)
        try:
            return self._add(source, check)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise CapacityError(f"no space left in adapter_store_dir {self.directory}") from None
            raise

    def _add(self, source: Path, check: Callable[[Path], None] | None) -> Path:
        incoming = self._make_incoming()
        try:
            copied = {CONFIG_FILE: _copy_file(source, incoming, CONFIG_FILE, MAX_CONFIG_BYTES)}
            meaning = read_peft_config(incoming).canonical().encode()
            digest = hashlib.sha256(b"ray_lora adapter 1 %d\n" % len(meaning) + meaning)
            copied[WEIGHTS_FILE] = _copy_file(source, incoming, WEIGHTS_FILE, MAX_WEIGHTS_BYTES, digest.update)
            for name, identity in copied.items():
                if _current_identity(source / name) != identity:
                    reject(name, f"{name} changed while the adapter was copied; load it again when it is complete")
            if check is not None:
                check(incoming)
            return self._publish(incoming, self.directory / digest.hexdigest())
        finally:
            shutil.rmtree(incoming, ignore_errors=True)

    def _make_incoming(self) -> Path:
        incoming = Path(tempfile.mkdtemp(prefix=_INCOMING, dir=self.directory))
        incoming.chmod(0o755)
        return incoming

    def _publish(self, incoming: Path, final: Path) -> Path:
        """Rename, or keep what is there if it is whole. A damaged copy (a crash, a full disk) is replaced."""
        while True:
            try:
                return incoming.rename(final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            if _is_same(incoming, final):
                return final
            damaged = self._make_incoming()
            try:
                final.rename(damaged / final.name)
            except FileNotFoundError:
                pass  # another process has just moved it away
            finally:
                shutil.rmtree(damaged, ignore_errors=True)


def _check_source(source: Path) -> None:
    try:
        is_directory = stat.S_ISDIR(source.stat().st_mode)
    except PermissionError:
        raise InvalidRequestError(f"lora_path {str(source)!r} may not be read", "lora_path") from None
    except (OSError, ValueError):
        raise NotFoundError(f"lora_path {str(source)!r} does not exist; give a local directory", "lora_path") from None
    if not is_directory:
        raise InvalidRequestError(f"lora_path {str(source)!r} is not a directory", "lora_path")


def _copy_file(
    source: Path, target: Path, name: str, max_bytes: int, see_chunk: Callable[[bytes], None] | None = None
) -> tuple[int, ...]:
    """Copy one regular file, following links, and show every chunk that is written; the identity of what was read."""
    try:
        reader = open(source / name, "rb", opener=_open_without_waiting)  # noqa: SIM115
    except (FileNotFoundError, NotADirectoryError):
        raise _missing(source, name) from None
    except IsADirectoryError:
        reject(name, f"{name} is not a regular file")
    except OSError as error:
        raise InvalidRequestError(f"cannot read {name} in lora_path: {error.strerror}", "lora_path") from None
    with reader, (target / name).open("wb") as writer:
        found = os.fstat(reader.fileno())
        if not stat.S_ISREG(found.st_mode):
            reject(name, f"{name} is not a regular file")
        if found.st_size > max_bytes:
            reject(name, f"{name} has {found.st_size} bytes, more than the {max_bytes} that are accepted")
        _copy_bytes(reader, writer, found.st_size, see_chunk)
    (target / name).chmod(0o444)
    return _identity(found)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    """Changes when a file is replaced, or written to."""
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _current_identity(file: Path) -> tuple[int, ...]:
    try:
        return _identity(file.stat())
    except OSError:
        return ()


def _open_without_waiting(path: str, flags: int) -> int:
    """Opening a pipe must lead to its refusal, not wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _copy_bytes(reader: BinaryIO, writer: BinaryIO, size: int, see_chunk: Callable[[bytes], None] | None) -> None:
    """At most `size` bytes."""
    while chunk := reader.read(min(_CHUNK_BYTES, size)):
        writer.write(chunk)
        size -= len(chunk)
        if see_chunk is not None:
            see_chunk(chunk)


def _missing(source: Path, name: str) -> AdapterRejectedError:
    if name == WEIGHTS_FILE and (source / PICKLE_FILE).exists():
        return AdapterRejectedError(
            f"{PICKLE_FILE} is a pickle, which can run code when it is read; save as {WEIGHTS_FILE} "
            "(safe_serialization=True)",
            PICKLE_FILE,
        )
    return AdapterRejectedError(f"{name} is missing in {str(source)!r}", name)


def _is_same(incoming: Path, final: Path) -> bool:
    """Whether an earlier copy of equal digest is still whole; the configurations may differ in inert fields."""
    try:
        same_size = (incoming / WEIGHTS_FILE).stat().st_size == (final / WEIGHTS_FILE).stat().st_size
        return same_size and read_peft_config(final).canonical() == read_peft_config(incoming).canonical()
    except (OSError, AdapterRejectedError):
        return False


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
