"""Rows of one shard as Arrow, cut at any row without copying, and the position each row stands for."""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # likewise
from attrs import evolve, frozen

from leasehold.adapters.sources.protocol import Batch, Record, Source
from leasehold.balancer.model import SHARD_END, Lease, Position

ROW_BYTES = 100
"""Bytes that a row takes besides its data, about: keys, numbers and times."""
LARGE_BYTES = 1 << 18
"""From here on it takes longer to copy a batch than to send one more."""
ANY_SIZE = 1 << 62
"""So large is no row: whatever comes first is taken."""


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
class SourceSpec:
    """Where rows come from, as one kind of source has it.

    open              opens the source; called in the runner process only
    columns           what its records become
    interval_seconds  least time between two readings of a shard
    shard_rows        most rows of one shard in one batch
    rereadable        whether anyone may read a shard at any time, so that every batch was delivered in full
    stream            what is read, as offsets name it: a checkpointLocation of another stream is refused
    sliced            whether shards end where a slice does, and a query once all of them have ended, whoever reads them
    """

    open: Callable[[], Source]
    columns: Columns
    interval_seconds: float
    shard_rows: int
    rereadable: bool
    stream: str = ""
    sliced: bool = False


@frozen
class ArrowBatch(Batch):
    """A reading whose records are rows already; `arrived` names the column that says when they arrived, or is ""."""

    rows: pa.RecordBatch | None = None
    arrived: str = ""

    @property
    def count(self) -> int:
        """How many user records: as rows, so that `records` has none of them."""
        return len(self.records) if self.rows is None else int(self.rows.num_rows)

    @property
    def arrivals(self) -> Sequence[float | None]:
        """When each row arrived."""
        return super().arrivals if self.rows is None else _seconds(self.rows[self.arrived])

    @property
    def last_arrived(self) -> float | None:
        """When the last row arrived; None where the rows are a reader's."""
        if self.rows is None:
            return super().last_arrived
        if not self.arrived:
            return None
        return next(iter(_seconds(self.rows[self.arrived][-1:])), None)

    def between(self, since: float, until: float) -> Batch:
        """The same reading with the rows that arrived in between."""
        if self.rows is None:
            return super().between(since, until)
        kept = pa.array([time is None or since <= time < until for time in self.arrivals])
        return evolve(self, rows=self.rows.filter(kept), read_to=self.end)


def _seconds(times: pa.Array) -> list[float | None]:
    return [None if each is None else each / 1e6 for each in times.cast(pa.int64()).to_pylist()]


@frozen
class Chunk:
    """Some rows, a batch or a table, and the position behind them: rows that were dropped count as read."""

    rows: pa.RecordBatch
    ends: Position

    @property
    def count(self) -> int:
        """How many rows."""
        return int(self.rows.num_rows)


class AheadBuffer(Protocol):
    """The rows that were read ahead of one shard, in order. Not safe for threads by itself.

    count, bytes  how much waits
    """

    count: int
    bytes: int

    def __bool__(self) -> bool:
        """Whether anything waits, be it a position without rows."""
        ...

    @property
    def gone(self) -> bool:
        """Whether something waits of which nobody has the rows any more."""
        ...

    def put(self, chunk: Chunk) -> None:
        """Add what was read next."""
        ...

    def take(self, count: int, most_bytes: int) -> Chunk | None:
        """The first rows, at most so many and so large; None if nothing fits."""
        ...


def chunk_of(columns: Columns, lease: Lease, batch: Batch) -> Chunk | None:
    """The rows and the position that a reading brought; None if it brought neither. A shard's end is a position."""
    ends = SHARD_END if batch.ended else batch.end
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


class RowBuffer:
    """The rows read ahead of one shard, in order. Not safe for threads by itself."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._chunks: deque[tuple[Chunk, int]] = deque()  # each with its size, which takes a while to tell
        self.count = 0
        self.bytes = 0

    def __bool__(self) -> bool:
        return bool(self._chunks)

    @property
    def gone(self) -> bool:
        """Never: the rows are here."""
        return False

    def put(self, chunk: Chunk) -> None:
        """Add what was read next."""
        size = self._size(chunk)  # which may fail, and then nothing is added
        self._chunks.append((chunk, size))
        self.count += chunk.count
        self.bytes += size

    def take(self, count: int, most_bytes: int) -> Chunk | None:
        """The first rows, at most so many and so large; None if not even one fits.

        Positions without rows behind the last row taken go with it.
        """
        taken: list[pa.RecordBatch] = []
        ends: Position | None = None
        while self._chunks:
            first, size = self._chunks[0]
            fitting = self._fitting(first, size, count, most_bytes)
            if fitting < first.count:
                if fitting:
                    ends = self._cut(fitting, taken)
                break
            count, most_bytes = count - first.count, most_bytes - size
            taken.append(first.rows)
            ends = first.ends
            self._pop()
        return None if ends is None else Chunk(joined(taken), ends)

    def _cut(self, fitting: int, taken: list[pa.RecordBatch]) -> Position:
        first = self._pop()
        taken.append(first.rows.slice(0, fitting))
        rest = evolve(first, rows=first.rows.slice(fitting))
        size = self._size(rest)
        self._chunks.appendleft((rest, size))
        self.count += rest.count
        self.bytes += size
        return self._columns.position(first.rows, fitting - 1)

    def _pop(self) -> Chunk:
        chunk, size = self._chunks.popleft()
        self.count -= chunk.count
        self.bytes -= size
        return chunk

    def _size(self, chunk: Chunk) -> int:
        return int(pc.sum(pc.binary_length(chunk.rows[self._columns.data])).as_py() or 0) + ROW_BYTES * chunk.count

    def _fitting(self, chunk: Chunk, size: int, count: int, most_bytes: int) -> int:
        if chunk.count <= count and size <= most_bytes:
            return chunk.count
        sizes = np.asarray(pc.binary_length(chunk.rows[self._columns.data])) + ROW_BYTES
        return min(count, int(np.searchsorted(np.cumsum(sizes), most_bytes, side="right")))


def joined(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Batches as one; large ones stay where they are, side by side in a table, since each copy of a row costs."""
    if len(batches) == 1:
        return batches[0]
    small = sum(batch.nbytes for batch in batches) < LARGE_BYTES * len(batches)
    return pa.concat_batches(batches) if small else pa.Table.from_batches(batches)


@frozen
class ReadAheadPace:
    """How fast and how far shards are read ahead.

    columns          what records become
    rows, bytes      most that waits, of all shards together
    interval_seconds least time between the beginnings of two readings of a shard
    buffer           where what was read of a shard waits
    """

    columns: Columns
    rows: int
    bytes: int
    interval_seconds: float
    buffer: Callable[[Columns], AheadBuffer] = RowBuffer
