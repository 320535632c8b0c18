"""What was loaded over HTTP or a handle, in a file: a replica that starts again loads it again."""

import logging
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("ray.serve")

_SCHEMA = "CREATE TABLE IF NOT EXISTS adapters (name TEXT PRIMARY KEY, version TEXT NOT NULL, source TEXT NOT NULL)"
_BUSY_S = 10.0


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """A registered name: the digest of its content, and where that was loaded from."""

    name: str
    version: str
    source: str


class AdapterRegistry:
    """A small SQLite database. Replicas may share it: all of them write the same.

    A file that is damaged is set aside, with a complaint in the log, and a new one is begun.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.entries()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            aside = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
            self.path.rename(aside)
            logger.error(
                "lora_registry_path: %s is damaged (%s); it is now %s, and a new one begins", path, error, aside
            )

    def entries(self) -> list[RegistryEntry]:
        """All names, in the order they were registered."""
        with self._connection() as connection:
            rows = connection.execute("SELECT name, version, source FROM adapters ORDER BY rowid").fetchall()
        return [RegistryEntry(*row) for row in rows]

    def put(self, entry: RegistryEntry) -> None:
        with self._connection() as connection:
            connection.execute(
                "INSERT INTO adapters VALUES (?, ?, ?) ON CONFLICT (name) "
                "DO UPDATE SET version = excluded.version, source = excluded.source",
                (entry.name, entry.version, entry.source),
            )

    def remove(self, name: str) -> None:
        with self._connection() as connection:
            connection.execute("DELETE FROM adapters WHERE name = ?", (name,))

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=_BUSY_S)) as connection, connection:
            connection.execute(_SCHEMA)
            yield connection
