"""What is known of an adapter's name between replicas. Where its content lies, each replica knows for itself."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What belongs to a name, wherever its content comes from; None is what was never said."""

    pinned: bool | None = None
    weight: float | None = None
    last_used: float | None = None
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """A name: the digest of its content, and where that was loaded from."""

    name: str
    version: str | None
    """None if nobody has read it yet: whatever is there then."""
    source: str
    """Without a URL's credentials."""
    settings: AdapterSettings = field(default_factory=AdapterSettings)


@dataclass(frozen=True, slots=True)
class Revision:
    """A moment in the directory's life; two are equal or not, and of those of one life the greater is the later."""

    life: str
    number: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All names at one revision."""

    revision: Revision
    entries: tuple[AdapterEntry, ...]


def in_order_of_need(entries: Iterable[AdapterEntry]) -> tuple[AdapterEntry, ...]:
    """The pinned ones first, then the most recently used."""
    return tuple(sorted(entries, key=lambda each: (not each.settings.pinned, -(each.settings.last_used or 0.0))))
