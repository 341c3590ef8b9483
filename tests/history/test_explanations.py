"""Waits and repetitions of a recorded run, each with a fault that explains it, or with none."""

from collections.abc import Sequence

import pytest
from attrs import evolve

from leasehold.balancer.model import TRIM_HORIZON
from leasehold_lab.judge.breach import Limits
from leasehold_lab.judge.events import Incident, ObservedRow, ReadingEvent, RunHistory, Sent
from leasehold_lab.judge.explanations import Explanations, RecordWait, verdict_on
from leasehold_lab.judge.tenures import by_shard, reading_of

LIMITS = Limits(wait_seconds=3.0, reach_seconds=10.0)
GAP = "unread: a record of s-0 waited for {} s from 20.000, of which {} s lie outside {}"


def begins(t: float, process: str, shard: str = "s-0") -> ReadingEvent:
    """A process begins to read."""
    return ReadingEvent(t, process, "initialize", shard)


def ends(t: float, process: str, how: str = "stopped") -> ReadingEvent:
    return ReadingEvent(t, process, how, "s-0")


def record(t: float, process: str, number: int, shard: str = "s-0") -> ReadingEvent:
    """It hands a record over."""
    return ReadingEvent(t, process, "record", shard, (number, 0), "k", f"digest {number}")


def sent(*times: float) -> list[Sent]:
    """Records that the stream acknowledged then."""
    return [Sent("k", number, f"digest {number}", t) for number, t in enumerate(times, 1)]


def history(
    events: Sequence[ReadingEvent], times: Sequence[float], *incidents: Incident, rows: Sequence[ObservedRow] = ()
) -> RunHistory:
    """What befell a fleet that was to hand over records of these times."""
    return RunHistory(
        sent=sent(*times),
        events=list(events),
        rows=list(rows),
        incidents=[Incident(-20, "start", "a"), Incident(-20, "start", "b"), *incidents],
        parents={"s-0": (), "s-1": ("s-0",)},
        end=100,
    )


def left_unread(*incidents: Incident, until: float = 40.0, rows: Sequence[ObservedRow] = ()) -> RunHistory:
    """The shard is left unread from 20 s on; then the other worker reads it."""
    events = [begins(0, "a#1"), record(10, "a#1", 1), begins(until, "b#1"), record(until, "b#1", 2)]
    return history(events, (9.0, 20.0), *incidents, rows=rows)


def said(run: RunHistory, limits: Limits = LIMITS) -> tuple[str, ...]:
    """The faults, but for their times."""
    return tuple(f"{fault.what}: {fault.why}" for fault in verdict_on(run, limits).faults)


def test_a_wait_within_the_limit_wants_no_fault() -> None:
    """Without it each batch that a busy machine hands over late would count as a gap."""
    assert said(left_unread(until=22.9)) == ()


@pytest.mark.parametrize(
    ("incident", "reached"),
    [
        (Incident(20, "crash", "a#1"), 30.0),
        (Incident(20, "nap", "a#1", 50), 30.0),
        (Incident(21, "leave", "b#1"), 31.0),
        (Incident(23, "trouble", "a", 7, "the store parted"), 40.0),
        (Incident(20, "trouble", "", 20, "a pause of the store"), 50.0),
        (Incident(22, "split", "s-0"), 32.0),
    ],
)
def test_a_gap_is_explained_by_what_befell_its_readers_or_everybody(incident: Incident, reached: float) -> None:
    """Without it a run with faults could only be judged by whoever compares times by hand.

    The wait may lie outside by three seconds in all, before the fault and beyond its reach.
    """
    assert said(left_unread(incident, until=reached + 2.9 - (incident.t - 20))) == ()
    (found,) = said(left_unread(incident, until=reached + 3.2))
    assert found.endswith(f"s lie outside {incident.note or f'{incident.what} {incident.subject}'}")


@pytest.mark.parametrize(
    "incidents",
    [
        (),
        (Incident(5, "crash", "a#1"),),
        (Incident(20, "crash", "c#1"),),
        (Incident(20, "trouble", "c", 20, "the store parted"),),
        (Incident(20, "split", "s-7"),),
        (Incident(20, "gone", "a#1"),),
    ],
)
def test_a_gap_that_no_fault_of_its_readers_explains_is_found(incidents: tuple[Incident, ...]) -> None:
    """Without it a shard that is held and not read would be put down to whatever else went wrong that day."""
    assert said(left_unread(*incidents)) == (GAP.format("20.0", "20.0", "all faults"),)


def test_a_nap_reaches_no_further_than_the_lease_of_the_sleeping_worker() -> None:
    """Without it nobody would have to take over from a worker for as long as it stands still."""
    found = said(left_unread(Incident(20, "nap", "a#1", 60), until=60.0))
    assert found == (GAP.format("40.0", "30.0", "nap a#1"),)


def test_faults_that_overlap_are_counted_once() -> None:
    """Without it ten faults at one moment would explain a gap of a minute and a half."""
    incidents = [Incident(20 + part / 10, "trouble", "a", 0, f"reset {part}") for part in range(10)]
    (found,) = said(left_unread(*incidents, until=50.0))
    assert found.startswith(
        "unread: a record of s-0 waited for 30.0 s from 20.000, of which 19.1 s lie outside reset 0,"
    )


def test_an_owner_in_between_is_concerned_though_it_read_nothing() -> None:
    """Without it a worker that took the lease and was stopped before it could read would look like no fault."""
    stopped = Incident(21, "trouble", "c", 12, "the stream parted")
    rows = [ObservedRow(25, "s-0", "c", TRIM_HORIZON)]
    assert said(left_unread(stopped, rows=rows)) == ()
    assert said(left_unread(stopped, rows=[evolve(rows[0], t=50)])) == (GAP.format("20.0", "20.0", "all faults"),)


def test_a_fault_of_the_reader_of_a_parent_keeps_its_child_waiting() -> None:
    """Without it a child that may not be read before its parent's end would have to be read nevertheless."""
    events = [begins(0, "a#1"), begins(40, "b#1", "s-1"), record(40, "b#1", 1, "s-1")]
    assert said(history(events, (20.0,), Incident(19, "trouble", "a", 15, "the stream parted"))) == ()
    (found,) = said(history(events, (20.0,), Incident(19, "trouble", "c", 15, "the stream parted")))
    assert "20.0 s lie outside all faults" in found


def test_a_repetition_wants_a_fault() -> None:
    """Without it an orderly hand-over that repeats a batch would pass as what a crash does."""
    events = [
        *(begins(0, "a#1"), record(10, "a#1", 1), record(11, "a#1", 2), ends(12, "a#1")),
        *(begins(13, "b#1"), record(14, "b#1", 2)),
    ]
    told = "handed over again: b#1 handed over 2 of s-0 after a#1 had, 3.0 s later; no fault explains it"
    assert said(history(events, (9.0, 10.0))) == (told,)
    assert said(history(events, (9.0, 10.0), Incident(2, "trouble", "a", 0, "lost replies"))) == ()
    assert said(history(events, (9.0, 10.0), Incident(0, "trouble", "a", 0, "lost replies"))) == (told,)
    assert said(history(events, (9.0, 10.0)), Limits()) == ()


def test_a_record_that_never_came_is_lost_and_waits_no_more() -> None:
    """Without it one record that was passed over would be hidden, or told twice."""
    events = [begins(0, "a#1"), record(10, "a#1", 1), record(30, "a#1", 3)]
    (found,) = said(history(events, (9.0, 20.0, 29.0)))
    assert found == "lost: 1 records were never handed over, the first is number 2 of k"


def test_the_longest_wait_is_told_with_what_explains_it() -> None:
    """Without it a run that is good could not say how near it came."""
    run = left_unread(Incident(21, "trouble", "a", 9, "the store parted"))
    found = Explanations(run, by_shard(reading_of(run).tenures), LIMITS).longest()
    assert found == RecordWait("s-0", 20.0, 40.0, ("the store parted",), 1.0)
    timeless = RunHistory(sent=[Sent("k", 1, "digest 1")], events=[begins(0, "a"), record(1, "a", 1)])
    assert Explanations(timeless, {}, LIMITS).longest() is None


def test_the_last_reader_before_the_record_is_concerned() -> None:
    """Without it what comes into a shard just after its reader was killed would have waited for no reason."""
    assert said(left_unread(Incident(19, "crash", "a#1"), until=28.0)) == ()
