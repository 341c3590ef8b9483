"""A sink in PostgreSQL that has each record exactly once: records, position and fence are one transaction.

The first statement is the fence: it takes the shard's row for this epoch, unless a higher one has it, and holds it
until the transaction ends. What a killed worker had not committed is gone; what it had committed is behind the
position, and skipped when it is delivered again.
"""

from psycopg import connect

from leasehold.adapters import Delivery

SCHEMA = """
CREATE TABLE IF NOT EXISTS progress (shard text PRIMARY KEY, epoch bigint, sequence numeric, sub bigint);
CREATE TABLE IF NOT EXISTS output (id bigserial PRIMARY KEY, shard text, data text);
"""

FENCE = """
INSERT INTO progress VALUES (%(shard)s, %(epoch)s, -1, 0)
ON CONFLICT (shard) DO UPDATE SET epoch = excluded.epoch WHERE progress.epoch <= excluded.epoch
RETURNING sequence, sub
"""


class Fenced(Exception):
    """A newer owner has written: this worker has lost the lease and does not know it yet."""


class PostgresSink:
    """A handler that inserts each record."""

    def __init__(self, conninfo: str) -> None:
        self.conninfo = conninfo
        with connect(conninfo) as connection:
            connection.execute("SELECT pg_advisory_xact_lock(1)")  # IF NOT EXISTS alone lets two workers collide
            connection.execute(SCHEMA)

    def __call__(self, batch: Delivery) -> None:
        """Insert what is not there yet. Raises Fenced."""
        with connect(self.conninfo) as connection:  # one transaction; a pool spares the connecting
            taken = connection.execute(FENCE, {"shard": batch.shard, "epoch": batch.epoch}).fetchone()
            if taken is None:
                raise Fenced(f"{batch.shard}: epoch {batch.epoch} is over")
            new = [each for each in batch.records if (int(each.sequence_number), each.sub_sequence_number) > taken]
            with connection.cursor() as cursor:
                rows = [(batch.shard, each.data.decode()) for each in new]
                cursor.executemany("INSERT INTO output (shard, data) VALUES (%s, %s)", rows)
            if new:
                last = (new[-1].sequence_number, new[-1].sub_sequence_number, batch.shard)
                connection.execute("UPDATE progress SET sequence = %s, sub = %s WHERE shard = %s", last)
