"""How rows that the runner has read reach Spark's tasks: they fetch them, or the rows are inside the tasks."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import frozen
from pyspark.sql.datasource import InputPartition

from leasehold.adapters.spark.fetching import Again, FetchedRows, RowServer, fetched, nothing
from leasehold.adapters.spark.options import Address
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.spark"))

AGAIN_SECONDS = 600.0
"""How long a task waits for rows that are read again from the source."""


@frozen
class EmbeddedRows(InputPartition):
    """Rows that travel with their task."""

    data: bytes

    def __repr__(self) -> str:
        return f"EmbeddedRows({len(self.data)} bytes)"


@frozen
class ReaderRows(InputPartition):
    """Rows that readers have.

    parts  what of them is fetched from each reader, in order; nothing where one is gone already
    count  how many rows there are in all
    again  where they are had, in the same order, once a reader is gone
    """

    parts: tuple[FetchedRows, ...]
    count: int
    again: FetchedRows


Rows = FetchedRows | EmbeddedRows | ReaderRows


class Transport:
    """Makes tasks of batches, and lets them go once Spark is done with them.

    address  where tasks fetch rows; None: rows are embedded
    memory   bytes of rows to be fetched that wait in memory
    folder   where more of them wait; "" for the system's own place

    `again` has the rows of a task that are not kept; set it before the first partition is made.
    """

    def __init__(self, address: Address | None, memory: int = 0, folder: str = "") -> None:
        self._address, self._memory, self._folder = address, memory, folder
        self._server: RowServer | None = None
        self.again: Again = nothing

    def partitions(self, number: int, tasks: Sequence[Sequence[pa.RecordBatch]]) -> Sequence[Rows]:
        """Make a partition for each task of this batch. The first that is to be fetched opens the port."""
        if self._address is None:
            return [_embedded(batches) for batches in tasks]
        return [self._opened(self._address).keep(number, *each) for each in enumerate(tasks)]

    def promised(self, number: int, place: int) -> FetchedRows:
        """Where a task fetches rows that are not kept here, but had by `again` when it asks. It opens the port."""
        if self._address is None:
            raise ValueError("rows that are embedded cannot be promised")
        return self._opened(self._address).promised(number, place)

    def _opened(self, address: Address) -> RowServer:
        if self._server is None:
            self._server = RowServer(address, self._memory, self._folder, self.again)
        return self._server

    def discard(self, number: int) -> None:
        """The rows of this batch are read no more."""
        if self._server is not None:
            self._server.discard(number)

    def close(self) -> None:
        """Close the port, and let all rows go."""
        if self._server is not None:
            self._server.close()


def spread(rows: Mapping[str, pa.RecordBatch], tasks: Callable[[int], int]) -> list[list[pa.RecordBatch]]:
    """Shards over as many tasks as there are for so many: the largest first, each to the task that has least so far."""
    batches = sorted((batch for batch in rows.values() if batch.num_rows), key=lambda batch: -batch.num_rows)
    found: list[list[pa.RecordBatch]] = [[] for _ in range(tasks(len(batches)))]
    for batch in batches:
        min(found, key=lambda task: sum(each.num_rows for each in task)).append(batch)
    return [[part for batch in task for part in _parts(batch)] for task in found]


def _parts(rows: pa.RecordBatch | pa.Table) -> Sequence[pa.RecordBatch]:
    return rows.to_batches() if isinstance(rows, pa.Table) else (rows,)


def _embedded(batches: Sequence[pa.RecordBatch]) -> EmbeddedRows:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return EmbeddedRows(sink.getvalue().to_pybytes())


def read(rows: Rows) -> Iterator[pa.RecordBatch]:
    """The rows of one task. Raises RuntimeError if they cannot be fetched."""
    match rows:
        case FetchedRows():
            yield from fetched(rows)
        case ReaderRows():
            yield from _from_readers(rows)
        case EmbeddedRows(data):
            yield from pa.ipc.open_stream(data)


def _from_readers(rows: ReaderRows) -> Iterator[pa.RecordBatch]:
    """From the readers, and where one fails, all that it has not sent from the planner: the same rows, in order."""
    seen = 0
    try:
        for part in rows.parts:
            for batch in fetched(part):
                yield batch
                seen += batch.num_rows
    except RuntimeError as fault:
        log.warning("a reader is gone, asking the planner: %s", fault)
    left = seen
    if seen < rows.count:
        for batch in fetched(rows.again, AGAIN_SECONDS):
            if left < batch.num_rows:
                yield batch.slice(left)
                seen += batch.num_rows - left
            left -= min(left, batch.num_rows)
    if seen != rows.count:
        raise RuntimeError(f"{seen} rows came of {rows.count} that were planned")
