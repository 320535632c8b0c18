"""What was loaded and set at run time, in a file: a server that starts again has it again."""

import logging
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from ray_lora.names import without_credentials
from ray_lora.serve.adapter_entry import AdapterEntry, AdapterSettings

logger = logging.getLogger("ray.serve")

_ADAPTERS = "CREATE TABLE IF NOT EXISTS adapters (name TEXT PRIMARY KEY, version TEXT NOT NULL, source TEXT NOT NULL)"
_SETTINGS = "CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, pinned INTEGER, weight REAL, last_used REAL)"
_PUT = (
    "INSERT INTO adapters VALUES (?, ?, ?) ON CONFLICT (name) "
    "DO UPDATE SET version = excluded.version, source = excluded.source"
)
_BUSY_S = 10.0


_COLUMNS = {"adapters": ["name", "version", "source"], "settings": ["name", "pinned", "weight", "last_used"]}
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
"""The last is what SQLite says of a table that is not as it should be."""


def is_damage(error: sqlite3.Error) -> bool:
    """Whether a file's content is at fault, rather than a lock, its disk or its permissions."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF in _DAMAGE


class AdapterRegistry:
    """A small SQLite database that its owner alone may read.

    A file that is damaged is set aside, with a complaint in the log, and a new one is begun.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.is_new = False
        """Nothing had ever been written to it when it was opened."""
        try:
            self._prepare()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self._set_aside(error)
            self._prepare()

    def entries(self) -> list[AdapterEntry]:
        """All registered names; the pinned ones first, then the most recently used."""
        with self._connection() as connection:
            rows = connection.execute(
                "SELECT name, version, source, pinned, weight, last_used "
                "FROM adapters LEFT JOIN settings USING (name) "
                "ORDER BY IFNULL(pinned, 0) DESC, last_used DESC NULLS LAST, adapters.rowid"
            ).fetchall()
        return [_entry(*row) for row in rows]

    def settings(self, name: str) -> AdapterSettings:
        """Of any name; the default ones if nothing was said of it."""
        with self._connection() as connection:
            query = "SELECT pinned, weight, last_used FROM settings WHERE name = ?"
            row = connection.execute(query, (name,)).fetchone()
        return AdapterSettings() if row is None else _settings(*row)

    def put(self, name: str, version: str, source: str) -> None:
        """Point a name, new or known, to a content."""
        with self._connection() as connection:
            connection.execute(_PUT, (name, version, without_credentials(source)))

    def restore(self, entries: Iterable[AdapterEntry], settings: Mapping[str, AdapterSettings]) -> None:
        """Write what others have kept of it; settings by name, also of names that were not loaded at run time."""
        known = [(name, each.pinned, each.weight, each.last_used) for name, each in settings.items()]
        with self._connection() as connection:
            connection.executemany(_PUT, [(each.name, each.version, each.source) for each in entries])
            connection.executemany("INSERT OR REPLACE INTO settings VALUES (?, ?, ?, ?)", known)

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
            (fault,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if fault != "ok":
                raise sqlite3.DatabaseError(fault)
            self.is_new = not connection.execute("SELECT 1 FROM sqlite_master").fetchall()
            connection.execute(_ADAPTERS)
            connection.execute(_SETTINGS)
            if _columns(connection, "settings") == ["name", "pinned", "last_used"]:
                connection.execute("ALTER TABLE settings RENAME TO settings_without_weights")
                connection.execute(_SETTINGS)
                connection.execute(
                    "INSERT INTO settings SELECT name, NULLIF(pinned, 0), NULL, last_used FROM settings_without_weights"
                )
                connection.execute("DROP TABLE settings_without_weights")
            for table, columns in _COLUMNS.items():
                if _columns(connection, table) != columns:
                    raise sqlite3.DatabaseError(f"the table {table} has other columns")
        self.entries()

    def _set_aside(self, error: sqlite3.Error) -> None:
        aside = self.path.with_name(f"{self.path.name}.damaged-{time.time_ns()}")
        for suffix in ("", "-journal"):
            with suppress(FileNotFoundError):
                Path(f"{self.path}{suffix}").rename(f"{aside}{suffix}")
        logger.error(
            "lora_registry_path: %s is damaged (%s); it is now %s, and a new one begins", self.path, error, aside
        )

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=_BUSY_S)) as connection, connection:
            yield connection


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [column for _, column, *_ in connection.execute(f"PRAGMA table_info({table})")]


def _entry(
    name: str, version: str, source: str, pinned: int | None, weight: float | None, last_used: float | None
) -> AdapterEntry:
    """A row, whose values may be of any type if somebody else has written them."""
    words, numbers = (name, version, source), (pinned, weight, last_used)
    if not all(isinstance(word, str) for word in words) or not all(
        number is None or isinstance(number, int | float) for number in numbers
    ):
        raise sqlite3.DatabaseError(f"a row that is none of ours: {words}, {numbers}")
    return AdapterEntry(name, version, source, _settings(pinned, weight, last_used))


def _settings(pinned: int | None, weight: float | None, last_used: float | None) -> AdapterSettings:
    return AdapterSettings(None if pinned is None else bool(pinned), weight, last_used)
