"""Reads the parts of a slice in Spark's tasks: each opens the stream by itself, and ends by itself."""

import logging
import time
from collections.abc import Iterator
from contextlib import closing

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from pyspark.sql.datasource import DataSourceReader, InputPartition

from leasehold.adapters.reading.cursor import Cursor, ShardPull
from leasehold.adapters.sources.backoff import Backoff
from leasehold.adapters.sources.protocol import Batch, Source, SourceUnavailable
from leasehold.adapters.spark.batch.bounds import Bounds, StreamPlace
from leasehold.adapters.spark.batch.planning import ShardPart, planned
from leasehold.adapters.spark.chunks import Chunk, Columns, chunk_of, up_to
from leasehold.adapters.spark.waiting import STUCK_SECONDS
from leasehold.balancer.model import SHARD_END, Lease
from leasehold.stores.printable import escaped

log = escaped(logging.getLogger("leasehold.spark"))

FAULT_SECONDS = 0.4, 10.0


class SlicedReader(DataSourceReader):
    """The reader of one batch, by Spark's interface."""

    def __init__(self, place: StreamPlace, bounds: Bounds, cores: int) -> None:
        self._place, self._bounds, self._tasks = place, bounds, bounds.tasks or cores

    def partitions(self) -> list[InputPartition]:
        """Plan the tasks, on the driver."""
        return [*planned(self._place, self._bounds, self._tasks)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task, on an executor; the same ones however often it is run."""
        if isinstance(partition, ShardPart):  # Spark makes one of its own where there are none
            with closing(self._place.open()) as source:
                yield from PartReading(source, self._place.columns, partition).rows()


class PartReading:
    """Reads one part once."""

    def __init__(self, source: Source, columns: Columns, part: ShardPart) -> None:
        self._columns, self._part = columns, part
        # A part that ends with a number needs no time to end at, so no odd time can end it early.
        source = part.cut.source(source) if part.ends is None else source
        self._lease = Lease(part.shard, hash_range=part.hash_range)
        self._cursor = Cursor(part.begins, until=part.ends or SHARD_END)
        self._pull = ShardPull(self._cursor, lambda start: source.open(self._lease, start))
        self._faults = Backoff(*FAULT_SECONDS)
        self._heard = time.monotonic()

    def rows(self) -> Iterator[pa.RecordBatch]:
        """All of them. Raises TimeoutError if nothing comes for too long; SourceError."""
        found = list[Chunk]()

        def keep(batch: Batch) -> None:
            if (chunk := chunk_of(self._columns, self._lease, self._part.cut.within(batch))) is not None:
                found.append(chunk)
                self._cursor.batch_read(chunk.ends)

        try:
            while not self._cursor.over:
                began = time.monotonic()
                batch: Batch | None = None
                try:
                    batch = self._pull.read(keep)
                except SourceUnavailable as fault:
                    log.warning("shard %s: trying again: %s", self._part.shard, fault)
                for chunk in found:
                    rows = up_to(self._columns, chunk, self._cursor.until)
                    if rows.num_rows:
                        yield rows
                found.clear()
                time.sleep(self._pause(batch, began))
        finally:
            self._pull.close()

    def _pause(self, batch: Batch | None, began: float) -> float:
        if self._cursor.over:
            return 0.0
        now = time.monotonic()
        # At the tip there is nothing to hear, and what is to come is there at once.
        if batch is not None and (batch.end is not None or batch.behind_seconds):
            self._heard = now
        elif now - self._heard > STUCK_SECONDS:
            raise TimeoutError(
                f"shard {self._part.shard}: nothing came of it for {STUCK_SECONDS:g} s; the task's log may say why it "
                "cannot be read"
            )
        if batch is None:
            return self._faults.next()
        self._faults.reset()
        return max(batch.wait_seconds, began + self._part.pause_seconds - now)
