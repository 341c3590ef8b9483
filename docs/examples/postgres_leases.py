"""Leases in PostgreSQL: a store of one's own, which keeps the contract because `lease_after_write` decides.

Rule 1: every write is one transaction that locks the key, reads, decides and replaces.
Rule 2: whatever PostgreSQL does not answer is OutcomeUnknown; the next reading is the truth.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock

from psycopg import Connection, OperationalError, connect
from psycopg.types.json import Jsonb

from leasehold import Lease
from leasehold.stores import Capabilities, DeleteLease, Done, Listing, Lost, Outcome, OutcomeUnknown, Write
from leasehold.stores.embedded.sqlite import to_lease, to_row
from leasehold.stores.writes import lease_after_write

SCHEMA = "CREATE TABLE IF NOT EXISTS leases (key text PRIMARY KEY, lease jsonb NOT NULL)"
PUT = "INSERT INTO leases VALUES (%s, %s) ON CONFLICT (key) DO UPDATE SET lease = leases.lease || excluded.lease"


class PostgresLeases:
    """One table of leases; one connection, used by one thread at a time."""

    capabilities = Capabilities()

    def __init__(self, conninfo: str) -> None:
        self._lock, self._connection = Lock(), connect(conninfo, autocommit=True)
        with self._transaction("the schema") as connection:
            connection.execute(SCHEMA)

    @contextmanager
    def _transaction(self, key: str) -> Iterator[Connection]:
        """A transaction that no other process has on this key; of a row that is not there yet, too."""
        try:
            with self._lock, self._connection.transaction():
                self._connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (key,))
                yield self._connection
        except OperationalError as error:
            raise OutcomeUnknown(f"PostgreSQL: {error}") from error

    def _read(self, connection: Connection, keys: Iterable[str]) -> tuple[Lease, ...]:
        rows = connection.execute("SELECT key, lease FROM leases WHERE key = ANY(%s)", (list(keys),)).fetchall()
        found = {key: to_lease(row) for key, row in rows}
        return tuple(lease for key in keys if isinstance(lease := found.get(key), Lease))

    def list(self) -> Listing:
        """Every lease."""
        with self._transaction("nothing") as connection:
            keys = [key for (key,) in connection.execute("SELECT key FROM leases ORDER BY key")]
            return Listing(self._read(connection, keys))

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """These leases, in the order asked."""
        with self._transaction("nothing") as connection:
            return self._read(connection, tuple(keys))

    def write(self, write: Write) -> Outcome:
        """Read, decide and replace in one transaction."""
        key = write.lease.key
        with self._transaction(key) as connection:
            stored = next(iter(self._read(connection, [key])), None)
            after = lease_after_write(write, stored)
            if after is None:
                return Lost(key, stored)
            if isinstance(write, DeleteLease):
                connection.execute("DELETE FROM leases WHERE key = %s", (key,))
            else:
                connection.execute(PUT, (key, Jsonb(to_row(after))))
        return Done(after)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
