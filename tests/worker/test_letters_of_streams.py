"""Replays of dead letters in a stream, simulated without threads: the outcome of each, and the end of the replay."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define, evolve, field
from dead_letter_samples import FULL
from replayed_dead_letters import dead_letter

from leasehold.adapters.consumer.dead_letters.dead_letter import DeadLetterEntry
from leasehold.adapters.consumer.dead_letters.replaying import (
    OVER_PAUSE_SECONDS,
    UNKNOWN_LAG_SECONDS,
    DeadLetterReader,
    DeadLetterSource,
    ReplayVerdict,
    replay_stream,
)
from leasehold.adapters.consumer.handling import Delivery, Handling
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.worker.progress import PROGRESS_ANNOTATION, Progress
from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, Lease, Position
from leasehold.errors import DeadLetterError

STREAM_REPLAY = "leasehold.adapters.consumer.dead_letters.replaying"


@define
class Stream:
    """A replacement for the worker that reads a stream of dead letters. The test dispatches the batches."""

    runs: Callable[["Stream"], bool] = lambda _stream: True
    put: list[DeadLetterEntry] = field(factory=list)
    logged: list[str] = field(factory=list)
    delivered: list[DeadLetterEntry] = field(factory=list)
    faults: list[Exception | None] = field(factory=list)
    closed: bool = False
    handling: Handling | None = None
    looks: list[Callable[[], bool]] = field(factory=list)
    finished: list[Callable[[Lease], bool]] = field(factory=list)
    worker: Any = field(factory=lambda: SimpleNamespace(me="r-1"))
    seconds: list[float] = field(factory=list)
    held: bool = True
    checkpoints: list[Position] = field(factory=list)

    def deliver(self, entry: DeadLetterEntry) -> Exception | None:
        """Record the dead letter, and return the next fault, or raise it if it is a DeadLetterError."""
        self.delivered.append(entry)
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, DeadLetterError):
            raise fault
        return fault

    def sink(self) -> Any:  # noqa: ANN401  a `DeadLetterSink`
        """Return a sink that accepts dead letters unless the stream is closed."""

        def put(entry: DeadLetterEntry) -> None:
            if self.closed:
                raise DeadLetterError("no such stream")
            self.put.append(entry)

        return SimpleNamespace(put=put)

    def dispatch(self, *lines: bytes) -> None:
        """Dispatch a batch with one record per line. The sequence numbers start with 1000."""
        records = tuple(Record(line, str(1000 + index)) for index, line in enumerate(lines))

        def checkpoint(position: Position) -> bool:
            self.checkpoints.append(position)
            return self.held

        holding: Any = SimpleNamespace(checkpoint=checkpoint)
        assert self.handling is not None
        self.handling.handler(Delivery(records, records[-1].position, None, holding))

    def replay(self, monkeypatch: pytest.MonkeyPatch, now: float = 9.0084) -> ReplayVerdict:
        def runner(worker: object, handling: Handling) -> "Stream":
            assert worker is self.worker
            self.handling = handling
            return self

        def run_until(run: object, is_over: Callable[[], bool], *, look_seconds: float) -> bool:
            assert run is self
            self.seconds.append(look_seconds)
            self.looks.append(is_over)
            return self.runs(self)

        def is_read(worker: object, is_finished: Callable[[Lease], bool]) -> bool:
            assert worker is self.worker
            self.finished.append(is_finished)
            return True

        monkeypatch.setattr(f"{STREAM_REPLAY}.Runner", runner)
        monkeypatch.setattr(f"{STREAM_REPLAY}.run_until", run_until)
        monkeypatch.setattr(f"{STREAM_REPLAY}.is_read", is_read)
        monkeypatch.setattr(f"{STREAM_REPLAY}.time", SimpleNamespace(time=lambda: now))
        tell = lambda name, why: self.logged.append(f"{name}: {why}")  # noqa: E731  a one-line log function
        return replay_stream(self.worker, self.sink(), self.deliver, tell, look_seconds=0.5)


def test_replayed_dead_letters_are_counted_by_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    def runs(stream: Stream) -> bool:
        stream.dispatch(dead_letter(1).line, dead_letter(2).line, b"mine")
        stream.dispatch(dead_letter(3).line, dead_letter(4).line, b"{}")
        return True

    stream = Stream(runs, faults=[None, ValueError("again"), None, OSError("too")])
    assert stream.replay(monkeypatch) == ReplayVerdict(done=2, failed=2, strange=2)
    assert stream.delivered == [dead_letter(number) for number in (1, 2, 3, 4)]
    failed_again = [
        evolve(dead_letter(2), error="ValueError", text="again"),
        evolve(dead_letter(4), error="OSError", text="too"),
    ]
    assert stream.put == [evolve(entry, alone=1, worker="r-1", time_ms=9008) for entry in failed_again]
    assert stream.logged == [
        "the dead letter at 1001: ValueError: again",
        "the dead letter at 1002: it is not a dead letter: it is not JSON",
        "the dead letter at 1001: OSError: too",
        "the dead letter at 1002: it is not a dead letter: data: it is missing",
    ]
    assert stream.checkpoints == [Position(str(1000 + index)) for index in (0, 1, 2, 0, 1, 2)]
    assert stream.seconds == [0.5]


def test_dead_letter_of_a_lost_lease_is_counted_by_the_present_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """If two replays run concurrently, only the current owner of a lease counts its dead letters and continues."""

    def runs(stream: Stream) -> bool:
        stream.dispatch(dead_letter(1).line)
        stream.held = False
        stream.dispatch(dead_letter(2).line, dead_letter(3).line)
        return True

    stream = Stream(runs)
    assert stream.replay(monkeypatch) == ReplayVerdict(done=1)
    assert stream.delivered == [dead_letter(1), dead_letter(2)]


def test_dead_letter_that_cannot_be_put_back_ends_the_replay_cleanly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dead letter is not checkpointed, and the worker exits, which releases its leases."""

    def runs(stream: Stream) -> bool:
        with pytest.raises(SystemExit) as exc_info:
            stream.dispatch(dead_letter(1).line)
        assert exc_info.value.code == 1
        assert stream.checkpoints == []
        raise exc_info.value

    with pytest.raises(DeadLetterError, match=r"^no such stream$"):
        Stream(runs, faults=[ValueError()], closed=True).replay(monkeypatch)
    delivery_error = DeadLetterError("nobody to hand it to")
    with pytest.raises(DeadLetterError) as exc_info:
        Stream(runs, faults=[delivery_error]).replay(monkeypatch)
    assert exc_info.value is delivery_error


def test_replay_ended_by_a_handler_or_signal_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay is reported as complete only if it is, because users may then delete the stream."""

    def raise_system_exit(_stream: Stream) -> bool:
        raise SystemExit(3)

    with pytest.raises(SystemExit) as exc_info:
        Stream(raise_system_exit).replay(monkeypatch)
    assert exc_info.value.code == 3
    with pytest.raises(DeadLetterError, match=r"^it was stopped before all dead letters were replayed"):
        Stream(lambda _stream: False).replay(monkeypatch)


def progress_row(**fields: Any) -> Lease:  # noqa: ANN401  the fields of Progress
    """Return a row with a progress annotation. `fields` override its values; by default, its owner wrote it at 9 s."""
    progress = Progress(**{"at": 9.0, "owner": "r-2", "end": True, "read": 9.0, **fields})
    return Lease("p", owner="r-2", annotations=((PROGRESS_ANNOTATION, progress.note),))


@pytest.mark.parametrize(
    ("row", "over"),
    [
        (progress_row(), True),
        (progress_row(read=9.1), True),
        (progress_row(read=8.9), False),
        (progress_row(read=None), False),
        (progress_row(end=False), False),
        (progress_row(owner="r-1"), False),
        (Lease("p", owner="r-2"), False),
        (Lease("p", checkpoint=SHARD_END), True),
        (evolve(progress_row(end=False), checkpoint=SHARD_END), True),
    ],
)
def test_shard_is_over_if_its_owner_wrote_so_since_the_replay_began(
    row: Lease, over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(lambda stream: stream.looks[0]())
    stream.replay(monkeypatch, now=9.0)
    (is_finished,) = stream.finished
    assert is_finished(row) is over


@pytest.mark.parametrize("read", [None, 0.5])
def test_unread_shard_is_not_over(read: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(lambda stream: stream.looks[0]())
    stream.replay(monkeypatch, now=0.75)
    assert stream.finished[0](progress_row(read=read)) is False


@define
class Script:
    """A source that is also its own reader, and returns the given batches."""

    answers: list[Batch]
    opened: list[tuple[Lease, Position]] = field(factory=list)
    stream: str = ""
    closed: bool = False

    def open(self, lease: Lease, start: Position) -> "Script":
        self.opened.append((lease, start))
        return self

    def read(self) -> Batch:
        return self.answers.pop(0)

    def close(self) -> None:
        self.closed = True


def rows(*workers: str) -> tuple[Record, ...]:
    """Return records with dead letters that were written by these workers. For "", the record is not a dead letter."""
    lines = (evolve(FULL, worker=name).line if name else b"mine" for name in workers)
    return tuple(Record(line, str(1 + index)) for index, line in enumerate(lines))


def reader(*answers: Batch) -> tuple[DeadLetterReader, Script]:
    """Return a reader of dead letters for a replay by worker r-1, and the source of the reader."""
    scripted_source = Script(list(answers))
    source: Any = scripted_source
    return DeadLetterSource(source, "r-1").open(Lease("p"), TRIM_HORIZON), scripted_source


def test_reading_ends_before_the_first_dead_letter_put_back_by_this_replay() -> None:
    records = rows("w-1", "", "w-2", "r-1", "w-1", "r-1")
    dead_letter_reader, scripted_source = reader(Batch(records, Position("9"), 4.0, 0.2, ended=True, in_columns=tuple))
    assert scripted_source.opened == [(Lease("p"), TRIM_HORIZON)]
    batch = dead_letter_reader.read()
    assert batch == Batch(records[:3], Position("3"), 0.0, 0.2, size=batch.size)
    assert batch.in_columns is None
    assert [dead_letter_reader.read() for _ in range(2)] == [Batch((), None, 0.0, OVER_PAUSE_SECONDS)] * 2
    dead_letter_reader.close()
    assert scripted_source.closed


def test_read_that_begins_with_our_own_dead_letter_returns_nothing() -> None:
    """The checkpoint stays before a dead letter that this replay has put back."""
    dead_letter_reader, _ = reader(Batch(rows("r-1", "w-1"), None, 4.0, 0.2))
    batch = dead_letter_reader.read()
    assert (batch.records, batch.read_to, batch.behind_seconds) == ((), None, 0.0)


@pytest.mark.parametrize(("behind", "expected"), [(0.0, UNKNOWN_LAG_SECONDS), (None, UNKNOWN_LAG_SECONDS), (4.0, 4.0)])
def test_read_with_dead_letters_does_not_show_the_end(behind: float | None, expected: float) -> None:
    batch, empty_batch = Batch(rows("w-1", "w-2"), None, behind, 0.2, ended=True), Batch((), Position("9"), behind, 0.2)
    dead_letter_reader, _ = reader(batch, empty_batch)
    assert dead_letter_reader.read() == evolve(batch, behind_seconds=expected)
    assert dead_letter_reader.read() is empty_batch
