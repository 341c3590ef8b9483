"""The reader that Spark calls: plans batches of what was read ahead, and commits them to the leases.

Spark makes a reader in its source-runner process and calls it there, one call at a time; copies of it go to
the executors, where only `read` is called. Nothing is opened before the first batch is planned.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
from attrs import evolve, frozen
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from adapters.holding import Holding
from adapters.source import Source
from adapters.spark.chunks import Columns
from adapters.spark.feed import Pace
from adapters.spark.lease_loop import LeaseLoop
from adapters.spark.offsets import Offset, Range, advance, decode, encode, owed, resumed
from adapters.spark.options import EMBEDDED_BYTES, LeaseOptions
from adapters.spark.replay import replayed
from adapters.spark.runner_process import end_on_signal, speak
from adapters.spark.transport import Rows, Transport, read
from adapters.spark.waiting import Waiting
from adapters.worker import Worker
from balancer.model import Position
from stores.protocol import Store
from stores.urls import open_store

log = logging.getLogger("leasehold.spark")

Opened = Callable[..., Store]
"""Opens the lease table; `open_store`, unless a test stands in between."""

IDLE_SECONDS, LOOK_SECONDS = 0.1, 0.3
FLUSH_SECONDS = 1.0
"""Idle for so long, a query commits its last batch by an empty one; sooner if a lease is asked for."""


@frozen
class Feedstock:
    """Where rows come from, as one kind of source has it.

    open              opens the source; called in the runner process only
    columns           what its records become
    interval_seconds  least time between two readings of a shard
    shard_rows        most rows of one shard in one batch
    rereadable        whether anyone may read a shard at any time, so that every batch was delivered in full
    spooled           whether rows may go by files where the user does not say
    """

    open: Callable[[], Source]
    columns: Columns
    interval_seconds: float
    shard_rows: int
    rereadable: bool
    spooled: bool


@frozen
class Plan:
    """A batch that was planned: the offsets on both sides, and the rows of each shard."""

    start: Offset
    end: Offset
    rows: Mapping[str, pa.RecordBatch]


class LeasedReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One query's part in its group."""

    def __init__(self, stock: Feedstock, options: LeaseOptions, opened: Opened = open_store) -> None:
        self._stock, self._options, self._opened = stock, options, opened
        self._only_now = False
        self._run: Run | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Executors call `read` alone, which knows all from its partition; options may hold a secret.
        return {}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name
        """Nothing yet; it is asked for twice, and not at all after a restart."""
        return encode(Offset())

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  Spark's name
        """The limits of this source are its options, and kept by itself."""
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  Spark's name
        """End with what is there now."""
        self._only_now = True

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802  Spark's name
        """The end of the next batch, or `start` itself if there is nothing to do."""
        offset, run = decode(start), self._running()
        run.join(offset)
        end = run.plan(offset, limit)
        return start if end is None else encode(end)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:  # noqa: ARG002  `end` says all
        """The tasks of a batch: the one just planned, or after a restart one that was planned before."""
        return list(self._running().partitions(decode(end)))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task, on an executor; as often as Spark likes."""
        if not isinstance(partition, Rows):
            raise TypeError(f"{type(partition).__name__} is no partition of this source")
        return read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Everything up to here is in the sink."""
        self._running().commit(decode(end))

    def stop(self) -> None:
        """Release what is held."""
        if self._run is not None:
            self._run.close()

    def _running(self) -> "Run":
        if self._run is None:
            self._run = Run(self._stock, self._options, self._opened, only_now=self._only_now)
        return self._run


class Run:
    """One run of a query, in the runner process."""

    def __init__(self, stock: Feedstock, options: LeaseOptions, opened: Opened, *, only_now: bool) -> None:
        end_on_signal()
        speak()
        self._stock, self._options, self._only_now = stock, options, only_now
        spool = options.transport == "spool" or (options.transport == "auto" and stock.spooled)
        most = options.trigger_bytes
        self._trigger_bytes = most if spool else min(most, EMBEDDED_BYTES)
        self._transport = Transport(options.spool_folder if spool else None)
        self._store = opened(options.store, create=options.create)
        self._source = stock.open()
        self._loop = self._made_loop()
        self._waiting = Waiting(options.config.lease_seconds)
        self._joined = False
        self._plans: dict[int, Plan] = {}
        self._parts: dict[int, list[Rows]] = {}
        self._previous = Offset()
        self._repeated: frozenset[str] | None = None  # the shards whose rows a repeated batch could have
        self._planned = time.monotonic()
        self._handed: dict[str, Position] = {}
        self._committed = -1

    def join(self, start: Offset, *, done: bool = True) -> None:
        """Become a worker of the group, if not yet; `start` is how far this query came, and if `done` its sink too."""
        if self._joined:
            return
        self._joined, self._previous = True, start
        if not start.ranges:
            log.info("no earlier batch is known: each shard goes on at its lease's checkpoint")
        # A row that was made anew is to say so before anybody else reads from it.
        self._loop.commit({key: self._done(key, start, each) if done else each.begins for key, each in start.ranges})
        self._loop.start(only_now=self._only_now)

    def plan(self, start: Offset, limit: ReadLimit) -> Offset | None:
        """The end of the batch behind `start`, the same however often it is asked; None if there is none."""
        self._loop.check()
        known = self._plans.get(start.number + 1)
        if known is not None and known.start == start:
            return known.end
        plan = self._next(start, limit)
        if plan is None:
            return None
        self._plans[plan.end.number] = plan
        return plan.end

    def partitions(self, end: Offset) -> list[Rows]:
        """The tasks of the batch that ends here."""
        if end.number not in self._parts:
            plan = self._plans.get(end.number)
            if plan is None or plan.end != end:
                rows = self._again(end)
            else:
                rows, self._plans[end.number] = plan.rows, evolve(plan, rows={})  # the tasks have them now
            self._parts[end.number] = self._transport.partitions(end.number, self._tasks(rows))
        return self._parts[end.number]

    def commit(self, end: Offset) -> None:
        """Spark is done with the batch that ends here."""
        done = {key: each.ends for key, each in end.ranges if not each.empty and self._delivered(key, end)}
        self._loop.commit(done)
        self._committed = end.number
        for number in [number for number in (*self._plans, *self._parts) if number <= end.number]:
            self._transport.discard(number)
            self._plans.pop(number, None)
            self._parts.pop(number, None)

    def close(self) -> None:
        """Release, and let connections and files go."""
        if self._joined:
            self._loop.close()
        self._source.close()
        self._store.close()
        self._transport.close()

    def _next(self, start: Offset, limit: ReadLimit) -> Plan | None:
        while True:
            self._loop.wait(LOOK_SECONDS if self._only_now else IDLE_SECONDS)
            self._loop.check()
            held, taken = self._loop.take(*self._most(limit))
            if taken:
                end = advance(start, held, {key: chunk.ends for key, chunk in taken.items()}, self._unwritten(start))
                self._handed.update({key: chunk.ends for key, chunk in taken.items()})
                self._planned = time.monotonic()
                return Plan(start, end, {key: chunk.rows for key, chunk in taken.items() if chunk.count})
            if self._only_now and (left := self._loop.unfinished):
                self._waiting.go_on(left, self._loop.answers)
                continue
            if self._flush_due and owed(start, self._committed):
                return Plan(start, advance(start, held, {}, self._unwritten(start)), {})
            return None

    def _unwritten(self, start: Offset) -> list[tuple[str, Range]]:
        """How far shards of the last batch are done where their leases, perhaps not held any more, do not say so."""
        done = [(key, self._handed.get(key) or self._done(key, start, each), each.epoch) for key, each in start.ranges]
        return [(key, Range(end, end, epoch)) for key, end, epoch in done if not self._loop.says(key, end)]

    def _done(self, key: str, offset: Offset, each: Range) -> Position:
        """How far a shard of this offset is complete in the sink."""
        return each.ends if self._delivered(key, offset) else each.begins

    @property
    def _flush_due(self) -> bool:
        idle = time.monotonic() - self._planned > FLUSH_SECONDS
        return self._options.flush and (idle or self._only_now or self._loop.parting)

    def _most(self, limit: ReadLimit) -> tuple[int, int, int]:
        rows, size = self._options.trigger_rows, self._trigger_bytes
        match limit:
            case ReadMaxRows(max_rows=most):
                rows = min(rows, most)
            case ReadMaxBytes(max_bytes=most):
                size = min(size, most)
            case _:
                pass
        return rows, self._stock.shard_rows, size

    def _again(self, end: Offset) -> Mapping[str, pa.RecordBatch]:
        """A batch of an earlier run, read anew; before joining, or we would read exclusively against ourselves."""
        if end.empty:
            return {}
        log.warning("batch %d was planned by an earlier run: reading its %d ranges again", end.number, len(end.ranges))
        rows = replayed(end, self._store, self._source, self._stock.columns)
        self._repeated = frozenset(rows)
        self.join(end, done=False)
        return rows

    def _resume(self, holding: Holding, checkpoint: Position) -> Position:
        if (handed := self._handed.get(holding.key)) is not None:
            return max(handed, checkpoint, key=lambda position: position.order)
        delivered = self._delivered(holding.key, self._previous)
        return resumed(checkpoint, self._previous.of(holding.key), delivered=delivered)

    def _delivered(self, key: str, end: Offset) -> bool:
        """Whether the sink has all of a shard up to this end: an earlier run may not have been able to repeat it."""
        if self._repeated is not None and end == self._previous and (each := end.of(key)) and not each.empty:
            return key in self._repeated
        return key in self._handed or self._stock.rereadable

    def _tasks(self, rows: Mapping[str, pa.RecordBatch]) -> list[list[pa.RecordBatch]]:
        """The largest first, each to the task that has least so far."""
        batches = sorted((batch for batch in rows.values() if batch.num_rows), key=lambda batch: -batch.num_rows)
        tasks: list[list[pa.RecordBatch]] = [[] for _ in range(self._options.tasks(len(batches)))]
        for batch in batches:
            min(tasks, key=lambda task: sum(each.num_rows for each in task)).append(batch)
        return tasks

    def _made_loop(self) -> LeaseLoop:
        options, stock = self._options, self._stock
        pace = Pace(stock.columns, options.buffer_rows, options.buffer_bytes, stock.interval_seconds)
        worker = Worker(store=self._store, source=self._source, me=options.worker_id, config=options.config)
        log.info("query joins as worker %s", worker.me)
        return LeaseLoop(worker, pace, self._resume)
