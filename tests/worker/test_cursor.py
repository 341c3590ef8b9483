"""The state machine behind every reading: its marks, its orders, and the law that nothing is passed over."""

from collections.abc import Callable

import pytest
from attrs import define
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from leasehold.adapters.reading.cursor import (
    Checkpoint,
    Cursor,
    Deliver,
    End,
    Leave,
    Open,
    Read,
    Release,
    ShardPull,
    Wait,
)
from leasehold.adapters.sources.protocol import Batch, Record, SourceUnavailable
from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, Position, Shard

RECORDS = 12


def at(number: int) -> Position:
    """The position of the n-th record; before the first, and behind the last."""
    if number == 0:
        return TRIM_HORIZON
    return SHARD_END if number > RECORDS else Position(str(number))


def number(position: Position) -> int:
    """The place of a position among the records."""
    return RECORDS + 1 if position.ended else int(position.sequence) if position.numbered else 0


@define
class Stream:
    """One shard whose readers may advance and then raise."""

    readers: int = 0
    broken: str = ""

    def open(self, start: Position) -> "StreamReader":
        """Open one more reader."""
        self.readers += 1
        return StreamReader(self, number(start))


@define
class StreamReader:
    """Reads up to three records at a time, and the end of the shard with the last."""

    stream: Stream
    place: int

    def read(self) -> Batch:
        """Advance, then raise if the stream is broken."""
        first = self.place + 1
        self.place = min(self.place + 3, RECORDS)
        if self.stream.broken == "reading":
            raise SourceUnavailable("it raised behind its advance")
        records = tuple(Record(b"", str(each)) for each in range(first, self.place + 1))
        return Batch(records, records[-1].position if records else None, None, 0.0, ended=self.place == RECORDS)

    def close(self) -> None:
        """Count it."""
        self.stream.readers -= 1


class EveryOrderOfEvents(RuleBasedStateMachine):
    """A consumer that acknowledges late, in parts, or never; readings that fail, rows that are dropped, new owners.

    rows      what is read and not delivered
    given     what the consumer of now was handed, and has not acknowledged
    finished  how far some consumer has finished; what the lease must never pass
    stored    what the lease says
    """

    def __init__(self) -> None:
        super().__init__()
        self.stream, self.rows, self.given = Stream(), list[int](), list[int]()
        self.finished = self.stored = 0
        self.cursor, self.pull = self._begun()

    def _begun(self) -> tuple[Cursor, ShardPull]:
        cursor = Cursor(at(self.stored))
        return cursor, ShardPull(cursor, self.stream.open)

    @initialize(stored=st.integers(0, RECORDS))
    def begin(self, stored: int) -> None:
        """The lease says where it was read before."""
        self.finished = self.stored = stored
        self.cursor, self.pull = self._begun()

    def _keep(self, batch: Batch) -> None:
        if self.stream.broken == "keeping":
            raise MemoryError
        self.rows += [int(record.sequence_number) for record in batch.records]
        self.cursor.batch_read(SHARD_END if batch.ended else batch.end)

    @rule(broken=st.sampled_from(["", "", "reading", "keeping"]))
    def read_on(self, broken: str) -> None:
        """Do what the cursor asks for, with a consumer that is busy."""
        self.stream.broken = broken
        match self.cursor.order(write=False, free=False):
            case Open(start):
                assert start == self.cursor.read
                self.pull.open()
            case Read():
                try:
                    self.pull.read(self._keep)
                except (SourceUnavailable, MemoryError):
                    assert self.stream.readers == 0
            case order:
                assert order in {Wait(), End(())}

    @rule(most=st.integers(1, 5))
    def deliver(self, most: int) -> None:
        """Hand over some of the rows: they follow what was handed over before without a gap."""
        if self.cursor.order(write=False) != Deliver():
            return
        last = number(self.cursor.delivered)
        taken, self.rows = self.rows[:most], self.rows[most:]
        assert taken == list(range(last + 1, last + 1 + len(taken)))
        self.given += taken
        self.cursor.rows_delivered(self.cursor.read if not self.rows else at(taken[-1]))

    @precondition(lambda self: self.cursor.out)
    @rule(share=st.floats(0, 1))
    def acknowledge(self, share: float) -> None:
        """The consumer has finished with a part, perhaps with none, of what it was given."""
        least, most = number(self.cursor.acknowledged), number(self.cursor.delivered)
        done = least + round(share * (most - least))
        self.finished = max(self.finished, done)
        self.given = [each for each in self.given if each > done]
        self.cursor.consumer_acknowledged(at(done))

    @rule()
    def store(self) -> None:
        """Write a checkpoint where one is due."""
        match self.cursor.order():
            case Checkpoint(to):
                assert self.stored < number(to) <= self.finished
                self.stored = number(to)
                self.cursor.checkpoint_stored(to)
            case End(_):
                assert self.finished == RECORDS + 1

    @rule()
    def drop(self) -> None:
        """The rows are gone."""
        self.rows.clear()
        self.pull.drop()

    @rule()
    def fail(self) -> None:
        """The consumer has failed: it is given again what it did not finish with, and nothing before that."""
        self.rows.clear()
        self.given.clear()
        self.cursor.consumer_gone()
        self.pull.drop()
        assert self.cursor.read == self.cursor.acknowledged

    @rule(crash=st.booleans())
    def change_owner(self, crash: bool) -> None:
        """The lease goes to another owner, by a release once nothing is out, or by a crash at any moment."""
        order = self.cursor.order(leaving=True)
        if not crash and order == Wait():
            assert self.given or self.cursor.out
            return
        if not crash:
            assert isinstance(order, Release)
            assert self.stored <= number(order.at) <= self.finished
            self.stored = number(order.at)
        self.pull.close()
        self.rows.clear()
        self.given.clear()
        self.cursor, self.pull = self._begun()

    @invariant()
    def marks_are_in_order(self) -> None:
        """Held rows are those between two marks, and one reader at most is open."""
        marks = [
            number(each)
            for each in (self.cursor.committed, self.cursor.acknowledged, self.cursor.delivered, self.cursor.read)
        ]
        assert marks == sorted(marks)
        assert self.stored <= self.finished
        assert [each for each in self.rows if not marks[2] < each <= marks[3]] == []
        assert len(self.rows) == min(marks[3], RECORDS) - min(marks[2], RECORDS)
        assert self.stream.readers == int(self.cursor.reader_open) <= 1


TestEveryOrderOfEvents = EveryOrderOfEvents.TestCase
"""Without it a reader that raised behind its advance, or a consumer that failed, could leave records out."""


def _read() -> Cursor:
    cursor = Cursor(at(3))
    cursor.reader_opened()
    cursor.batch_read(at(6))
    return cursor


def _out() -> Cursor:
    cursor = _read()
    cursor.rows_delivered(at(6))
    return cursor


def _done() -> Cursor:
    cursor = _out()
    cursor.consumer_acknowledged(at(5))
    return cursor


def _ended() -> Cursor:
    cursor = _out()
    cursor.consumer_acknowledged(at(6))
    cursor.batch_read(SHARD_END, (Shard("child"),))
    cursor.rows_delivered(SHARD_END)
    cursor.consumer_acknowledged(SHARD_END)
    return cursor


@pytest.mark.parametrize(
    ("cursor", "flags", "order"),
    [
        (_done, {"lost": True, "leaving": True}, Leave()),
        (_ended, {"lost": True}, Leave()),
        (_out, {"leaving": True}, Wait()),
        (_done, {"leaving": True}, Wait()),
        (_read, {"leaving": True, "expired": True}, Release(at(3))),
        (_ended, {"leaving": True}, Release(at(6))),
        (_ended, {"expired": True}, End((Shard("child"),))),
        (_done, {"expired": True}, Checkpoint(at(5))),
        (_done, {"write": False, "expired": True}, Wait()),
        (_done, {"write": False}, Read()),
        (_read, {"expired": True}, Wait()),
        (_read, {}, Deliver()),
        (_read, {"free": False}, Read()),
        (_read, {"free": False, "room": False}, Wait()),
        (lambda: Cursor(at(3)), {}, Open(at(3))),
        (lambda: Cursor(at(3)), {"room": False}, Wait()),
        (lambda: Cursor(at(3), until=at(3)), {}, Wait()),
        (lambda: Cursor(at(5), acknowledged=at(4), committed=at(2)), {}, Checkpoint(at(4))),
        (lambda: Cursor(at(5), acknowledged=at(4)), {}, Open(at(5))),
    ],
)
def test_each_line_of_the_table_of_orders(cursor: Callable[[], Cursor], flags: dict[str, bool], order: object) -> None:
    """Without it a line of the table could change places with another, and say something else than the code."""
    assert cursor().order(**flags) == order


def test_more_than_was_delivered_cannot_be_acknowledged() -> None:
    """Without it a consumer could move the checkpoint past records that it was never handed."""
    cursor = _read()
    with pytest.raises(ValueError, match=r"^cursor: .*6.* is acknowledged, and only what lies before .*3.* was"):
        cursor.consumer_acknowledged(at(6))
    assert (cursor.acknowledged, cursor.committed) == (at(3), at(3))


@pytest.mark.parametrize("marks", [{"acknowledged": 6}, {"committed": 6}, {"acknowledged": 2, "committed": 3}])
def test_marks_that_are_not_in_order_are_refused(marks: dict[str, int]) -> None:
    """Without it a reading could begin behind what its lease says is done."""
    with pytest.raises(ValueError, match="must not fall in this order"):
        Cursor(at(5), **{name: at(place) for name, place in marks.items()})


def test_no_event_moves_a_mark_back() -> None:
    """Without it an older word of a source, a consumer or a lease could have records read and written again."""
    cursor = _done()
    cursor.batch_read(at(4))
    cursor.rows_delivered(at(4))
    cursor.consumer_acknowledged(at(4))
    cursor.checkpoint_stored(at(5))
    cursor.checkpoint_stored(at(4))
    assert (cursor.committed, cursor.acknowledged, cursor.delivered, cursor.read) == (at(5), at(5), at(6), at(6))
