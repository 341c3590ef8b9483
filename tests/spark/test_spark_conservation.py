"""Every buffer of rows delivers each row once and in order, and in the end no resource remains open.

In whatever order reads, plans, commits, faults and ends come, no position of a shard overtakes the position before it
(committed ≤ acknowledged ≤ delivered ≤ read). The number of waiting rows is bounded, and in the end everything that was
opened is closed.
"""

import math
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no types
import pytest
from attrs import evolve
from fake_stream import PAGE, Stream
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prefetchers import new_prefetcher, pace
from waiters import WAIT, until

from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.spark import fetching
from leasehold.adapters.spark.fetching import (
    REQUEST_FORMAT,
    FetchedRows,
    Rows,
    RowTransport,
    read_task_rows,
    spread_over_tasks,
)
from leasehold.adapters.spark.kinesis.rows import make_columns as kinesis
from leasehold.adapters.spark.options import Address
from leasehold.adapters.spark.prefetcher import ReadAheadState
from leasehold.adapters.spark.rows import SourceColumns
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, Lease, Position
from leasehold.errors import StoreError
from leasehold.stores.protocol import Done
from leasehold.stores.writes import StealLease

HOST = "127.0.0.1"
ROOM = 30
SIZES = 1 << 20, 300, 101  # the limits of a take, in bytes: no limit, some rows, about one row


class Refused(Exception):
    """Raised in place of an error of a system that has no memory, thread or descriptor at the moment."""


class Faulty:
    """Columns that include the source's own offset. Building them fails `faults` times."""

    def __init__(self) -> None:
        self.faults = 0
        self.columns = SourceColumns(pa.schema([]), "data", self._rows, _position)

    def _rows(self, _lease: Lease, records: Sequence[Record]) -> pa.RecordBatch:
        self.refuse()
        names = ["data", "sequenceNumber", "offset"]
        rows = [[record.data for record in records], [record.sequence_number for record in records]]
        column_types = [pa.binary(), pa.string(), pa.string()]
        columns = [*rows, [record.token for record in records]]
        return pa.record_batch([pa.array(*record) for record in zip(columns, column_types, strict=True)], names)

    def refuse(self) -> None:
        if self.faults:
            self.faults -= 1
            raise Refused


def _position(rows: pa.RecordBatch, row: int) -> Position:
    return Position(rows["sequenceNumber"][row].as_py(), token=rows["offset"][row].as_py())


def numbers(rows: pa.RecordBatch) -> list[int]:
    return [int(value) for value in rows["sequenceNumber"].to_pylist()]


def behind(position: Position, stream: Stream, key: str) -> int:
    """Return the number of records up to this position, after checking that the source's own offset was kept."""
    assert not position.numbered or not stream.tokens or position.token == f"@{position.sequence}", position
    return len(stream.records[key]) if position.ended else int(position.sequence) if position.numbered else 0


class Feeding(RuleBasedStateMachine):
    """One shard that a query reads ahead and commits, until the lease moves to another worker."""

    @initialize(done=st.sampled_from([0, 5, PAGE, PAGE + 1]), end=st.sampled_from(["asked away", "stolen"]))
    def join(self, done: int, end: str) -> None:
        """Hold the shard from its beginning, or from the position that an earlier run committed, perhaps its end."""
        self.stream = Stream({"a": ["x"] * PAGE}, tokens=True)
        self.made = Faulty()
        self.now = 0.0
        self.end = end
        self.ahead = ReadAheadState(
            evolve(pace(), columns=self.made.columns, rows=ROOM),
            Condition(),
            lambda _holding, checkpoint: max(self.committed, checkpoint, key=lambda position: position.order),
            lambda _key: self.committed if self.committed.numbered or self.committed.ended else None,
            measure=self._measure,
            held_count=1,
        )
        self.committed = Position(str(done), token=f"@{done}") if done else TRIM_HORIZON
        if done > PAGE:
            self.committed = SHARD_END
            self.split()
        self.handed, self.ends = [behind(self.committed, self.stream, "a")], list[Position]()
        self.left, self.store_faults = 0, 0
        self.worker, self.feed = new_prefetcher(self.stream, self.ahead, lambda: self.now, self._left)
        self.over = False
        write, get = self.worker.store.write, self.worker.store.get
        self.worker.store.write = self._failing(write)  # type: ignore[method-assign]
        self.worker.store.get = self._failing(get)  # type: ignore[method-assign]

    @rule(count=st.integers(1, 4 * PAGE))
    def put(self, count: int) -> None:
        """Put records, unless the shard is closed."""
        if "a" not in self.stream.children:
            self.stream.put("a", *["x"] * count)

    @rule()
    def split(self) -> None:
        """Close the shard, so that its last response is empty."""
        if "a" not in self.stream.children:
            self.stream.split("a", "a1", "a2")

    @rule(count=st.integers(1, 3), how=st.sampled_from(["late", "unreachable", "throttled", "rows"]))
    def fault(self, count: int, how: str) -> None:
        """Make reads advance and raise, openings fail, reads return nothing, or memory for the rows run out."""
        if how == "rows":
            self.made.faults = count
        else:
            getattr(self.stream, how)["a"] += count

    @invariant()
    def a_shard_has_one_reader(self) -> None:
        """A second reader would disconnect the first one, or would count twice against the limits of the service."""
        shards = self.stream.open_readers if hasattr(self, "stream") else []
        assert len(shards) == len(set(shards))

    def _measure(self, _holding: Holding, _batch: Batch) -> None:
        self.made.refuse()

    def _left(self, _feed: object) -> None:
        self.left += 1

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def fail_or_call(*arguments: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as the store's own
            if self.store_faults:
                self.store_faults -= 1
                raise StoreError("the table is away")
            return call(*arguments, **kwargs)

        return fail_or_call

    @rule(count=st.integers(1, 3))
    def make_table_unavailable(self, count: int) -> None:
        """Make some calls of the lease table fail."""
        self.store_faults = count

    @precondition(lambda self: not self.over)
    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        """Call the prefetcher's step whenever the prefetcher asks for it, as its thread does."""
        for _ in range(count):
            self.now += 0.1
            was_lost, reads_before = self.feed.holding.lost.is_set(), self.stream.readings
            try:
                next_step = self.feed.step(self.now)
            except Refused:
                next_step = self.now + 5.0  # as the caller of the steps does
            assert not was_lost or (next_step, self.stream.readings) == (math.inf, reads_before)
            if next_step == math.inf:
                self.over = True
                return
            self.now = max(self.now, next_step)

    @precondition(lambda self: not self.over and self.feed.range_start is not None)
    @rule(count=st.integers(1, 2 * PAGE), size=st.sampled_from(SIZES))
    def take(self, count: int, size: int) -> None:
        range_start = self.feed.range_start
        assert range_start is not None
        chunk = self.feed.take_rows(count, size)
        if chunk is None:
            return
        numbers_taken, taken_before = numbers(chunk.rows), behind(range_start.begins, self.stream, "a")
        assert numbers_taken == list(range(taken_before + 1, behind(chunk.ends, self.stream, "a") + 1))
        assert len(numbers_taken) <= count
        assert taken_before == self.handed[-1]
        self.handed.append(taken_before + len(numbers_taken))
        self.ends.append(chunk.ends)

    @precondition(lambda self: self.ends)
    @rule(count=st.integers(1, 3))
    def commit(self, count: int) -> None:
        """Commit some of the rows, as Spark does."""
        committed, self.ends = self.ends[:count], self.ends[count:]
        self.committed = committed[-1]
        self.feed.commit(committed[-1])

    @precondition(lambda self: not self.over)
    @rule(seconds=st.sampled_from([0.0, 100.0]))
    def passes(self, seconds: float) -> None:
        """Suspend the process for this time, which may be none, and then renew the lease."""
        self.now += seconds
        if seconds:
            self.step(2)
            assert self.feed.range_start is None or not self.feed.holding.expired
        if not self.store_faults and not self.over:
            self.worker.renew(self.now)

    @precondition(lambda self: not self.over and len(self.handed) > 1)
    @rule(how=st.sampled_from(["asked away", "stolen", "denied"]))
    def leave(self, how: str) -> None:
        """Move the lease to another worker, or make the shard unreadable here."""
        self.store_faults = 0
        if how == "asked away":
            self.feed.holding.ask_release()
        elif how == "denied":
            self.stream.denied.add("a")
        else:
            lease = self.worker.store.get(["a"])[0]
            assert lease.ended or isinstance(self.worker.store.write(StealLease(lease, "thief")), Done)
            assert self.feed.holding.renew() == lease.ended

    @invariant()
    def marks_follow_one_another(self) -> None:
        """No checkpoint is after the last row that Spark has finished, and the number of waiting rows is bounded."""
        if not hasattr(self, "worker"):
            return
        faults, self.store_faults = self.store_faults, 0
        (lease,) = self.worker.store.get(["a"])
        self.store_faults = faults
        read_position = max((reader.at for reader in self.stream.readers), default=0)
        committed_count = behind(self.committed, self.stream, "a")
        assert behind(lease.checkpoint, self.stream, "a") <= committed_count <= self.handed[-1]
        assert not lease.checkpoint.ended or self.committed.ended
        assert self.handed[-1] == self.handed[0] or self.handed[-1] <= read_position
        assert self.feed.buffered_rows_and_bytes[0] <= ROOM + PAGE
        assert self.feed.is_opened >= (self.feed.range_start is not None)
        assert self.feed.is_opened or not self.stream.open_readers

    @invariant()
    def readers_of_lost_leases_are_closed(self) -> None:
        """A reader that stayed open after its lease moved would disconnect the new owner's reader."""
        if hasattr(self, "left") and self.over:
            assert (self.left, self.stream.open_readers) == (1, [])

    def teardown(self) -> None:
        """Clear all faults.

        Check that all rows come, and that a prefetcher that is asked to leave closes everything immediately.
        """
        if not hasattr(self, "worker"):
            return
        for faults in (self.stream.late, self.stream.unreachable, self.stream.throttled):
            faults.clear()
        self.made.faults = 0
        self.stream.denied.clear()
        self.store_faults = 0
        # One page per turn, and some turns for the start, its faults and the last commit.
        for _ in range(60 + len(self.stream.records["a"]) // PAGE):
            if self.over or self.feed.holding.releasing:
                break
            self.worker.renew(self.now)
            self.step(1)
            if self.feed.range_start is not None:
                self.take(1000, SIZES[0])
            if self.ends:
                self.commit(len(self.ends))
        else:
            assert self.handed[-1] == len(self.stream.records["a"])
            assert "a" not in self.stream.children
            (lease,) = self.worker.store.get(["a"])
            assert behind(lease.checkpoint, self.stream, "a") == len(self.stream.records["a"])
        self.ahead.ending = True
        if not self.over:
            self.leave(self.end)
        for _ in range(3):
            if not self.over:
                self.step(1)
        assert (self.over, self.left, self.stream.open_readers) == (True, 1, [])


class Serving(RuleBasedStateMachine):
    """A query's transport: batches are planned, fetched by tasks any number of times, and discarded."""

    @initialize(limit=st.sampled_from([0, 1 << 20]))
    def begin(self, limit: int) -> None:
        """Create a transport, which opens no port yet. If the memory limit is 0, all rows are on disk."""
        self.before = self._resources()
        self.transport = RowTransport(Address(HOST, HOST), limit)
        self.number = 0
        self.planned: dict[int, list[tuple[Rows, list[int]]]] = {}

    def _resources(self) -> set[object]:
        """Return the threads and descriptors of this process."""
        resources: set[object] = set(threading.enumerate())
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # the descriptor of the listing itself is closed by now
                resources.add(descriptor.readlink())
        return resources

    @rule(counts=st.lists(st.integers(1, PAGE), max_size=3), tasks=st.integers(1, 3))
    def batch(self, counts: list[int], tasks: int) -> None:
        """Plan a batch of some shards."""
        self.number += 1
        first_number, rows = 1, dict[str, pa.RecordBatch]()
        for shard, count in enumerate(counts):
            records = [Record(b"x", str(number)) for number in range(first_number, first_number + count)]
            rows[str(shard)] = kinesis("fake").rows(Lease(str(shard)), records)
            first_number += count
        parts_by_task = spread_over_tasks(rows, tasks)
        expected = [[number for part in parts for number in numbers(part)] for parts in parts_by_task]
        parts = self.transport.make_partitions(self.number, parts_by_task)
        self.planned[self.number] = list(zip(parts, expected, strict=True))
        assert sorted(number for task in expected for number in task) == list(range(1, first_number))

    @rule(data=st.data())
    @precondition(lambda self: any(self.planned.values()))
    def task(self, data: st.DataObject) -> None:
        """Check that a task gets exactly its rows, however often it runs."""
        number = data.draw(st.sampled_from([number for number, parts in self.planned.items() if parts]))
        part, expected = data.draw(st.sampled_from(self.planned[number]))
        assert [row_number for rows in read_task_rows(part) for row_number in numbers(rows)] == expected

    @rule(data=st.data())
    @precondition(lambda self: any(self.planned.values()))
    def connect_without_token(self, data: st.DataObject) -> None:
        """Check that a client without the token is disconnected immediately."""
        number = data.draw(st.sampled_from([number for number, parts in self.planned.items() if parts]))
        part = self.planned[number][0][0]
        assert isinstance(part, FetchedRows)
        with socket.create_connection((part.host, part.port), WAIT) as connection:
            connection.sendall(bytes(REQUEST_FORMAT.size))
            assert connection.recv(1) == b""

    @rule(data=st.data())
    @precondition(lambda self: self.planned)
    def done(self, data: st.DataObject) -> None:
        """Commit a batch, and check that a task of the batch that is left over gets an error."""
        number = data.draw(st.sampled_from(sorted(self.planned)))
        self.transport.discard_batch(number)
        for part, _ in self.planned.pop(number):
            with pytest.raises(RuntimeError, match=f"batch {number} is done"):
                list(read_task_rows(part))

    def teardown(self) -> None:
        """Check that no thread runs and no descriptor is open any more."""
        if not hasattr(self, "transport"):
            return
        self.transport.close()
        self.planned.clear()
        until(lambda: self._resources() <= self.before, "no thread and no descriptor that was not there before")


Serving.TestCase.settings = settings(max_examples=20, stateful_step_count=14)
Feeding.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestFeeding, TestServing = Feeding.TestCase, Serving.TestCase


@pytest.fixture(autouse=True)
def no_request_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limit of requests above the test's own, so that no connection is closed by a timeout."""
    monkeypatch.setattr(fetching, "REQUEST_SECONDS", 100 * WAIT)
