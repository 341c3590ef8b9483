"""Defines the rows that a query reads: their columns, their positions, and the settings of their source."""

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import Factory, evolve, frozen

from leasehold.adapters.sources.deduplication import Tokens, Trail
from leasehold.adapters.sources.protocol import Batch, Record, Source
from leasehold.balancer.model import Lease, Position


@frozen
class SourceColumns:
    """The columns of one kind of source.

    Attributes:
        schema: The Arrow schema.
        data: The name of the column with the record's bytes.
        rows: Converts records of a lease to these columns.
        position: Returns the position of a row.
    """

    schema: pa.Schema
    data: str
    rows: Callable[[Lease, Sequence[Record]], pa.RecordBatch]
    position: Callable[[pa.RecordBatch, int], Position]


@frozen
class SourceSpec:
    """The source of a query's rows, and how to read it.

    Attributes:
        open: Opens the source.
        columns: The columns of the rows that are made from records.
        interval_seconds: The minimum time between two reads of a shard.
        shard_rows: The maximum number of rows of one shard in one batch.
        rereadable: Whether several readers may read a shard at the same time without disconnecting one another.
        stream: The name of the stream in offsets. A checkpointLocation of another stream is rejected.
        sliced: Whether each shard ends at the end of a slice. If so, the query ends once the group has read all shards.
        start_positions: For each shard, the position at which to begin if neither its lease nor the query has a
            position.
        open_for_replay: Opens the source for reading ranges again; None to use `open`. It must not subscribe as a
            registered consumer, because such a consumer allows only one subscription per shard, and a second one would
            disconnect the shard's owner.
    """

    open: Callable[[], Source]
    columns: SourceColumns
    interval_seconds: float
    shard_rows: int
    rereadable: bool
    stream: str = ""
    sliced: bool = False
    start_positions: Mapping[str, Position] = Factory(dict)
    open_for_replay: Callable[[], Source] | None = None


@frozen
class ArrowBatch(Batch):
    """The result of a read whose records are already Arrow rows.

    Attributes:
        rows: The rows.
        arrived: The name of the column with the times of arrival, or "".
        trail: The deduplication state at the position of each row, or None if the source has none.
    """

    rows: pa.RecordBatch | None = None
    arrived: str = ""
    trail: Trail | None = None

    @property
    def count(self) -> int:
        """The number of user records. If the batch has rows, `records` is empty."""
        return len(self.records) if self.rows is None else int(self.rows.num_rows)

    @property
    def arrival_times(self) -> Sequence[float | None]:
        """When each row arrived."""
        return super().arrival_times if self.rows is None else _convert_to_seconds(self.rows[self.arrived])

    @property
    def first_arrival_time(self) -> float | None:
        """When the first row arrived."""
        return super().first_arrival_time if self.rows is None else self._find_arrival_time(slice(0, 1))

    @property
    def last_arrival_time(self) -> float | None:
        """When the last row arrived."""
        return super().last_arrival_time if self.rows is None else self._find_arrival_time(slice(-1, None))

    def _find_arrival_time(self, part: slice) -> float | None:
        return (
            next(iter(_convert_to_seconds(self.rows[self.arrived][part])), None) if self.rows and self.arrived else None
        )

    def select_arrived_between(self, since: float, until: float) -> Batch:
        """Return a copy of this batch with only the rows that arrived between these times."""
        if self.rows is None:
            return super().select_arrived_between(since, until)
        arrived_between = [time is None or since <= time < until for time in self.arrival_times]
        trail = None if self.trail is None else self.trail.select_rows(arrived_between)
        return evolve(self, rows=self.rows.filter(pa.array(arrived_between)), read_to=self.end, trail=trail)


def _convert_to_seconds(times: pa.Array) -> list[float | None]:
    return [None if micros is None else micros / 1e6 for micros in times.cast(pa.int64()).to_pylist()]


@frozen
class RowChunk:
    """A sequence of rows, and the position up to which the shard has been read with them.

    Attributes:
        rows: The rows, as a batch or a table.
        ends: The position up to which the shard has been read. It may lie after the last row, if later rows were
            dropped.
        trail: The deduplication state at the position of each row, or None if the source has none.
    """

    rows: pa.RecordBatch
    ends: Position
    trail: Trail | Tokens | None = None

    @property
    def count(self) -> int:
        """The number of rows."""
        return int(self.rows.num_rows)


def make_chunk(columns: SourceColumns, lease: Lease, batch: Batch) -> RowChunk | None:
    """Return the rows of a batch and the position that it reached, or None if it has neither.

    The end of a shard (SHARD_END) is also a position.
    """
    end_position = batch.reached
    if end_position is None:
        return None
    if not isinstance(batch, ArrowBatch) or batch.rows is None:
        tokens = [record.token for record in batch.records]
        return RowChunk(columns.rows(lease, batch.records), end_position, Tokens(tokens) if any(tokens) else None)
    return RowChunk(batch.rows, end_position, batch.trail)
