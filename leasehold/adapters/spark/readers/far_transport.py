"""How rows that readers have reach Spark's tasks: from the reader, or once more from the source where it is gone.

Rule 1: a task that cannot have its rows from a reader asks the planner, which reads exactly their ranges again.
Rule 2: a range that cannot be had again whole fails its task, and with it the query: Spark repeats the batch when it
is started again, and then its rules hold for what is left out (`replay`).
"""

import logging
from collections.abc import Iterable, Sequence

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types

from leasehold.adapters.spark.fetching import FetchedRows
from leasehold.adapters.spark.offsets import Offset
from leasehold.adapters.spark.readers.connection import ReaderConnection
from leasehold.adapters.spark.readers.far_rows import FarRows
from leasehold.adapters.spark.readers.messages import Discard, Keep
from leasehold.adapters.spark.readers.pool import ReaderPool
from leasehold.adapters.spark.replay import Place, replayed
from leasehold.adapters.spark.transport import ReaderRows, Rows, Transport
from leasehold.adapters.spark.waiting import Waiting
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.spark"))

TaskShare = dict[ReaderConnection | None, list[FarRows]]
"""The rows of one task by the reader that has them; None where that is gone."""
KEPT_SECONDS = 10.0
"""How long a reader may take to say that it keeps a batch; then its tasks are sent there all the same."""


class FarTransport:
    """Makes tasks of batches whose rows readers have; rows that are here go by the transport from here.

    pool   the readers
    here   carries what the planner has read itself
    place  where ranges are read again
    """

    def __init__(self, pool: ReaderPool, here: Transport, place: Place, lease_seconds: float) -> None:
        self._pool, self._here, self._place, self._seconds = pool, here, place, lease_seconds
        self._planned: dict[tuple[int, int], tuple[FarRows, ...]] = {}
        here.again = self._again

    def partitions(self, number: int, tasks: Sequence[Sequence[pa.RecordBatch | FarRows]]) -> Sequence[Rows]:
        """Make a partition for each task of this batch."""
        if not tasks or not isinstance(tasks[0][0], FarRows):
            return self._here.partitions(number, tasks)
        shares = [self._by_reader(rows) for rows in tasks]
        self._keep(number, shares)
        return [self._rows(number, place, share) for place, share in enumerate(shares)]

    def discard(self, number: int) -> None:
        """The rows of this batch are read no more."""
        self._here.discard(number)
        for reader in self._pool.connected:
            reader.send(Discard(number))
        for key in [key for key in self._planned if key[0] == number]:
            del self._planned[key]

    def close(self) -> None:
        """Close the port, and let all rows go."""
        self._here.close()

    def _by_reader(self, rows: Iterable[FarRows]) -> TaskShare:
        share: TaskShare = {}
        for each in rows:
            share.setdefault(self._pool.reader_of(each.opening), []).append(each)
        return share

    def _keep(self, number: int, shares: Sequence[TaskShare]) -> None:
        """Have each reader keep its rows of this batch, and wait until all do: tasks may come at any time."""
        parts: dict[ReaderConnection, list[tuple[int, tuple[tuple[int, int], ...]]]] = {}
        for place, share in enumerate(shares):
            for reader, rows in share.items():
                if reader is not None:
                    pieces = tuple((each.opening.number, each.through) for each in rows)
                    parts.setdefault(reader, []).append((place, pieces))
        for reader, told in parts.items():
            reader.send(Keep(number, tuple(told)))
        for reader in parts:
            reader.wait_kept(number, KEPT_SECONDS)

    def _rows(self, number: int, place: int, share: TaskShare) -> ReaderRows:
        rows = self._planned[number, place] = tuple(each for mine in share.values() for each in mine)
        there = [reader.rows for reader in share if reader is not None]
        parts = tuple(FetchedRows(each.host, each.port, each.token, number, place) for each in there)
        count = sum(each.num_rows for each in rows)
        return ReaderRows(parts if len(there) == len(share) else (), count, self._here.promised(number, place))

    def _again(self, number: int, place: int) -> Sequence[pa.RecordBatch]:
        """The rows of a task read again from the source, in the same order; none of a batch that is done.

        Raises ValueError if they are not all to be had any more.
        """
        planned = self._planned.get((number, place), ())
        if not planned:
            return []
        log.warning("batch %d: reading %d ranges again, whose reader is gone", number, len(planned))
        offset = Offset(number, tuple((each.opening.lease.key, each.range) for each in planned))
        found = replayed(offset, self._place, Waiting(self._seconds, doing=f"batch {number}, whose reader is gone"))
        for each in planned:
            key = each.opening.lease.key
            if (rows := found.get(key)) is None or rows.num_rows != each.num_rows:
                had = "none" if rows is None else rows.num_rows
                raise ValueError(f"shard {key}: of {each.num_rows} rows that were planned {had} can be read again")
        return [found[each.opening.lease.key] for each in planned]
