"""Which contents of a store are in use, by any process of this machine, and which must go to make room.

Whoever uses a content holds a shared lock on its directory; whoever wants to remove it needs the exclusive one. The
system lets go of the locks of a process that ends, however it ends.
"""

import fcntl
import os
import resource
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_DESCRIPTORS = 1 << 16


class Leases:
    """The contents that this process uses, each as often as it was taken. Safe to share between threads.

    Each takes a file descriptor, so the process is allowed more of them, up to `MAX_DESCRIPTORS`.
    """

    def __init__(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MAX_DESCRIPTORS, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        self._lock = threading.Lock()
        self._descriptors: dict[str, int] = {}
        self._counts: Counter[str] = Counter()

    def take(self, directory: Path) -> bool:
        """Keep a content from being removed; false if it is not there (any more)."""
        version = directory.name
        with self._lock:
            held = self._descriptors.get(version)
            if held is None or not _is_at(held, directory):
                descriptor = _lock(directory, fcntl.LOCK_SH)
                if descriptor is None:
                    return False
                if held is not None:
                    os.close(held)
                self._descriptors[version] = descriptor
            self._counts[version] += 1
        with suppress(OSError):
            os.utime(directory)
        return True

    def give_back(self, version: str) -> None:
        """Undo one `take`."""
        with self._lock:
            self._counts[version] -= 1
            if self._counts[version] == 0:
                del self._counts[version]
                os.close(self._descriptors.pop(version))


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """One thread of one process at a time, where the file system has locks."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def remove_least_recently_used(contents: Sequence[Path], num_bytes: int, grave: Path) -> int:
    """Remove contents that nobody uses until `num_bytes` are free or none is left; the bytes that are free now.

    They are moved to `grave`, a directory of the same file system, so that nobody sees half of one.
    """
    freed = 0
    for directory in sorted(contents, key=_last_use):
        if freed >= num_bytes:
            break
        size = size_of(directory)
        descriptor = _lock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if descriptor is not None:
            directory.rename(grave / directory.name)
            os.close(descriptor)
            shutil.rmtree(grave / directory.name, ignore_errors=True)
            freed += size
    return freed


def size_of(directory: Path) -> int:
    """Bytes of the files in it; 0 if it has vanished."""
    try:
        return sum(file.stat().st_size for file in directory.iterdir())
    except OSError:
        return 0


def _lock(directory: Path, operation: int) -> int | None:
    """A descriptor of the directory, locked and still at this path; None if that cannot be had."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        os.close(descriptor)
        return None
    if _is_at(descriptor, directory):
        return descriptor
    os.close(descriptor)
    return None


def _is_at(descriptor: int, directory: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), directory.stat())
    except OSError:
        return False


def _last_use(directory: Path) -> float:
    try:
        return directory.stat().st_mtime
    except OSError:
        return 0.0
