"""Tests of the cursor of a lease reader: its positions, and the order of its steps. The cursor never skips a record."""

from collections.abc import Callable

import pytest
from attrs import define
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from leasehold.adapters.consumer.cursor import (
    AwaitEvent,
    CloseLostShard,
    Cursor,
    DeliverRows,
    EndShard,
    OpenReader,
    ReadBatch,
    ReleaseAt,
    ShardReader,
    StoreCheckpoint,
)
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Position, Shard, at_timestamp
from leasehold.errors import SourceUnavailable

RECORDS = 12


def position_of(number: int) -> Position:
    """Return the position of the record with this number, TRIM_HORIZON for 0, or SHARD_END after the last record."""
    if number == 0:
        return TRIM_HORIZON
    return SHARD_END if number > RECORDS else Position(str(number))


def index_of(position: Position) -> int:
    """Return the index of a position among the records.

    For a time, this is the number of records that arrived before it.
    """
    if position.sequence == "AT_TIMESTAMP":
        return position.sub
    return RECORDS + 1 if position.ended else int(position.sequence) if position.numbered else 0


@define
class Stream:
    """One shard whose readers may advance and then raise."""

    readers: int = 0
    broken: str = ""

    def open(self, start: Position) -> "StreamReader":
        assert start != LATEST  # A reader opened at LATEST would skip the records after the pinned position.
        self.readers += 1
        return StreamReader(self, index_of(start))


@define
class StreamReader:
    """Reads up to three records at a time, and the end of the shard together with the last record."""

    stream: Stream
    index: int

    def read(self) -> Batch:
        """Advance, and then raise an error if the stream is broken."""
        first_number = self.index + 1
        self.index = min(self.index + 3, RECORDS)
        if self.stream.broken == "reading":
            raise SourceUnavailable("it raised behind its advance")
        records = tuple(Record(b"", str(number)) for number in range(first_number, self.index + 1))
        return Batch(records, records[-1].position if records else None, None, 0.0, ended=self.index == RECORDS)

    def close(self) -> None:
        self.stream.readers -= 1


class EveryOrderOfEvents(RuleBasedStateMachine):
    """Events in any order: late, partial or missing acknowledgements, failing reads, dropped rows and new owners.

    Attributes:
        rows: The rows that were read but not delivered yet.
        unacknowledged: The rows that the current consumer has received but not acknowledged yet.
        finished: The furthest record that any consumer has finished. The checkpoint must never pass it.
        stored: The checkpoint of the lease or, if that is LATEST, the position to which LATEST was pinned.
        pinned: The pinned position as the source returns it (a time or a number), or None if the lease did not start at
            LATEST.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stream, self.rows, self.unacknowledged = Stream(), list[int](), list[int]()
        self.finished = self.stored = 0
        self.pinned: Position | None = None
        self.cursor, self.pull = self._begun()

    def _begun(self) -> tuple[Cursor, ShardReader]:
        resumes_at_pinned = self.pinned is not None and self.stored == index_of(self.pinned)
        cursor = Cursor(LATEST if resumes_at_pinned else position_of(self.stored))
        if resumes_at_pinned and self.pinned is not None:
            cursor.pinned_at(self.pinned)
        return cursor, ShardReader(cursor, self.stream.open)

    @initialize(stored=st.integers(0, RECORDS), latest=st.sampled_from(["", "", "a time", "a number"]))
    def begin(self, stored: int, latest: str) -> None:
        """Begin at a checkpoint, or at LATEST, which was pinned to the tip of the shard when the lease was created."""
        self.finished = self.stored = stored
        if latest and stored:
            self.pinned = position_of(stored) if latest == "a number" else at_timestamp(stored)
        self.cursor, self.pull = self._begun()

    def _number(self, position: Position) -> int:
        return self.stored if position == LATEST else index_of(position)

    def _keep(self, batch: Batch) -> None:
        if self.stream.broken == "keeping":
            raise MemoryError
        self.rows += [int(record.sequence_number) for record in batch.records]
        self.cursor.batch_read(SHARD_END if batch.ended else batch.end)

    @rule(broken=st.sampled_from(["", "", "reading", "keeping"]))
    def read_on(self, broken: str) -> None:
        """Carry out the next order of the cursor while the consumer is busy."""
        self.stream.broken = broken
        match self.cursor.next_order(write_due=False, can_deliver=False):
            case OpenReader(start):
                assert start == self.cursor.read
                self.pull.open()
            case ReadBatch():
                try:
                    self.pull.read(self._keep)
                except (SourceUnavailable, MemoryError):
                    assert self.stream.readers == 0
            case order:
                assert order in {AwaitEvent(), EndShard(())}

    @rule(count=st.integers(1, 5))
    def deliver(self, count: int) -> None:
        """Deliver some of the rows. They must directly follow the rows that were delivered before."""
        if self.cursor.next_order(write_due=False) != DeliverRows():
            return
        last_delivered = self._number(self.cursor.delivered)
        delivered_rows, self.rows = self.rows[:count], self.rows[count:]
        assert delivered_rows == list(range(last_delivered + 1, last_delivered + 1 + len(delivered_rows)))
        self.unacknowledged += delivered_rows
        self.cursor.rows_delivered(self.cursor.read if not self.rows else position_of(delivered_rows[-1]))

    @precondition(lambda self: self.cursor.has_unacknowledged)
    @rule(share=st.floats(0, 1))
    def acknowledge(self, share: float) -> None:
        """Acknowledge some of the delivered rows, or none."""
        min_number, max_number = self._number(self.cursor.acknowledged), self._number(self.cursor.delivered)
        acknowledged_number = min_number + round(share * (max_number - min_number))
        self.finished = max(self.finished, acknowledged_number)
        self.unacknowledged = [number for number in self.unacknowledged if number > acknowledged_number]
        # If reading began at a time, no sequence number is known for the position before the first record.
        self.cursor.consumer_acknowledged(
            position_of(acknowledged_number) if acknowledged_number > min_number else self.cursor.acknowledged
        )

    @rule()
    def store(self) -> None:
        """Write a checkpoint if one is due."""
        match self.cursor.next_order():
            case StoreCheckpoint(position):
                assert self.stored < index_of(position) <= self.finished
                self.stored = index_of(position)
                self.cursor.checkpoint_stored(position)
            case EndShard(_):
                assert self.finished == RECORDS + 1

    @rule()
    def drop(self) -> None:
        self.rows.clear()
        self.pull.drop()

    @rule()
    def fail(self) -> None:
        """Let the consumer fail. Rows are delivered again from the first one that it has not acknowledged."""
        self.rows.clear()
        self.unacknowledged.clear()
        self.cursor.consumer_gone()
        self.pull.drop()
        assert not self.cursor.has_unacknowledged
        assert self._number(self.cursor.read) == self._number(self.cursor.acknowledged)

    @rule(crash=st.booleans())
    def change_owner(self, crash: bool) -> None:
        """Change the owner, by a release after all delivered rows are acknowledged, or by a crash at any moment."""
        next_order = self.cursor.next_order(releasing=True)
        if not crash and next_order == AwaitEvent():
            assert self.unacknowledged or self.cursor.has_unacknowledged
            return
        if not crash:
            assert isinstance(next_order, ReleaseAt)
            assert self.stored <= self._number(next_order.position) <= self.finished
            self.stored = self._number(next_order.position)
        self.pull.close()
        self.rows.clear()
        self.unacknowledged.clear()
        self.cursor, self.pull = self._begun()

    @invariant()
    def marks_are_in_order(self) -> None:
        """The positions are in order, the rows in memory lie between two of them, and at most one reader is open."""
        marks = [
            self._number(mark)
            for mark in (self.cursor.committed, self.cursor.acknowledged, self.cursor.delivered, self.cursor.read)
        ]
        assert marks == sorted(marks)
        assert self.stored <= self.finished
        assert [number for number in self.rows if not marks[2] < number <= marks[3]] == []
        assert len(self.rows) == min(marks[3], RECORDS) - min(marks[2], RECORDS)
        assert self.stream.readers == int(self.cursor.reader_open) <= 1


TestEveryOrderOfEvents = EveryOrderOfEvents.TestCase
"""No record is skipped if a reader raises after it has advanced, or if a consumer fails."""


def _read() -> Cursor:
    cursor = Cursor(position_of(3))
    cursor.reader_opened()
    cursor.batch_read(position_of(6))
    return cursor


def _out() -> Cursor:
    cursor = _read()
    cursor.rows_delivered(position_of(6))
    return cursor


def _done() -> Cursor:
    cursor = _out()
    cursor.consumer_acknowledged(position_of(5))
    return cursor


def _resumed() -> Cursor:
    cursor = Cursor(position_of(2))
    cursor.begun_at(position_of(5))
    return cursor


def _ended() -> Cursor:
    cursor = _out()
    cursor.consumer_acknowledged(position_of(6))
    cursor.batch_read(SHARD_END, (Shard("child"),))
    cursor.rows_delivered(SHARD_END)
    cursor.consumer_acknowledged(SHARD_END)
    return cursor


@pytest.mark.parametrize(
    ("cursor", "flags", "order"),
    [
        (_done, {"lost": True, "releasing": True}, CloseLostShard()),
        (_ended, {"lost": True}, CloseLostShard()),
        (_out, {"releasing": True}, AwaitEvent()),
        (_done, {"releasing": True}, AwaitEvent()),
        (_read, {"releasing": True, "expired": True}, ReleaseAt(position_of(3))),
        (_ended, {"releasing": True}, ReleaseAt(position_of(6))),
        (_ended, {"expired": True}, EndShard((Shard("child"),))),
        (_done, {"expired": True}, StoreCheckpoint(position_of(5))),
        (_done, {"write_due": False, "expired": True}, AwaitEvent()),
        (_done, {"write_due": False}, ReadBatch()),
        (_read, {"expired": True}, AwaitEvent()),
        (_read, {}, DeliverRows()),
        (_read, {"can_deliver": False}, ReadBatch()),
        (_read, {"can_deliver": False, "can_read": False}, AwaitEvent()),
        (lambda: Cursor(position_of(3)), {}, OpenReader(position_of(3))),
        (lambda: Cursor(position_of(3)), {"can_read": False}, AwaitEvent()),
        (lambda: Cursor(position_of(3), until=position_of(3)), {}, AwaitEvent()),
        (_resumed, {}, OpenReader(position_of(5))),
        (_resumed, {"releasing": True}, AwaitEvent()),
    ],
)
def test_order_matches_each_row_of_the_table(
    cursor: Callable[[], Cursor], flags: dict[str, bool], order: object
) -> None:
    assert cursor().next_order(**flags) == order


def test_acknowledgement_past_the_delivered_position_is_rejected() -> None:
    cursor = _read()
    with pytest.raises(ValueError, match=r"^cursor: .*6.* is acknowledged, and only what lies before .*3.* was"):
        cursor.consumer_acknowledged(position_of(6))
    assert (cursor.acknowledged, cursor.committed) == (position_of(3), position_of(3))


def test_consumer_may_begin_before_or_after_the_checkpoint() -> None:
    """A Spark query may continue at a position before or after the checkpoint."""
    cursor_after_checkpoint, cursor_before_checkpoint = _resumed(), Cursor(position_of(5))
    cursor_before_checkpoint.begun_at(position_of(2))
    cursor_after_checkpoint.consumer_acknowledged(position_of(4))
    assert (
        cursor_after_checkpoint.committed,
        cursor_after_checkpoint.acknowledged,
        cursor_after_checkpoint.delivered,
        cursor_after_checkpoint.read,
    ) == (
        position_of(2),
        position_of(4),
        position_of(5),
        position_of(5),
    )
    assert (
        cursor_before_checkpoint.committed,
        cursor_before_checkpoint.acknowledged,
        cursor_before_checkpoint.delivered,
        cursor_before_checkpoint.read,
    ) == (
        position_of(2),
        position_of(2),
        position_of(2),
        position_of(2),
    )
    assert (cursor_after_checkpoint.unstored_position, cursor_before_checkpoint.unstored_position) == (
        position_of(4),
        None,
    )


def test_checkpoint_past_the_acknowledged_position_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"^cursor: committed, acknowledged, delivered, read must not fall"):
        _out().checkpoint_stored(position_of(4))


def test_rows_are_dropped_even_if_their_reader_cannot_be_closed() -> None:
    class ReaderThatCannotClose(StreamReader):
        def close(self) -> None:
            raise SourceUnavailable("it cannot be closed")

    cursor = Cursor(TRIM_HORIZON)
    pull = ShardReader(cursor, lambda start: ReaderThatCannotClose(Stream(), index_of(start)))
    pull.read(lambda batch: cursor.batch_read(batch.end))
    with pytest.raises(SourceUnavailable):
        pull.drop()
    assert (cursor.next_order(), cursor.read) == (OpenReader(TRIM_HORIZON), TRIM_HORIZON)


def test_reader_that_fails_to_open_is_not_open() -> None:
    def raise_unavailable(_start: Position) -> StreamReader:
        raise SourceUnavailable("the service asks to slow down")

    cursor = Cursor(TRIM_HORIZON)
    with pytest.raises(SourceUnavailable):
        ShardReader(cursor, raise_unavailable).open()
    assert not cursor.reader_open


def test_no_event_moves_a_mark_back() -> None:
    cursor = _done()
    cursor.batch_read(position_of(4))
    cursor.rows_delivered(position_of(4))
    cursor.consumer_acknowledged(position_of(4))
    cursor.checkpoint_stored(position_of(5))
    cursor.checkpoint_stored(position_of(4))
    assert (cursor.committed, cursor.acknowledged, cursor.delivered, cursor.read) == (
        position_of(5),
        position_of(5),
        position_of(6),
        position_of(6),
    )


def test_reader_that_cannot_be_closed_is_not_read_again() -> None:
    """It may have skipped records, so the next read opens another reader just after the records in memory."""

    class ReaderThatCannotClose(StreamReader):
        def close(self) -> None:
            raise SourceUnavailable("it cannot be closed")

    opened, cursor = list[Position](), Cursor(TRIM_HORIZON)

    def open_reader(start: Position) -> StreamReader:
        opened.append(start)
        return ReaderThatCannotClose(Stream(), index_of(start))

    pull = ShardReader(cursor, open_reader)
    for closed in (False, True):
        pull.read(lambda batch: cursor.batch_read(batch.end))
        if not closed:
            with pytest.raises(SourceUnavailable):
                pull.close()
    assert opened == [TRIM_HORIZON, position_of(3)]
