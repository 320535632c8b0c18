"""What every process of a server holds, sampled every few seconds."""

import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression

import psutil

MIB = 1 << 20
MIN_LIFE_S = 60.0
"""Of a process whose growth says anything."""


@dataclass(frozen=True, slots=True)
class Sample:
    at: float
    private_bytes: int
    """Resident, without what is shared with other processes."""
    num_descriptors: int
    num_threads: int


@dataclass(slots=True)
class Life:
    kind: str
    process: psutil.Process
    samples: list[Sample] = field(default_factory=list)

    @property
    def growth_mib_an_hour(self) -> float | None:
        """The slope over the second half of its life."""
        late = [each for each in self.samples if each.at > (self.samples[0].at + self.samples[-1].at) / 2]
        if self.samples[-1].at - self.samples[0].at < MIN_LIFE_S or len(late) < 3:
            return None
        slope, _ = linear_regression([each.at for each in late], [each.private_bytes for each in late])
        return slope * 3600 / MIB


class ProcessWatch:
    """The processes below this one that serve: Ray's, Serve's, ours."""

    def __init__(self) -> None:
        self.lives: dict[int, Life] = {}

    def sample(self) -> None:
        for process in psutil.Process().children(recursive=True):
            try:
                kind = _kind(process)
                if kind is None or not is_alive(process):
                    continue
                with process.oneshot():
                    memory = process.memory_info()
                    taken = Sample(
                        time.monotonic(), memory.rss - memory.shared, process.num_fds(), process.num_threads()
                    )
            except psutil.Error:
                continue
            life = self.lives.setdefault(process.pid, Life(kind, process))
            life.kind = kind  # a process begins under the name of the one that starts it
            life.samples.append(taken)

    def running(self, kind: str) -> list[Life]:
        return [life for life in self.lives.values() if life.kind == kind and is_alive(life.process)]

    def most(self) -> dict[str, tuple[int, int]]:
        """Descriptors and threads now, by kind of process: of several the most."""
        now: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for life in self.lives.values():
            if is_alive(life.process):
                last = life.samples[-1]
                descriptors, threads = now[life.kind]
                now[life.kind] = max(descriptors, last.num_descriptors), max(threads, last.num_threads)
        return dict(now)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Of each that lived long enough: kind, pid, seconds, MiB at the end, growth, descriptors, threads."""
        for pid, life in sorted(self.lives.items(), key=lambda item: (item[1].kind, item[0])):
            first, last, growth = life.samples[0], life.samples[-1], life.growth_mib_an_hour
            if growth is not None:
                yield (
                    life.kind,
                    f"{pid}",
                    f"{last.at - first.at:.0f}",
                    f"{last.private_bytes / MIB:.1f}",
                    f"{growth:+.1f}",
                    f"{last.num_descriptors}",
                    f"{last.num_threads}",
                )


def leases(process: psutil.Process, store: Path) -> int:
    """How many contents of the store a process keeps."""
    links = Path(f"/proc/{process.pid}/fd").iterdir()
    return sum(Path(target).parent == store for target in (_target(link) for link in links))


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


def _kind(process: psutil.Process) -> str | None:
    title = " ".join(process.cmdline()) or process.name()
    if found := re.match(r"ray::(?:ServeReplica:\w+:)?(\w+)", title):
        return None if found[1] == "IDLE" else found[1]
    return next((kind for kind in ("raylet", "gcs_server", "ray-lora serve") if kind in title), None)
