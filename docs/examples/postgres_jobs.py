"""A PostgreSQL table of jobs: each of its buckets is a shard, whose jobs are done in the order of their transactions.

Where ids alone are the order, a job whose transaction commits late is passed over for ever. So each row keeps its
transaction, and only those are read before which no transaction is still open.
"""

from typing import Any

from psycopg import OperationalError, connect

from leasehold import Lease, Position, Shard
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.errors import SourceUnavailable

SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
  id bigserial PRIMARY KEY, tx xid8 NOT NULL DEFAULT pg_current_xact_id(), bucket int NOT NULL, work text NOT NULL
);
CREATE INDEX IF NOT EXISTS jobs_in_order ON jobs (bucket, tx, id);
"""

NEXT = """
SELECT tx::text, id, work FROM jobs
WHERE bucket = %s AND (tx, id) > (%s::xid8, %s) AND tx < pg_snapshot_xmin(pg_current_snapshot())
ORDER BY tx, id LIMIT 100
"""


class Jobs:
    """The source: a fixed number of buckets; a producer chooses one by the key whose order matters."""

    stream = ""

    def __init__(self, conninfo: str, buckets: int) -> None:
        self.connection, self.buckets = connect(conninfo, autocommit=True), buckets

    def shards(self) -> tuple[Shard, ...]:
        """The buckets."""
        return tuple(Shard(f"bucket-{number}") for number in range(self.buckets))

    def gone(self, shard: str) -> bool:
        """A table with fewer buckets than before still has the rows."""
        return False

    def latest(self, lease: Lease) -> Position:
        """Behind every job that can be read now."""
        return Position(self.rows("SELECT pg_snapshot_xmin(pg_current_snapshot())::text", ())[0][0], -1)

    def open(self, lease: Lease, start: Position) -> "Bucket":
        """Read on behind this checkpoint."""
        return Bucket(self, int(lease.shard.removeprefix("bucket-")), start)

    def rows(self, query: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        """Ask PostgreSQL."""
        try:
            return self.connection.execute(query, values).fetchall()
        except OperationalError as error:
            raise SourceUnavailable(f"PostgreSQL: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


class Bucket:
    """The reader of one bucket. A transaction's number is the sequence number, the id counts within it."""

    def __init__(self, jobs: Jobs, number: int, start: Position) -> None:
        self.jobs, self.number = jobs, number
        self.at = (start.sequence, start.sub) if start.numbered else ("0", 0)

    def read(self) -> Batch:
        """The next jobs; none is an answer too."""
        rows = self.jobs.rows(NEXT, (self.number, *self.at))
        records = [Record(work.encode(), tx, number) for tx, number, work in rows]
        if rows:
            self.at = rows[-1][:2]
        return Batch(records, records[-1].position if records else None, behind_seconds=None, wait_seconds=0.2)

    def close(self) -> None:
        """The connection is everybody's."""
