"""What is read for Spark: the columns of a source, its rows with their positions, and what a query reads them from."""

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import Factory, evolve, frozen

from leasehold.adapters.sources.deduplication import Tokens, Trail
from leasehold.adapters.sources.protocol import Batch, Record, Source
from leasehold.balancer.model import Lease, Position


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
    starts            where shards begin of which neither a lease nor the query knows how far they are done, by shard
    again             opens the source for what is read once more, if otherwise: of one consumer a shard has
                      one subscription at a time, which a repeated batch would take from the shard's owner
    """

    open: Callable[[], Source]
    columns: Columns
    interval_seconds: float
    shard_rows: int
    rereadable: bool
    stream: str = ""
    sliced: bool = False
    starts: Mapping[str, Position] = Factory(dict)
    again: Callable[[], Source] | None = None


@frozen
class ArrowBatch(Batch):
    """A reading whose records are rows already; `arrived` names the column that says when they arrived, or is "".

    trail  what the position of each row carries along, where the rows cannot tell
    """

    rows: pa.RecordBatch | None = None
    arrived: str = ""
    trail: Trail | None = None

    @property
    def count(self) -> int:
        """How many user records: as rows, so that `records` has none of them."""
        return len(self.records) if self.rows is None else int(self.rows.num_rows)

    @property
    def arrivals(self) -> Sequence[float | None]:
        """When each row arrived."""
        return super().arrivals if self.rows is None else _seconds(self.rows[self.arrived])

    @property
    def first_arrived(self) -> float | None:
        """When the first row arrived; None where the rows are a reader's."""
        return super().first_arrived if self.rows is None else self._arrived_in(slice(0, 1))

    @property
    def last_arrived(self) -> float | None:
        """When the last row arrived; None where the rows are a reader's."""
        return super().last_arrived if self.rows is None else self._arrived_in(slice(-1, None))

    def _arrived_in(self, part: slice) -> float | None:
        return next(iter(_seconds(self.rows[self.arrived][part])), None) if self.rows and self.arrived else None

    def between(self, since: float, until: float) -> Batch:
        """Return the reading with only the rows that arrived between these times."""
        if self.rows is None:
            return super().between(since, until)
        kept = [time is None or since <= time < until for time in self.arrivals]
        trail = None if self.trail is None else self.trail.where(kept)
        return evolve(self, rows=self.rows.filter(pa.array(kept)), read_to=self.end, trail=trail)


def _seconds(times: pa.Array) -> list[float | None]:
    return [None if each is None else each / 1e6 for each in times.cast(pa.int64()).to_pylist()]


@frozen
class Chunk:
    """Some rows, a batch or a table, and the position behind them: rows that were dropped count as read.

    trail  what the position of each row carries along, where that is not in its columns
    """

    rows: pa.RecordBatch
    ends: Position
    trail: Trail | Tokens | None = None

    @property
    def count(self) -> int:
        """How many rows."""
        return int(self.rows.num_rows)


def chunk_of(columns: Columns, lease: Lease, batch: Batch) -> Chunk | None:
    """The rows and the position that a reading brought; None if it brought neither. A shard's end is a position."""
    ends = batch.reached
    if ends is None:
        return None
    if not isinstance(batch, ArrowBatch) or batch.rows is None:
        tokens = [record.token for record in batch.records]
        return Chunk(columns.rows(lease, batch.records), ends, Tokens(tokens) if any(tokens) else None)
    return Chunk(batch.rows, ends, batch.trail)
