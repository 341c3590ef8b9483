"""Leases in one SQLite file: durable, for many processes of one machine, with nothing to install.

Rule 1: every write is one BEGIN IMMEDIATE transaction that reads, decides and replaces.
Rule 2: only our own columns are written, so that columns others add survive.
Rule 3: a row keeps no time; how long a lease has stood still is for its watchers.
"""

import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from leasehold.balancer.model import Lease
from leasehold.stores.applied import applied
from leasehold.stores.embedded.rows import COLUMNS, SCHEMA, to_lease, to_row
from leasehold.stores.fields import insist
from leasehold.stores.protocol import Done, Listing, Lost, Malformed, Outcome, OutcomeUnknown, Promises, StoreError
from leasehold.stores.writes import DeleteLease, Write

BUSY_SECONDS = 10.0
"""How long a write waits for another process's; a write takes milliseconds, so this means trouble."""

_SELECT = f"SELECT {', '.join(COLUMNS)} FROM leases"  # noqa: S608  our own column names
_INSERT = f"INSERT INTO leases ({', '.join(COLUMNS)}) VALUES ({', '.join(':' + name for name in COLUMNS)})"  # noqa: S608
_UPDATE = f"UPDATE leases SET {', '.join(f'{name} = :{name}' for name in COLUMNS)} WHERE key = :key"  # noqa: S608


class SqliteStore:
    """A connection to the file, used by one thread at a time. The counter is the version and the epoch."""

    def __init__(self, path: str, *, create: bool = True, busy_seconds: float = BUSY_SECONDS) -> None:
        """Open the file, and make it and its table if they are not there and `create` allows."""
        if not create and not Path(path).exists():
            raise StoreError(f"there is no file {path}, and it may not be created here; create it first")
        self._lock = Lock()
        self._path = path
        if create and path != ":memory:":
            _make_private(path)
        with self._translated():
            self._connection = sqlite3.connect(
                path, timeout=busy_seconds, isolation_level=None, check_same_thread=False
            )
            self._connection.row_factory = sqlite3.Row
            self._connection.text_factory = _text
            if create:
                self._prepare()
            self._connection.execute(f"{_SELECT} LIMIT 0")

    def _prepare(self) -> None:
        # WAL: readers and the writer do not wait for each other. synchronous=FULL is SQLite's
        # default: a checkpoint answered with Done survives a loss of power.
        (mode,) = self._connection.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            self._connection.close()
            raise StoreError(
                f"{self._path}: SQLite keeps no write-ahead log here (it answers {mode!r}); name a file on a local disk"
            )
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

    @property
    def promises(self) -> Promises:
        """The file keeps every promise."""
        return Promises()

    def list(self) -> Listing:
        """Every lease, sorted by key, as of one moment."""
        with self._lock, self._translated():
            rows = self._connection.execute(f"{_SELECT} ORDER BY key").fetchall()
        read = tuple(to_lease(row) for row in rows)
        leases = tuple(lease for lease in read if isinstance(lease, Lease))
        return Listing(leases, tuple(row for row in read if isinstance(row, Malformed)))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:  # noqa: ARG002  never stale
        """Read these leases, in the order asked; those not there are left out."""
        with self._lock, self._translated():
            found = tuple(self._stored(key) for key in keys)
        return tuple(lease for lease in found if lease)

    def write(self, write: Write) -> Outcome:
        """Read the row, decide and replace it in one transaction; children have no column, for nothing reads them."""
        key = write.lease.key
        with self._transaction() as connection:
            stored = self._stored(key)
            after = applied(write, stored)
            if after is None:
                return Lost(key, stored)
            if isinstance(write, DeleteLease):
                connection.execute("DELETE FROM leases WHERE key = ?", (key,))
            else:
                connection.execute(_UPDATE if stored else _INSERT, to_row(after))
        return Done(after)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()


def _make_private(path: str) -> None:
    """A new file is its owner's alone, as SQLite's files beside it then are: notes and names of workers are in it."""
    # Only a file that is new is opened: closing any other would let go the locks that this process has on it.
    with suppress(OSError):  # it is there, or SQLite will say why it cannot be
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _text(raw: bytes) -> str | bytes:
    """As text, or as it is where it is none: the driver's own way fails the whole reading for one such row."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def _hint(place: str) -> str:
    """Where an absolute path may have been meant as one of this folder, which is how SQLAlchemy reads three slashes."""
    path = Path(place)
    if not path.is_absolute() or (len(path.parts) > 2 and path.parent.is_dir()):  # noqa: PLR2004  the root and a file
        return ""
    return f"; after sqlite:/// a path is absolute: the file of this folder is sqlite://{place.lstrip('/')}"


def open_url(
    place: str,
    options: Mapping[str, str],  # noqa: ARG001  it has none
    *,
    create: bool,
    request_seconds: float | None,
) -> SqliteStore:
    """The store of this file; a path after two slashes is relative, after three absolute."""
    if not place.strip("/"):
        raise ValueError("store URL: sqlite:// wants the path of a file")
    busy = BUSY_SECONDS if request_seconds is None else min(BUSY_SECONDS, request_seconds)
    try:
        return SqliteStore(place, create=create, busy_seconds=busy)
    except StoreError as error:
        raise StoreError(f"{error}{_hint(place)}") from error
