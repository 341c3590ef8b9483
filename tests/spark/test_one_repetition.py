"""A range is read again, one read at a time: how long the replay waits, when it gives up, and what it records."""

import logging
from collections.abc import Callable, Iterable, Mapping
from threading import Barrier, Event, current_thread
from typing import cast

import pytest
from attrs import Factory, define, evolve, field

from leasehold.adapters.sources.protocol import Batch, Record, Source
from leasehold.adapters.spark import replay
from leasehold.adapters.spark.kinesis.rows import make_columns
from leasehold.adapters.spark.lease_loop import Watchdog
from leasehold.adapters.spark.offsets import Offset, Range, format_range
from leasehold.adapters.spark.replay import (
    UNREAD_ANNOTATION,
    RangeReplay,
    ReplayContext,
    find_delivered_keys,
    replay_batch,
)
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position, Shard
from leasehold.errors import OutcomeUnknown, SourceError, SourceUnavailable, StoreError, Trimmed
from leasehold.stores.embedded.memory import MemoryStore
from leasehold.stores.protocol import Capabilities, Lost, Outcome
from leasehold.stores.writes import AnnotateLease, ClaimLease, CreateLease, DeleteLease, ReleaseLease, RenewLease, Write

PAUSE = 0.25
WANTED = Range(TRIM_HORIZON, Position("3"), 1)
"""The range that `ann` read under epoch 1, from the claim right after the lease was created."""

ALL_READ = Batch((), None, 0.0, 0.01)
BEHIND = Batch((), None, 3.0, 0.01)
MUTE = Batch((), None, None, 0.01)
"""Empty reads, which mean that the source has no more records, that it has more records, or that it did not respond."""

Answer = Batch | Exception


def records(*numbers: int) -> Batch:
    """Return a read that contains these records."""
    batch_records = tuple(Record(b"r", str(number)) for number in numbers)
    return Batch(batch_records, batch_records[-1].position, 0.0, 0.01)


def _turns(responses: Iterable[Answer]) -> list[Answer]:
    return list(responses)


@define
class Script:
    """A source whose readers return these responses in turn. After the last one, reads get no response.

    opened    the lease and the start position of each opening
    mute      the shard whose readers never respond
    together  openings wait for as many others
    """

    answers: list[Answer] = field(converter=_turns)
    refused: int = 0
    opened: list[tuple[Lease, Position]] = Factory(list)
    mute: str = ""
    together: Barrier | None = None
    threads: list[str] = Factory(list)
    closed: int = 0
    asked: int = 0
    on_latest: Callable[[int], None] = field(default=lambda _: None)
    stream: str = ""

    def open(self, lease: Lease, start: Position) -> "Script":
        """Open a reader that continues the script."""
        self.opened.append((lease, start))
        self.threads.append(current_thread().name)
        if self.together is not None:
            self.together.wait(10.0)
        if self.refused:
            self.refused -= 1
            raise SourceUnavailable("no link")
        return Script([]) if lease.key == self.mute else self

    def read(self) -> Batch:
        response_or_fault = self.answers.pop(0) if self.answers else MUTE
        if isinstance(response_or_fault, Exception):
            raise response_or_fault
        return response_or_fault

    def shards(self) -> tuple[Shard, ...]:
        """Return two shards with their hash ranges."""
        return (Shard("a", hash_range=(0, 7)), Shard("b", hash_range=(8, 15)))

    def latest(self, lease: Lease) -> Position:
        assert lease.key == "a"
        self.asked += 1
        self.on_latest(self.asked)
        return Position("3")

    def close(self) -> None:
        self.closed += 1


class Waits(Event):
    """Records the requested waits without waiting. `on_wait` is called with the number of each wait."""

    def __init__(self, on_wait: Callable[[int], None] = lambda _: None) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.at = on_wait

    def wait(self, timeout: float | None = None) -> bool:
        """Return immediately."""
        assert timeout is not None
        assert len(self.seconds) < 2000, "it waits for ever"
        self.seconds.append(timeout)
        self.at(len(self.seconds))
        return self.is_set()


class Counted(MemoryStore):
    """A store that counts reads, and can make some reads and writes fail."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        super().__init__()
        self.readings = self.failing = self.refusing = 0
        self.annotations: list[Write] = []

    def get(self, keys: Iterable[str], *, stale_ok: bool = False) -> tuple[Lease, ...]:
        """Read as the store does, or fail."""
        self.readings += 1
        if self.failing:
            self.failing -= 1
            raise StoreError("the table is away")
        return super().get(keys, stale_ok=stale_ok)

    def write(self, write: Write) -> Outcome:
        """Write as the store does, or reject the write."""
        if isinstance(write, AnnotateLease):
            self.annotations.append(write)
            if self.refusing:
                self.refusing -= 1
                return Lost(write.lease.key, write.lease)
        return super().write(write)


@define
class Trial:
    """A lease that `ann` holds under epoch 1, with all that a test needs to replay a range of the lease."""

    script: Script
    exclusive: bool = False
    store: Counted = Factory(Counted)
    waits: Waits = Factory(Waits)
    wanted: Range = WANTED

    def __attrs_post_init__(self) -> None:
        self.store.write(CreateLease(Lease("a")))
        self.store.write(ClaimLease(self.row, "ann"))

    @property
    def row(self) -> Lease:
        """Return the stored lease."""
        return MemoryStore.get(self.store, ["a"])[0]

    @property
    def place(self) -> ReplayContext:
        return ReplayContext(self.store, cast("Source", self.script), make_columns("fake"), self.exclusive)

    def repetition(self) -> RangeReplay:
        return RangeReplay(self.row, self.wanted, self.place, self.waits)

    def claim(self, worker: str) -> None:
        """Let another worker take the lease."""
        self.store.write(ClaimLease(self.row, worker))

    def renew(self) -> None:
        self.store.write(RenewLease(self.row))


def numbers(repetition: RangeReplay) -> list[str] | None:
    """Return the sequence numbers of the range, or None if the replay gave up."""
    rows = repetition.read_rows()
    return None if rows is None else list(rows["sequenceNumber"].to_pylist())


def test_range_is_read_in_pieces_exactly_to_its_end() -> None:
    """The range ends exactly where the next batch begins, so no row is missing or doubled."""
    wanted_range = evolve(WANTED, epoch=7)
    trial = Trial(Script([records(1), ALL_READ, records(2), records(3, 4), records(5)]), wanted=wanted_range)
    range_replay = trial.repetition()
    assert range_replay.problem == "the source has not responded"
    assert numbers(range_replay) == ["1", "2", "3"]
    ((lease, start),) = trial.script.opened
    assert (lease, start, trial.script.closed) == (evolve(trial.row, epoch=7), TRIM_HORIZON, 1)
    assert len(trial.script.answers) == 1
    assert trial.waits.seconds == [PAUSE] * 3
    assert range_replay.answered_reads == 3
    assert trial.row.annotation(UNREAD_ANNOTATION) is None


def test_range_that_ends_within_an_aggregated_record_is_cut_there() -> None:
    """The next batch begins with the other user records."""
    user_records = tuple(Record(b"r", "3", sub) for sub in range(3))
    script = Script([records(1), Batch(user_records, user_records[-1].position, 0.0, 0.01)])
    rows = Trial(script, wanted=evolve(WANTED, ends=Position("3", 1))).repetition().read_rows()
    assert rows is not None
    assert rows["sequenceNumber"].to_pylist() == ["1", "3", "3"]
    assert rows["subSequenceNumber"].to_pylist() == [0, 0, 1]


def test_longer_pause_of_a_reader_is_honored() -> None:
    """Kinesis allows five reads per second and shard, which all workers share."""
    trial = Trial(Script([evolve(ALL_READ, wait_seconds=7.0), evolve(BEHIND, wait_seconds=0.5), records(3)]))
    assert numbers(trial.repetition()) == ["3"]
    assert trial.waits.seconds == [7.0, 0.5]


def test_unreachable_stream_is_reopened_with_growing_waits() -> None:
    """The waits grow so that a throttled service is not flooded. The reason explains what the batch waits for."""
    trial = Trial(Script([SourceUnavailable("slow down")] * 40 + [records(3)], refused=1))
    range_replay = trial.repetition()
    assert numbers(range_replay) == ["3"]
    assert range_replay.problem == "slow down"
    assert (len(trial.script.opened), trial.script.closed, range_replay.answered_reads) == (42, 41, 0)
    assert all(PAUSE <= seconds <= 10.0 for seconds in trial.waits.seconds)
    assert len(trial.waits.seconds) == 41
    assert max(trial.waits.seconds) > 3 * PAUSE


def test_throttled_read_is_reported_as_throttled() -> None:
    range_replay = Trial(Script([evolve(MUTE, fault="throttled"), records(3)])).repetition()
    assert numbers(range_replay) == ["3"]
    assert range_replay.problem == "throttled"


def test_response_resets_the_waits_for_faults() -> None:
    faults: list[Answer] = [SourceUnavailable("slow down")]
    trial = Trial(Script([*faults * 40, ALL_READ, *faults, records(3)]))
    assert numbers(trial.repetition()) == ["3"]
    assert trial.waits.seconds[40:] == [PAUSE, pytest.approx(PAUSE, abs=2 * PAUSE)]


def test_range_is_given_up_after_half_a_minute_at_the_tip() -> None:
    trial = Trial(Script([ALL_READ] * 200))
    range_replay = trial.repetition()
    assert numbers(range_replay) is None
    assert trial.waits.seconds == [PAUSE] * 120
    assert (range_replay.answered_reads, len(trial.script.answers), trial.script.closed) == (121, 79, 1)
    assert trial.script.asked == 0
    assert trial.row.annotation(UNREAD_ANNOTATION) == format_range(WANTED) == '["TRIM_HORIZON","3",1]'


@pytest.mark.parametrize("between", [[BEHIND], [records(1)]], ids=["more is there", "a record came"])
def test_silence_is_counted_from_the_last_sign_of_more(between: list[Answer]) -> None:
    """In a sparse part of a shard many reads are empty, although the range continues."""
    trial = Trial(Script([*[ALL_READ] * 120, *between, *[ALL_READ] * 120, records(3)]))
    range_replay = trial.repetition()
    sequence_numbers = numbers(range_replay)
    assert sequence_numbers is not None
    assert sequence_numbers[-1] == "3"
    assert range_replay.answered_reads == 241


def test_unanswered_read_is_neither_silence_nor_a_response() -> None:
    """Only responses of the source count toward giving up. A throttled read is not a response."""
    trial = Trial(Script([MUTE] * 500 + [records(3)]))
    range_replay = trial.repetition()
    assert numbers(range_replay) == ["3"]
    assert (range_replay.answered_reads, trial.script.asked, trial.store.readings) == (0, 0, 0)


def test_trimmed_range_is_given_up_at_once_and_noted() -> None:
    """Spark commits a batch without the range. The annotation shows the next run that the range was not delivered."""
    trial = Trial(Script([Trimmed("it begins at 9")]))
    assert numbers(trial.repetition()) is None
    assert trial.row.annotation(UNREAD_ANNOTATION) == format_range(WANTED)
    offset = Offset(1, (("a", WANTED), ("b", WANTED)))
    assert find_delivered_keys(offset, trial.place) == {"b"}


def test_cancelled_repetition_stops_reading() -> None:
    trial = Trial(Script([records(1)]))
    trial.waits.at = lambda number: trial.waits.set() if number == 3 else None
    assert numbers(trial.repetition()) == ["1"]
    assert (len(trial.waits.seconds), trial.script.closed) == (3, 1)


# A shard that only one reader may read


def test_silent_range_of_a_living_owner_is_given_up() -> None:
    """The query starts while another worker reads the partition, and does not disturb that worker's writes."""
    trial = Trial(Script([ALL_READ] * 200), exclusive=True)
    trial.claim("bob")
    range_replay = trial.repetition()
    trial.waits.at = lambda _: trial.renew()
    assert numbers(range_replay) is None
    assert trial.waits.seconds == [PAUSE] * 20  # 5 s; the read after them is one too many
    assert (range_replay.answered_reads, trial.script.asked) == (0, 0)
    assert (trial.store.annotations, trial.row.annotation(UNREAD_ANNOTATION)) == ([], None)


def test_owner_is_checked_every_five_seconds_by_its_own_writes() -> None:
    """The first write of a new owner is not a sign of life of the former owner."""
    trial = Trial(Script([]), exclusive=True)
    trial.waits.at = lambda number: trial.claim(f"w-{number}")
    assert numbers(trial.repetition()) is None
    assert (len(trial.waits.seconds), trial.script.asked) == (120, 1)
    assert trial.store.readings == 5 + 1  # at 5.25, 10.5, 15.75, 21 and 26.25 s, and once for the annotation


@pytest.mark.parametrize("failing", [0, 2], ids=["its row stands still", "its row cannot be read"])
def test_silent_range_of_an_inactive_owner_is_given_up_after_a_response(failing: int) -> None:
    trial = Trial(Script([]), exclusive=True)
    trial.store.failing = failing
    assert numbers(trial.repetition()) is None
    assert (len(trial.waits.seconds), trial.script.asked) == (120, 1)
    assert trial.row.annotation(UNREAD_ANNOTATION) == format_range(trial.wanted)


def test_silent_range_without_a_row_is_given_up_after_a_response() -> None:
    trial = Trial(Script([]), exclusive=True)
    range_replay = trial.repetition()
    trial.store.write(DeleteLease(trial.row))
    assert numbers(range_replay) is None
    assert trial.script.asked == 1


def test_write_to_a_row_without_an_owner_is_no_sign_of_life() -> None:
    """If the partition of a range was released, the range is awaited, because it can still be read."""
    trial = Trial(Script([MUTE] * 40 + [records(3)]), exclusive=True)
    trial.store.write(ReleaseLease(trial.row, "ann"))
    trial.waits.at = lambda _: trial.renew()
    assert numbers(trial.repetition()) == ["3"]


def test_silent_range_is_awaited_while_the_source_is_unreachable() -> None:
    trial = Trial(Script([MUTE] * 130 + [records(3)]), exclusive=True)

    def raise_unavailable(_: int) -> None:
        raise SourceUnavailable("no link to the hub")

    trial.script.on_latest = raise_unavailable
    range_replay = trial.repetition()
    assert numbers(range_replay) == ["3"]
    assert (range_replay.problem, trial.script.asked, trial.store.readings) == ("no link to the hub", 1, 5 + 0)


def test_silent_range_is_asked_about_every_half_minute() -> None:
    """A service in trouble gets one request per half minute, not one per read."""
    trial = Trial(Script([]), exclusive=True)

    def raise_twice(count: int) -> None:
        if count < 3:
            raise SourceUnavailable("no link to the hub")

    trial.script.on_latest = raise_twice
    assert numbers(trial.repetition()) is None
    assert (len(trial.waits.seconds), trial.script.asked, trial.store.readings) == (120 + 121 + 121, 3, 3 * 5 + 1)


def test_record_ends_the_silence_of_a_link() -> None:
    """If a slow partition delivers a record every twenty seconds, the range is read to its end."""
    trial = Trial(Script([*[MUTE] * 100, records(1), *[MUTE] * 100, records(3)]), exclusive=True)
    range_replay = trial.repetition()
    assert numbers(range_replay) == ["1", "3"]
    assert (range_replay.answered_reads, trial.script.asked, trial.store.readings) == (1, 0, 4 + 4)


# What the next run learns


def test_rejected_note_is_retried() -> None:
    """A renewal by the owner may come in between, and make the first attempt fail."""
    trial = Trial(Script([Trimmed("gone")]))
    trial.store.refusing = 2
    assert numbers(trial.repetition()) is None
    assert trial.row.annotation(UNREAD_ANNOTATION) == format_range(trial.wanted)
    assert (len(trial.store.annotations), trial.store.readings) == (3, 3)


def test_note_rejected_three_times_fails_the_batch() -> None:
    """A batch fails if its missing range cannot be noted, because the next run would take the range for delivered."""
    trial = Trial(Script([Trimmed("gone")]))
    trial.store.refusing = 3
    with pytest.raises(
        OutcomeUnknown, match="lease a: the note that a range could not be repeated was rejected 3 times"
    ):
        trial.repetition().read_rows()
    assert trial.row.annotation(UNREAD_ANNOTATION) is None


def test_deleted_lease_needs_no_note() -> None:
    trial = Trial(Script([Trimmed("gone")]))
    range_replay = trial.repetition()
    trial.store.write(DeleteLease(trial.row))
    assert numbers(range_replay) is None


@pytest.mark.parametrize(
    ("exclusive", "counts", "epoch", "was_delivered"),
    [
        (False, True, 1, True),  # any reader may read, so the batch was complete under any owner
        (True, True, 1, True),
        (True, True, 2, False),  # another reader may have been connected
        (True, False, 1, False),  # without an owner count, another reader may have been connected
        (False, False, 2, True),
    ],
)
def test_range_is_trusted_only_if_no_other_worker_read_it_alone(
    *, exclusive: bool, counts: bool, epoch: int, was_delivered: bool
) -> None:
    """If another worker may have read a range alone, it does not count as delivered.

    Otherwise, rows could be lost or doubled.
    """
    trial = Trial(Script([]), exclusive=exclusive)
    trial.store.capabilities = Capabilities(counts_owners=counts)
    for key in ("a", "gone"):
        shard_range = Range(TRIM_HORIZON, Position("3"), epoch if key == "a" else 7)
        offset = Offset(1, ((key, shard_range),))
        counts_as_delivered = was_delivered or (key == "gone" and counts)
        assert find_delivered_keys(offset, trial.place) == (frozenset([key]) if counts_as_delivered else set())


# A whole batch


def test_batch_omits_only_the_ranges_given_up() -> None:
    """A sink that has a batch without a range skips a repetition with the range, so the range stays left out."""
    trial = Trial(Script([records(3)]))
    trial.store.write(CreateLease(Lease("b")))
    trial.store.write(AnnotateLease(trial.store.get(["b"])[0], UNREAD_ANNOTATION, format_range(trial.wanted)))
    empty_range = Range(Position("3"), Position("3"), 1)
    offset = Offset(1, (("a", trial.wanted), ("b", trial.wanted), ("c", empty_range)))
    batch = replay_batch(offset, trial.place, Watchdog(10.0))
    assert {key: rows["sequenceNumber"].to_pylist() for key, rows in batch.items()} == {"a": ["3"]}
    assert [lease.key for lease, _ in trial.script.opened] == ["a"]


def test_given_up_range_is_excluded_from_the_batch() -> None:
    trial = Trial(Script([Trimmed("gone")]))
    assert replay_batch(Offset(1, (("a", trial.wanted),)), trial.place, Watchdog(10.0)) == {}


class RecordingWatchdog(Watchdog):
    """Records the calls, and ends the wait after a number of them."""

    def __init__(self, call_limit: int) -> None:
        super().__init__(10.0)
        self.most, self.told = call_limit, list[tuple[dict[str, str], int]]()

    def check_progress(self, awaited: Mapping[str, str], answered_reads: int) -> None:
        self.told.append((dict(awaited), answered_reads))
        if len(self.told) >= self.most:
            raise TimeoutError("enough")


@pytest.mark.parametrize(("limit", "lines"), [(10, 0), (11, 1), (25, 2)])
def test_wait_names_what_is_left_and_logs_every_tenth_look(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, limit: int, lines: int
) -> None:
    """A long wait is logged, but not at every check, and the error that ends the wait names the shard."""
    monkeypatch.setattr(replay, "POLL_SECONDS", 0.0)
    trial, watchdog = Trial(Script([MUTE] * 2000)), RecordingWatchdog(limit)
    with caplog.at_level(logging.WARNING), pytest.raises(TimeoutError, match="enough"):
        replay_batch(Offset(1, (("a", trial.wanted),)), trial.place, watchdog)
    assert watchdog.told == [({"a": "the source has not responded"}, 0)] * limit
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["the repeated batch waits for a (the source has not responded)"] * lines


def test_sixteen_ranges_are_read_in_parallel_by_named_threads() -> None:
    keys = [f"shard-{number:02}" for number in range(16)]
    script = Script([records(3)] * 16, together=Barrier(16))
    trial = Trial(script)
    batch = replay_batch(Offset(1, tuple((key, trial.wanted) for key in keys)), trial.place, Watchdog(10.0))
    assert sorted(batch) == keys
    assert {name.rpartition("_")[0] for name in script.threads} == {"leasehold-replay"}


def test_lasting_fault_ends_the_wait_for_other_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "POLL_SECONDS", 600.0)  # the fault is noticed without another check
    trial = Trial(Script([SourceError("denied")], mute="b"))
    with pytest.raises(SourceError, match="denied"):
        replay_batch(Offset(1, (("a", trial.wanted), ("b", trial.wanted))), trial.place, Watchdog(10.0))


@pytest.mark.parametrize("failing", [0, 1], ids=["one row is there", "none can be read"])
def test_shard_is_opened_by_its_row_or_by_the_listing(failing: int) -> None:
    """The reader of an event hub, or of an old table, is opened with the shard's hash range."""
    trial = Trial(Script([records(3), records(3), records(3)]))
    trial.store.failing = failing
    row = Lease("a", hash_range=(0, 7), epoch=1) if failing else trial.row
    offset = Offset(1, tuple((key, trial.wanted) for key in "abc"))
    assert set(replay_batch(offset, trial.place, Watchdog(10.0))) == {"a", "b", "c"}
    opened_leases = sorted((lease for lease, _ in trial.script.opened), key=lambda lease: lease.key)
    assert opened_leases == [row, Lease("b", hash_range=(8, 15), epoch=1), Lease("c", epoch=1)]
