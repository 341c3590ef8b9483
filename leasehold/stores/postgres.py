"""Leases in a table of PostgreSQL: a row for each, changed only while it still says what the decision was made of.

Rule 1: every write is one statement under its condition, and never a transaction that waits for this process: one that
stalls holds no lock, and a pooler between (PgBouncer, by transactions) changes nothing.
Rule 2: `applied` decides, on the row as this process last saw it. The statement compares every column with that row, so
that a row which says anything else, whoever wrote it, is read anew and decided upon again.
Rule 3: only our own columns are written, so that columns others add survive.
Rule 4: a write is sent once. What PostgreSQL does not answer is OutcomeUnknown, and the next reading is the truth.
Rule 5: a row keeps no time by which leases are judged; `written` is for people and for `leasehold tables`.

The row of a lease is SQLite's, column by column (`stores/embedded/sqlite.py`).
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
from leasehold.stores.embedded.sqlite import COLUMNS, cell_of, to_lease, to_row
from leasehold.stores.fields import insist, listing_of
from leasehold.stores.printable import escaped, printable
from leasehold.stores.protocol import ATTEMPTS, Capabilities, Done, Listing, Lost, Outcome, Patience
from leasehold.stores.requests import PAGE_LEASES, ObjectFields, Stored
from leasehold.stores.writes import CreateLease, DeleteLease, Write, applied

log = escaped(logging.getLogger("leasehold.postgres"))

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
"""Half of each page is left free, so that a renewal finds room beside its row and no index has to be written."""

PATIENCE = Patience(connect_seconds=3, read_seconds=5, attempts=3)
CONNECTIONS = 8
"""Most of one process; all but one are closed once they are idle."""
IDLE_SECONDS = 60.0
_AGAIN = (errors.SerializationFailure, errors.DeadlockDetected)
"""Certainly not applied: where the database's default isolation is stricter, this is how it refuses."""
_NO_ANSWER = (OperationalError, InterfaceError, InternalError)
_OUR_FAULT = re.compile(
    r"authentication failed|no pg_hba\.conf entry|no password supplied|does not exist|permission denied"
    r"|invalid sslmode|does not support SSL|root certificate|not permitted to log in|invalid (port|integer)"
)
"""Words of a refused connection that no repetition mends; the service has no codes for these."""
_ADVICE: Mapping[type[Error], str] = {
    errors.UndefinedTable: "there is no such table here; check the name, or let a worker make it",
    errors.UndefinedColumn: "the table is of another shape than a lease table; name another table",
    errors.InvalidColumnReference: "the table has no primary key on its column key; name another table",
    errors.InsufficientPrivilege: (
        "this user may not do that; a worker needs SELECT, INSERT, UPDATE and DELETE on the table, and CREATE on its "
        "schema to make it; tools that only read need the first"
    ),
    errors.InvalidSchemaName: "there is no such schema; create it first",
}

SqlRow = Mapping[str, Any]


@frozen
class PostgresPlace:
    """Where a lease table is: the settings of libpq, and the table's name, its schema before it.

    Settings that are None come from libpq's own environment: PGHOST, PGUSER, PGPASSWORD, PGPASSFILE, PGSSLMODE.
    """

    host: str
    port: str
    database: str
    table: tuple[str, ...] = ("leases",)
    user: str | None = None
    sslmode: str | None = None

    @property
    def name(self) -> str:
        """For sentences."""
        return f"PostgreSQL table {'.'.join(self.table)} of {self.host or 'this machine'}/{self.database}"

    def conninfo(self, patience: Patience) -> str:
        """The connection string, without any secret."""
        return make_conninfo(
            host=self.host or None,
            port=self.port or None,
            dbname=self.database,
            user=self.user,
            sslmode=self.sslmode,
            connect_timeout=max(1, round(patience.connect_seconds)),
            application_name="leasehold",
            # Of several hosts, the one that takes writes: a standby would answer with what was true a while ago.
            target_session_attrs="read-write",
        )


@frozen
class Statements:
    """The statements that a table is asked; each write says by its count of rows whether its condition held."""

    table: str
    schema: bytes
    every: bytes
    some: bytes
    any: bytes
    insert: bytes
    update: bytes
    delete: bytes

    @classmethod
    def of(cls, named: tuple[str, ...]) -> "Statements":
        """The statements for the table of this name, which may have its schema before it."""
        columns = [Identifier(name) for name in COLUMNS]
        every = SQL(", ").join(columns)
        new = SQL(", ").join(map(Placeholder, COLUMNS))
        sets = SQL(", ").join(SQL("{} = {}").format(Identifier(name), Placeholder(name)) for name in COLUMNS)
        same = SQL(" AND ").join(
            SQL("{} IS NOT DISTINCT FROM {}").format(Identifier(name), Placeholder(f"was_{name}")) for name in COLUMNS
        )

        # By its key alone PostgreSQL finds the row by the index: IS NOT DISTINCT FROM reads the whole table.
        same = SQL("key = {} AND {}").format(Placeholder("was_key"), same)

        def said(text: LiteralString) -> bytes:
            table = Identifier(*named)
            return SQL(text).format(table=table, every=every, new=new, sets=sets, same=same).as_bytes(None)

        return cls(
            Identifier(*named).as_string(None),
            said(SCHEMA),
            said("SELECT {every} FROM {table}"),
            said("SELECT {every} FROM {table} WHERE key = ANY(%(keys)s)"),
            said("SELECT key FROM {table} LIMIT 1"),
            said("INSERT INTO {table} ({every}) VALUES ({new}) ON CONFLICT (key) DO NOTHING"),
            said("UPDATE {table} SET {sets}, written = now() WHERE {same}"),
            said("DELETE FROM {table} WHERE {same}"),
        )


class _Bounded(Connection[DictRow]):
    """A connection that waits for an answer for a limited time: a server that hangs keeps its end of the line open."""

    seconds: float = PATIENCE.read_seconds

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:  # noqa: ANN401  psycopg's
        """Wait for the server, `seconds` at most unless a call sets its own time-out."""
        return super().wait(gen, interval, self.seconds if timeout is None else timeout)


class PostgresStore:
    """A table of leases; may be used by many threads. The counter is the version and the epoch."""

    def __init__(self, place: PostgresPlace, *, create: bool = True, patience: Patience = PATIENCE) -> None:
        """Find the table, or make it if there is none and `create` allows."""
        self._place, self._create, self._patience = place, create, patience
        self._sql = Statements.of(place.table)
        self._seen: dict[str, SqlRow] = {}
        # The pool tells nobody why it has no connection, so the first one is made without it.
        with self._translated():
            connect(place.conninfo(patience)).close()

        def bounded(connection: _Bounded) -> None:
            connection.seconds = patience.read_seconds

        self._pool = ConnectionPool(
            place.conninfo(patience),
            connection_class=_Bounded,
            # Statements that are prepared would be looked for on another connection, behind a pooler.
            kwargs={"autocommit": True, "row_factory": dict_row, "prepare_threshold": None},
            configure=bounded,
            min_size=1,
            max_size=CONNECTIONS,
            max_idle=IDLE_SECONDS,
            timeout=patience.connect_seconds,
            # By itself it would pause for longer and longer while the service is away, and so for a while after.
            reconnect_timeout=patience.connect_seconds,
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
        """The table keeps every promise."""
        return Capabilities()

    def list(self) -> Listing:
        """Every lease, sorted by key, as of one moment. A dropped table is created again, where rights allow."""
        try:
            rows = self.rows(self._sql.every)
        except StoreError as fault:
            if not (self._create and isinstance(fault.__cause__, errors.UndefinedTable)):
                raise
            self._prepare()
            rows = self.rows(self._sql.every)
            log.error("%s was dropped, and this process has made it again", self._place.name)  # noqa: TRY400  said
        self._seen = {row["key"]: row for row in rows}
        return listing_of(map(to_lease, rows))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:  # noqa: ARG002  never stale
        """Read these leases, in the order asked; those not there are left out."""
        asked = tuple(keys)
        found = {row["key"]: row for row in self.rows(self._sql.some, {"keys": list(asked)})} if asked else {}
        self._seen.update(found)
        return tuple(insist(to_lease(found[key])) for key in asked if key in found)

    def write(self, write: Write) -> Outcome:
        """Decide on the row as last seen (rule 2), then on the row as it is, until nobody writes in between."""
        key = write.lease.key
        row = self._seen.get(key)
        fresh = row is None and not isinstance(write, CreateLease)
        if fresh:
            row = self._read(key)
        for _ in range(ATTEMPTS):
            stored = insist(to_lease(row)) if row else None
            after = applied(write, stored)
            if after is None and fresh:
                return Lost(key, stored)
            if after and self._put(key, row, None if isinstance(write, DeleteLease) else after):
                return Done(after)
            row, fresh = self._read(key), True
        raise StoreError(f"lease {key!r}: {ATTEMPTS} conditional writes in a row were refused")

    def prove(self) -> None:
        """Return if the service keeps conditions, and what it has answered. Raises StoreError.

        All of it is in a transaction that is undone: nobody sees a row of it.
        """
        row = _values(Lease(f"leasehold-probe-{uuid4().hex}"))
        other = {**row, "owner": "another"}
        sql = self._sql
        with self.connection() as connection, connection.transaction(force_rollback=True):
            (durable,) = connection.execute("SELECT current_setting('synchronous_commit') AS said").fetchall()
            asked = (
                (sql.insert, row, 1),
                (sql.insert, row, 0),
                (sql.update, _over(row, other), 1),
                (sql.update, _over(row, other), 0),
                (sql.delete, _over(row, {}), 0),
                (sql.delete, _over(other, {}), 1),
            )
            kept = all(connection.execute(ask, told).rowcount == count for ask, told, count in asked)
        if not kept:
            raise StoreError(
                f"{self._place.name} ignores the conditions of writes, or refuses what fits them (has it rules or "
                "triggers?), so two workers could own one lease; name a table of its own"
            )
        if durable["said"] in {"off", "local"}:
            raise StoreError(
                f"{self._place.name}: synchronous_commit is {durable['said']} for this user, so that a checkpoint "
                "that was answered could be lost; ALTER ROLE … SET synchronous_commit = on"
            )

    def probe(self, right: Literal["INSERT", "UPDATE", "DELETE"]) -> None:
        """Use this right on a row that is not there, in a transaction that is undone. Raises StoreError."""
        row = _values(Lease(f"leasehold-probe-{uuid4().hex}"))
        statement = {"INSERT": self._sql.insert, "UPDATE": self._sql.update, "DELETE": self._sql.delete}[right]
        with self.connection() as connection, connection.transaction(force_rollback=True):
            connection.execute(statement, _over(row, row))

    def standbys(self) -> tuple[int, str]:
        """The number of servers that follow this one, and the names of those that its commits wait for."""
        asked = (
            b"SELECT count(*) AS many, current_setting('synchronous_standby_names') AS waited FROM pg_stat_replication"
        )
        (row,) = self.rows(asked)
        return row["many"], row["waited"]

    def cells(self) -> "PostgresCells":
        """The rows of layout `sessions`, in a table of their own beside this one."""
        return PostgresCells(self, self._place.table, create=self._create)

    def layouts(self, *, asked: bool) -> tuple[bool, bool]:  # noqa: ARG002  it costs next to nothing
        """Whether there are rows of layout `sessions`, and of this one."""
        beside = cell_statements(self._place.table)
        (there,) = self.rows(b"SELECT to_regclass(%(table)s) IS NOT NULL AS said", {"table": beside.table})
        return bool(there["said"] and self.rows(beside.any)), bool(self.rows(self._sql.any))

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()

    def _prepare(self) -> None:
        """Make sure that the table is there and has our columns."""
        if self._create:
            # Of two that make it at the same moment, PostgreSQL refuses one, which is as good.
            with self.connection() as connection, suppress(errors.UniqueViolation, errors.DuplicateTable):
                if not connection.execute("SELECT to_regclass(%s) AS found", [self._sql.table]).fetchall()[0]["found"]:
                    connection.execute(self._sql.schema)
        self.rows(self._sql.some, {"keys": []})

    def rows(self, statement: bytes, told: SqlRow | None = None) -> Sequence[DictRow]:
        """Read, again where no answer came. Raises StoreError, OutcomeUnknown."""
        again = Retrying(
            retry=retry_if_exception_type(OutcomeUnknown),
            stop=stop_after_attempt(self._patience.attempts),
            wait=wait_random_exponential(multiplier=0.05, max=1),
            reraise=True,
        )

        def read() -> Sequence[DictRow]:
            with self.connection() as connection:
                return connection.execute(statement, told).fetchall()

        return again(read)

    def _read(self, key: str) -> SqlRow | None:
        row = next(iter(self.rows(self._sql.some, {"keys": [key]})), None)
        if row:
            self._seen[key] = row
        else:
            self._seen.pop(key, None)
        return row

    def _put(self, key: str, row: SqlRow | None, after: Lease | None) -> bool:
        """Put this lease, or none, in the place of that row, or of none; False if another is there by now."""
        told: SqlRow = _values(after) if after else {}
        statement, asked = self._sql.insert, told
        if row is None:
            if after is None:
                return True
        else:
            statement, asked = self._sql.update if after else self._sql.delete, _over(row, told)
        self._seen.pop(key, None)  # unless it is answered, the next write reads first
        with self.connection() as connection:
            try:
                if connection.execute(statement, asked).rowcount != 1:
                    return False
            except _AGAIN:
                return False
        if after:
            self._seen[key] = told
        return True

    @contextmanager
    def connection(self) -> Iterator[_Bounded]:
        """A connection of the pool, whose faults become ours."""
        with self._translated():
            connection = self._pool.getconn()
            try:
                yield connection
            except BaseException as error:
                if not (isinstance(error, Error) and error.sqlstate):
                    connection.close()  # its answer may still come, and would be taken for another's
                if isinstance(error, _NO_ANSWER):
                    # The server ended, or takes no writes any more: the other connections are no better.
                    self._pool.drain()
                raise
            finally:
                self._pool.putconn(connection)

    def _translated(self) -> AbstractContextManager[None]:
        return translated(self._place, self._patience)


@contextmanager
def translated(place: PostgresPlace, patience: Patience) -> Iterator[None]:
    """Turns psycopg's errors into ours; no password is in any of them."""
    where = place.name
    try:
        yield
    except PoolTimeout as error:
        raise OutcomeUnknown(f"{where}: no connection within {patience.connect_seconds:g} s") from error
    except _NO_ANSWER as error:
        if not error.sqlstate and _OUR_FAULT.search(str(error)):
            raise StoreError(f"{where}: {printable(str(error).strip())}") from error
        raise OutcomeUnknown(f"{where}: {printable(str(error).strip())}") from error
    except Error as error:
        raise StoreError(f"{where}: {_ADVICE.get(type(error)) or printable(str(error).strip())}") from error


CELLS_SCHEMA = """
CREATE TABLE IF NOT EXISTS {table} (
  name    text PRIMARY KEY,  -- lease/<key>, session/<id> or told/<id>
  version text NOT NULL,     -- never the same twice
  fields  text NOT NULL      -- JSON object of strings
) WITH (fillfactor = 50)
"""


def cell_statements(named: tuple[str, ...]) -> Statements:
    """The statements for the table of layout `sessions`: that of the lease table, with `_cells` behind its name."""
    table = Identifier(*named[:-1], f"{named[-1]}_cells")

    def said(text: LiteralString) -> bytes:
        return SQL(text).format(table=table).as_bytes(None)

    return Statements(
        table.as_string(None),
        said(CELLS_SCHEMA),
        said("SELECT name, version, fields FROM {table}"),
        said("SELECT name, version, fields FROM {table} WHERE name = ANY(%(names)s)"),
        said("SELECT name FROM {table} LIMIT 1"),
        said("INSERT INTO {table} VALUES (%(name)s, %(fresh)s, %(fields)s) ON CONFLICT (name) DO NOTHING"),
        said(
            "UPDATE {table} SET version = %(fresh)s, fields = %(fields)s "
            "WHERE name = %(name)s AND version = %(version)s"
        ),
        said("DELETE FROM {table} WHERE name = %(name)s AND version = %(version)s"),
    )


class PostgresCells:
    """Rows of layout `sessions`: one statement each, under the version as read; rules 1 and 4 hold here, too."""

    page_leases = PAGE_LEASES

    def __init__(self, store: PostgresStore, named: tuple[str, ...], *, create: bool) -> None:
        self._store, self._sql = store, cell_statements(named)
        if create:
            # Of two that make it at the same moment, PostgreSQL refuses one, which is as good.
            with store.connection() as connection, suppress(errors.UniqueViolation, errors.DuplicateTable):
                connection.execute(self._sql.schema)

    def list(self, *prefixes: str, certain: bool = False) -> tuple[Stored, ...]:  # noqa: ARG002  each is consistent
        """Every row whose name begins with one of these, as of one moment."""
        found = self._store.rows(self._sql.every)
        return tuple(cell_of(row) for row in found if row["name"].startswith(prefixes))

    def read(self, names: Collection[str], *, stale_ok: bool = False) -> Mapping[str, Stored]:  # noqa: ARG002  never stale
        """The rows of these keys that are there, as of one moment."""
        found = self._store.rows(self._sql.some, {"names": [*names]}) if names else ()
        return {row["name"]: cell_of(row) for row in found}

    def put_new(self, name: str, fields: ObjectFields) -> str | None:
        """Insert it, unless there is one."""
        return self._written(self._sql.insert, name, fields)

    def put_over(self, name: str, fields: ObjectFields, version: str) -> str | None:
        """Update it, if it is still this one."""
        return self._written(self._sql.update, name, fields, version)

    def delete(self, name: str, version: str) -> bool:
        """Delete it, if it is still this one."""
        return self._written(self._sql.delete, name, {}, version) is not None or name not in self.read([name])

    def prove(self) -> None:
        """Return if the service keeps conditions, and what it has answered. Raises StoreError."""
        self._store.prove()

    def close(self) -> None:
        """Close all connections."""
        self._store.close()

    def _written(self, statement: bytes, name: str, fields: ObjectFields, version: str = "") -> str | None:
        fresh = uuid4().hex
        told = {"name": name, "fresh": fresh, "fields": json.dumps(dict(fields)), "version": version}
        with self._store.connection() as connection:
            try:
                made = connection.execute(statement, told).rowcount
            except _AGAIN:
                return None
        return fresh if made else None


def _values(lease: Lease) -> dict[str, Any]:
    return {**to_row(lease), "yields": lease.yields}


def _over(row: SqlRow, told: SqlRow) -> SqlRow:
    """The arguments of a statement that puts these values in the place of that row."""
    return {**told, **{f"was_{name}": row[name] for name in COLUMNS}}


def open_url(place: str, options: Mapping[str, str], *, create: bool, request_seconds: float | None) -> PostgresStore:
    """The store of this table; raises ValueError where the place or an option cannot be one."""
    return PostgresStore(place_of(place, options), create=create, patience=PATIENCE.within(request_seconds))


def place_of(place: str, options: Mapping[str, str]) -> PostgresPlace:
    """The place that `host:port/database` and the options name. Raises ValueError."""
    server, _, database = place.partition("/")
    if not database or "/" in database:
        raise ValueError("store URL: postgres:// wants host:port/database, or /database on this machine")
    # Several hosts have commas between them; the colons of an address in brackets begin no port.
    hosts = [re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::(\d*))?", each) for each in server.split(",")]
    if not all(hosts):
        raise ValueError("store URL: postgres:// wants host:port/database, and a port is a number")
    named = [(each[1].strip("[]"), each[2] or "") for each in hosts if each]
    host, port = (",".join(parts) for parts in zip(*named, strict=True))
    table = tuple(options.get("table", "leases").split("."))
    if len(table) > 2 or not all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,62}", name) for name in table):  # noqa: PLR2004
        raise ValueError("store URL: option 'table' wants a table's name, or schema.table: letters, digits and _")
    return PostgresPlace(host, port.strip(","), database, table, options.get("user"), options.get("sslmode"))


def tables_of(place: PostgresPlace, *, all_of_them: bool) -> Iterator[tuple[str, float | None]]:
    """Lease tables of a database that this user may see, and when each was last written; or the named one alone.

    Raises StoreError, OutcomeUnknown.
    """
    with translated(place, PATIENCE), connect(place.conninfo(PATIENCE), autocommit=True) as connection:
        named = connection.execute(
            "SELECT table_schema, table_name, table_schema = ANY(current_schemas(false)) "
            "FROM information_schema.columns WHERE column_name = ANY(%s) AND table_schema !~ '^pg_' "
            "GROUP BY table_schema, table_name HAVING count(*) = %s",
            [[*COLUMNS, "written"], len(COLUMNS) + 1],
        ).fetchall()
        for schema, table, near in named:
            if all_of_them or (schema, table) == place.table or (near and (table,) == place.table):
                last = SQL("SELECT extract(epoch FROM max(written))::float8 FROM {}").format(Identifier(schema, table))
                (written,) = connection.execute(last).fetchall()[0]
                yield (table if near else f"{schema}.{table}"), written
