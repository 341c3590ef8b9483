"""Leases in one SQLite file: durable, for many processes of one machine, with nothing to install.

Rule 1: every write is one BEGIN IMMEDIATE transaction that reads, decides and replaces.
Rule 2: only our own columns are written, so that columns others add survive.
Rule 3: a row keeps no time; how long a lease has stood still is for its watchers.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from balancer.model import Lease
from stores.fields import insist
from stores.protocol import Done, Listing, Lost, Malformed, Outcome, OutcomeUnknown, StoreError
from stores.sqlite_rows import COLUMNS, SCHEMA, to_lease, to_row
from stores.transacted import Change, TransactedStore

BUSY_SECONDS = 10.0
"""How long a write waits for another process's; a write takes milliseconds, so this means trouble."""

_SELECT = f"SELECT {', '.join(COLUMNS)} FROM leases"  # noqa: S608  our own column names
_INSERT = f"INSERT INTO leases ({', '.join(COLUMNS)}) VALUES ({', '.join(':' + name for name in COLUMNS)})"  # noqa: S608
_UPDATE = f"UPDATE leases SET {', '.join(f'{name} = :{name}' for name in COLUMNS)} WHERE key = :key"  # noqa: S608


class SqliteStore(TransactedStore):
    """One connection, used by one thread at a time. The counter is the version and the epoch."""

    def __init__(self, path: str, *, create: bool = True) -> None:
        """Open the file, and make it and its table if they are not there and `create` allows."""
        if not create and not Path(path).exists():
            raise StoreError(f"there is no file {path}, and it may not be created here; create it first")
        self._lock = Lock()
        self._path = path
        with self._translated():
            self._connection = sqlite3.connect(
                path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            self._connection.row_factory = sqlite3.Row
            if create:
                self._prepare()
            self._connection.execute(f"{_SELECT} LIMIT 0")

    def _prepare(self) -> None:
        # WAL: readers and the writer do not wait for each other. synchronous=FULL is SQLite's
        # default: a checkpoint answered with Done survives a loss of power.
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute(SCHEMA)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF in (
                sqlite3.SQLITE_CANTOPEN,
                sqlite3.SQLITE_ERROR,
                sqlite3.SQLITE_READONLY,
            ):
                raise StoreError(f"{self._path}: {error}; check the folder, the permissions and the table") from error
            raise OutcomeUnknown(f"{self._path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{self._path} cannot be used as a lease table: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._translated():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _stored(self, key: str) -> Lease | None:
        row = self._connection.execute(f"{_SELECT} WHERE key = ?", (key,)).fetchone()
        return insist(to_lease(row)) if row else None

    def list(self) -> Listing:
        """Every lease, sorted by key, as of one moment."""
        with self._lock, self._translated():
            rows = self._connection.execute(f"{_SELECT} ORDER BY key").fetchall()
        read = tuple(to_lease(row) for row in rows)
        leases = tuple(lease for lease in read if isinstance(lease, Lease))
        return Listing(leases, tuple(row for row in read if isinstance(row, Malformed)))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:  # noqa: ARG002  never stale
        """These leases, in the order asked; those not there are left out."""
        with self._lock, self._translated():
            found = tuple(self._stored(key) for key in keys)
        return tuple(lease for lease in found if lease)

    def _insert(self, lease: Lease) -> Outcome:
        with self._transaction() as connection:
            if stored := self._stored(lease.key):
                return Lost(lease.key, stored)
            connection.execute(_INSERT, to_row(lease))
        return Done(lease)

    def _change(self, key: str, change: Change) -> Outcome:
        with self._transaction() as connection:
            stored = self._stored(key)
            after = change(stored) if stored else None
            if after is None:
                return Lost(key, stored)
            connection.execute(_UPDATE, to_row(after))
        return Done(after)

    def _remove(self, key: str, fits: Callable[[Lease], bool]) -> Lost | None:
        with self._transaction() as connection:
            stored = self._stored(key)
            if stored and not fits(stored):
                return Lost(key, stored)
            connection.execute("DELETE FROM leases WHERE key = ?", (key,))
        return None

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()


def open_url(place: str, options: Mapping[str, str], *, create: bool) -> SqliteStore:  # noqa: ARG001  it has none
    """The store of this file; a path after two slashes is relative, after three absolute."""
    if not place.strip("/"):
        raise ValueError("store URL: sqlite:// wants the path of a file")
    return SqliteStore(place, create=create)
