"""Laws of everything that buffers rows: a row comes once and in order, and in the end nothing remains.

In whatever order reads, plans, commits, faults and ends come, no mark of a shard overtakes the one before it
(committed, acknowledged, delivered, read), the number of waiting rows is bounded, and in the end everything that was
opened is closed.
"""

import math
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread
from typing import Any, cast

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pytest
from attrs import evolve
from fake_stream import PAGE, Stream
from feeds import a_feed, pace
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reader_pools import HELLO, HOST, a_spec, closed_by_pool, read_for_ever
from waiters import WAIT, until

from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.spark import fetching
from leasehold.adapters.spark.feed import ReadAheadState
from leasehold.adapters.spark.fetching import TOKEN_BYTES, ReaderRows, Rows, Transport, read, spread
from leasehold.adapters.spark.kinesis.rows import columns as kinesis
from leasehold.adapters.spark.options import Address
from leasehold.adapters.spark.readers import pool as pool_module
from leasehold.adapters.spark.readers.messages import (
    FromReader,
    Open,
    ShardFailure,
    ShardReport,
    from_planner,
    from_reader,
    line_of,
)
from leasehold.adapters.spark.readers.pool import FarBuffer, FarReader, FarTransport, ReaderPool
from leasehold.adapters.spark.readers.reader import ReaderSpec, ShardReadAhead, ShardReader
from leasehold.adapters.spark.replay import Place
from leasehold.adapters.spark.rows import Chunk, Columns, SourceSpec
from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, Lease, Position
from leasehold.errors import StoreError
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Done
from leasehold.stores.writes import StealLease

ROOM = 30
SIZES = 1 << 20, 300, 101  # of what is taken: anything, some rows, about one


class Refused(Exception):
    """The system has no memory, thread or descriptor at the moment."""


class Faulty:
    """Columns with the source's own offset; building them fails `faults` times."""

    def __init__(self) -> None:
        self.faults = 0
        self.columns = Columns(pa.schema([]), "data", self._rows, _position)

    def _rows(self, _lease: Lease, records: Sequence[Record]) -> pa.RecordBatch:
        self.refuse()
        names = ["data", "sequenceNumber", "offset"]
        rows = [[each.data for each in records], [each.sequence_number for each in records]]
        kinds = [pa.binary(), pa.string(), pa.string()]
        columns = [*rows, [each.token for each in records]]
        return pa.record_batch([pa.array(*each) for each in zip(columns, kinds, strict=True)], names)

    def refuse(self) -> None:
        if self.faults:
            self.faults -= 1
            raise Refused


def _position(rows: pa.RecordBatch, row: int) -> Position:
    return Position(rows["sequenceNumber"][row].as_py(), token=rows["offset"][row].as_py())


def numbers(rows: pa.RecordBatch) -> list[int]:
    return [int(each) for each in rows["sequenceNumber"].to_pylist()]


def behind(position: Position, stream: Stream, key: str) -> int:
    """Return how many records lie up to this position, and check that the source's own offset was kept."""
    assert not position.numbered or not stream.tokens or position.token == f"@{position.sequence}", position
    return len(stream.records[key]) if position.ended else int(position.sequence) if position.numbered else 0


KEYS = st.sampled_from("ab")


class Reading(RuleBasedStateMachine):
    """A stream, and the faults that readers of it meet."""

    keys = "ab"

    def begin(self) -> None:
        """Create shards with a page each."""
        self.stream = Stream({key: ["x"] * PAGE for key in self.keys}, tokens=True)
        self.made = Faulty()
        self.now = 0.0

    @rule(key=KEYS, count=st.integers(1, 4 * PAGE))
    def put(self, key: str, count: int) -> None:
        """Put records, unless the shard is closed."""
        if key in self.keys and key not in self.stream.children:
            self.stream.put(key, *["x"] * count)

    @rule(key=KEYS)
    def split(self, key: str) -> None:
        """Close a shard, so that its last response is empty."""
        if key in self.keys and key not in self.stream.children:
            self.stream.split(key, f"{key}1", f"{key}2")

    @rule(key=KEYS, count=st.integers(1, 3), how=st.sampled_from(["late", "unreachable", "throttled", "rows"]))
    def fault(self, key: str, count: int, how: str) -> None:
        """Make reads advance and raise, openings fail, reads return nothing, or memory for the rows run out."""
        if how == "rows":
            self.made.faults = count
        else:
            getattr(self.stream, how)[key] += count

    def mend(self) -> None:
        """Clear all faults."""
        for each in (self.stream.late, self.stream.unreachable, self.stream.throttled):
            each.clear()
        self.made.faults = 0

    @invariant()
    def a_shard_has_one_reader(self) -> None:
        """A second reader would disconnect the first, or count twice against the limits of the service."""
        shards = self.stream.open_readers if hasattr(self, "stream") else []
        assert len(shards) == len(set(shards))


class Feeding(Reading):
    """One shard that a query reads ahead and commits, until the lease moves elsewhere."""

    keys = "a"

    @initialize(done=st.sampled_from([0, 5, PAGE, PAGE + 1]), end=st.sampled_from(["asked away", "stolen"]))
    def join(self, done: int, end: str) -> None:
        """Hold the shard from its beginning, or from where an earlier run committed it, which may be its end."""
        self.begin()
        self.end = end
        self.ahead = ReadAheadState(
            evolve(pace(), columns=self.made.columns, rows=ROOM),
            Condition(),
            lambda _holding, checkpoint: max(self.committed, checkpoint, key=lambda each: each.order),
            lambda _key: self.committed if self.committed.numbered or self.committed.ended else None,
            measure=self._measure,
            feeds=1,
        )
        self.committed = Position(str(done), token=f"@{done}") if done else TRIM_HORIZON
        if done > PAGE:
            self.committed = SHARD_END
            self.split("a")
        self.handed, self.ends = [behind(self.committed, self.stream, "a")], list[Position]()
        self.left, self.store_faults = 0, 0
        self.worker, self.feed = a_feed(self.stream, self.ahead, lambda: self.now, self._left)
        self.over = False
        write, get = self.worker.store.write, self.worker.store.get
        self.worker.store.write = self._failing(write)  # type: ignore[method-assign]
        self.worker.store.get = self._failing(get)  # type: ignore[method-assign]

    def _measure(self, _holding: Holding, _batch: Batch) -> None:
        self.made.refuse()

    def _left(self, _feed: object) -> None:
        self.left += 1

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:  # noqa: ANN401  as the store's own
            if self.store_faults:
                self.store_faults -= 1
                raise StoreError("the table is away")
            return call(*given, **named)

        return called

    @rule(count=st.integers(1, 3))
    def table_away(self, count: int) -> None:
        """Make some calls of the lease table fail."""
        self.store_faults = count

    @precondition(lambda self: not self.over)
    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        """Step the feed as its thread does, when it asks to be called."""
        for _ in range(count):
            self.now += 0.1
            lost, before = self.feed.holding.lost.is_set(), self.stream.readings
            try:
                due = self.feed.step(self.now)
            except Refused:
                due = self.now + 5.0  # as whoever calls the steps does
            assert not lost or (due, self.stream.readings) == (math.inf, before)
            if due == math.inf:
                self.over = True
                return
            self.now = max(self.now, due)

    @precondition(lambda self: not self.over and self.feed.held is not None)
    @rule(count=st.integers(1, 2 * PAGE), size=st.sampled_from(SIZES))
    def take(self, count: int, size: int) -> None:
        held = self.feed.held
        assert held is not None
        chunk = self.feed.take(count, size)
        if chunk is None:
            return
        taken, before = numbers(chunk.rows), behind(held.begins, self.stream, "a")
        assert taken == list(range(before + 1, behind(chunk.ends, self.stream, "a") + 1))
        assert len(taken) <= count
        assert before == self.handed[-1]
        self.handed.append(before + len(taken))
        self.ends.append(chunk.ends)

    @precondition(lambda self: self.ends)
    @rule(count=st.integers(1, 3))
    def commit(self, count: int) -> None:
        """Commit some of the rows, as Spark does."""
        done, self.ends = self.ends[:count], self.ends[count:]
        self.committed = done[-1]
        self.feed.commit(done[-1])

    @precondition(lambda self: not self.over)
    @rule(seconds=st.sampled_from([0.0, 100.0]))
    def passes(self, seconds: float) -> None:
        """Suspend the process or not, and then renew the lease."""
        self.now += seconds
        if seconds:
            self.step(2)
            assert self.feed.held is None or not self.feed.holding.expired
        if not self.store_faults and not self.over:
            self.worker.renew(self.now)

    @precondition(lambda self: not self.over and len(self.handed) > 1)
    @rule(how=st.sampled_from(["asked away", "stolen", "denied"]))
    def leave(self, how: str) -> None:
        """Have the lease move elsewhere, or make the shard unreadable here."""
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
        """No checkpoint passes what Spark has finished with, and waiting rows are bounded."""
        if not hasattr(self, "worker"):
            return
        faults, self.store_faults = self.store_faults, 0
        (lease,) = self.worker.store.get(["a"])
        self.store_faults = faults
        read = max((reader.at for reader in self.stream.readers), default=0)
        committed = behind(self.committed, self.stream, "a")
        assert behind(lease.checkpoint, self.stream, "a") <= committed <= self.handed[-1]
        assert not lease.checkpoint.ended or self.committed.ended
        assert self.handed[-1] == self.handed[0] or self.handed[-1] <= read
        assert self.feed.waiting[0] <= ROOM + PAGE
        assert self.feed.opened >= (self.feed.held is not None)
        assert self.feed.opened or not self.stream.open_readers

    @invariant()
    def whoever_has_left_has_closed(self) -> None:
        """A reader that stayed open after its lease moved would disconnect the new owner."""
        if hasattr(self, "left") and self.over:
            assert (self.left, self.stream.open_readers) == (1, [])

    def teardown(self) -> None:
        """With all faults cleared, all rows come, and a feed that is asked to leave closes everything at once."""
        if not hasattr(self, "worker"):
            return
        self.mend()
        self.stream.denied.clear()
        self.store_faults = 0
        # One page per turn, and some turns for the start, its faults and the last commit.
        for _ in range(60 + len(self.stream.records["a"]) // PAGE):
            if self.over or self.feed.holding.releasing:
                break
            self.worker.renew(self.now)
            self.step(1)
            if self.feed.held is not None:
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


class Shelving(Reading):
    """Two shards that one reader reads ahead and its planner plans; each message passes through its text form."""

    @initialize(rows=st.sampled_from([1, ROOM, 1000]), size=st.sampled_from([500, 1 << 20]))
    def join(self, rows: int, size: int) -> None:
        """Have the reader open both shards."""
        self.begin()
        source_spec = SourceSpec(lambda: self.stream, self.made.columns, 0.01, 2**53, rereadable=True)
        self.spec = ReaderSpec(("", 1), b"", Address("", ""), source_spec, rows, size, 3, 500, "")
        self.aheads: dict[str, ShardReadAhead] = {}
        self.openings: dict[str, FarReader] = {}
        self.buffers: dict[str, FarBuffer] = {}
        self.planned = dict.fromkeys("ab", TRIM_HORIZON)
        self.read_to = dict.fromkeys("ab", TRIM_HORIZON)
        self.unheard = self.number = 0
        self.over = set[str]()
        for key in "ab":
            self._open(key)

    def _open(self, key: str) -> None:
        self.number += 1
        self.buffers[key] = FarBuffer(self.made.columns)
        self.openings[key] = FarReader(self.number, Lease(key), self.planned[key], lambda _opening: None)
        request = from_planner(line_of(Open(self.number, Lease(key), self.planned[key])))
        assert isinstance(request, Open)
        self.aheads[key] = ShardReadAhead(request, self.stream, self.spec, self._say, lambda: 2)
        self.read_to[key] = self.planned[key]
        self.over.discard(key)

    def _say(self, message: FromReader) -> None:
        if self.unheard:
            self.unheard -= 1
            raise Refused
        received = from_reader(line_of(message))
        assert isinstance(received, ShardReport | ShardFailure)
        (key,) = [key for key, each in self.openings.items() if each.number == received.opening]
        if isinstance(received, ShardFailure):
            self.openings[key].fail(received.text)
        else:
            self.openings[key].report(received)

    @rule(count=st.integers(1, 2))
    def unheard_of(self, count: int) -> None:
        """Make memory run out for some of the reader's messages."""
        self.unheard = count

    @rule(key=KEYS, count=st.integers(1, 5))
    def step(self, key: str, count: int) -> None:
        for _ in range(0 if key in self.over else count):
            self.now += 20.0
            try:
                if self.aheads[key].step(self.now) == math.inf:
                    self.over.add(key)
                    return
            except Refused:
                self.now += 5.0

    def hear(self, key: str) -> None:
        batch = self.openings[key].read()
        if batch.end is None and not batch.ended:
            return
        ends = SHARD_END if batch.ended else batch.end
        assert ends is not None
        self.buffers[key].put(Chunk(batch.rows, ends))  # type: ignore[attr-defined]  # it is one of columns
        self.read_to[key] = ends

    @rule(key=KEYS, count=st.integers(1, 2 * PAGE), size=st.sampled_from(SIZES))
    def plan(self, key: str, count: int, size: int) -> None:
        """Plan some of what was reported, and take exactly those rows from the reader."""
        self.hear(key)
        chunk = self.buffers[key].take(count, size)
        if chunk is None:
            return
        before = behind(self.planned[key], self.stream, key)
        taken = self.aheads[key].take(chunk.rows.through)
        assert taken is not None
        rows = [number for each in taken for number in numbers(each)]
        assert rows == list(range(before + 1, behind(chunk.ends, self.stream, key) + 1))
        assert (chunk.rows.range.begins, chunk.rows.num_rows) == (self.planned[key], len(rows))
        self.planned[key] = chunk.ends

    @rule(key=KEYS)
    def asked_again(self, key: str) -> None:
        """Close the shard, and open it after what was planned."""
        if self.planned[key].ended:
            return
        self.openings[key].close()
        self.aheads[key].close()
        assert (self.aheads[key].take(1), self.aheads[key].step(self.now)) == (None, math.inf)
        assert key not in self.stream.open_readers
        self._open(key)

    @invariant()
    def what_waits_is_bounded(self) -> None:
        """A blocked sink does not fill the memory of the readers."""
        for key, buffer in getattr(self, "buffers", {}).items():
            waiting = behind(self.read_to[key], self.stream, key) - behind(self.planned[key], self.stream, key)
            assert waiting == buffer.count <= max(1, self.spec.rows // 2) + 2 * PAGE
            assert bool(buffer) or (buffer.count, buffer.bytes) == (0, 0)

    def teardown(self) -> None:
        """With all faults cleared, all rows come, and nothing stays open."""
        if not hasattr(self, "aheads"):
            return
        self.mend()
        self.unheard = 0
        for key in "ab":
            for _ in range(40 + len(self.stream.records[key]) // PAGE):
                if not self.planned[key].ended:
                    self.step(key, 2)
                    self.plan(key, 1000, SIZES[0])
            assert behind(self.planned[key], self.stream, key) == len(self.stream.records[key])
            assert self.planned[key].ended == (key in self.stream.children)
            self.asked_again(key)
            self.aheads[key].close()
            self.aheads[key].step(self.now)
        assert self.stream.open_readers == []


class Serving(RuleBasedStateMachine):
    """A query's port for readers, and readers that come and go; each task has rows of several shards."""

    @initialize()
    def begin(self) -> None:
        """Create shards with records, and no readers."""
        self.before = self._held()
        self.stream = Stream({key: ["x"] * PAGE for key in "abc"})
        self.pool = ReaderPool(Address(HOST, HOST), lambda _key: None)
        place = Place(MemoryStore(), self.stream, kinesis("fake"), exclusive=False)
        self.here = Transport(Address(HOST, HOST), 1 << 20)
        self.transport = FarTransport(self.pool, self.here, place, 10.0)
        self.readers = list[Thread]()
        self.planned = dict.fromkeys("abc", TRIM_HORIZON)
        self.openings: dict[str, FarReader] = {}
        self.buffers: dict[str, FarBuffer] = {}
        self.number = 0
        self.part: Rows | None = None
        self.wanted: list[list[int]] = []

    def _held(self) -> set[object]:
        """Return the threads and descriptors of this process."""
        held: set[object] = set(threading.enumerate())
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # that of the listing itself is closed by now
                held.add(descriptor.readlink())
        return held

    @rule()
    @precondition(lambda self: len(self.readers) < 3)
    def come(self) -> None:
        """Connect a reader, which gets its part of the shards."""
        thread = Thread(target=ShardReader(a_spec(self.stream, self.pool)).run)
        thread.start()
        self.readers.append(thread)
        until(lambda: len(self.pool.connected) == len(self.readers), "it has come")

    @rule()
    @precondition(lambda self: self.readers)
    def go(self) -> None:
        """Cut the connection of a reader, which ends."""
        self.pool.connected[0].end()
        until(lambda: sum(each.is_alive() for each in self.readers) < len(self.readers), "it has ended")
        self.readers = [each for each in self.readers if each.is_alive()]
        until(lambda: len(self.pool.connected) == len(self.readers), "it is known to have ended")

    @rule(key=KEYS, count=st.integers(1, PAGE))
    def put(self, key: str, count: int) -> None:
        self.stream.put(key, *["x"] * count)

    @rule(at=st.sampled_from(["readers", "rows"]))
    def a_stranger(self, at: str) -> None:
        """A client without the token is disconnected at once."""
        promised = self.here.promised(0, 0)
        port, said = (self.pool.port, HELLO) if at == "readers" else (promised.port, bytes(16))
        with socket.create_connection((HOST, port), WAIT) as connection:
            connection.sendall(bytes(TOKEN_BYTES) + said)
            assert closed_by_pool(connection)
        assert len(self.pool.connected) == len(self.readers)

    @rule()
    @precondition(lambda self: self.readers)
    def batch(self) -> None:
        """Plan everything as one task, once it is reported."""
        for key, records in self.stream.records.items():
            until(lambda key=key, records=records: self._hears(key) == len(records), f"all of {key}")  # type: ignore[misc]
        self.number += 1
        chunks = {key: chunk for key, buffer in self.buffers.items() if (chunk := buffer.take(10_000, 1 << 30))}
        self.wanted = sorted(
            list(range(behind(self.planned[key], self.stream, key) + 1, len(self.stream.records[key]) + 1))
            for key in chunks
        )
        tasks = spread({key: chunk.rows for key, chunk in chunks.items()}, 1)
        self.planned |= {key: chunk.ends for key, chunk in chunks.items()}
        (self.part,) = self.transport.partitions(self.number, tasks) if tasks else (None,)

    def _hears(self, key: str) -> int:
        """Take what was reported, and return how many records that is."""
        if key not in self.openings or self.openings[key].gone:
            self.buffers[key] = FarBuffer(kinesis("fake"))
            self.openings[key] = self.pool.open(Lease(key), self.planned[key])
        batch = self.openings[key].read()
        if batch.end is not None:
            self.buffers[key].put(Chunk(batch.rows, batch.end))  # type: ignore[attr-defined]  # it is one of columns
        return behind(self.planned[key], self.stream, key) + self.buffers[key].count

    @rule()
    @precondition(lambda self: self.part is not None)
    def task(self) -> None:
        """The task gets exactly its rows, whichever readers have gone since."""
        assert self.part is not None
        by_shard: dict[str, list[int]] = {}
        for rows in read(self.part):
            for shard, number in zip(rows["shardId"].to_pylist(), numbers(rows), strict=True):
                by_shard.setdefault(shard, []).append(number)
        assert sorted(by_shard.values()) == self.wanted

    @rule()
    @precondition(lambda self: self.part is not None)
    def done(self) -> None:
        """Commit the batch; a task that is left over gets an error."""
        assert self.part is not None
        self.transport.discard(self.number)
        with pytest.raises(RuntimeError, match=f"batch {self.number} is done"):
            read_for_ever(cast("ReaderRows", self.part))
        self.part = None

    def teardown(self) -> None:
        """Nothing listens, runs or is open any more."""
        if not hasattr(self, "pool"):
            return
        self.transport.close()
        self.pool.close()
        for thread in self.readers:
            thread.join(WAIT)
        until(lambda: self._held() <= self.before, "no thread and no descriptor that was not there before")
        assert (self.stream.open_readers, self.pool.connected) == ([], ())


Serving.TestCase.settings = settings(max_examples=8, stateful_step_count=14)
Feeding.TestCase.settings = Shelving.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestFeeding, TestShelving, TestServing = Feeding.TestCase, Shelving.TestCase, Serving.TestCase


@pytest.fixture(autouse=True)
def no_door_closes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the time limits above the test's patience, so that no connection is closed by a timeout."""
    for module, name in (
        (pool_module, "SILENT_SECONDS"),
        (pool_module, "REQUEST_SECONDS"),
        (fetching, "REQUEST_SECONDS"),
    ):
        monkeypatch.setattr(module, name, 100 * WAIT)
