"""Rows of one shard as Arrow, cut at any row without copying, and the position each row stands for."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # likewise
from attrs import evolve, frozen

from adapters.source import Batch, Record
from balancer.model import SHARD_END, Lease, Position

ROW_BYTES = 100
"""What a row takes besides its data: keys, numbers and times, about."""


@frozen
class Columns:
    """The columns of one kind of source.

    schema    as Arrow has it
    data      the name of the column that holds the bytes
    rows      records of a lease as these columns
    position  the position that a row stands for
    """

    schema: pa.Schema
    data: str
    rows: Callable[[Lease, Sequence[Record]], pa.RecordBatch]
    position: Callable[[pa.RecordBatch, int], Position]


@frozen
class ArrowBatch(Batch):
    """A reading whose records are rows already."""

    rows: pa.RecordBatch | None = None

    @property
    def count(self) -> int:
        """How many user records: as rows, so that `records` has none of them."""
        return len(self.records) if self.rows is None else int(self.rows.num_rows)


@frozen
class Chunk:
    """Some rows, and the position behind them: rows that were dropped count as read."""

    rows: pa.RecordBatch
    ends: Position

    @property
    def count(self) -> int:
        """How many rows."""
        return int(self.rows.num_rows)


def chunk_of(columns: Columns, lease: Lease, batch: Batch) -> Chunk | None:
    """What a reading brought; None if it was nothing, not even a position. The end of a shard is a position."""
    ends = batch.read_to or (batch.records[-1].position if batch.records else None)
    ends = SHARD_END if batch.ended else ends
    if ends is None:
        return None
    rows = batch.rows if isinstance(batch, ArrowBatch) else None
    return Chunk(columns.rows(lease, batch.records) if rows is None else rows, ends)


def up_to(columns: Columns, chunk: Chunk, end: Position) -> pa.RecordBatch:
    """The rows of a chunk that do not lie behind a position."""
    if chunk.ends.order <= end.order:
        return chunk.rows
    orders = range(chunk.count)
    return chunk.rows.slice(0, bisect_right(orders, end.order, key=lambda row: columns.position(chunk.rows, row).order))


class Larder:
    """What was read ahead of one shard, in order. Not safe for threads by itself."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._chunks: deque[Chunk] = deque()
        self.count = 0
        self.bytes = 0

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def put(self, chunk: Chunk) -> None:
        """Add what was read next."""
        self._chunks.append(chunk)
        self.count += chunk.count
        self.bytes += self._size(chunk)

    def take(self, count: int, most_bytes: int) -> Chunk | None:
        """The first rows, at most so many and so large; None if not even one fits.

        Positions without rows behind the last row taken go with it.
        """
        taken: list[pa.RecordBatch] = []
        ends: Position | None = None
        while self._chunks:
            first = self._chunks[0]
            fitting = self._fitting(first, count, most_bytes)
            if fitting < first.count:
                if fitting:
                    ends = self._cut(fitting, taken)
                break
            count, most_bytes = count - first.count, most_bytes - self._size(first)
            taken.append(first.rows)
            ends = first.ends
            self._pop()
        return None if ends is None else Chunk(self._joined(taken), ends)

    def _cut(self, fitting: int, taken: list[pa.RecordBatch]) -> Position:
        first = self._pop()
        taken.append(first.rows.slice(0, fitting))
        rest = evolve(first, rows=first.rows.slice(fitting))
        self._chunks.appendleft(rest)
        self.count += rest.count
        self.bytes += self._size(rest)
        return self._columns.position(first.rows, fitting - 1)

    def _pop(self) -> Chunk:
        chunk = self._chunks.popleft()
        self.count -= chunk.count
        self.bytes -= self._size(chunk)
        return chunk

    def _size(self, chunk: Chunk) -> int:
        return int(pc.sum(pc.binary_length(chunk.rows[self._columns.data])).as_py() or 0) + ROW_BYTES * chunk.count

    def _fitting(self, chunk: Chunk, count: int, most_bytes: int) -> int:
        if chunk.count <= count and self._size(chunk) <= most_bytes:
            return chunk.count
        sizes = np.asarray(pc.binary_length(chunk.rows[self._columns.data])) + ROW_BYTES
        return min(count, int(np.searchsorted(np.cumsum(sizes), most_bytes, side="right")))

    def _joined(self, batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
