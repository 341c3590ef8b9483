"""Reads a fixed range of one shard, for repeated batches of a query and for batches without leases."""

from bisect import bisect_right
from collections.abc import Callable, Generator

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types

from leasehold.adapters.consumer.cursor import ShardReader
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.spark.rows import RowChunk, SourceColumns, make_chunk
from leasehold.balancer.model import Lease, Position
from leasehold.errors import SourceUnavailable


def select_rows_up_to(columns: SourceColumns, chunk: RowChunk, end: Position) -> pa.RecordBatch:
    """Return the rows of a chunk up to the position `end`, inclusive."""
    if chunk.ends.order <= end.order:
        return chunk.rows
    row_numbers = range(chunk.count)
    return chunk.rows.slice(
        0, bisect_right(row_numbers, end.order, key=lambda row: columns.position(chunk.rows, row).order)
    )


def read_range(
    shard_reader: ShardReader,
    columns: SourceColumns,
    lease: Lease,
    *,
    select_in_range: Callable[[Batch], Batch] = lambda batch: batch,
    should_stop: Callable[[], bool] = lambda: False,
) -> Generator[tuple[Batch | SourceUnavailable, list[pa.RecordBatch]]]:
    """Read up to the cursor's end or until `should_stop` returns true, then close `shard_reader`. Raises SourceError.

    Args:
        shard_reader: Reads the shard.
        columns: The columns that records become.
        lease: The lease of the shard.
        select_in_range: Removes the records outside the time range from a response.
        should_stop: Returns whether to stop reading early.

    Yields:
        Each response together with its rows. If the source does not respond, the error is yielded without rows.
    """
    cursor, fetched_chunks = shard_reader.cursor, list[RowChunk]()

    def keep_rows(batch: Batch) -> None:
        if (chunk := make_chunk(columns, lease, select_in_range(batch))) is not None:
            fetched_chunks.append(chunk)
            cursor.batch_read(chunk.ends)

    try:
        while not (should_stop() or cursor.is_fully_read):
            response: Batch | SourceUnavailable
            try:
                response = shard_reader.read(keep_rows)
            except SourceUnavailable as fault:
                response = fault
            yield response, [select_rows_up_to(columns, chunk, cursor.until) for chunk in fetched_chunks]
            fetched_chunks.clear()
    finally:
        shard_reader.close()
