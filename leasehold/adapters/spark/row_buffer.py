"""Buffers the rows of one shard that are read but not part of a batch yet, and cuts them at any row without copying."""

from collections import deque
from collections.abc import Sequence

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # likewise
from attrs import evolve

from leasehold.adapters.spark.rows import Chunk, Columns

ROW_BYTES = 100
"""The approximate size of a row without its data, that is, of its keys, numbers and times."""
LARGE_BYTES = 1 << 18
"""The average size from which batches are not merged, because copying one takes longer than sending it separately."""
ANY_SIZE = 1 << 62
"""Used as a size limit that no row exceeds."""


class RowBuffer:
    """The rows of one shard that were read ahead, in order. Not thread-safe.

    `bool(buffer)` is true if the buffer contains rows, or a position without rows.

    Attributes:
        count: The number of buffered rows.
        bytes: The size of the buffered rows.
    """

    def __init__(self, columns: Columns) -> None:
        self.count = self.bytes = 0
        self._columns = columns
        self._chunks: deque[tuple[Chunk, int]] = deque()  # each with its size, which is slow to compute

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def put(self, chunk: Chunk) -> None:
        """Append the chunk that was read next."""
        size = self._size(chunk)  # compute the size first: if this raises, the chunk must not be added
        self._chunks.append((chunk, size))
        self.count += chunk.count
        self.bytes += size

    def take(self, count: int, max_bytes: int) -> Chunk | None:
        """Remove and return the first rows within both limits, or None if not even one fits.

        Positions without rows that directly follow the last returned row are removed too.
        """
        batches, ends = list[pa.RecordBatch](), None
        while self._chunks:
            first_chunk, size = self._chunks[0]
            if first_chunk.count <= count and size <= max_bytes:
                count, max_bytes = count - first_chunk.count, max_bytes - size
                # The whole chunk fits, so do not slice it.
                batches.append(first_chunk.rows)
                ends = first_chunk.ends
                self._pop()
                continue
            # Measure single rows only in the chunk that exceeds a limit, because measuring rows is slow.
            row_sizes = np.asarray(pc.binary_length(first_chunk.rows[self._columns.data])) + ROW_BYTES
            fitting_rows = min(count, int(np.searchsorted(np.cumsum(row_sizes), max_bytes, side="right")))
            if fitting_rows:
                self._pop()
                batches.append(first_chunk.rows.slice(0, fitting_rows))
                ends, trail = self._columns.position(first_chunk.rows, fitting_rows - 1), first_chunk.trail
                if trail is not None:
                    ends, trail = (
                        evolve(ends, token=trail.token_for_row(fitting_rows - 1)),
                        trail.starting_at_row(fitting_rows),
                    )
                remaining = evolve(first_chunk, rows=first_chunk.rows.slice(fitting_rows), trail=trail)
                self._chunks.appendleft((remaining, size := self._size(remaining)))
                self.count += remaining.count
                self.bytes += size
            break
        return None if ends is None else Chunk(concatenate(batches), ends)

    def _pop(self) -> None:
        chunk, size = self._chunks.popleft()
        self.count -= chunk.count
        self.bytes -= size

    def _size(self, chunk: Chunk) -> int:
        return int(pc.sum(pc.binary_length(chunk.rows[self._columns.data])).as_py() or 0) + ROW_BYTES * chunk.count


def concatenate(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Concatenate batches, keeping large ones as separate chunks."""
    if len(batches) == 1:
        return batches[0]
    are_small = sum(batch.nbytes for batch in batches) < LARGE_BYTES * len(batches)
    return pa.concat_batches(batches) if are_small else pa.Table.from_batches(batches)
