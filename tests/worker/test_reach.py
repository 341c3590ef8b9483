"""The lag that an owner writes to its row, and the lag that is computed from the rows of a listing."""

import json
import math

import pytest
from attrs import evolve, fields_dict
from virtual_fleet import FaultySource, FaultyStore, four_shards, member
from waiters import Clock

from leasehold.adapters.consumer.handler_consumer import handler_reader
from leasehold.adapters.consumer.handling import Handling
from leasehold.adapters.consumer.status import LeaseLag, fleet_lag, lag_of, lags_from_stream, lags_of
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.worker.progress import (
    ANNOTATE_SECONDS,
    FAULT_LENGTH,
    FIRST_ANNOTATION_SECONDS,
    LAG_STEP_SECONDS,
    LAG_STEPS,
    PROGRESS_ANNOTATION,
    SILENT_SECONDS,
    STUCK_READ_FAULT,
    Progress,
    ProgressMeter,
    progress_of,
)
from leasehold.balancer.model import LATEST, SHARD_END, Lease, Position, at_timestamp
from leasehold.errors import SourceUnavailable
from leasehold_lab.simulator.world.world import ListSource, ShardRecords, create_records

NOW = 1_700_000_000.0
BATCH = Batch((Record(b"x", "7", arrived=NOW - 5),), Position("7"), 4.0, 0.2)
EMPTY = Batch((), None, 0.0, 0.2)


def meter(lease: Lease | None = None) -> ProgressMeter:
    """Return a meter of worker a that writes annotations. Its wall clock starts at `NOW`, and its other clock at 0."""
    moment[0] = 0.0
    progress_meter = ProgressMeter(lease or Lease("s-0"), "a")
    progress_meter.enable_annotations("vm-7", lambda: NOW + moment[0], 0.0)
    return progress_meter


moment = [0.0]


def progress_at(progress_meter: ProgressMeter, now: float) -> Progress:
    """Return the progress that the meter would write to the row at this time."""
    moment[0] = now
    progress = progress_of(Lease("s-0", annotations=progress_meter.annotations(now)))
    assert progress is not None
    return progress


class Columns(Batch):
    """A batch of records in columns, as for Spark. Counting the records creates no objects."""

    @property
    def count(self) -> int:
        """The number of rows."""
        return 3


def test_columnar_batch_is_measured_like_any_other() -> None:
    progress_meter = meter()
    progress_meter.read(Columns((), Position("7"), 4.0, 0.2), 0.0)
    assert progress_at(progress_meter, 10.0).behind == 14.0
    progress_meter.done(moment[0])
    assert progress_at(progress_meter, 10.0).behind == 4.0


def test_running_batch_counts_as_unread_until_done() -> None:
    progress_meter = meter()
    progress_meter.read(BATCH, 0.0)
    assert progress_at(progress_meter, 10.0).behind == 15.0
    progress_meter.done(moment[0])
    progress_when_done = progress_at(progress_meter, 10.0)
    assert (
        progress_when_done.behind,
        progress_when_done.end,
        progress_when_done.arrived,
        progress_when_done.read,
        progress_when_done.host,
    ) == (
        4.0,
        False,
        NOW - 5,
        NOW,
        "vm-7",
    )
    progress_meter.read(EMPTY, 11.0)
    progress_at_tip = progress_at(progress_meter, 12.0)
    assert (progress_at_tip.behind, progress_at_tip.end, progress_at_tip.arrived) == (0.0, True, NOW - 5)


@pytest.mark.parametrize(("wait", "grows"), [(SILENT_SECONDS + 1, True), (0.0, False)])
def test_lag_is_the_wait_of_the_first_unfinished_record(wait: float, grows: bool) -> None:
    """The lag is the age of the first unfinished record even if the service reports that the read is at the tip."""
    wall = [NOW]
    progress_meter = ProgressMeter(Lease("s-0"), "a", 0.0)
    progress_meter.enable_annotations("vm", lambda: wall[0], 0.0)
    progress_meter.read(Batch((Record(b"x", "7", arrived=NOW - wait),), Position("7"), 0.0, 0.2), 0.0)
    for step in range(1, LAG_STEPS + 1):
        now = step * LAG_STEP_SECONDS
        wall[0] = NOW + now
        # If `grows`, a step of 20 s handles only the records of 2 s. Otherwise, it handles all records.
        progress_meter.part_done(now, wall[0] - wait - (0.9 * now if grows else 0.0))
    assert progress_meter.progress(now, wall[0]).grows == grows


def test_age_of_the_first_record_lasts_until_it_is_handled() -> None:
    """Neither a failed read, an empty response nor a change of owner resets the age."""
    first_meter = meter()
    first_meter.read(BATCH, 0.0)
    first_meter.failed("its handler raised X", 30.0)
    first_meter.read(evolve(EMPTY, behind_seconds=3.0), 31.0)
    first_meter.done(31.0)
    first_meter.read(evolve(EMPTY, behind_seconds=None, fault="throttled"), 32.0)
    progress_at_release = progress_at(first_meter, 40.0)
    assert (progress_at_release.behind, progress_at_release.oldest, progress_at_release.fault) == (
        45.0,
        NOW - 5,
        "throttled",
    )
    second_meter = ProgressMeter(Lease("s-0", annotations=((PROGRESS_ANNOTATION, progress_at_release.note),)), "b", 0.0)
    second_meter.enable_annotations("vm", lambda: NOW + 100.0, 0.0)
    assert second_meter.progress(0.0, NOW + 100.0).behind == 105.0
    second_meter.read(evolve(EMPTY, behind_seconds=3.0), 1.0)
    second_meter.done(1.0)
    progress = second_meter.progress(2.0, NOW + 102.0)
    assert (progress.behind, progress.fault, progress.done) == (107.0, "throttled", progress_at_release.done)
    second_meter.read(BATCH, 3.0)
    second_meter.part_done(4.0, NOW + 104.0)
    assert second_meter.progress(5.0, NOW + 105.0).oldest is not None
    second_meter.done(5.0)
    progress = second_meter.progress(5.0, NOW + 105.0)
    assert (progress.behind, progress.oldest, progress.fault) == (4.0, None, "")


def test_response_at_the_tip_ends_an_age_inherited_from_an_earlier_owner() -> None:
    progress_at_release = Progress(NOW - 50, "a", behind=10.0, oldest=NOW - 60, fault="x", done=NOW - 70)
    progress_meter = meter(Lease("s-0", annotations=((PROGRESS_ANNOTATION, progress_at_release.note),)))
    assert progress_meter.progress(0.0, NOW).behind == 60.0
    progress_meter.read(EMPTY, 1.0)
    progress_meter.done(1.0)
    progress = progress_at(progress_meter, 1.0)
    assert (progress.behind, progress.oldest, progress.fault) == (0.0, None, "")


def test_response_that_does_not_end_is_a_fault() -> None:
    progress_meter = meter()
    progress_meter.call_began(0.0)
    assert progress_at(progress_meter, SILENT_SECONDS).fault == ""
    assert progress_at(progress_meter, SILENT_SECONDS + 1).fault == STUCK_READ_FAULT
    progress_meter.read(EMPTY, SILENT_SECONDS + 2)
    assert progress_at(progress_meter, 100.0).fault == ""
    progress_meter.call_began(100.0)
    progress_meter.failed("throttled", 101.0)
    assert progress_at(progress_meter, 200.0).fault == "throttled"


def test_request_under_way_is_not_a_read() -> None:
    progress_meter = meter()
    progress_meter.read(EMPTY, 0.0)
    progress_meter.done(0.0)
    progress_meter.read(evolve(EMPTY, behind_seconds=None, answered=False), 50.0)
    progress_meter.done(50.0)
    progress = progress_at(progress_meter, 50.0)
    assert (progress.read, progress.done, progress.behind) == (NOW, NOW, 50.0)


def test_unread_shard_falls_behind() -> None:
    progress_meter = meter()
    progress_meter.read(EMPTY, 0.0)
    assert progress_at(progress_meter, SILENT_SECONDS - 1).behind == 0.0
    assert progress_at(progress_meter, 100.0).behind == 100.0


def test_no_time_is_written_unless_requested() -> None:
    """A simulated worker must not write real times. A reader that has not read anything also writes an annotation."""
    assert ProgressMeter(Lease("s-0"), "a").annotations(1.0) == ()
    assert not ProgressMeter(Lease("s-0"), "a").annotation_due(1_000.0)
    progress_meter = meter()
    assert (
        progress_meter.annotation_due(FIRST_ANNOTATION_SECONDS - 1),
        progress_meter.annotation_due(FIRST_ANNOTATION_SECONDS),
    ) == (
        False,
        True,
    )
    progress_at(progress_meter, FIRST_ANNOTATION_SECONDS)
    next_due = FIRST_ANNOTATION_SECONDS + ANNOTATE_SECONDS
    assert (progress_meter.annotation_due(next_due - 1), progress_meter.annotation_due(next_due)) == (False, True)


def test_finished_handler_is_no_longer_at_work() -> None:
    for end_work in (ProgressMeter.handler_ended, lambda finished_meter: finished_meter.done(2.0)):
        progress_meter = meter()
        progress_meter.handler_began(1.0)
        assert progress_at(progress_meter, 2.0).work == NOW + 1.0
        end_work(progress_meter)
        assert progress_at(progress_meter, 3.0).work is None


def test_moves_are_counted_across_owners() -> None:
    first_progress = Progress(NOW, "b", moves=2)
    row = Lease("s-0", owner="b", idle=1.0, annotations=((PROGRESS_ANNOTATION, first_progress.note),))
    for worker, moves in (("b", 2), ("a", 3)):
        progress_meter = ProgressMeter(row, worker)
        progress_meter.enable_annotations("vm", lambda: NOW, 0.0)
        progress_meter.read(EMPTY, 0.0)
        assert progress_at(progress_meter, 0.0).moves == moves
    assert lag_of(evolve(row, owner="a"), NOW, 10.0).moves == 3


@pytest.mark.parametrize(
    "note",
    [
        "",
        "x",
        "[]",
        "{}",
        '{"at": "now", "owner": "a"}',
        '{"more": 1}',
        '{"at": 1, "owner": "a", "fault": 7}',
        '{"at": 1, "owner": "a", "grows": 1.5}',
        '{"at": 1, "owner": "a", "done": -1}',
        '{"at": NaN, "owner": "a"}',
        '{"at": 1, "owner": 7}',
        '{"at": 1, "owner": "a", "moves": 1.5}',
        "[" * 9_999,
    ],
)
def test_unreadable_annotation_has_no_meaning(note: str) -> None:
    """Any program with access to the table may have written an unreadable annotation."""
    assert progress_of(Lease("s-0", annotations=((PROGRESS_ANNOTATION, note),))) is None


def row(owner: str | None, progress: Progress, idle: float = 1.0) -> Lease:
    """Return a lease whose row has this progress annotation."""
    return Lease("s-0", owner=owner, idle=idle, annotations=((PROGRESS_ANNOTATION, progress.note),))


RECENT = Progress(NOW - 10, "a", "vm-7", 1, behind=2.0, end=False, arrived=NOW - 12, read=NOW - 10, done=NOW - 10)


@pytest.mark.parametrize(
    ("lease", "lag"),
    [
        (row("a", RECENT), LeaseLag(2.0, age=2.0, host="vm-7", moves=1)),
        (row("a", evolve(RECENT, behind=0.0, end=True)), LeaseLag(0.0, end=True, age=2.0, host="vm-7", moves=1)),
        (row(None, RECENT), LeaseLag(12.0, age=2.0, moves=1)),
        (row("a", RECENT, idle=99.0), LeaseLag(12.0, age=2.0, host="vm-7", moves=1)),
        (row("a", evolve(RECENT, at=NOW, end=True, done=NOW - 60)), LeaseLag(2.0, age=12.0, host="vm-7", moves=1)),
        (row("a", evolve(RECENT, at=NOW - 27, done=NOW - 27)), LeaseLag(29.0, host="vm-7", moves=1, age=0.0)),
        (row("java", evolve(RECENT, at=NOW - 90)), LeaseLag(moves=2)),
        (Lease("s-0", owner="java", idle=1.0), LeaseLag()),
        (Lease("s-0"), LeaseLag()),
    ],
)
def test_row_shows_lag(lease: Lease, lag: LeaseLag) -> None:
    """The last good values of a lease are no longer shown if the lease is not read."""
    assert lag_of(lease, NOW, 10.0) == lag


@pytest.mark.parametrize(
    ("lease", "at_least"),
    [
        (row("a", RECENT), False),
        (row("a", evolve(RECENT, read=NOW - 10 - SILENT_SECONDS)), False),
        (row("a", evolve(RECENT, read=NOW - 11 - SILENT_SECONDS)), True),
        (row("a", evolve(RECENT, read=None)), True),
        # The first unhandled record and its age are known, so the lag is exact.
        (row("a", evolve(RECENT, read=NOW - 90, oldest=NOW - 91)), False),
        (row("a", evolve(RECENT, behind=None, read=None)), False),
        # The lease has no owner, so no request was made since the last read.
        (row(None, RECENT), False),
        (row(None, evolve(RECENT, at=NOW - 90, read=NOW - 90)), True),
        (row("a", evolve(RECENT, at=NOW - 90, read=NOW - 90), idle=99.0), True),
        (Lease("s-0", owner="java", idle=1.0), False),
    ],
)
def test_lag_is_a_lower_bound_while_the_stream_is_silent(lease: Lease, at_least: bool) -> None:
    """A lag that includes a time without responses is marked as a lower bound wherever it is shown."""
    lag = lag_of(lease, NOW, 10.0)
    total_lag = fleet_lag({"s-0": lag, "s-1": LeaseLag(1.0)})
    assert (lag.at_least, lag.as_json().get("at_least", False), total_lag.at_least) == (at_least,) * 3


def test_application_lag_is_that_of_its_worst_lease() -> None:
    rows = [
        evolve(row("a", RECENT), key="s-0"),
        evolve(row(None, RECENT), key="s-1"),
        Lease("s-2", owner="j", idle=1.0),
    ]
    total_lag = fleet_lag(lags_of([*rows, Lease("s-3", checkpoint=SHARD_END)], NOW, 10.0))
    assert (total_lag.most, total_lag.total) == (12.0, 14.0)


def test_renewal_carries_the_annotation_only_where_annotations_are_free() -> None:
    """Annotations that look like renewals, as those on blobs do, are not written."""
    clock, store = Clock(), FaultyStore()
    source = ListSource(four_shards())
    source.shard_logs["s-0"] = ShardRecords(create_records(3), size=20)
    driven_worker = member(store, source, clock)
    driven_worker.run(60)
    holding = driven_worker.worker.holdings[0]
    holding.progress.enable_annotations("vm-7", lambda: NOW, clock.now)
    reader = handler_reader(driven_worker.worker, holding, Handling(lambda _batch: None))
    for _ in range(3):
        reader.step(clock.now)
    assert progress_of(store.get(["s-0"])[0]) is None
    clock.now += ANNOTATE_SECONDS
    driven_worker.worker.renew(clock.now)
    progress = progress_of(store.get(["s-0"])[0])
    assert progress is not None
    assert (progress.owner, progress.host, progress.read) == (holding.lease.owner, "vm-7", NOW - ANNOTATE_SECONDS)


def test_stream_is_asked_for_lag_that_no_row_shows() -> None:
    java_lease = Lease("s-0", owner="java", checkpoint=Position("10"))
    assert lags_from_stream(FaultySource(four_shards(), present=Position("12")), [java_lease], {"s-0": LeaseLag()}) == {
        "s-0": LeaseLag(None, 2)
    }
    owner_lags = {"s-0": LeaseLag(3.0)}
    assert lags_from_stream(FaultySource(four_shards(), present=Position("12")), [java_lease], owner_lags) == owner_lags
    source = FaultySource(four_shards(), present=at_timestamp(round(NOW * 1000)))
    waiting_records = [record._replace(arrived=NOW - 30) for record in create_records(3)]
    source.shard_logs["s-0"] = ShardRecords(waiting_records, size=20)
    lags = lags_from_stream(source, [evolve(java_lease, checkpoint=Position("100"))], {"s-0": LeaseLag()})
    assert lags["s-0"].seconds == 30.0
    assert [reader.closed for reader in source.readers] == [True]
    # No worker has read the shard yet, so its lag cannot be measured from LATEST.
    unknown_lags = {"s-0": LeaseLag()}
    assert lags_from_stream(source, [evolve(java_lease, checkpoint=LATEST)], unknown_lags) == unknown_lags
    assert len(source.readers) == 1


def test_lag_is_unknown_until_a_read_shows_it() -> None:
    progress_meter = meter()
    assert progress_meter.behind(SILENT_SECONDS) is None
    progress_meter.read(Batch((), None, None, 0.2), 1.0)
    assert progress_meter.behind(1.0 + SILENT_SECONDS) is None
    progress_meter.read(EMPTY, 41.0)
    assert progress_meter.behind(41.0) == 0.0


@pytest.mark.parametrize("read", [True, False])
def test_lag_grows_if_a_stream_falls_silent_before_its_tip(read: bool) -> None:
    """The lag is at least the time since the last response or the claim, and is marked as a lower bound."""
    progress_meter = meter()
    if read:
        progress_meter.read(Batch((), None, None, 0.2), 0.0)
        progress_meter.done(0.0)
    progress_meter.failed("throttled", 20.0)
    annotation = progress_at(progress_meter, 60.0)
    lag = lag_of(row("a", annotation), NOW + 60, 10.0)
    assert (annotation.behind, lag.seconds, lag.at_least) == (60.0, 60.0, True)


def test_record_without_lag_has_its_age() -> None:
    """If a response contains no lag, the lag is the age of its first record."""
    progress_meter = meter()
    progress_meter.read(evolve(BATCH, behind_seconds=None), 0.0)
    annotation = progress_at(progress_meter, 10.0)
    assert (annotation.behind, lag_of(row("a", annotation), NOW + 10, 10.0).at_least) == (15.0, False)


def test_lag_of_an_owner_that_never_read_counts_from_its_claim() -> None:
    first_progress = progress_at(meter(), 10.0)
    assert first_progress.behind is None
    released_lease = row(None, first_progress)
    assert [lag_of(released_lease, NOW + seconds, 10.0).seconds for seconds in (SILENT_SECONDS, 50.0)] == [None, 50.0]
    assert lag_of(released_lease, NOW + 50.0, 10.0).at_least
    second_meter = ProgressMeter(released_lease, "b", 0.0)
    second_meter.enable_annotations("vm", lambda: NOW + 100.0, 0.0)
    assert second_meter.behind(0.0) == 100.0


def test_shard_that_waits_for_its_parents_has_no_lag() -> None:
    """The records of the shard must not be read before those of its parents, so they do not count as unread."""
    progress_meter = meter()
    progress_meter.excused("its parents are not done", 0.0)
    annotation = progress_at(progress_meter, 500.0)
    assert (annotation.behind, lag_of(row(None, annotation), NOW + 900, 10.0).seconds) == (None, None)
    progress_meter.failed("throttled", 520.0)
    assert progress_at(progress_meter, 520.0).behind == 520.0


def test_failed_read_for_a_lag_leaves_no_open_reader() -> None:
    """The other leases are still asked for, but neither those that have ended nor those that are known."""

    def fail_once(_batch: Batch) -> None:
        if len(source.readers) == 1:
            raise SourceUnavailable("not now")

    source = FaultySource(four_shards(), present=at_timestamp(round(NOW * 1000)), on_read=fail_once)
    leases = [Lease(f"s-{number}", owner="java", checkpoint=Position("100")) for number in range(4)]
    lags = lags_from_stream(source, leases, {"s-0": LeaseLag(), "s-1": LeaseLag(), "s-2": LeaseLag(2.0)})
    assert (set(lags), lags["s-0"], lags["s-2"]) == ({"s-0", "s-1", "s-2"}, LeaseLag(), LeaseLag(2.0))
    assert [reader.closed for reader in source.readers] == [True, True]


def met(previous: Progress, wall: float = NOW, now: float = 0.0) -> ProgressMeter:
    """Return a meter of worker a, which took the lease at 0 s from the owner that wrote this progress."""
    progress_meter = ProgressMeter(row(None, previous), "a", 0.0, 10.0)
    progress_meter.enable_annotations("vm", lambda: wall, now)
    return progress_meter


def test_faults_of_the_previous_owner_stay_until_a_record_is_handled() -> None:
    previous = Progress(NOW, "b", fault="its handler raised X", dead_letter="the disk is full")
    for handle in (ProgressMeter.part_done, ProgressMeter.done):
        progress_meter = met(previous)
        progress_meter.read(BATCH, 1.0)
        progress = progress_meter.progress(1.0, NOW)
        assert (progress.cause, progress.lease) == ("its handler raised X; the disk is full", 10.0)
        handle(progress_meter, 2.0)
        assert progress_meter.progress(2.0, NOW).dead_letter == ""


def test_lag_continues_from_the_previous_owner_whose_clock_may_be_ahead() -> None:
    """The time since the note was written counts once, and no difference of clocks makes the lag shrink."""
    assert met(Progress(NOW - 10, "b", behind=10.0), NOW + 5, 5.0).behind(5.0) == 25.0
    assert met(Progress(NOW + 50, "b", behind=10.0)).behind(0.0) == 10.0
    assert met(Progress(NOW + 50, "b", oldest=NOW + 40)).behind(0.0) is None
    assert met(Progress(NOW + 50, "b", done=NOW + 40)).behind(SILENT_SECONDS + 1) == SILENT_SECONDS + 1


def test_silence_lasts_from_the_first_call_to_the_next_response() -> None:
    """Neither another call nor a failure ends the silence, and a reader without a connection makes no request."""
    progress_meter = meter()
    progress_meter.call_began(1.0)
    progress_meter.failed("throttled", 1.0)
    progress_meter.call_began(5.0)
    progress_meter.call_returned()
    assert (progress_meter.silent_since, progress_meter.failed_at, progress_meter.call_began_at) == (1.0, 1.0, None)
    progress_meter.call_began(6.0)
    progress_meter.read(EMPTY, 9.0)
    assert (progress_meter.silent_since, progress_meter.failed_at) == (None, -math.inf)
    assert (progress_meter.last_response_at, progress_meter.response_seconds) == (9.0, 8.0)
    progress_meter.call_began(10.0)
    progress_meter.read(evolve(EMPTY, answered=False), 11.0)
    assert (progress_meter.silent_since, progress_meter.call_began_at) == (None, None)


def test_shard_that_need_not_be_read_is_not_silent() -> None:
    progress_meter = meter()
    progress_meter.expect_response(1.0)
    assert progress_meter.silent_since == 1.0
    progress_meter.expect_no_response()
    silences = [progress_meter.silent_since]
    progress_meter.expect_response(2.0)
    progress_meter.excused("its parents are not done", 3.0)
    assert [*silences, progress_meter.silent_since] == [None, None]


def test_call_once_abandoned_stays_abandoned() -> None:
    """The reader must not deliver what a call returned after its lease was released."""
    progress_meter = meter()
    assert not progress_meter.abandon_call()
    progress_meter.call_began(1.0)
    assert progress_meter.abandon_call()
    progress_meter.call_returned()
    assert (progress_meter.abandon_call(), progress_meter.call_abandoned) == (True, True)


@pytest.mark.parametrize(
    ("owner", "read", "responded"),
    [("b", NOW - 10, True), ("b", NOW - 10.1, False), ("a", NOW - 1, False), ("b", None, False)],
)
def test_response_to_the_previous_owner_counts_for_a_while(owner: str, read: float | None, *, responded: bool) -> None:
    progress_meter = met(Progress(NOW, owner, read=read), NOW + 99.0, 99.0)
    assert progress_meter.has_responded_within(99.0, 10.0) is responded
    progress_meter.read(EMPTY, 100.0)
    assert progress_meter.has_responded_within(999.0, 10.0)


def test_end_of_a_shard_ends_the_age_of_its_records() -> None:
    progress_meter = met(Progress(NOW, "b", oldest=NOW - 60))
    progress_meter.read(Batch((), None, None, 0.2, ended=True), 1.0)
    assert progress_meter.progress(1.0, NOW).oldest is None


def test_records_that_wait_on_purpose_are_neither_stalled_nor_falling_behind() -> None:
    progress_meter = meter()
    arrived = Batch((Record(b"x", "7", arrived=NOW - 2 * SILENT_SECONDS),), Position("7"), 0.5, 0.2)
    for step in range(LAG_STEPS + 1):
        moment[0] = step * LAG_STEP_SECONDS
        progress_meter.read(arrived, moment[0], "it waits for more records")
    end = LAG_STEPS * LAG_STEP_SECONDS
    progress = progress_at(progress_meter, end)
    assert (progress.done, progress.excused, progress.grows) == (NOW + end, "it waits for more records", False)


def test_reason_of_a_wait_and_a_fault_replace_each_other() -> None:
    progress_meter = meter()
    progress_meter.failed("throttled", 1.0)
    progress_meter.dead_letter_failed("the disk is full", 1.0)
    progress_meter.excused("its parents are not done", 2.0)
    assert (progress_at(progress_meter, 2.0).cause, progress_at(progress_meter, 2.0).excused) == (
        "",
        "its parents are not done",
    )
    progress_meter.failed("throttled", 3.0)
    assert (progress_at(progress_meter, 3.0).cause, progress_at(progress_meter, 3.0).excused) == ("throttled", "")


def test_long_reasons_are_cut_so_that_they_fit_on_a_row() -> None:
    progress_meter = meter()
    progress_meter.failed("f" * 9_999, 1.0)
    progress_meter.dead_letter_failed("d" * 9_999, 1.0)
    progress = progress_at(progress_meter, 1.0)
    assert (progress.fault, progress.dead_letter) == ("f" * FAULT_LENGTH, "d" * FAULT_LENGTH)


def test_time_of_a_handler_starts_again_at_each_of_its_checkpoints() -> None:
    progress_meter = meter()
    progress_meter.part_done(1.0)
    assert progress_at(progress_meter, 1.0).work is None
    progress_meter.handler_began(2.0)
    progress_meter.part_done(5.0)
    assert progress_at(progress_meter, 6.0).work == NOW + 5.0


def test_record_is_at_least_as_old_as_the_stream_reports() -> None:
    """The clock of the machine may be behind that of the service."""
    progress_meter = meter()
    progress_meter.read(Batch((Record(b"x", "7", arrived=NOW + 50),), Position("7"), 4.0, 0.2), 0.0)
    progress_meter.part_done(1.0)
    assert progress_at(progress_meter, 1.0).oldest == NOW - 4.0


def test_smallest_lag_of_a_step_counts() -> None:
    """A slow response at the end of each step is no growth."""
    progress_meter = meter()
    for step in range(LAG_STEPS):
        for part_of_step, lag in ((0.0, 5.0), (0.9, 5.0 + step)):
            progress_meter.read(Batch((), None, lag, 0.2), (step + part_of_step) * LAG_STEP_SECONDS)
    assert not progress_at(progress_meter, LAG_STEPS * LAG_STEP_SECONDS).grows


@pytest.mark.parametrize("name", sorted({*fields_dict(Progress)}))
def test_field_of_the_wrong_type_makes_the_annotation_unreadable(name: str) -> None:
    """Rows with annotations of other programs must not break the listing of a table."""
    wrong_values = [["x"], {"x": 1}] if name in {"end", "grows"} else [["x"], True, 7 if name == "owner" else -1]
    for value in wrong_values:
        note = json.dumps({"at": 1.0, "owner": "a", name: value})
        assert progress_of(Lease("s-0", annotations=((PROGRESS_ANNOTATION, note),))) is None
