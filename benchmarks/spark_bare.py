"""Readers without leases, whose tasks read for themselves or bring rows that are made already: what Spark can carry."""

import time
from collections.abc import Iterator
from typing import Any, Protocol, cast

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import frozen
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from leasehold.adapters.sources.kinesis.poller import Poller
from leasehold.adapters.spark.kinesis import rows as kinesis_rows
from leasehold.adapters.spark.rows import Chunk, chunk_of
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position, Shard

Row = tuple[Any, ...]
SHORT_ANSWERS, LONG_ANSWERS = 6, 18
"""Of each shard in a batch."""
SHORT_BATCHES = 8
"""How many there are before the long ones."""

MADE: dict[tuple[str, str], Any] = {}
"""What was made at first in this process, for each form and shard; Spark's workers live on from batch to batch."""


class CannedStream(Protocol):
    """Where the rows come from."""

    def shards(self) -> tuple[Shard, ...]:
        """All of them."""
        ...

    def open(self, lease: Lease, start: Position, kind: type[Poller] = ...) -> Poller:
        """A reader of one."""
        ...


@frozen
class Half(InputPartition):
    """Every other shard from the first or the second on, and how many answers are read of each."""

    first: int
    answers: int


class Bare(DataSourceStreamReader):
    """Tasks that each read half of the shards, and take what they read apart into Arrow."""

    def __init__(self, stream: CannedStream) -> None:
        self._stream, self._batches = stream, 0

    def initialOffset(self) -> dict[str, int]:  # noqa: N802  Spark's name
        """The first."""
        return {"n": 0}

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]  # noqa: N802  Spark's name
        """Always one more; the rows are the same, whoever asks."""
        return {"n": time.monotonic_ns()}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:  # noqa: ARG002  no ranges
        """Two halves, of a short batch or, behind those, of a long one."""
        self._batches += 1
        answers = SHORT_ANSWERS if self._batches <= SHORT_BATCHES else LONG_ANSWERS
        return [Half(first, answers) for first in (0, 1)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """The rows of one task."""
        half = cast("Half", partition)
        for shard in self._stream.shards()[half.first :: 2]:
            yield from self._answered(Lease(shard.id, hash_range=shard.hash_range), half.answers)

    def _answered(self, lease: Lease, answers: int) -> Iterator[Any]:
        reader = self._stream.open(lease, TRIM_HORIZON)
        for _ in range(answers):
            yield cast("Chunk", chunk_of(kinesis_rows.columns("canned"), lease, reader.read())).rows


class BareTuples(Bare):
    """The same, as tuples, by the reader that plain workers have."""

    def _answered(self, lease: Lease, answers: int) -> Iterator[Row]:
        reader = self._stream.open(lease, TRIM_HORIZON, Poller)
        for _ in range(answers):
            for row in reader.read().records:
                keys = (row.partition_key, row.explicit_hash_key)
                yield row.data, "canned", lease.key, *keys, row.sequence_number, row.sub_sequence_number, None


class ConstantArrow(Bare):
    """The first answer again and again, as Arrow made it once: what is left is Spark's own."""

    def _answered(self, lease: Lease, answers: int) -> Iterator[pa.RecordBatch]:
        if (rows := MADE.get(("arrow", lease.key))) is None:
            rows = MADE["arrow", lease.key] = next(super()._answered(lease, 1))
        for _ in range(answers):
            yield rows


class ConstantTuples(Bare):
    """The same tuples again and again."""

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
