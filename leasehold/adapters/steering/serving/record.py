"""The moves and the lag since the server started, kept in memory, or in a SQLite file if one is named."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

from attrs import frozen

SCHEMA = """
CREATE TABLE IF NOT EXISTS moves (store TEXT, at REAL, key TEXT, before TEXT, after TEXT, rule TEXT);
CREATE TABLE IF NOT EXISTS lag (store TEXT, at REAL, most REAL, total REAL);
CREATE INDEX IF NOT EXISTS moves_at ON moves (store, at);
CREATE INDEX IF NOT EXISTS lag_at ON lag (store, at)
"""

LOCKED_SECONDS = 0.5
"""How long another process's lock is waited for: what is not written then is written with the next reading."""

KEPT_SECONDS = 7 * 86400.0
"""The age from which moves and lag are removed."""


@frozen
class SeenMove:
    """A change of owner as two readings of a table show it; None is nobody.

    at    seconds since 1970
    rule  by which the new owner took it, or the lookout freed it; "" where the owner before let it go
    """

    at: float
    key: str
    before: str | None
    after: str | None
    rule: str = ""


@frozen
class LagPoint:
    """How far behind the application was at a time; `most` is None where no row told."""

    at: float
    most: float | None
    total: float


class HistoryError(Exception):
    """The history takes or tells nothing now, for this reason."""


@contextmanager
def _understood() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise HistoryError(f"the history cannot be used now: {error}") from error


class FleetRecord:
    """The moves and the lag of all stores since the beginning; safe under threads.

    path  of a SQLite file, made if it is not there; in memory, if left out
    """

    def __init__(self, path: str | None = None) -> None:
        """Raises OSError if the file cannot be used."""
        self._lock = Lock()
        try:
            self._connection = sqlite3.connect(path or ":memory:", check_same_thread=False, timeout=LOCKED_SECONDS)
            self._connection.executescript(SCHEMA)
        except sqlite3.Error as error:
            raise OSError(f"--history: {path}: {error}") from error

    def add(self, store: str, moves: tuple[SeenMove, ...], lag: LagPoint) -> None:
        """Keep what one reading showed, all of it or nothing. Raises HistoryError."""
        rows = [(store, move.at, move.key, move.before, move.after, move.rule) for move in moves]
        with _understood(), self._lock, self._connection as connection:
            connection.executemany("INSERT INTO moves VALUES (?, ?, ?, ?, ?, ?)", rows)
            connection.execute(
                "INSERT INTO lag (store, at, most, total) VALUES (?, ?, ?, ?)", (store, lag.at, lag.most, lag.total)
            )
            for table in ("moves", "lag"):
                connection.execute(f"DELETE FROM {table} WHERE at < ?", (lag.at - KEPT_SECONDS,))  # noqa: S608  our own names

    def moves(self, store: str, most: int = 100) -> tuple[SeenMove, ...]:
        """The latest moves, the last one first. Raises HistoryError."""
        asked = "SELECT at, key, before, after, rule FROM moves WHERE store = ? ORDER BY at DESC, key LIMIT ?"
        with _understood(), self._lock:
            return tuple(SeenMove(*row) for row in self._connection.execute(asked, (store, most)))

    def lag(self, store: str, most: int = 300) -> tuple[LagPoint, ...]:
        """The latest points of lag, in order of time. Raises HistoryError."""
        asked = "SELECT at, most, total FROM lag WHERE store = ? ORDER BY at DESC LIMIT ?"
        with _understood(), self._lock:
            return tuple(LagPoint(*row) for row in self._connection.execute(asked, (store, most)))[::-1]

    def count(self, store: str) -> int:
        """How many moves are known. Raises HistoryError."""
        with _understood(), self._lock:
            return int(self._connection.execute("SELECT count(*) FROM moves WHERE store = ?", (store,)).fetchone()[0])

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()
