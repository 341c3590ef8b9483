"""The status of a lease and of a group: a word and a sentence, derived from rows and from observed changes."""

import pytest
from attrs import evolve

from leasehold.adapters.consumer.status import (
    MEANINGS,
    NUMBERS,
    GroupWatch,
    LeaseLag,
    Status,
    confirmed,
    group_status,
    lag_of,
    status_of,
    statuses_of,
)
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.worker.progress import (
    LAG_STEP_SECONDS,
    LAG_STEPS,
    PROGRESS_ANNOTATION,
    Progress,
    ProgressMeter,
    is_lag_growing,
    progress_of,
    tolerated_unread_seconds,
)
from leasehold.balancer.contradictions import CONTRADICTION
from leasehold.balancer.model import SHARD_END, Lease, Position

NOW = 1_700_000_000.0
TIP = Progress(NOW - 5, "a", behind=0.0, end=True, read=NOW - 5, done=NOW - 5, tried=NOW - 5, lease=10.0)
"""The progress of a lease whose owner has read to the tip of the shard, and wrote this five seconds ago."""

LATE = evolve(TIP, behind=70.0, end=False, read=NOW - 70, done=NOW - 70)


def row(progress: Progress | None, owner: str | None = "a", idle: float = 0.0) -> Lease:
    """Return a lease whose row has this progress annotation."""
    return Lease(
        "s-0", owner=owner, idle=idle, annotations=() if progress is None else ((PROGRESS_ANNOTATION, progress.note),)
    )


LONE = "a owns it and has not been heard of"


@pytest.mark.parametrize(
    ("lease", "watched", "status"),
    [
        (row(TIP), 0.0, Status("OK", "read to the tip")),
        (row(evolve(TIP, behind=3.25, end=False)), 0.0, Status("OK", "3.2 s behind")),
        (row(evolve(TIP, behind=None, end=False)), 0.0, Status("OK", "read, how far behind is not known")),
        (row(evolve(TIP, behind=None, end=False, read=None)), 0.0, Status("OK", "not read yet")),
        (
            row(evolve(TIP, behind=9.0, end=False, grows=True)),
            0.0,
            Status("BEHIND", "9.0 s behind, and falling further behind for two minutes"),
        ),
        (
            row(LATE),
            0.0,
            Status("UNREAD", "a owns it, and has not read it for 70 s, without giving a reason"),
        ),
        (row(evolve(LATE, fault="throttled")), 0.0, Status("STALLED", "it has not moved for 70 s: throttled")),
        (
            row(evolve(LATE, fault="throttled", work=NOW - 60)),
            0.0,
            Status("HUNG", "its handler has been at work for 60 s, without an end or a checkpoint"),
        ),
        (
            row(evolve(LATE, fault="throttled", work=NOW - 3)),
            0.0,
            Status("STALLED", "it has not moved for 70 s: throttled"),
        ),
        # The owner's last sign of life was half a minute ago, and it had last read the shard 21 s before that.
        (
            row(evolve(LATE, at=NOW - 30, read=NOW - 51, done=NOW - 51)),
            0.0,
            Status("ORPHAN", f"{LONE} for 30 s, and no other worker takes it"),
        ),
        # If leases last two minutes, their owner renews and annotates them less often.
        (row(evolve(LATE, lease=120.0)), 0.0, Status("OK", "70.0 s behind")),
        # An old annotation in a single look means that the owner is dead. If the row has changed since the first look,
        # the owner is alive and its clock is wrong.
        (row(evolve(TIP, at=NOW - 55)), 0.0, Status("ORPHAN", f"{LONE} for 55 s, and no other worker takes it")),
        (row(evolve(TIP, at=NOW - 55, done=NOW - 56), idle=2.0), 30.0, Status("OK", "read to the tip")),
        (row(TIP, idle=51.0), 60.0, Status("ORPHAN", f"{LONE} for 51 s, and no other worker takes it")),
        (row(TIP, owner="b"), 0.0, Status("OK", "its owner changed recently")),
        (
            row(evolve(LATE, fault="its handler raised X"), owner="b"),
            0.0,
            Status("STALLED", "it has not moved for 70 s: its handler raised X"),
        ),
        # An excluded lease is STALLED during the exclusion, and until another worker had time to read the table. Then,
        # it is an ORPHAN.
        (
            row(evolve(LATE, fault="its handler raised X", aside=NOW + 30), owner=None, idle=float("inf")),
            0.0,
            Status("STALLED", "it has not moved for 70 s: its handler raised X; a put it aside until 22:13:50 UTC"),
        ),
        (
            row(evolve(LATE, at=NOW - 90, fault="its handler raised X", aside=NOW - 30), owner="b"),
            0.0,
            Status("STALLED", "it has not moved for 70 s: its handler raised X"),
        ),
        (
            row(evolve(LATE, at=NOW - 120, fault="its handler raised X", aside=NOW - 60), owner=None),
            0.0,
            Status(
                "ORPHAN", "nobody owns it for 120 s, and no other worker takes it; the last fault: its handler raised X"
            ),
        ),
        (row(TIP, owner=None), 0.0, Status("OK", "nobody owns it: a worker will find it at its next look")),
        (
            row(evolve(TIP, at=NOW - 51), owner=None, idle=float("inf")),
            0.0,
            Status("ORPHAN", "nobody owns it for 51 s, and no other worker takes it"),
        ),
        (
            row(None, owner=None, idle=float("inf")),
            0.0,
            Status("UNKNOWN", "nobody owns it; one look does not tell for how long: watch it (--watch)"),
        ),
        (
            row(None, owner=None, idle=20.0),
            20.0,
            Status(
                "UNKNOWN",
                "nobody owns it for 20 s as far as was observed; a worker should renew or take it within 50 s",
            ),
        ),
        (
            row(None, owner=None, idle=51.0),
            51.0,
            Status("ORPHAN", "nobody owns it for 51 s, and no other worker takes it"),
        ),
        (row(None), 0.0, Status("UNKNOWN", "a tells nothing of its reading: watch it (--watch)")),
        # Our annotation is outdated, because a Java worker has owned the lease since. That it has now released the
        # lease is no reason for an alarm.
        (
            row(evolve(TIP, at=NOW - 900), owner=None, idle=1.0),
            60.0,
            Status(
                "UNKNOWN", "nobody owns it for 1 s as far as was observed; a worker should renew or take it within 50 s"
            ),
        ),
        (evolve(row(LATE, owner=None), checkpoint=SHARD_END), 0.0, Status("OK", "read to its end")),
    ],
)
def test_status_of_a_lease_by_one_look(lease: Lease, watched: float, status: Status) -> None:
    assert status_of(lease, LeaseLag(), NOW, 10.0, watched_seconds=watched) == status


def test_contradiction_and_wait_for_parents_come_first() -> None:
    message = "its shard is open, and has no children"
    ended_lease, late_lease = Lease("s-0", checkpoint=SHARD_END, annotations=((CONTRADICTION, message),)), row(LATE)
    statuses = statuses_of([ended_lease], {}, NOW, 10.0)
    assert statuses == {"s-0": Status("UNREAD", message)}
    child, parent = evolve(late_lease, parents=("p",)), Lease("p", owner="a")
    lags = {"s-0": LeaseLag(), "p": LeaseLag()}
    child_status = statuses_of([child, parent], lags, NOW, 10.0)["s-0"]
    assert child_status == Status("OK", "its parents are not done: it is read after them")
    assert statuses_of([child, evolve(parent, checkpoint=SHARD_END)], lags, NOW, 10.0)["s-0"].word == "UNREAD"


def statuses_at_looks(lags: list[LeaseLag], checkpoint_moves: bool, seconds: float = 10.0) -> list[Status]:
    """Return the status at each look at a lease that a worker of another library renews.

    `seconds` is the time between looks.
    """
    watch, statuses = GroupWatch(), []
    for number, lag in enumerate(lags):
        lease = Lease("s-0", owner="java", checkpoint=Position(str(100 + number * checkpoint_moves)))
        watch = watch.after(number * seconds, [lease], {"s-0": lag})
        statuses.append(statuses_of([lease], {"s-0": lag}, NOW, 10.0, watch)["s-0"])
    return statuses


def test_status_of_a_foreign_lease_is_found_by_watching() -> None:
    statuses_without_lag = statuses_at_looks([LeaseLag()] * 8, checkpoint_moves=False)
    assert [status.word for status in statuses_without_lag] == ["UNKNOWN"] * 8
    assert (
        statuses_without_lag[3].says
        == "its checkpoint has not moved in 30 s; use --source to check the stream for waiting records"
    )
    assert statuses_at_looks([LeaseLag()] * 2, checkpoint_moves=True)[1] == Status("OK", "its checkpoint moves")
    assert statuses_at_looks([LeaseLag(events=7)] * 2, checkpoint_moves=True)[1] == Status(
        "OK", "its checkpoint moves; 7 events behind"
    )
    assert statuses_at_looks([LeaseLag(0.0, events=0)], checkpoint_moves=False) == [Status("OK", "read to the tip")]
    statuses_while_stuck = statuses_at_looks([LeaseLag(events=7)] * 7, checkpoint_moves=False)
    assert [status.word for status in statuses_while_stuck] == ["UNKNOWN"] * 6 + ["STALLED"]
    assert statuses_while_stuck[-1].says == "7 events behind, and its checkpoint has not moved for 60 s"
    statuses_while_lagging = statuses_at_looks(
        [LeaseLag(float(10 + number)) for number in range(13)], checkpoint_moves=True
    )
    assert {status.word for status in statuses_while_lagging[1:10]} == {"OK"}
    assert statuses_while_lagging[-1] == Status("BEHIND", "22.0 s behind, and falling further behind for two minutes")


def test_checkpoint_that_moved_once_does_not_stay_ok() -> None:
    watch = GroupWatch()
    for number in range(8):
        lease = Lease("s-0", owner="java", checkpoint=Position("100" if number == 0 else "101"))
        watch = watch.after(10.0 * number, [lease], {"s-0": LeaseLag()})
        status = statuses_of([lease], {"s-0": LeaseLag()}, NOW, 10.0, watch)["s-0"]
        assert status.word == ("UNKNOWN" if number in {0, 7} else "OK")


def test_old_annotation_is_not_attributed_to_the_present_owner() -> None:
    progress = Progress(
        NOW, "a", behind=2.0, read=NOW - 1, done=NOW - 2, tried=NOW, fault="its handler raised ValueError"
    )
    watch, status_words = GroupWatch(), []
    for seconds, owner in ((0.0, "a"), (10.0, None), (75.0, "a")):
        lease = row(progress, owner)
        watch = watch.after(seconds, [lease], {"s-0": LeaseLag(2.0)})
        status_words.append(statuses_of([lease], {"s-0": LeaseLag(2.0)}, NOW + seconds, 10.0, watch)["s-0"].word)
    assert status_words == ["OK", "OK", "STALLED"]


def test_frequent_looks_take_no_more_memory() -> None:
    watch, lease = GroupWatch(), Lease("s-0", owner="java", checkpoint=Position("100"))
    for number in range(3_000):
        watch = watch.after(number / 10, [lease], {"s-0": LeaseLag()})
    assert len(watch.leases["s-0"].samples) < 250
    assert 119 < watch.leases["s-0"].unchanged_seconds <= 121


@pytest.mark.parametrize(
    ("lags", "grows"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], True),
        ([1.0, 2.0, 3.0, 4.0, 5.0], False),  # too short to decide
        ([0.0, 2.0, 3.0, 4.0, 5.0, 6.0], False),  # it was at the tip
        ([1.0, 2.0, 3.0, 3.0, 5.0, 6.0], False),  # it kept up for a while
        ([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], True),
        ([60.0, 50.0, 40.0, 30.0, 20.0, 10.0], False),
    ],
)
def test_lag_grows_only_if_it_rises_all_the_time(lags: list[float], *, grows: bool) -> None:
    """A group that is catching up or waiting for a slow batch must not be reported as too small."""
    assert is_lag_growing([(number * LAG_STEP_SECONDS, lag) for number, lag in enumerate(lags)]) == grows
    # One slow response within a step is not growth.
    assert not is_lag_growing(
        [
            (number * LAG_STEP_SECONDS + part_of_step, lag * (1 - part_of_step))
            for number, lag in enumerate(lags)
            for part_of_step in (0, 1)
        ]
    )
    meter = ProgressMeter(Lease("s-0"), "a")
    for number in range(len(lags) * 20):
        meter.read(Batch((), None, lags[number // 20], 1.0), float(number))
    assert meter.progress(float(len(lags) * 20), NOW).grows == grows


def test_stale_limit_follows_the_lease_time_and_covers_annotations() -> None:
    """Leases that last two minutes are renewed and annotated every minute, and must not be UNREAD in between."""
    assert [tolerated_unread_seconds(seconds) for seconds in (1.0, 10.0, 30.0, 120.0)] == [50.0, 50.0, 50.0, 102.0]


def test_standstill_is_counted_across_owners() -> None:
    first_meter = ProgressMeter(Lease("s-0"), "a", 0.0, 10.0)
    first_meter.read(Batch((Record(b"x", "7"),), Position("7"), 4.0, 0.2), 1.0)
    first_meter.handler_began(1.0)
    first_meter.failed("its handler raised KeyError", 2.0)
    first_meter.handler_ended()
    progress = first_meter.progress(31.0, NOW + 31)
    assert (progress.done, progress.read, progress.tried, progress.work, progress.fault) == (
        NOW,
        NOW + 1,
        NOW + 2,
        None,
        "its handler raised KeyError",
    )
    second_meter = ProgressMeter(Lease("s-0", annotations=((PROGRESS_ANNOTATION, progress.note),)), "b", 40.0, 10.0)
    assert second_meter.progress(45.0, NOW + 45).done == NOW
    second_meter.read(Batch((Record(b"x", "7"),), Position("7"), 50.0, 0.2), 46.0)
    second_meter.handler_began(46.0)
    second_meter.part_done(47.0)
    later_progress = second_meter.progress(48.0, NOW + 48)
    assert (later_progress.done, later_progress.work, later_progress.fault) == (
        NOW + 47,
        NOW + 47,
        "its handler raised KeyError",
    )
    second_meter.handler_ended()
    second_meter.done(50.0)
    assert (second_meter.progress(50.0, NOW + 50).done, second_meter.progress(50.0, NOW + 50).fault) == (NOW + 50, "")


def test_failed_read_does_not_count_as_a_read() -> None:
    meter = ProgressMeter(Lease("s-0"), "a", 0.0)
    meter.read(Batch((), None, 0.0, 1.0), 1.0)
    meter.done(1.0)
    for second in range(2, 100):
        meter.read(Batch((), None, None, 1.0, fault="asked to slow down"), float(second))
        meter.done(float(second))
    progress = meter.progress(100.0, NOW + 100)
    assert (progress.read, progress.done, progress.tried) == (NOW + 1, NOW + 1, NOW + 99)
    assert (progress.behind, progress.end, progress.fault) == (99.0, False, "asked to slow down")
    meter.excused("its parents are not done", 101.0)
    assert (meter.progress(101.0, NOW).fault, meter.progress(101.0, NOW).done) == ("", NOW)
    assert progress_of(
        Lease("s-0", annotations=((PROGRESS_ANNOTATION, meter.progress(101.0, NOW).note),))
    ) == meter.progress(101.0, NOW)


def test_long_fault_is_truncated() -> None:
    """A longer fault could make the row larger than the store allows, so that the lease could not be renewed."""
    meter = ProgressMeter(Lease("s-0"), "a")
    meter.failed("x" * 9_999, 1.0)
    assert meter.progress(1.0, NOW).fault == "x" * 200


def test_group_status_is_that_of_its_worst_lease() -> None:
    """The status of an empty or unreadable table is UNKNOWN, not OK."""
    ok_status, behind_status, orphan_status = (
        Status("OK", "read"),
        Status("BEHIND", "9 s behind"),
        Status("ORPHAN", "nobody owns it"),
    )
    assert group_status({"s-0": ok_status, "s-1": ok_status}) == Status(
        "OK", "2 leases are read, and do not fall behind"
    )
    status = group_status(
        {"s-0": behind_status, "s-2": orphan_status, "s-1": orphan_status, "s-3": Status("UNKNOWN", "?")}
    )
    assert status == Status("ORPHAN", "2 of 4 leases, s-1 first: nobody owns it")
    assert group_status({"s-0": behind_status, "s-3": Status("UNKNOWN", "?")}).word == "BEHIND"
    assert group_status({}) == Status("UNKNOWN", "the table has no leases")
    assert group_status({"s-0": ok_status}, "down") == Status("UNKNOWN", "the table cannot be read: down")


def test_status_numbers_are_those_documented() -> None:
    """Alarms and scripts depend on these numbers, which are metric values and exit statuses."""
    expected_numbers = {"OK": 0, "UNKNOWN": 3, "BEHIND": 4, "STALLED": 5, "HUNG": 6, "UNREAD": 7, "ORPHAN": 8}
    assert (expected_numbers, list(MEANINGS)) == (NUMBERS, list(expected_numbers))
    assert (LAG_STEPS * LAG_STEP_SECONDS, Status("HUNG", "x").as_json()) == (120.0, {"status": "HUNG", "says": "x"})


def test_overdue_lease_shows_the_time_since_its_last_renewal() -> None:
    """After a worker is killed, the lag of its leases grows with the clock from the first missed renewal."""
    for idle, seconds, end, status_word, message in (
        (5.0, 0.0, True, "OK", "read to the tip"),
        (7.0, 5.0, False, "OK", "read to the tip 5 s ago; a should have renewed it since"),
        (8.5, 5.0, False, "UNKNOWN", "a owns it and has not renewed it for 8 s; a living owner does within 8 s"),
        (float("inf"), 5.0, False, "OK", "read to the tip"),
    ):
        lease = row(TIP, idle=idle)
        lag = lag_of(lease, NOW, 50.0)
        assert (lag.seconds, lag.end) == (seconds, end)
        assert status_of(lease, lag, NOW, 10.0, watched_seconds=7.0) == Status(status_word, message)


@pytest.mark.parametrize(
    ("at", "owner", "idle", "watched", "expected"),
    [
        (NOW - 5, "a", 0.0, 0.0, True),  # a living owner renews within that time
        (NOW - 7, "a", 0.0, 0.0, False),  # its owner may be dead, or may have written only checkpoints since
        (NOW + 60, "a", 0.0, 0.0, False),  # its owner's clock is ahead of ours, so the age is unknown
        (NOW - 7, "a", 3.0, 0.0, True),  # the store keeps the age of the row
        (NOW - 7, "a", 0.0, 2.0, True),  # it was renewed while we watched
        (NOW - 7, "a", 5.0, 5.0, False),
        (NOW - 7, "a", 8.5, 8.5, True),  # not renewed in time, as the status says
        (NOW - 5, "b", 0.0, 0.0, False),  # the annotation is not from the present owner
        (NOW - 70, "a", 0.0, 0.0, True),  # a single look is enough to call it an ORPHAN
    ],
)
def test_single_look_needs_a_recent_annotation_to_show_a_living_owner(
    at: float, owner: str, idle: float, watched: float, *, expected: bool
) -> None:
    lease = row(evolve(TIP, at=at, done=at), owner, idle)
    status = status_of(lease, LeaseLag(), NOW, 10.0, watched_seconds=watched)
    assert confirmed(lease, status, NOW, 10.0, watched) == expected
