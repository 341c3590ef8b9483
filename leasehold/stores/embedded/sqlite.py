"""Leases in one SQLite file: durable, for many processes of one machine, with nothing to install.

Rule 1: every write is one BEGIN IMMEDIATE transaction that reads, decides and replaces.
Rule 2: only our own columns are written, so that columns others add survive.
Rule 3: a row keeps no time; how long a lease has stood still is for its watchers.
Rule 4: the open file is the one that the path names, or it is opened anew: a file that was removed or replaced lives
on for those who have it open, and two fleets would read everything.

Lease <-> SQLite row: one column per fact, readable with any SQLite tool.
"""

import json
import logging
import os
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from sqlite3 import Row
from threading import Lock
from types import NoneType
from typing import Any

from leasehold.balancer.model import Lease
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.fields import (
    FIELDS,
    BadRowField,
    CellKind,
    cells,
    checked,
    insist,
    lease_of,
    listing_of,
    readable,
    shown,
)
from leasehold.stores.printable import escaped
from leasehold.stores.protocol import Capabilities, Done, Listing, Lost, Malformed, Outcome
from leasehold.stores.requests import PAGE_LEASES, ObjectFields, Stored
from leasehold.stores.writes import DeleteLease, Write, applied, counted

_COLUMNS = {field.name: field.column for field in FIELDS if field.column}
COLUMNS = tuple(_COLUMNS.values())

SCHEMA = """
CREATE TABLE IF NOT EXISTS leases (
  key        TEXT PRIMARY KEY NOT NULL,
  stream     TEXT NOT NULL DEFAULT '',
  shard      TEXT NOT NULL,
  parents    TEXT NOT NULL DEFAULT '[]',  -- JSON list of lease keys
  owner      TEXT,
  counter    INTEGER NOT NULL,            -- one more at every renewal and owner change
  checkpoint TEXT NOT NULL,               -- sequence number or sentinel
  sub        INTEGER NOT NULL DEFAULT 0,
  token      TEXT NOT NULL DEFAULT '',
  first_hash TEXT,                        -- decimal: 128 bits do not fit an INTEGER
  last_hash  TEXT,
  weight     REAL,                        -- KB/s
  heir       TEXT,
  yields     INTEGER NOT NULL DEFAULT 0,
  notes      TEXT NOT NULL DEFAULT '{}'   -- JSON object of strings
) WITHOUT ROWID
"""

_TYPES: Mapping[CellKind, type | tuple[type, ...]] = {
    "name": str,
    "text": str,
    "names": str,
    "worker": (str, NoneType),
    "count": int,
    "sequence": str,
    "hash key": (str, NoneType),
    "KB/s": (float, NoneType),
    "flag": int,
    "notes": str,
}


def to_row(lease: Lease) -> Mapping[str, str | int | float | None]:
    """The row of a lease, by column."""
    told = cells(lease)
    told["parents"], told["yields"] = json.dumps(told["parents"]), int(lease.yields)
    told["notes"] = json.dumps(told["notes"], ensure_ascii=False)
    return {column: told[name] for name, column in _COLUMNS.items()}


def to_lease(row: Row | Mapping[str, Any]) -> Lease | Malformed:
    """The lease of a row, or what is wrong with it: SQLite lets anything stand in any column."""
    return readable(str(row["key"]), lambda: _lease(row))


def _lease(row: Row | Mapping[str, Any]) -> Lease:
    told = {}
    for field in FIELDS:
        if column := field.column:
            if not isinstance(row[column], _TYPES[field.kind]):
                raise BadRowField(column, f"{shown(row[column])} is not of the type this column holds")
            told[field.name] = checked(field, column, row[column])
    return counted(lease_of(told, _COLUMNS), told["epoch"])


log = escaped(logging.getLogger("leasehold.sqlite"))

BUSY_SECONDS = 10.0
"""A write waits so long for another process's write, which takes milliseconds unless something is wrong."""

_SELECT = f"SELECT {', '.join(COLUMNS)} FROM leases"  # noqa: S608  our own column names
_INSERT = f"INSERT INTO leases ({', '.join(COLUMNS)}) VALUES ({', '.join(':' + name for name in COLUMNS)})"  # noqa: S608
_UPDATE = f"UPDATE leases SET {', '.join(f'{name} = :{name}' for name in COLUMNS)} WHERE key = :key"  # noqa: S608


_Inode = tuple[int, int]
"""The device, and the number of a file on it."""


class SqliteStore:
    """A connection to the file, used by one thread at a time. The counter is the version and the epoch."""

    def __init__(self, path: str, *, create: bool = True, busy_seconds: float = BUSY_SECONDS) -> None:
        """Open the file, and make it and its table if they are not there and `create` allows."""
        if not create and not Path(path).exists():
            raise StoreError(f"there is no file {path}, and it is not created here; is the name right?")
        self._lock = Lock()
        self._path, self._create, self._busy_seconds = path, create, busy_seconds
        self._connection = self._open()

    def _open(self) -> sqlite3.Connection:
        if self._create and self._path != ":memory:":
            # A new file is its owner's alone, as SQLite's files beside it then are: notes and names of workers are in
            # it. Only a new file is opened: closing any other would let go the locks that this process has on it.
            with suppress(OSError):  # it is there, or SQLite will say why it cannot be
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with self._translated():
            named = _inode(self._path)
            connection = sqlite3.connect(
                self._path, timeout=self._busy_seconds, isolation_level=None, check_same_thread=False
            )
            connection.row_factory = sqlite3.Row
            connection.text_factory = _text
            if self._create:
                # WAL: readers and the writer do not wait for each other. synchronous=FULL is SQLite's
                # default: a checkpoint answered with Done survives a loss of power.
                (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
                if mode != "wal":
                    connection.close()
                    raise StoreError(
                        f"{self._path}: SQLite keeps no write-ahead log here (it answers {mode!r}); "
                        "name a file on a local disk"
                    )
                connection.execute(SCHEMA)
            connection.execute(f"{_SELECT} LIMIT 0")
        self._files = (named, *_files(self._path)[1:])
        return connection

    @contextmanager
    def current(self) -> Iterator[sqlite3.Connection]:
        """The connection to the file that the path names now (rule 4).

        The path is asked before and after: what was done in a file that is no longer the one may not count.
        """
        with self._lock, self._translated():
            if self._replaced():
                if not self._create and _inode(self._path) is None:
                    raise StoreError(f"{self._path}: the file was removed, and it is not created here")
                log.error("%s was removed or replaced under this process, which opens it anew", self._path)
                self._connection.close()
                self._connection = self._open()
            yield self._connection
            if self._replaced():
                raise OutcomeUnknown(f"{self._path}: the file was removed or replaced meanwhile")

    def _replaced(self) -> bool:
        # A log that was not there yet may have been made since; one that was there stays as long as we have it open.
        return any(was not in (None, now) for was, now in zip(self._files, _files(self._path), strict=True))

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

    def cells(self) -> "SqliteCells":
        """The rows of layout `sessions` in this file."""
        return SqliteCells(self)

    def layouts(self, *, asked: bool) -> tuple[bool, bool]:  # noqa: ARG002  it costs next to nothing
        """Whether the file has rows of layout `sessions`, and of this one."""
        with self.current() as connection:
            there = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'cells'").fetchone() is not None
            tables = ("cells", "leases") if there else ("leases",)
            some = {table: connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() for table in tables}  # noqa: S608
        return some.get("cells") is not None, some["leases"] is not None

    def _stored(self, key: str) -> Lease | None:
        row = self._connection.execute(f"{_SELECT} WHERE key = ?", (key,)).fetchone()
        return insist(to_lease(row)) if row else None

    @property
    def capabilities(self) -> Capabilities:
        """The file keeps every promise."""
        return Capabilities()

    def list(self) -> Listing:
        """Every lease, sorted by key, as of one moment."""
        with self.current() as connection:
            rows = connection.execute(_SELECT).fetchall()
        return listing_of(map(to_lease, rows))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:  # noqa: ARG002  never stale
        """Read these leases, in the order asked; those not there are left out."""
        with self.current():
            found = tuple(self._stored(key) for key in keys)
        return tuple(lease for lease in found if lease)

    def write(self, write: Write) -> Outcome:
        """Read the row, decide and replace it in one transaction; children have no column, for nothing reads them."""
        key = write.lease.key
        with self.current() as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
                stored = self._stored(key)
                after = applied(write, stored)
                if isinstance(write, DeleteLease) and after:
                    connection.execute("DELETE FROM leases WHERE key = ?", (key,))
                elif after:
                    connection.execute(_UPDATE if stored else _INSERT, to_row(after))
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        return Done(after) if after else Lost(key, stored)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()


def _files(path: str) -> tuple[_Inode | None, ...]:
    """The file and the two of its log, as the path names them now."""
    return tuple(_inode(f"{path}{end}") for end in ("", "-wal", "-shm"))


def _inode(path: str) -> _Inode | None:
    try:
        found = os.stat(path)  # noqa: PTH116  before and after every request
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _text(raw: bytes) -> str | bytes:
    """The text of these bytes, or the bytes if they are no UTF-8, for which the driver would fail the whole reading."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


class SqliteCells:
    """Rows of layout `sessions`, in a table of their own beside the leases of the usual layout."""

    page_leases = PAGE_LEASES

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    def list(self, *prefixes: str, certain: bool = False) -> tuple[Stored, ...]:  # noqa: ARG002  each is consistent
        """Every row whose name begins with one of these, as of one moment."""
        with self._table() as connection:
            found = connection.execute(f"{_CELLS} ORDER BY name").fetchall()
        return tuple(cell_of(row) for row in found if str(row["name"]).startswith(prefixes))

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, Stored]:  # noqa: ARG002  never stale
        """The rows of these keys that are there, as of one moment."""
        with self._table() as connection:
            found = [connection.execute(f"{_CELLS} WHERE name = ?", (name,)).fetchone() for name in names]
        return {row["name"]: cell_of(row) for row in found if row is not None}

    def put_new(self, name: str, fields: ObjectFields) -> str | None:
        """Insert it, unless there is one."""
        version = token_hex(8)
        insert = "INSERT OR IGNORE INTO cells (name, version, fields) VALUES (?, ?, ?)"
        with self._table() as connection:
            made = connection.execute(insert, (name, version, json.dumps(dict(fields)))).rowcount
        return version if made else None

    def put_over(self, name: str, fields: ObjectFields, version: str) -> str | None:
        """Update it, if it is still this one."""
        fresh = token_hex(8)
        update = "UPDATE cells SET version = ?, fields = ? WHERE name = ? AND version = ?"
        with self._table() as connection:
            made = connection.execute(update, (fresh, json.dumps(dict(fields)), name, version)).rowcount
        return fresh if made else None

    def delete(self, name: str, version: str) -> bool:
        """Delete it, if it is still this one."""
        with self._table() as connection:
            connection.execute("DELETE FROM cells WHERE name = ? AND version = ?", (name, version))
            return connection.execute("SELECT 1 FROM cells WHERE name = ?", (name,)).fetchone() is None

    def prove(self) -> None:
        """A transaction keeps its conditions."""

    def close(self) -> None:
        """Close the file."""
        self._store.close()

    @contextmanager
    def _table(self) -> Iterator[sqlite3.Connection]:
        with self._store.current() as connection:
            connection.execute(CELLS_SCHEMA)
            yield connection


CELLS_SCHEMA = """
CREATE TABLE IF NOT EXISTS cells (
  name    TEXT PRIMARY KEY NOT NULL,  -- lease/<key>, session/<id> or told/<id>
  version TEXT NOT NULL,              -- never the same twice
  fields  TEXT NOT NULL               -- JSON object of strings
) WITHOUT ROWID
"""

_CELLS = "SELECT name, version, fields FROM cells"


def cell_of(row: Row | Mapping[str, Any]) -> Stored:
    """The stored row; one whose fields cannot be read has none, and its own reader says which is missing."""
    try:
        fields = json.loads(row["fields"])
    except ValueError:
        fields = {}
    return Stored(row["name"], row["version"], fields if isinstance(fields, dict) else {})


def open_url(
    place: str,
    options: Mapping[str, str],  # noqa: ARG001  its layout is looked at afterwards
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
        path = Path(place)
        if not path.is_absolute() or (len(path.parts) > 2 and path.parent.is_dir()):  # noqa: PLR2004  the root and a file
            raise
        # It may have been meant as one of this folder, which is how SQLAlchemy reads three slashes.
        hint = f"after sqlite:/// a path is absolute: the file of this folder is sqlite://{place.lstrip('/')}"
        raise StoreError(f"{error}; {hint}") from error
