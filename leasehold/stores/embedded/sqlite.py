"""Stores leases in an SQLite file, which several processes on one machine can share. Nothing needs to be installed.

The row of a lease has one column per field, so that any SQLite tool can show the leases.

1. Every write is one BEGIN IMMEDIATE transaction that reads the row, checks the condition, and replaces the row.
2. Only our own columns are written, so columns that others have added survive.
3. Rows contain no times. `Watch` measures for how long each lease has not changed.
4. If the file was removed or replaced, the file at the path is opened again. A process can still use a removed file
   that it has open, so otherwise two groups of workers could process every shard at the same time.
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
from leasehold.errors import NotWritten, OutcomeUnknown, StoreError
from leasehold.stores.fields import (
    FIELDS,
    BadRowField,
    CellKind,
    build_listing,
    check_cell,
    lease_from_cells,
    lease_to_cells,
    parse_row,
    require_valid_lease,
    shortened_repr,
)
from leasehold.stores.printable import make_safe_logger
from leasehold.stores.protocol import Capabilities, Done, Listing, Lost, Malformed, Outcome
from leasehold.stores.requests import PAGE_LEASES, ObjectFields, StoredObject
from leasehold.stores.writes import DeleteLease, Write, lease_after_write, with_counter

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

_COLUMN_TYPES: Mapping[CellKind, type | tuple[type, ...]] = {
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
    """Return the row of a lease, by column."""
    values = lease_to_cells(lease)
    values["parents"], values["yields"] = json.dumps(values["parents"]), int(lease.yields)
    values["annotations"] = json.dumps(values["annotations"], ensure_ascii=False)
    return {column: values[name] for name, column in _COLUMNS.items()}


def to_lease(row: Row | Mapping[str, Any]) -> Lease | Malformed:
    """Parse a row. A row may be malformed, because SQLite accepts any value in any column."""
    return parse_row(str(row["key"]), lambda: _parse_lease(row))


def _parse_lease(row: Row | Mapping[str, Any]) -> Lease:
    values = {}
    for field in FIELDS:
        if column := field.column:
            if not isinstance(row[column], _COLUMN_TYPES[field.kind]):
                raise BadRowField(column, f"{shortened_repr(row[column])} is not of the type this column holds")
            values[field.name] = check_cell(field, column, row[column])
    return with_counter(lease_from_cells(values, _COLUMNS), values["epoch"])


log = make_safe_logger(logging.getLogger("leasehold.sqlite"))

BUSY_SECONDS = 10.0
"""How long a write waits for the writes of other processes, in seconds. A write normally takes milliseconds."""

_SELECT = f"SELECT {', '.join(COLUMNS)} FROM leases"  # noqa: S608  our own column names
_INSERT = f"INSERT INTO leases ({', '.join(COLUMNS)}) VALUES ({', '.join(':' + name for name in COLUMNS)})"  # noqa: S608
_UPDATE = f"UPDATE leases SET {', '.join(f'{name} = :{name}' for name in COLUMNS)} WHERE key = :key"  # noqa: S608


_Inode = tuple[int, int]
"""The device of a file, and its inode number."""


class SqliteStore:
    """A lease table in an SQLite file. Thread-safe. The counter is both the version and the epoch."""

    def __init__(self, path: str, *, create: bool = True, busy_seconds: float = BUSY_SECONDS) -> None:
        """Open the file.

        Args:
            path: The path of the file.
            create: Whether to create the file and its table if they do not exist.
            busy_seconds: The maximum time for which a write waits for other processes.
        """
        if not create and not Path(path).exists():
            raise StoreError(f"there is no file {path}, and it is not created here; check the name")
        self._lock = Lock()
        self._path, self._create, self._busy_seconds = path, create, busy_seconds
        self._connection = self._open()

    def _open(self) -> sqlite3.Connection:
        if self._create and self._path != ":memory:":
            # Create a new file that only its owner can read, because annotations contain the names of workers. SQLite
            # gives the files that it adds the same permissions. Do not open an existing file here, because closing it
            # would release the locks that this process holds on the file.
            with suppress(OSError):  # the file exists, or SQLite will raise the error
                os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with self._translate_errors():
            inode = _file_inode(self._path)
            connection = sqlite3.connect(
                self._path, timeout=self._busy_seconds, isolation_level=None, check_same_thread=False
            )
            connection.row_factory = sqlite3.Row
            connection.text_factory = _decode_text
            if self._create:
                # With a write-ahead log (WAL), readers and the writer do not wait for each other. Because
                # synchronous=FULL is SQLite's default, a checkpoint that returned Done survives a power failure.
                (journal_mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
                if journal_mode != "wal":
                    connection.close()
                    raise StoreError(
                        f"{self._path}: SQLite cannot use a write-ahead log here (journal mode {journal_mode!r}); "
                        "name a file on a local disk"
                    )
                connection.execute(SCHEMA)
            connection.execute(f"{_SELECT} LIMIT 0")
        self._inodes = (inode, *_file_inodes(self._path)[1:])
        return connection

    @contextmanager
    def current_connection(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection to the file that is now at the path (rule 4).

        The file at the path is checked before and after the connection is used, because a write to a file that has been
        replaced would be lost.
        """
        with self._lock, self._translate_errors():
            if self._is_replaced():
                if not self._create and _file_inode(self._path) is None:
                    raise StoreError(f"{self._path}: the file was removed, and it is not created here")
                log.error("%s was removed or replaced while in use; opening it again", self._path)
                self._connection.close()
                self._connection = self._open()
            yield self._connection
            if self._is_replaced():
                raise OutcomeUnknown(f"{self._path}: the file was removed or replaced in the meantime")

    def _is_replaced(self) -> bool:
        # An inode of None means that the file did not exist when the database was opened. Ignore such a file, because
        # SQLite may have created its write-ahead log since then. A write-ahead log that did exist is kept while it is
        # open, so a different inode means that the database was replaced.
        return any(
            old_inode not in (None, inode)
            for old_inode, inode in zip(self._inodes, _file_inodes(self._path), strict=True)
        )

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF in (
                sqlite3.SQLITE_CANTOPEN,
                sqlite3.SQLITE_ERROR,
                sqlite3.SQLITE_READONLY,
            ):
                raise StoreError(f"{self._path}: {error}; check the folder, the permissions and the table") from error
            may_be_written = (
                error.sqlite_errorcode & 0xFF not in _NOT_WRITTEN_CODES
                and error.sqlite_errorcode not in _NOT_WRITTEN_CODES
            )
            raise (OutcomeUnknown if may_be_written else NotWritten)(f"{self._path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{self._path} cannot be used as a lease table: {error}") from error

    def cells(self) -> "SqliteCells":
        """Return the rows of layout `sessions` in this file."""
        return SqliteCells(self)

    def layouts(self, *, requested: bool) -> tuple[bool, bool]:  # noqa: ARG002  it costs almost nothing
        """Return whether the file has rows of layout `sessions`, and whether it has rows of this layout."""
        with self.current_connection() as connection:
            has_cells = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'cells'").fetchone() is not None
            tables = ("cells", "leases") if has_cells else ("leases",)
            rows = {table: connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchone() for table in tables}  # noqa: S608
        return rows.get("cells") is not None, rows["leases"] is not None

    def _read_lease(self, key: str) -> Lease | None:
        row = self._connection.execute(f"{_SELECT} WHERE key = ?", (key,)).fetchone()
        return require_valid_lease(to_lease(row)) if row else None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def list(self) -> Listing:
        """Return every lease, sorted by key. The listing is a snapshot."""
        with self.current_connection() as connection:
            rows = connection.execute(_SELECT).fetchall()
        return build_listing(map(to_lease, rows))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:  # noqa: ARG002  never stale
        """Return these leases in the given order, without those that do not exist."""
        with self.current_connection():
            leases = tuple(self._read_lease(key) for key in keys)
        return tuple(lease for lease in leases if lease)

    def write(self, write: Write) -> Outcome:
        """Read, check and replace the row in one transaction.

        The children of a shard are not stored, because nothing reads them.
        """
        key = write.lease.key
        with self.current_connection() as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
                stored_lease = self._read_lease(key)
                new_lease = lease_after_write(write, stored_lease)
                if isinstance(write, DeleteLease) and new_lease:
                    connection.execute("DELETE FROM leases WHERE key = ?", (key,))
                elif new_lease:
                    connection.execute(_UPDATE if stored_lease else _INSERT, to_row(new_lease))
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        return Done(new_lease) if new_lease else Lost(key, stored_lease)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()


_NOT_WRITTEN_CODES = frozenset(
    {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE}
)
"""The errors of transactions that were not committed. Another process has the lock, or the disk is full."""


def _file_inodes(path: str) -> tuple[_Inode | None, ...]:
    """Return the current inodes of the file and of the two files of its write-ahead log."""
    return tuple(_file_inode(f"{path}{suffix}") for suffix in ("", "-wal", "-shm"))


def _file_inode(path: str) -> _Inode | None:
    try:
        status = os.stat(path)  # noqa: PTH116  faster, and needed before and after every request
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _decode_text(raw: bytes) -> str | bytes:
    """Decode a string, or return its bytes if they are not UTF-8. The driver's decoder would raise an error."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


class SqliteCells:
    """The rows of layout `sessions`, which are in a separate table of the same file."""

    page_leases = PAGE_LEASES

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    def list(self, *prefixes: str, consistent: bool = False) -> tuple[StoredObject, ...]:  # noqa: ARG002  each is consistent
        """Return the rows whose names begin with one of these prefixes. The listing is a snapshot."""
        with self._connection_with_table() as connection:
            rows = connection.execute(f"{_SELECT_CELLS} ORDER BY name").fetchall()
        return tuple(parse_cell(row) for row in rows if str(row["name"]).startswith(prefixes))

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, StoredObject]:  # noqa: ARG002  never stale
        """Return those rows with these names that exist."""
        with self._connection_with_table() as connection:
            rows = [connection.execute(f"{_SELECT_CELLS} WHERE name = ?", (name,)).fetchone() for name in names]
        return {row["name"]: parse_cell(row) for row in rows if row is not None}

    def put_if_absent(self, name: str, fields: ObjectFields) -> str | None:
        """Insert a row, unless a row with this name exists."""
        version = token_hex(8)
        insert_sql = "INSERT OR IGNORE INTO cells (name, version, fields) VALUES (?, ?, ?)"
        with self._connection_with_table() as connection:
            count = connection.execute(insert_sql, (name, version, json.dumps(dict(fields)))).rowcount
        return version if count else None

    def put_if_match(self, name: str, fields: ObjectFields, version: str) -> str | None:
        """Update a row, if the row still has this version."""
        new_version = token_hex(8)
        update = "UPDATE cells SET version = ?, fields = ? WHERE name = ? AND version = ?"
        with self._connection_with_table() as connection:
            count = connection.execute(update, (new_version, json.dumps(dict(fields)), name, version)).rowcount
        return new_version if count else None

    def delete(self, name: str, version: str) -> bool:
        """Delete a row, if the row still has this version."""
        with self._connection_with_table() as connection:
            connection.execute("DELETE FROM cells WHERE name = ? AND version = ?", (name, version))
            return connection.execute("SELECT 1 FROM cells WHERE name = ?", (name,)).fetchone() is None

    def prove(self) -> None:
        """Do nothing. The conditions are part of our SQL statements, so there is no service to check."""

    def close(self) -> None:
        """Close the file."""
        self._store.close()

    @contextmanager
    def _connection_with_table(self) -> Iterator[sqlite3.Connection]:
        with self._store.current_connection() as connection:
            connection.execute(CELLS_SCHEMA)
            yield connection


CELLS_SCHEMA = """
CREATE TABLE IF NOT EXISTS cells (
  name    TEXT PRIMARY KEY NOT NULL,  -- lease/<key>, session/<id> or told/<id>
  version TEXT NOT NULL,              -- never the same twice
  fields  TEXT NOT NULL               -- JSON object of strings
) WITHOUT ROWID
"""

_SELECT_CELLS = "SELECT name, version, fields FROM cells"


def parse_cell(row: Row | Mapping[str, Any]) -> StoredObject:
    """Parse a stored row.

    If the fields of the row are invalid, return the row without fields, so that the caller reports a missing field.
    """
    try:
        fields = json.loads(row["fields"])
    except ValueError:
        fields = {}
    return StoredObject(row["name"], row["version"], fields if isinstance(fields, dict) else {})


def open_url(
    location: str,
    options: Mapping[str, str],  # noqa: ARG001  the caller applies the layout
    *,
    create: bool,
    request_seconds: float | None,
) -> SqliteStore:
    """Open the store in this file.

    After two slashes in the URL, the path is relative, and after three, it is absolute.
    """
    if not location.strip("/"):
        raise ValueError("store URL: sqlite:// wants the path of a file")
    busy_seconds = BUSY_SECONDS if request_seconds is None else min(BUSY_SECONDS, request_seconds)
    try:
        return SqliteStore(location, create=create, busy_seconds=busy_seconds)
    except StoreError as error:
        path = Path(location)
        if not path.is_absolute() or (len(path.parts) > 2 and path.parent.is_dir()):  # noqa: PLR2004  the root and a file
            raise
        # The user may have meant a relative path, because SQLAlchemy treats a path after three slashes as relative.
        hint = f"after sqlite:/// a path is absolute: the file of this folder is sqlite://{location.lstrip('/')}"
        raise StoreError(f"{error}; {hint}") from error
