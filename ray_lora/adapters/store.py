"""Private copies of adapters, named by their content: what happens to the source afterwards cannot hurt.

A copy is made in a directory of its own, hashed as it is written, checked, and only then renamed to
`<store>/<version>`. Renaming is atomic, so threads and processes may share a store: the first to arrive wins, and the
others find the same bytes.

The version is the SHA-256 of what the configuration means (`PeftConfig.canonical`) and of the bytes of the weights
file. Fields that cannot change the result, such as `inference_mode` or `base_model_name_or_path`, do not make a new
version; nor does the order in which PEFT happened to write a set of names.

A content that was added stays until it is given back; after that it may be removed to make room for others, the least
recently used first. What is beside the two files of a content spares work and is never needed: it may go even earlier.
"""

import errno
import hashlib
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ray_lora.adapter import AdapterFiles
from ray_lora.adapters.peft_config import CONFIG_FILE, read_peft_config, reject
from ray_lora.adapters.store_leases import Leases, exclusive, remove_least_recently_used, size_of
from ray_lora.errors import AdapterRejectedError, CapacityError, ConfigError, InvalidRequestError, NotFoundError

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
MAX_CONFIG_BYTES = 1 << 20
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_CHUNK_BYTES = 1 << 20
_VERSION = re.compile(r"[0-9a-f]{64}")
_INCOMING = ".incoming-"
_ABANDONED_S = 24 * 3600.0


class AdapterStore:
    """Content-addressed copies under one directory, which is created if need be.

    Args:
        directory: may be shared with other processes of this machine.
        max_bytes: of all contents together.
        max_adapter_bytes: of one adapter's weights.

    Raises:
        ConfigError: the directory cannot be created.
    """

    def __init__(self, directory: Path, max_bytes: int = 64 << 30, max_adapter_bytes: int = 32 << 30) -> None:
        self.directory = directory.expanduser()
        self.max_bytes = max_bytes
        self.max_adapter_bytes = max_adapter_bytes
        self._leases = Leases()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"adapter_store_dir: cannot create {self.directory}: {error.strerror}") from None
        for leftover in self.directory.glob(f"{_INCOMING}*"):
            if _age_s(leftover) > _ABANDONED_S:
                shutil.rmtree(leftover, ignore_errors=True)

    def add(self, source: Path, check: Callable[[Path, str], None] | None = None) -> Path:
        """Copy an adapter into the store and return the copy's directory, whose name is the version.

        The copy stays until `give_back`, once for each time that it was added or taken. `check` is called with its
        directory and the version before anyone else sees it, and may put more files there; if it raises, the copy is
        dropped.

        Raises:
            NotFoundError: `source` does not exist.
            InvalidRequestError: `source` is not a directory, or may not be read.
            AdapterRejectedError: files are missing, too large, not regular, or changed meanwhile; the weights are a
                pickle; a field of the configuration cannot be honoured.
            CapacityError: the store's disk is full, or `max_bytes` are in use.
        """
        _check_source(source)
        with self._full_disk_told():
            return self._add(source, check)

    def has(self, version: str) -> bool:
        return _VERSION.fullmatch(version) is not None and (self.directory / version).is_dir()

    def files(self, version: str) -> AdapterFiles | None:
        """What makes up a content; None if it is not in the store."""
        if not (self.has(version) and self.take(version)):
            return None
        try:
            content = self.directory / version
            return AdapterFiles((content / CONFIG_FILE).read_bytes(), (content / WEIGHTS_FILE).read_bytes())
        finally:
            self.give_back(version)

    def take(self, version: str) -> bool:
        """Keep a content until `give_back`; false if it is not in the store."""
        return self._leases.take(self.directory / version)

    def give_back(self, version: str) -> None:
        """Undo one `add` or `take`."""
        self._leases.give_back(version)

    @contextmanager
    def incoming(self) -> Iterator[Path]:
        """A directory of the store's file system that nobody else sees, removed at the end.

        Raises:
            CapacityError: the disk is full.
        """
        with self._full_disk_told():
            directory = Path(tempfile.mkdtemp(prefix=_INCOMING, dir=self.directory))
        try:
            directory.chmod(0o755)
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    @contextmanager
    def _full_disk_told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in DISK_FULL:
                raise CapacityError(f"no space left in adapter_store_dir {self.directory}") from None
            raise

    def _add(self, source: Path, check: Callable[[Path, str], None] | None) -> Path:
        with self.incoming() as incoming:
            copied = {CONFIG_FILE: _copy_file(source, incoming, CONFIG_FILE, MAX_CONFIG_BYTES)}
            meaning = read_peft_config(incoming).canonical().encode()
            digest = hashlib.sha256(b"ray_lora adapter 1 %d\n" % len(meaning) + meaning)
            copied[WEIGHTS_FILE] = _copy_file(source, incoming, WEIGHTS_FILE, self.max_adapter_bytes, digest.update)
            for name, identity in copied.items():
                if _current_identity(source / name) != identity:
                    reject(name, f"{name} changed while the adapter was copied; load it again when it is complete")
            final = self.directory / digest.hexdigest()
            if check is not None:
                check(incoming, final.name)
            with exclusive(self.directory):
                self._make_room(incoming, final)
                self._publish(incoming, final)
                if not self._leases.take(final):
                    raise CapacityError(
                        f"adapter_store_dir {self.directory} cannot be locked; are too many files open?"
                    )
            return final

    def _make_room(self, incoming: Path, final: Path) -> None:
        """Remove what is not in use until all that `final` does not have yet fits into `max_bytes`."""
        num_bytes = sum(file.stat().st_size for file in incoming.iterdir() if not (final / file.name).exists())
        if num_bytes == 0:
            return
        contents = [path for path in self.directory.iterdir() if _VERSION.fullmatch(path.name)]
        excess = sum(map(size_of, contents)) + num_bytes - self.max_bytes
        if excess <= 0:
            return
        with self.incoming() as grave:
            excess -= remove_least_recently_used([path for path in contents if path != final], excess, grave)
        for directory in (incoming, *contents):
            if excess > 0:
                excess -= _remove_extras(directory)
        if excess > 0 and not final.exists():
            raise CapacityError(f"the adapters in use and this one exceed adapter_store_max_bytes {self.max_bytes}")

    def _publish(self, incoming: Path, final: Path) -> None:
        """Rename, or keep what is there if it is whole. A damaged copy (a crash, a full disk) is replaced."""
        while True:
            try:
                incoming.rename(final)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            if _is_same(incoming, final):
                for file in _extras(incoming):
                    file.rename(final / file.name)
                return
            with self.incoming() as damaged, suppress(FileNotFoundError):  # another process may have moved it away
                final.rename(damaged / final.name)


def _check_source(source: Path) -> None:
    try:
        is_directory = stat.S_ISDIR(source.stat().st_mode)
    except PermissionError:
        raise InvalidRequestError(f"lora_path {str(source)!r} may not be read", "lora_path") from None
    except (OSError, ValueError):
        raise NotFoundError(
            f"lora_path {str(source)!r} does not exist on {socket.gethostname()}; give a directory of a node where a "
            "replica has its rank 0, or a URL",
            "lora_path",
        ) from None
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


def _extras(content: Path) -> list[Path]:
    return [file for file in content.iterdir() if file.name not in (CONFIG_FILE, WEIGHTS_FILE)]


def _remove_extras(content: Path) -> int:
    """The bytes that are free now."""
    freed = 0
    with suppress(OSError):  # another process may have moved the content away
        for file in _extras(content):
            freed += file.stat().st_size
            file.unlink()
    return freed


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
