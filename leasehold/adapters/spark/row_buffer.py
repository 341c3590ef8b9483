"""Buffers the rows of one shard that have been read but are not in a batch yet.

The rows can be cut at any row without copying.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # likewise
from attrs import evolve

from leasehold.adapters.spark.rows import RowChunk, SourceColumns

ROW_OVERHEAD_BYTES = 100
"""The approximate size of a row without its data, that is, of its keys, numbers and times."""
UNMERGED_BATCH_BYTES = 1 << 18
"""If batches have at least this average size, they are not merged, because copying a batch would take longer than
sending it."""
UNLIMITED_BYTES = 1 << 62
"""A size limit that no row exceeds."""


class RowBuffer:
    """The rows of one shard that were read ahead, in order. Not thread-safe.

    `bool(buffer)` is true if the buffer contains rows or a position without rows.

    Attributes:
        count: The number of buffered rows.
        bytes: The size of the buffered rows.
    """

    def __init__(self, columns: SourceColumns) -> None:
        self.count = self.bytes = 0
        self._columns = columns
        self._chunks: deque[tuple[RowChunk, int]] = deque()  # each chunk with its size, which is slow to compute

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def append_chunk(self, chunk: RowChunk) -> None:
        """Append the chunk that was read next."""
        chunk_bytes = self._measure_chunk(chunk)  # this may raise, so compute the size before the chunk is added
        self._chunks.append((chunk, chunk_bytes))
        self.count += chunk.count
        self.bytes += chunk_bytes

    def take_rows(self, max_count: int, max_bytes: int) -> RowChunk | None:
        """Remove and return the first rows within both limits, or None if not even one fits.

        Positions without rows are also removed if they directly follow the last returned row.
        """
        batches, end_position = list[pa.RecordBatch](), None
        while self._chunks:
            first_chunk, size = self._chunks[0]
            if first_chunk.count <= max_count and size <= max_bytes:
                max_count, max_bytes = max_count - first_chunk.count, max_bytes - size
                # The whole chunk fits, so do not slice it.
                batches.append(first_chunk.rows)
                end_position = first_chunk.ends
                self._remove_first_chunk()
                continue
            # Measure single rows only in a chunk that exceeds a limit, because measuring rows is slow.
            row_sizes = np.asarray(pc.binary_length(first_chunk.rows[self._columns.data])) + ROW_OVERHEAD_BYTES
            fitting_row_count = min(max_count, int(np.searchsorted(np.cumsum(row_sizes), max_bytes, side="right")))
            if fitting_row_count:
                self._remove_first_chunk()
                batches.append(first_chunk.rows.slice(0, fitting_row_count))
                end_position, trail = self._columns.position(first_chunk.rows, fitting_row_count - 1), first_chunk.trail
                if trail is not None:
                    end_position, trail = (
                        evolve(end_position, token=trail.token_for_row(fitting_row_count - 1)),
                        trail.starting_at_row(fitting_row_count),
                    )
                remaining_chunk = evolve(first_chunk, rows=first_chunk.rows.slice(fitting_row_count), trail=trail)
                self._chunks.appendleft((remaining_chunk, size := self._measure_chunk(remaining_chunk)))
                self.count += remaining_chunk.count
                self.bytes += size
            break
        return None if end_position is None else RowChunk(concatenate_batches(batches), end_position)

    def _remove_first_chunk(self) -> None:
        chunk, size = self._chunks.popleft()
        self.count -= chunk.count
        self.bytes -= size

    def _measure_chunk(self, chunk: RowChunk) -> int:
        return (
            int(pc.sum(pc.binary_length(chunk.rows[self._columns.data])).as_py() or 0)
            + ROW_OVERHEAD_BYTES * chunk.count
        )


def concatenate_batches(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Concatenate batches. If they are large, return a table that keeps them as separate chunks, without copying."""
    if len(batches) == 1:
        return batches[0]
    are_small = sum(batch.nbytes for batch in batches) < UNMERGED_BATCH_BYTES * len(batches)
    return pa.concat_batches(batches) if are_small else pa.Table.from_batches(batches)
