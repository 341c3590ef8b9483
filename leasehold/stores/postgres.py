"""Stores leases in a PostgreSQL table. Each lease is one row.

The columns are those of the SQLite store (`leasehold.stores.embedded.sqlite`).

1. Every write is a single conditional statement, and never a transaction that waits for this process. Therefore, a
   process that stalls holds no locks, and a connection pooler may be used (PgBouncer in transaction mode).
2. `lease_after_write` decides about a write, based on the row as this process last read it. The statement compares
   every column with that row. If any column has changed, the row is read again, and the decision is repeated.
3. Only our own columns are written, so columns that others have added survive.
4. A write is sent only once. If PostgreSQL does not respond, OutcomeUnknown is raised, and the next read shows what
   happened.
5. No decision depends on a time in a row. The column `written` is for information only.
"""

import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Literal, LiteralString
from uuid import uuid4

from attrs import frozen
from psycopg import Connection, Error, InterfaceError, InternalError, OperationalError, connect, errors
from psycopg.conninfo import make_conninfo
from psycopg.rows import DictRow, dict_row
from psycopg.sql import SQL, Identifier, Placeholder
from psycopg_pool import ConnectionPool, PoolTimeout
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from leasehold.balancer.model import Lease
from leasehold.errors import OutcomeUnknown, StoreError
from leasehold.stores.embedded.sqlite import COLUMNS, parse_cell, to_lease, to_row
from leasehold.stores.fields import build_listing, require_valid_lease
from leasehold.stores.printable import make_safe_logger, printable
from leasehold.stores.protocol import ATTEMPTS, Capabilities, Done, Listing, Lost, Outcome, Timeouts
from leasehold.stores.requests import PAGE_LEASES, ObjectFields, StoredObject
from leasehold.stores.writes import CreateLease, DeleteLease, Write, lease_after_write

log = make_safe_logger(logging.getLogger("leasehold.postgres"))

SCHEMA = """
CREATE TABLE IF NOT EXISTS {table} (
  key        text PRIMARY KEY,
  stream     text NOT NULL DEFAULT '',
  shard      text NOT NULL,
  parents    text NOT NULL DEFAULT '[]',  -- JSON list of lease keys
  owner      text,
  counter    bigint NOT NULL,             -- one more at every renewal and owner change
  checkpoint text NOT NULL,               -- sequence number or sentinel
  sub        bigint NOT NULL DEFAULT 0,
  token      text NOT NULL DEFAULT '',
  first_hash text,                        -- decimal
  last_hash  text,
  weight     double precision,            -- KB/s
  heir       text,
  yields     boolean NOT NULL DEFAULT false,
  notes      text NOT NULL DEFAULT '{{}}',  -- JSON object of strings
  written    timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 50)
"""
"""The schema of a lease table.

The fillfactor leaves half of each page free, so that the new version of a renewed row fits into the same page and no
index has to be updated.
"""

TIMEOUTS = Timeouts(connect_seconds=3, read_seconds=5, attempts=3)
POOL_CONNECTIONS_MAX = 8
"""The maximum number of connections per process. Idle connections are closed, except for one."""
IDLE_SECONDS = 60.0
_RETRYABLE_ERRORS = (errors.SerializationFailure, errors.DeadlockDetected)
"""The errors of writes that were certainly not applied. Such errors occur if the default isolation level is strict."""
_UNAVAILABLE_ERRORS = (OperationalError, InterfaceError, InternalError)
_PERMANENT_ERRORS = re.compile(
    r"authentication failed|no pg_hba\.conf entry|no password supplied|does not exist|permission denied"
    r"|invalid sslmode|does not support SSL|root certificate|not permitted to log in|invalid (port|integer)"
)
"""Matches connection errors that a retry cannot resolve. PostgreSQL reports these errors without error codes."""
_ADVICE: Mapping[type[Error], str] = {
    errors.UndefinedTable: "the table does not exist; check the name, or let a worker create it",
    errors.UndefinedColumn: "the table does not have the columns of a lease table; name another table",
    errors.InvalidColumnReference: "the table has no primary key on its column key; name another table",
    errors.InsufficientPrivilege: (
        "this user may not do that; a worker needs SELECT, INSERT, UPDATE and DELETE on the table, and CREATE on its "
        "schema to create it; tools that only read need the first"
    ),
    errors.InvalidSchemaName: "the schema does not exist; create it first",
}

SqlRow = Mapping[str, Any]


@frozen
class TableLocation:
    """The location of a lease table.

    The location consists of connection settings and the table's name, which may include a schema.

    If a setting is empty or None, libpq takes it from the environment (PGHOST, PGUSER, PGPASSWORD, PGPASSFILE,
    PGSSLMODE).
    """

    host: str
    port: str
    database: str
    table: tuple[str, ...] = ("leases",)
    user: str | None = None
    sslmode: str | None = None

    @property
    def name(self) -> str:
        """The name of the table as it is shown in error messages."""
        return f"PostgreSQL table {'.'.join(self.table)} of {self.host or 'this machine'}/{self.database}"

    def conninfo(self, timeouts: Timeouts) -> str:
        """Return the connection string, which contains no secrets."""
        return make_conninfo(
            host=self.host or None,
            port=self.port or None,
            dbname=self.database,
            user=self.user,
            sslmode=self.sslmode,
            connect_timeout=max(1, round(timeouts.connect_seconds)),
            application_name="leasehold",
            # If there are several hosts, use the one that accepts writes, because reads from a standby could be stale.
            target_session_attrs="read-write",
        )


@frozen
class Statements:
    """The SQL statements for a table. The row count of a write shows whether the condition of the write held."""

    table: str
    schema: bytes
    select_all: bytes
    select_some: bytes
    select_one: bytes
    insert: bytes
    update: bytes
    delete: bytes

    @classmethod
    def of(cls, name_parts: tuple[str, ...]) -> "Statements":
        """Return the statements for the table with this name, which may include its schema."""
        columns = [Identifier(name) for name in COLUMNS]
        all_columns = SQL(", ").join(columns)
        placeholders = SQL(", ").join(map(Placeholder, COLUMNS))
        assignments = SQL(", ").join(SQL("{} = {}").format(Identifier(name), Placeholder(name)) for name in COLUMNS)
        unchanged_condition = SQL(" AND ").join(
            SQL("{} IS NOT DISTINCT FROM {}").format(Identifier(name), Placeholder(f"was_{name}")) for name in COLUMNS
        )

        # Also compare the key with `=`, because PostgreSQL uses the index for this operator. With IS NOT DISTINCT FROM
        # alone, it would scan the whole table.
        unchanged_condition = SQL("key = {} AND {}").format(Placeholder("was_key"), unchanged_condition)

        def compiled(template: LiteralString) -> bytes:
            table = Identifier(*name_parts)
            return (
                SQL(template)
                .format(table=table, every=all_columns, new=placeholders, sets=assignments, same=unchanged_condition)
                .as_bytes(None)
            )

        return cls(
            Identifier(*name_parts).as_string(None),
            compiled(SCHEMA),
            compiled("SELECT {every} FROM {table}"),
            compiled("SELECT {every} FROM {table} WHERE key = ANY(%(keys)s)"),
            compiled("SELECT key FROM {table} LIMIT 1"),
            compiled("INSERT INTO {table} ({every}) VALUES ({new}) ON CONFLICT (key) DO NOTHING"),
            compiled("UPDATE {table} SET {sets}, written = now() WHERE {same}"),
            compiled("DELETE FROM {table} WHERE {same}"),
        )


class _TimeoutConnection(Connection[DictRow]):
    """A connection with a read timeout. Without a timeout, a read from a server that hangs would never end."""

    seconds: float = TIMEOUTS.read_seconds

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:  # noqa: ANN401  psycopg's
        """Wait for the server. The wait takes at most `seconds`, unless the call has its own timeout."""
        return super().wait(gen, interval, self.seconds if timeout is None else timeout)


class PostgresStore:
    """A lease table in PostgreSQL. Thread-safe. The counter is both the version and the epoch."""

    def __init__(self, location: TableLocation, *, create: bool = True, timeouts: Timeouts = TIMEOUTS) -> None:
        """Find the table, or create it.

        Args:
            location: The location of the table.
            create: Whether to create the table if it does not exist, and again if it is dropped later.
            timeouts: The timeouts and retries.
        """
        self._location, self._create, self._timeouts = location, create, timeouts
        self._sql = Statements.of(location.table)
        self._cached_rows: dict[str, SqlRow] = {}
        # Connect once without the pool. If this attempt fails, the error contains the reason, which the pool would not
        # report.
        with self._translate_errors():
            connect(location.conninfo(timeouts)).close()

        def set_timeout(connection: _TimeoutConnection) -> None:
            connection.seconds = timeouts.read_seconds

        self._pool = ConnectionPool(
            location.conninfo(timeouts),
            connection_class=_TimeoutConnection,
            # Do not prepare statements, because a pooler such as PgBouncer may execute them on another connection,
            # where they do not exist.
            kwargs={"autocommit": True, "row_factory": dict_row, "prepare_threshold": None},
            configure=set_timeout,
            min_size=1,
            max_size=POOL_CONNECTIONS_MAX,
            max_idle=IDLE_SECONDS,
            timeout=timeouts.connect_seconds,
            # By default, the pool waits longer after each failed attempt, so it would reconnect too late after a long
            # outage.
            reconnect_timeout=timeouts.connect_seconds,
            num_workers=1,
            open=True,
        )
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def list(self) -> Listing:
        """Return a snapshot of all leases, sorted by key. A dropped table is created again if that is allowed."""
        try:
            rows = self.rows(self._sql.select_all)
        except StoreError as fault:
            if not (self._create and isinstance(fault.__cause__, errors.UndefinedTable)):
                raise
            self._prepare()
            rows = self.rows(self._sql.select_all)
            log.error("%s was dropped while in use; created it again", self._location.name)  # noqa: TRY400  no traceback is needed
        self._cached_rows = {row["key"]: row for row in rows}
        return build_listing(map(to_lease, rows))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:  # noqa: ARG002  never stale
        """Return these leases in the given order, without those that do not exist."""
        requested_keys = tuple(keys)
        rows = (
            {row["key"]: row for row in self.rows(self._sql.select_some, {"keys": list(requested_keys)})}
            if requested_keys
            else {}
        )
        self._cached_rows.update(rows)
        return tuple(require_valid_lease(to_lease(rows[key])) for key in requested_keys if key in rows)

    def write(self, write: Write) -> Outcome:
        """Apply the write to the row as last read (rule 2). If the row has changed, read it and try again."""
        key = write.lease.key
        row = self._cached_rows.get(key)
        just_read = row is None and not isinstance(write, CreateLease)
        if just_read:
            row = self._read(key)
        for _ in range(ATTEMPTS):
            stored_lease = require_valid_lease(to_lease(row)) if row else None
            new_lease = lease_after_write(write, stored_lease)
            if new_lease is None and just_read:
                return Lost(key, stored_lease)
            if new_lease and self._put(key, row, None if isinstance(write, DeleteLease) else new_lease):
                return Done(new_lease)
            row, just_read = self._read(key), True
        raise StoreError(f"lease {key!r}: {ATTEMPTS} conditional writes in a row were rejected")

    def prove(self) -> None:
        """Check that the service honors conditions, and that its commits are durable. Raises StoreError if not.

        The check runs in a transaction that is rolled back, so other connections never see its rows.
        """
        row = _row_values(Lease(f"leasehold-probe-{uuid4().hex}"))
        changed_row = {**row, "owner": "another"}
        sql = self._sql
        with self.connection() as connection, connection.transaction(force_rollback=True):
            (commit_setting,) = connection.execute("SELECT current_setting('synchronous_commit') AS value").fetchall()
            probes = (
                (sql.insert, row, 1),
                (sql.insert, row, 0),
                (sql.update, _update_arguments(row, changed_row), 1),
                (sql.update, _update_arguments(row, changed_row), 0),
                (sql.delete, _update_arguments(row, {}), 0),
                (sql.delete, _update_arguments(changed_row, {}), 1),
            )
            are_honored = all(
                connection.execute(probe, arguments).rowcount == expected_row_count
                for probe, arguments, expected_row_count in probes
            )
        if not are_honored:
            raise StoreError(
                f"{self._location.name} ignores the conditions of writes, or rejects writes whose conditions hold "
                "(does it have rules or triggers?), so two workers could own one lease; name another table"
            )
        if commit_setting["value"] in {"off", "local"}:
            raise StoreError(
                f"{self._location.name}: synchronous_commit is {commit_setting['value']} for this user, so a confirmed "
                "checkpoint could be lost; ALTER ROLE … SET synchronous_commit = on"
            )

    def probe(self, privilege: Literal["INSERT", "UPDATE", "DELETE"]) -> None:
        """Check a privilege with a probe row, in a transaction that is rolled back. Raises StoreError."""
        row = _row_values(Lease(f"leasehold-probe-{uuid4().hex}"))
        statement = {"INSERT": self._sql.insert, "UPDATE": self._sql.update, "DELETE": self._sql.delete}[privilege]
        with self.connection() as connection, connection.transaction(force_rollback=True):
            connection.execute(statement, _update_arguments(row, row))

    def standbys(self) -> tuple[int, str]:
        """Return the number of standby servers, and the names of those servers for which commits wait."""
        query = (
            b"SELECT count(*) AS many, current_setting('synchronous_standby_names') AS waited FROM pg_stat_replication"
        )
        (row,) = self.rows(query)
        return row["many"], row["waited"]

    def cells(self) -> "PostgresCells":
        """Return the rows of layout `sessions`, which are in a separate table."""
        return PostgresCells(self, self._location.table, create=self._create)

    def layouts(self, *, requested: bool) -> tuple[bool, bool]:  # noqa: ARG002  it costs almost nothing
        """Return whether there are rows of layout `sessions`, and whether there are rows of this layout."""
        sql = cell_statements(self._location.table)
        (row,) = self.rows(b"SELECT to_regclass(%(table)s) IS NOT NULL AS value", {"table": sql.table})
        return bool(row["value"] and self.rows(sql.select_one)), bool(self.rows(self._sql.select_one))

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()

    def _prepare(self) -> None:
        """Make sure that the table exists and has our columns."""
        if self._create:
            # If two workers create the table at the same moment, one of them gets an error although the table now
            # exists. Ignore this error.
            with self.connection() as connection, suppress(errors.UniqueViolation, errors.DuplicateTable):
                if not connection.execute("SELECT to_regclass(%s) AS found", [self._sql.table]).fetchall()[0]["found"]:
                    connection.execute(self._sql.schema)
        self.rows(self._sql.select_some, {"keys": []})

    def rows(self, statement: bytes, values: SqlRow | None = None) -> Sequence[DictRow]:
        """Run a query, and repeat it if the outcome is unknown. Raises StoreError or OutcomeUnknown."""
        retrying = Retrying(
            retry=retry_if_exception_type(OutcomeUnknown),
            stop=stop_after_attempt(self._timeouts.attempts),
            wait=wait_random_exponential(multiplier=0.05, max=1),
            reraise=True,
        )

        def read() -> Sequence[DictRow]:
            with self.connection() as connection:
                return connection.execute(statement, values).fetchall()

        return retrying(read)

    def _read(self, key: str) -> SqlRow | None:
        row = next(iter(self.rows(self._sql.select_some, {"keys": [key]})), None)
        if row:
            self._cached_rows[key] = row
        else:
            self._cached_rows.pop(key, None)
        return row

    def _put(self, key: str, row: SqlRow | None, new_lease: Lease | None) -> bool:
        """Insert, update or delete a row.

        Args:
            key: The key of the lease.
            row: The row as it was last read, or None if it did not exist.
            new_lease: The lease to store, or None to delete the row.

        Returns:
            False if the row has changed since it was read.
        """
        values: SqlRow = _row_values(new_lease) if new_lease else {}
        statement, arguments = self._sql.insert, values
        if row is None:
            if new_lease is None:
                return True
        else:
            statement, arguments = self._sql.update if new_lease else self._sql.delete, _update_arguments(row, values)
        # Drop the cached row. If the outcome of this write is unknown, the next write then reads the row again.
        self._cached_rows.pop(key, None)
        with self.connection() as connection:
            try:
                if connection.execute(statement, arguments).rowcount != 1:
                    return False
            except _RETRYABLE_ERRORS:
                return False
        if new_lease:
            self._cached_rows[key] = values
        return True

    @contextmanager
    def connection(self) -> Iterator[_TimeoutConnection]:
        """Yield a connection from the pool, and turn its errors into StoreError or OutcomeUnknown."""
        with self._translate_errors():
            connection = self._pool.getconn()
            try:
                yield connection
            except BaseException as error:
                if not (isinstance(error, Error) and error.sqlstate):
                    connection.close()  # otherwise, the next statement could receive the late response to this one
                if isinstance(error, _UNAVAILABLE_ERRORS):
                    # The server has stopped or no longer accepts writes, so replace the other connections of the pool,
                    # too.
                    self._pool.drain()
                raise
            finally:
                self._pool.putconn(connection)

    def _translate_errors(self) -> AbstractContextManager[None]:
        return translate_errors(self._location, self._timeouts)


@contextmanager
def translate_errors(location: TableLocation, timeouts: Timeouts) -> Iterator[None]:
    """Turn psycopg's errors into StoreError or OutcomeUnknown. The messages never contain a password."""
    table = location.name
    try:
        yield
    except PoolTimeout as error:
        raise OutcomeUnknown(f"{table}: no connection within {timeouts.connect_seconds:g} s") from error
    except _UNAVAILABLE_ERRORS as error:
        if not error.sqlstate and _PERMANENT_ERRORS.search(str(error)):
            raise StoreError(f"{table}: {_error_message(error)}") from error
        raise OutcomeUnknown(f"{table}: {_error_message(error)}") from error
    except Error as error:
        raise StoreError(f"{table}: {_ADVICE.get(type(error)) or _error_message(error)}") from error


def _error_message(error: Error) -> str:
    # Join the lines of the message, because the messages of failed connections have several lines.
    return printable(" ".join(str(error).split()))


CELLS_SCHEMA = """
CREATE TABLE IF NOT EXISTS {table} (
  name    text PRIMARY KEY,  -- lease/<key>, session/<id> or told/<id>
  version text NOT NULL,     -- never the same twice
  fields  text NOT NULL      -- JSON object of strings
) WITH (fillfactor = 50)
"""


def cell_statements(name_parts: tuple[str, ...]) -> Statements:
    """Return the statements for the table of layout `sessions`.

    The name of this table is the name of the lease table followed by `_cells`.
    """
    table = Identifier(*name_parts[:-1], f"{name_parts[-1]}_cells")

    def compiled(template: LiteralString) -> bytes:
        return SQL(template).format(table=table).as_bytes(None)

    return Statements(
        table.as_string(None),
        compiled(CELLS_SCHEMA),
        compiled("SELECT name, version, fields FROM {table}"),
        compiled("SELECT name, version, fields FROM {table} WHERE name = ANY(%(names)s)"),
        compiled("SELECT name FROM {table} LIMIT 1"),
        compiled("INSERT INTO {table} VALUES (%(name)s, %(fresh)s, %(fields)s) ON CONFLICT (name) DO NOTHING"),
        compiled(
            "UPDATE {table} SET version = %(fresh)s, fields = %(fields)s "
            "WHERE name = %(name)s AND version = %(version)s"
        ),
        compiled("DELETE FROM {table} WHERE name = %(name)s AND version = %(version)s"),
    )


class PostgresCells:
    """The rows of layout `sessions`.

    Each write is a single statement that is conditional on the version (rules 1 and 4).
    """

    page_leases = PAGE_LEASES

    def __init__(self, store: PostgresStore, name_parts: tuple[str, ...], *, create: bool) -> None:
        self._store, self._sql = store, cell_statements(name_parts)
        if create:
            # If two workers create the table at the same moment, one of them gets an error although the table now
            # exists. Ignore this error.
            with store.connection() as connection, suppress(errors.UniqueViolation, errors.DuplicateTable):
                connection.execute(self._sql.schema)

    def list(self, *prefixes: str, consistent: bool = False) -> tuple[StoredObject, ...]:  # noqa: ARG002  each is consistent
        """Return the rows whose names begin with one of these prefixes. The listing is a snapshot."""
        rows = self._store.rows(self._sql.select_all)
        return tuple(parse_cell(row) for row in rows if row["name"].startswith(prefixes))

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, StoredObject]:  # noqa: ARG002  never stale
        """Return those rows with these names that exist. The result is a snapshot."""
        rows = self._store.rows(self._sql.select_some, {"names": [*names]}) if names else ()
        return {row["name"]: parse_cell(row) for row in rows}

    def put_if_absent(self, name: str, fields: ObjectFields) -> str | None:
        """Insert a row, unless a row with this name exists."""
        return self._write(self._sql.insert, name, fields)

    def put_if_match(self, name: str, fields: ObjectFields, version: str) -> str | None:
        """Update a row, if the row still has this version."""
        return self._write(self._sql.update, name, fields, version)

    def delete(self, name: str, version: str) -> bool:
        """Delete a row, if the row still has this version."""
        return self._write(self._sql.delete, name, {}, version) is not None or name not in self.read([name])

    def prove(self) -> None:
        """Check that the service honors conditions, and that its commits are durable. Raises StoreError if not."""
        self._store.prove()

    def close(self) -> None:
        """Close all connections."""
        self._store.close()

    def _write(self, statement: bytes, name: str, fields: ObjectFields, version: str = "") -> str | None:
        new_version = uuid4().hex
        values = {"name": name, "fresh": new_version, "fields": json.dumps(dict(fields)), "version": version}
        with self._store.connection() as connection:
            try:
                count = connection.execute(statement, values).rowcount
            except _RETRYABLE_ERRORS:
                return None
        return new_version if count else None


def _row_values(lease: Lease) -> dict[str, Any]:
    return {**to_row(lease), "yields": lease.yields}


def _update_arguments(row: SqlRow, values: SqlRow) -> SqlRow:
    """Return the arguments of a statement that replaces `row` with these values."""
    return {**values, **{f"was_{name}": row[name] for name in COLUMNS}}


def open_url(
    location: str, options: Mapping[str, str], *, create: bool, request_seconds: float | None
) -> PostgresStore:
    """Open the store in this table. Raises ValueError if the location or an option is invalid."""
    return PostgresStore(parse_location(location, options), create=create, timeouts=TIMEOUTS.within(request_seconds))


def parse_location(location: str, options: Mapping[str, str]) -> TableLocation:
    """Parse `host:port/database` and the options of a URL. Raises ValueError if they are invalid."""
    server, _, database = location.partition("/")
    if not database or "/" in database:
        raise ValueError("store URL: postgres:// wants host:port/database, or /database on this machine")
    # There may be several hosts, which are separated by commas. Colons within brackets are part of an IPv6 address.
    hosts = [re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::(\d*))?", address) for address in server.split(",")]
    if not all(hosts):
        raise ValueError("store URL: postgres:// wants host:port/database, and a port is a number")
    pairs = [(host_match[1].strip("[]"), host_match[2] or "") for host_match in hosts if host_match]
    host, port = (",".join(hosts_or_ports) for hosts_or_ports in zip(*pairs, strict=True))
    table = tuple(options.get("table", "leases").split("."))
    if len(table) > 2 or not all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,62}", name_part) for name_part in table):  # noqa: PLR2004
        raise ValueError("store URL: option 'table' needs a table name, or schema.table: letters, digits and _")
    return TableLocation(host, port.strip(","), database, table, options.get("user"), options.get("sslmode"))
