"""What was loaded and set at run time, in a file: a server that starts again has it again."""

import logging
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from ray_lora.names import without_credentials
from ray_lora.serve.adapter_entry import AdapterEntry, AdapterSettings

logger = logging.getLogger("ray.serve")

_ADAPTERS = "CREATE TABLE IF NOT EXISTS adapters (name TEXT PRIMARY KEY, version TEXT NOT NULL, source TEXT NOT NULL)"
_SETTINGS = "CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, pinned INTEGER, weight REAL, last_used REAL)"
_BUSY_S = 10.0


class AdapterRegistry:
    """A small SQLite database that its owner alone may read.

    A file that is damaged is set aside, with a complaint in the log, and a new one is begun.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._prepare()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise
            aside = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
            self.path.rename(aside)
            logger.error(
                "lora_registry_path: %s is damaged (%s); it is now %s, and a new one begins", path, error, aside
            )
            self._prepare()

    def entries(self) -> list[AdapterEntry]:
        """All registered names; the pinned ones first, then the most recently used."""
        with self._connection() as connection:
            rows = connection.execute(
                "SELECT name, version, source, pinned, weight, last_used "
                "FROM adapters LEFT JOIN settings USING (name) "
                "ORDER BY IFNULL(pinned, 0) DESC, last_used DESC NULLS LAST, adapters.rowid"
            ).fetchall()
        return [AdapterEntry(name, version, source, _settings(*rest)) for name, version, source, *rest in rows]

    def settings(self, name: str) -> AdapterSettings:
        """Of any name; the default ones if nothing was said of it."""
        with self._connection() as connection:
            query = "SELECT pinned, weight, last_used FROM settings WHERE name = ?"
            row = connection.execute(query, (name,)).fetchone()
        return AdapterSettings() if row is None else _settings(*row)

    def put(self, name: str, version: str, source: str) -> None:
        """Point a name, new or known, to a content."""
        with self._connection() as connection:
            connection.execute(
                "INSERT INTO adapters VALUES (?, ?, ?) ON CONFLICT (name) "
                "DO UPDATE SET version = excluded.version, source = excluded.source",
                (name, version, without_credentials(source)),
            )

    def remove(self, name: str) -> None:
        """Forget a name and its settings."""
        with self._connection() as connection:
            connection.execute("DELETE FROM adapters WHERE name = ?", (name,))
            connection.execute("DELETE FROM settings WHERE name = ?", (name,))

    def set_pinned(self, name: str, is_pinned: bool) -> None:
        with self._connection() as connection:
            connection.execute(
                "INSERT INTO settings (name, pinned) VALUES (?, ?) ON CONFLICT (name) "
                "DO UPDATE SET pinned = excluded.pinned",
                (name, is_pinned),
            )

    def set_weight(self, name: str, weight: float) -> None:
        with self._connection() as connection:
            connection.execute(
                "INSERT INTO settings (name, weight) VALUES (?, ?) ON CONFLICT (name) "
                "DO UPDATE SET weight = excluded.weight",
                (name, weight),
            )

    def set_last_used(self, times: Mapping[str, float]) -> None:
        """By name, in seconds since the epoch; of two replicas' times the later one stays."""
        with self._connection() as connection:
            connection.executemany(
                "INSERT INTO settings (name, last_used) VALUES (?, ?) ON CONFLICT (name) "
                "DO UPDATE SET last_used = MAX(excluded.last_used, IFNULL(last_used, 0))",
                times.items(),
            )

    def _prepare(self) -> None:
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(_ADAPTERS)
            connection.execute(_SETTINGS)
            if "weight" not in [column for _, column, *_ in connection.execute("PRAGMA table_info(settings)")]:
                connection.execute("ALTER TABLE settings RENAME TO settings_without_weights")
                connection.execute(_SETTINGS)
                connection.execute(
                    "INSERT INTO settings SELECT name, NULLIF(pinned, 0), NULL, last_used FROM settings_without_weights"
                )
                connection.execute("DROP TABLE settings_without_weights")
        self.entries()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=_BUSY_S)) as connection, connection:
            yield connection


def _settings(pinned: int | None, weight: float | None, last_used: float | None) -> AdapterSettings:
    return AdapterSettings(None if pinned is None else bool(pinned), weight, last_used)
