"""Spark readers without leases, whose tasks read by themselves or return prepared rows, to find the limits of Spark."""

import time
from collections.abc import Iterator
from typing import Any, Protocol, cast

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import frozen
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from leasehold.adapters.sources.kinesis.poller import Poller
from leasehold.adapters.spark.kinesis import rows as kinesis_rows
from leasehold.adapters.spark.rows import RowChunk, make_chunk
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position, Shard

Row = tuple[Any, ...]
SHORT_ANSWERS, LONG_ANSWERS = 6, 18
"""The number of responses of each shard in a short and in a long batch."""
SHORT_BATCHES = 8
"""The number of short batches, which come before the long ones."""

MADE: dict[tuple[str, str], Any] = {}
"""The prepared rows of this process, by form and shard. They are reused, because Spark keeps its workers."""


class CannedStream(Protocol):
    """The stream that the tasks read."""

    def shards(self) -> tuple[Shard, ...]:
        """Return all shards."""
        ...

    def open(self, lease: Lease, start: Position, kind: type[Poller] = ...) -> Poller:
        """Return a reader of the lease's shard."""
        ...


@frozen
class Half(InputPartition):
    """Every second shard, starting with the first or the second, and the number of responses to read from each."""

    first: int
    answers: int


class Bare(DataSourceStreamReader):
    """A reader whose two tasks each read half of the shards, and deaggregate into Arrow."""

    def __init__(self, stream: CannedStream) -> None:
        self._stream, self._batches = stream, 0

    def initialOffset(self) -> dict[str, int]:  # noqa: N802  Spark's name
        """Return the first offset."""
        return {"n": 0}

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]  # noqa: N802  Spark's name
        """Return a new offset. The rows do not depend on it."""
        return {"n": time.monotonic_ns()}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:  # noqa: ARG002  no ranges
        """Return two tasks. The first batches are short, and later ones are long."""
        self._batches += 1
        answers = SHORT_ANSWERS if self._batches <= SHORT_BATCHES else LONG_ANSWERS
        return [Half(first, answers) for first in (0, 1)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the rows of one task."""
        half = cast("Half", partition)
        for shard in self._stream.shards()[half.first :: 2]:
            yield from self._answered(Lease(shard.id, hash_range=shard.hash_range), half.answers)

    def _answered(self, lease: Lease, answers: int) -> Iterator[Any]:
        reader = self._stream.open(lease, TRIM_HORIZON)
        for _ in range(answers):
            yield cast("RowChunk", make_chunk(kinesis_rows.make_columns("canned"), lease, reader.read())).rows


class BareTuples(Bare):
    """A reader whose tasks return tuples, with the reader of records that workers use."""

    def _answered(self, lease: Lease, answers: int) -> Iterator[Row]:
        reader = self._stream.open(lease, TRIM_HORIZON, Poller)
        for _ in range(answers):
            for row in reader.read().records:
                keys = (row.partition_key, row.explicit_hash_key)
                yield row.data, "canned", lease.key, *keys, row.sequence_number, row.sub_sequence_number, None


class ConstantArrow(Bare):
    """A reader whose tasks return the same Arrow batch every time, so the remaining cost is that of Spark."""

    def _answered(self, lease: Lease, answers: int) -> Iterator[pa.RecordBatch]:
        if (rows := MADE.get(("arrow", lease.key))) is None:
            rows = MADE["arrow", lease.key] = next(super()._answered(lease, 1))
        for _ in range(answers):
            yield rows


class ConstantTuples(Bare):
    """A reader whose tasks return the same tuples every time."""

    def _answered(self, lease: Lease, answers: int) -> Iterator[Row]:
        if (rows := MADE.get(("tuples", lease.key))) is None:
            columns = next(super()._answered(lease, 1)).columns
            rows = MADE["tuples", lease.key] = list(zip(*(column.to_pylist() for column in columns), strict=True))
        for _ in range(answers):
            yield from rows


BARE: dict[str, type[Bare]] = {
    "arrow": Bare,
    "tuples": BareTuples,
    "constant arrow": ConstantArrow,
    "constant tuples": ConstantTuples,
}
