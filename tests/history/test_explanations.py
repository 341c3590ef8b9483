"""Long waits and repeated records of a recorded run count as faults unless an incident explains them."""

from collections.abc import Sequence

import pytest
from attrs import evolve

from leasehold.balancer.model import TRIM_HORIZON
from leasehold_lab.judge.breach import JudgeLimits
from leasehold_lab.judge.events import Incident, ObservedRow, ReadingEvent, RunHistory, SentRecord
from leasehold_lab.judge.explanations import Explanations, RecordWait, judge_finished_run
from leasehold_lab.judge.tenures import compute_tenures, group_by_shard

LIMITS = JudgeLimits(wait_seconds=3.0, reach_seconds=10.0)
GAP = "unread: a record of s-0 waited for {} s from 20.000, of which {} s lie outside {}"


def start_event(t: float, process: str, shard: str = "s-0") -> ReadingEvent:
    """Return the event of a process that starts to read a shard."""
    return ReadingEvent(t, process, "initialize", shard)


def end_event(t: float, process: str, how: str = "stopped") -> ReadingEvent:
    return ReadingEvent(t, process, how, "s-0")


def record(t: float, process: str, number: int, shard: str = "s-0") -> ReadingEvent:
    """Return the event of a dispatched record."""
    return ReadingEvent(t, process, "record", shard, (number, 0), "k", f"digest {number}")


def sent(*times: float) -> list[SentRecord]:
    """Return one record for each of these times, at which the stream acknowledged the records."""
    return [SentRecord("k", number, f"digest {number}", t) for number, t in enumerate(times, 1)]


def history(
    events: Sequence[ReadingEvent], times: Sequence[float], *incidents: Incident, rows: Sequence[ObservedRow] = ()
) -> RunHistory:
    """Return the history of a group that had to dispatch records that were acknowledged at these times."""
    return RunHistory(
        sent=sent(*times),
        events=list(events),
        rows=list(rows),
        incidents=[Incident(-20, "start", "a"), Incident(-20, "start", "b"), *incidents],
        parents={"s-0": (), "s-1": ("s-0",)},
        end=100,
    )


def make_run_with_gap(*incidents: Incident, until: float = 40.0, rows: Sequence[ObservedRow] = ()) -> RunHistory:
    """Return a run in which the shard is not read from 20 s until `until`, when the other worker starts to read it."""
    events = [start_event(0, "a#1"), record(10, "a#1", 1), start_event(until, "b#1"), record(until, "b#1", 2)]
    return history(events, (9.0, 20.0), *incidents, rows=rows)


def describe_faults(run: RunHistory, limits: JudgeLimits = LIMITS) -> tuple[str, ...]:
    """Return the faults without their times."""
    return tuple(f"{fault.what}: {fault.why}" for fault in judge_finished_run(run, limits).faults)


def test_short_wait_needs_no_explanation() -> None:
    """A record that a busy machine dispatches a little late is no fault."""
    assert describe_faults(make_run_with_gap(until=22.9)) == ()


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
def test_incident_of_its_readers_explains_a_gap(incident: Incident, reached: float) -> None:
    """An incident explains a gap while it lasts, and for the recovery time afterwards.

    In total, up to three seconds of the wait may lie before the incident and after its effects.
    """
    assert describe_faults(make_run_with_gap(incident, until=reached + 2.9 - (incident.t - 20))) == ()
    (fault,) = describe_faults(make_run_with_gap(incident, until=reached + 3.2))
    assert fault.endswith(f"s lie outside {incident.note or f'{incident.what} {incident.subject}'}")


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
def test_unrelated_incident_explains_no_gap(incidents: tuple[Incident, ...]) -> None:
    """Incidents of other workers and shards do not explain a gap."""
    assert describe_faults(make_run_with_gap(*incidents)) == (GAP.format("20.0", "20.0", "all faults"),)


def test_pause_explains_a_gap_only_until_the_lease_expires() -> None:
    """Other workers must take over once the lease of a paused worker has expired, however long the pause lasts."""
    faults = describe_faults(make_run_with_gap(Incident(20, "nap", "a#1", 60), until=60.0))
    assert faults == (GAP.format("40.0", "30.0", "nap a#1"),)


def test_faults_that_overlap_are_counted_once() -> None:
    """Ten simultaneous incidents cannot explain a longer gap than one of them can."""
    incidents = [Incident(20 + part / 10, "trouble", "a", 0, f"reset {part}") for part in range(10)]
    (fault,) = describe_faults(make_run_with_gap(*incidents, until=50.0))
    assert fault.startswith(
        "unread: a record of s-0 waited for 30.0 s from 20.000, of which 19.1 s lie outside reset 0,"
    )


def test_incident_of_an_owner_that_read_nothing_explains_a_gap() -> None:
    """An incident of a worker that held the lease meanwhile counts even if this worker read nothing."""
    incident = Incident(21, "trouble", "c", 12, "the stream parted")
    rows = [ObservedRow(25, "s-0", "c", TRIM_HORIZON)]
    assert describe_faults(make_run_with_gap(incident, rows=rows)) == ()
    assert describe_faults(make_run_with_gap(incident, rows=[evolve(rows[0], t=50)])) == (
        GAP.format("20.0", "20.0", "all faults"),
    )


def test_incident_of_a_parents_reader_explains_its_childs_wait() -> None:
    """A child shard cannot be read before the end of its parent."""
    events = [start_event(0, "a#1"), start_event(40, "b#1", "s-1"), record(40, "b#1", 1, "s-1")]
    assert describe_faults(history(events, (20.0,), Incident(19, "trouble", "a", 15, "the stream parted"))) == ()
    (fault,) = describe_faults(history(events, (20.0,), Incident(19, "trouble", "c", 15, "the stream parted")))
    assert "20.0 s lie outside all faults" in fault


def test_repetition_needs_an_explanation() -> None:
    """An orderly hand-off repeats no records. Only an incident explains repeated records."""
    events = [
        *(start_event(0, "a#1"), record(10, "a#1", 1), record(11, "a#1", 2), end_event(12, "a#1")),
        *(start_event(13, "b#1"), record(14, "b#1", 2)),
    ]
    fault = "dispatched again: b#1 dispatched 2 of s-0 after a#1 had, 3.0 s later; no fault explains it"
    assert describe_faults(history(events, (9.0, 10.0))) == (fault,)
    assert describe_faults(history(events, (9.0, 10.0), Incident(2, "trouble", "a", 0, "lost replies"))) == ()
    assert describe_faults(history(events, (9.0, 10.0), Incident(0, "trouble", "a", 0, "lost replies"))) == (fault,)
    assert describe_faults(history(events, (9.0, 10.0)), JudgeLimits()) == ()


def test_skipped_record_is_reported_only_as_lost() -> None:
    """A record that was skipped is reported as lost, and not also as unread."""
    events = [start_event(0, "a#1"), record(10, "a#1", 1), record(30, "a#1", 3)]
    (fault,) = describe_faults(history(events, (9.0, 20.0, 29.0)))
    assert fault == "lost: 1 records were never dispatched, the first is number 2 of k"


def test_longest_wait_is_returned_with_its_explanation() -> None:
    """The longest wait of a good run shows how close the run came to the limit."""
    run = make_run_with_gap(Incident(21, "trouble", "a", 9, "the store parted"))
    wait = Explanations(run, group_by_shard(compute_tenures(run).tenures), LIMITS).find_longest_wait()
    assert wait == RecordWait("s-0", 20.0, 40.0, ("the store parted",), 1.0)
    run_without_times = RunHistory(
        sent=[SentRecord("k", 1, "digest 1")], events=[start_event(0, "a"), record(1, "a", 1)]
    )
    assert Explanations(run_without_times, {}, LIMITS).find_longest_wait() is None


def test_incident_of_the_last_reader_explains_a_wait() -> None:
    """A crash just before a record arrives explains the record's wait."""
    assert describe_faults(make_run_with_gap(Incident(19, "crash", "a#1"), until=28.0)) == ()
