"""The judge names the one fault that is planted in each recorded history."""

from collections.abc import Sequence
from hashlib import sha1
from typing import Any

import pytest
from attrs import evolve

from leasehold.balancer.model import LATEST, SHARD_END, Lease, Position
from leasehold_lab.judge.breach import JudgeLimits
from leasehold_lab.judge.events import (
    Incident,
    ObservedRow,
    ReadingEvent,
    RunHistory,
    SentRecord,
    WriteAnswer,
    WriteEvent,
    WriteVerb,
    parse_event,
)
from leasehold_lab.judge.explanations import UNLIMITED, RunVerdict, judge_finished_run, judge_history
from leasehold_lab.judge.run import OPERATOR, ReaderChange


def digest(key: str, number: int) -> str:
    """Return the digest of one record's data."""
    return sha1(f"{key} {number}".encode(), usedforsecurity=False).hexdigest()


def sent(*numbers: int, key: str = "k") -> list[SentRecord]:
    """Return the records of one key, as the stream stored them."""
    return [SentRecord(key, number, digest(key, number)) for number in numbers]


def start_event(t: float, worker: str, shard: str = "s-0") -> ReadingEvent:
    """Return the event of a worker that starts to read a shard."""
    return ReadingEvent(t, worker, "initialize", shard)


def ends(t: float, worker: str, shard: str = "s-0", how: str = "stopped") -> ReadingEvent:
    return ReadingEvent(t, worker, how, shard)


def records(t: float, worker: str, *numbers: int, shard: str = "s-0", key: str = "k") -> list[ReadingEvent]:
    """Return the events of dispatched records. The position of each is 100 plus its number."""
    return [ReadingEvent(t, worker, "record", shard, (100 + n, 0), key, digest(key, n)) for n in numbers]


def faultless_events() -> list[ReadingEvent]:
    """Return the events of a run in which a shard moves from one worker to another without a fault."""
    return [
        start_event(0, "a"),
        *records(10, "a", 1, 2, 3),
        ends(20, "a"),
        start_event(30, "b"),
        *records(40, "b", 4, 5),
        ends(50, "b"),
    ]


def faults(events: list[ReadingEvent], count: int = 5, rows: tuple[ObservedRow, ...] = ()) -> tuple[str, ...]:
    """Return the faults that the judge reports."""
    return describe_faults(verdict(sent(*range(1, count + 1)), events, rows=rows))


def verdict(
    sent_records: list[SentRecord],
    events: list[ReadingEvent],
    *,
    incidents: Sequence[Incident] = (),
    rows: Sequence[ObservedRow] = (),
    parents: dict[str, tuple[str, ...]] | None = None,
) -> RunVerdict:
    """Return the judge's verdict on a history."""
    end = max((event.t for event in events), default=0.0)
    run = RunHistory((), sent_records, events, [], list(rows), list(incidents), parents or {}, end=end)
    return judge_finished_run(run)


def describe_faults(verdict: RunVerdict) -> tuple[str, ...]:
    """Return descriptions of the faults, without their times."""
    return tuple(f"{fault.what}: {fault.why}" for fault in verdict.faults)


def test_verdict_on_a_good_run_has_every_count() -> None:
    """The verdict on a good run contains every count and no fault."""
    incidents = [Incident(-2, "start", "a"), Incident(-1, "start", "b"), Incident(45, "end")]
    assert verdict(sent(1, 2, 3, 4, 5), faultless_events(), incidents=incidents, parents={"s-0": ()}) == RunVerdict(
        produced=5,
        delivered=5,
        lost=0,
        strangers=0,
        duplicates=0,
        fenced=0,
        shards=1,
        unowned_seconds_max=10.0,
        unowned_shard="s-0",
        moves=1,
        moves_least=0,
        owner_changes=(ReaderChange(30, "s-0", "a", "b", "stopped", 0, 3, 0),),
        faults=(),
    )


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (faultless_events()[:-2], "lost: 1 records were never dispatched, the first is number 5 of k"),
        (
            [*faultless_events()[:-1], *records(45, "b", 6)],
            "stranger: 1 records were dispatched and never sent, one of them of k",
        ),
        (
            [*faultless_events(), *records(60, "b", 5)],
            "dispatched unheld: b dispatched 1 records while not reading, as of s-0",
        ),
        (
            [*faultless_events()[:4], *records(15, "a", 3), *faultless_events()[4:]],
            "repeated: a dispatched 1 records of s-0 twice without a change of owner",
        ),
        (
            [start_event(0, "a"), *records(10, "a", 1, 3, 2, 4, 5)],
            "out of order: a dispatched number 2 of k after number 3, both of s-0",
        ),
        (
            [
                start_event(0, "a"),
                *records(20, "a", 1, 2, 4, 5),
                start_event(5, "b", "s-1"),
                *records(10, "b", 3, shard="s-1"),
            ],
            "out of order: number 3 of k was dispatched before number 2",
        ),
    ],
)
def test_each_fault_is_named(events: list[ReadingEvent], expected: str) -> None:
    assert faults(events) == (expected,)


def crash_events(*again: int) -> list[ReadingEvent]:
    """Return a run in which a worker dies after three records, and the next worker starts with the records `again`."""
    return [start_event(0, "a"), *records(10, "a", 1, 2, 3), start_event(30, "b"), *records(40, "b", *again, 4, 5)]


def stored_row(t: float, number: int) -> ObservedRow:
    """Return a row of the table whose checkpoint is at this record."""
    return ObservedRow(t, "s-0", "a", Position(str(100 + number)))


def test_a_record_that_was_not_checkpointed_may_come_again() -> None:
    """Records that are repeated after a crash are counted, but are no fault."""
    result = verdict(
        sent(1, 2, 3, 4, 5), crash_events(2, 3), incidents=[Incident(15, "crash", "a")], rows=[stored_row(12, 1)]
    )
    assert (result.duplicates, result.faults) == (2, ())
    assert result.owner_changes == (ReaderChange(30, "s-0", "a", "b", "cut", duplicates=2, since=2, replayed=0),)


def test_a_record_that_was_checkpointed_may_not_come_again() -> None:
    """A new owner must start after the checkpoint, and must not read a finished shard again."""
    for row in (stored_row(12, 2), ObservedRow(12, "s-0", None, SHARD_END)):
        result = verdict(sent(1, 2, 3, 4, 5), crash_events(2), rows=[row])
        expected_reason = "b dispatched 1 records of s-0 again that were checkpointed when it took it"
        assert describe_faults(result) == (f"dispatched again: {expected_reason}",)


def test_records_of_a_recreated_hub_are_no_duplicates() -> None:
    """Records of a recreated hub are not mistaken for duplicates of old records with the same numbers."""
    second_events = [evolve(event, place=(event.place[0] - 2, 0)) for event in records(40, "b", 3, 4)]
    events = [
        start_event(0, "a"),
        *records(10, "a", 1, 2),
        ends(20, "a"),
        start_event(30, "b"),
        *second_events,
        ends(50, "b"),
    ]
    result = verdict(sent(1, 2, 3, 4), events, rows=[stored_row(12, 2)])
    assert (describe_faults(result), result.duplicates, result.owner_changes[0].duplicates) == ((), 0, 0)


@pytest.mark.parametrize("verb", ["reset", "annotate"])
def test_reset_excuses_repeated_records(verb: WriteVerb) -> None:
    """If an operator reset a lease, it is no fault that records are read again."""
    writes = [
        WriteAnswer(5, 4, "z", "claim", "s-0", "done", "z", "3", 3, (1, 102, 0)),
        WriteAnswer(25, 24, OPERATOR, verb, "s-0", "done", None, "6", 6, (0, 0, 0)),
    ]
    run = RunHistory(
        sent=sent(1, 2, 3, 4, 5), events=crash_events(2), answers=writes, rows=[stored_row(12, 2)], end=40.0
    )
    assert ("dispatched again" in " ".join(describe_faults(judge_finished_run(run)))) is (verb != "reset")


@pytest.mark.parametrize(
    ("owner", "ends", "starts", "excused"),
    [
        (None, 99, 21, True),
        ("b", 24, 21, True),
        ("b", 99, 21, False),
        (None, 99, 5, False),
    ],
    ids=["nobody held it", "its owner went", "its owner lived", "its maker had seen it"],
)
def test_loss_is_excused_if_no_worker_knew_the_checkpoint(
    owner: str | None, ends: float, starts: float, *, excused: bool
) -> None:
    """A loss is excused only if no living worker could have known the deleted checkpoint."""
    deleted_row, created_row = Lease("k", owner=owner, checkpoint=Position("1")), Lease("k", checkpoint=LATEST)
    writes = [
        WriteEvent(20, 20, OPERATOR, OPERATOR, "delete", "k", deleted_row, None, done=True),
        WriteEvent(28, 28, "a", "a#0", "create", "k", None, created_row, done=True),
    ]
    incidents = [Incident(starts, "start", "a#0"), Incident(1, "start", "b#1"), Incident(ends, "crash", "b#1")]
    run = RunHistory(sent=sent(1), writes=writes, incidents=incidents, end=100.0)
    breaches = {breach.what for breach in judge_history(run, JudgeLimits(lease_seconds={"a": 10.0, "b": 10.0}))}
    assert ("lost" not in breaches) is excused


def test_deleted_checkpoint_excuses_repeated_records() -> None:
    """If an operator deleted the row, it is no fault that the shard is read from its beginning."""
    deletions = [WriteAnswer(20, 19, "operator", "delete", "s-0", "done")]
    common_fields: dict[str, Any] = {
        "sent": sent(1, 2, 3, 4, 5),
        "events": crash_events(2),
        "answers": deletions,
        "end": 40.0,
    }
    rows = [stored_row(12, 2), stored_row(25, 1)]
    assert "dispatched again" not in " ".join(
        describe_faults(judge_finished_run(RunHistory(rows=rows, **common_fields)))
    )
    assert "dispatched again" in " ".join(
        describe_faults(judge_finished_run(RunHistory(rows=[*rows, stored_row(29, 2)], **common_fields)))
    )


@pytest.mark.parametrize(("number", "is_reported"), [(1, False), (2, True)])
def test_reader_starts_at_the_checkpoint_in_its_claims_response(number: int, is_reported: bool) -> None:
    """The checkpoint in the response to the claim counts, not one that the previous owner stored later."""
    claim = WriteAnswer(29, 28, "b", "claim", "s-0", "done", "b", "7", 7, (1, 100 + number, 0))
    run = RunHistory(
        sent=sent(1, 2, 3, 4, 5), events=crash_events(2), answers=[claim], rows=[stored_row(29.5, 2)], end=40.0
    )
    assert ("dispatched again" in " ".join(describe_faults(judge_finished_run(run)))) is is_reported


def test_later_checkpoints_do_not_count_against_a_new_owner() -> None:
    """The checkpoints that a new owner writes itself do not count against it."""
    assert faults(crash_events(2, 3), rows=(stored_row(12, 1), stored_row(45, 5))) == ()


def test_order_is_judged_within_each_key() -> None:
    """The records of different keys in one shard need not be in order."""
    events = [start_event(0, "a"), *records(10, "a", 2), *records(20, "a", 1, key="other")]
    assert verdict([*sent(2), *sent(1, key="other")], events).faults == ()


def test_longest_time_without_a_reader_is_measured() -> None:
    """A child shard's time without a reader starts at the end of its parent."""
    parents = {"s-0": (), "s-1": ("s-0",), "s-2": ("s-0",)}
    events = [
        start_event(0, "a"),
        ends(1000, "a", how="shard-ended"),
        start_event(1200, "a", "s-1"),
        ends(3000, "a", "s-1"),
    ]
    later_events = [*events, start_event(4500, "b", "s-1"), start_event(1100, "b", "s-2")]
    assert _gap(later_events, parents, 5000) == (1500.0, "s-1")
    assert _gap(events, {"s-0": (), "s-1": ("s-0",)}, 9000) == (6000.0, "s-1")
    assert _gap(events, parents, 9000) == (8000.0, "s-2")  # The child s-2 is never read.
    assert _gap(events[:2], {"s-0": ()}, 9000) == (0.0, "")


def _gap(events: list[ReadingEvent], parents: dict[str, tuple[str, ...]], end: float) -> tuple[float, str]:
    result = verdict([], events, incidents=[Incident(end, "end")], parents=parents)
    return result.unowned_seconds_max, result.unowned_shard


def test_killed_process_stops_reading() -> None:
    """The time between a crash and the takeover counts as unowned."""
    result = verdict(sent(1, 2, 3, 4, 5), crash_events(), incidents=[Incident(15, "crash", "a")])
    assert (result.unowned_seconds_max, result.unowned_shard) == (15.0, "s-0")


def test_only_moves_between_living_workers_count() -> None:
    """Takeovers from dead workers and first claims are not moves."""
    shards = ["s-0", "s-1", "s-2", "s-3"]
    events = [start_event(1, "a", shard) for shard in shards]
    for shard in shards[2:]:
        events += [ends(20, "a", shard), start_event(21, "b", shard)]
    events += [start_event(40, "b", shard) for shard in shards[:2]]
    incidents = [
        Incident(0, "start", "a"),
        Incident(10, "start", "b"),
        Incident(30, "crash", "a"),
        Incident(50, "end"),
    ]
    result = verdict([], events, incidents=incidents)
    assert (result.moves, result.moves_least) == (2, 2)


def test_moves_beyond_the_minimum_are_counted() -> None:
    """A fleet that passes leases in circles has more moves than the minimum."""
    events = [
        start_event(1, "a"),
        start_event(1, "b", "s-1"),
        ends(20, "a"),
        start_event(21, "b"),
        ends(30, "b"),
        start_event(31, "a"),
    ]
    result = verdict([], events, incidents=[Incident(0, "start", "a"), Incident(0, "start", "b"), Incident(50, "end")])
    assert (result.moves, result.moves_least) == (2, 0)


def test_shared_token_is_reported() -> None:
    """The judge reports a fencing token that two owners of a lease share."""
    events_with_token = [evolve(event, token=7) if event.event == "record" else event for event in faultless_events()]
    assert faults(events_with_token) == ("token: b read s-0 under 7, as a did",)


def test_recreated_row_may_issue_tokens_again() -> None:
    """A recreated row may issue the tokens of the deleted row again."""
    events_with_token = [evolve(event, token=7) if event.event == "record" else event for event in faultless_events()]
    deletion = WriteEvent(25.0, 25.0, "a", "a", "delete", "s-0", Lease("s-0"), None, done=True)
    breaches = judge_history(RunHistory((), sent(1, 2, 3, 4, 5), events_with_token, [deletion], end=50.0), UNLIMITED)
    assert "token" not in {breach.what for breach in breaches}


@pytest.mark.parametrize(("epoch", "is_reported"), [(0, False), (1_000_001, True)])
def test_recreated_row_may_start_at_its_first_token(epoch: int, is_reported: bool) -> None:
    """Only a worker that had seen the deleted row must continue with higher tokens in the recreated one."""
    free_lease, owned_lease = Lease("s-0"), Lease("s-0", owner="a", epoch=7)
    created_row = Lease("s-0", epoch=epoch)
    writes = [
        WriteEvent(1.0, 1.0, "a", "a", "claim", "s-0", free_lease, owned_lease, done=True),
        WriteEvent(20.0, 20.0, OPERATOR, OPERATOR, "delete", "s-0", owned_lease, None, done=True),
        WriteEvent(21.0, 21.0, "b", "b", "create", "s-0", None, created_row, done=True),
        WriteEvent(22.0, 22.0, "b", "b", "claim", "s-0", created_row, evolve(created_row, owner="b"), done=True),
    ]
    events = [start_event(5, "a"), start_event(22, "b"), *records(23, "a", 1), *records(24, "b", 2)]
    events_with_token = [evolve(item, token=7) if item.event == "record" else item for item in events]
    history = RunHistory((), sent(1, 2), events_with_token, writes, end=30.0)
    assert ("token" in {item.what for item in judge_history(history, JudgeLimits())}) is is_reported


def test_tokens_of_deleted_and_recreated_rows_are_not_compared() -> None:
    """The tokens of a deleted row and of the recreated row are not compared."""
    deleted_lease = Lease("s-0", owner="a", epoch=1)
    created_row = Lease("s-0")
    claimed_lease = evolve(created_row, owner="b", epoch=1)
    writes = [
        WriteEvent(1.0, 1.0, "a", "a", "claim", "s-0", Lease("s-0"), deleted_lease, done=True),
        WriteEvent(20.0, 20.0, OPERATOR, OPERATOR, "delete", "s-0", deleted_lease, None, done=True),
        WriteEvent(21.0, 21.0, "b", "b", "create", "s-0", None, created_row, done=True),
        WriteEvent(22.0, 22.0, "b", "b", "claim", "s-0", created_row, claimed_lease, done=True),
        WriteEvent(
            24.0, 24.0, "a", "a", "steal", "s-0", claimed_lease, evolve(claimed_lease, owner="a", epoch=2), done=True
        ),
    ]
    events = [start_event(5, "a"), start_event(22, "b"), *records(23, "b", 1), ends(24, "b"), *records(25, "a", 2)]
    events_with_token = [evolve(item, token=1) if item.event == "record" else item for item in events]
    assert "token" not in {
        item.what
        for item in judge_history(RunHistory((), sent(1, 2), events_with_token, writes, end=30.0), JudgeLimits())
    }


@pytest.mark.parametrize(("how", "is_reported"), [("lease-lost", False), ("stopped", True)])
def test_new_group_is_excused_if_the_owner_had_lost_the_lease(how: str, is_reported: bool) -> None:
    """A new group is excused if the owner had lost the lease. A living owner would have passed its checkpoint on."""
    held_lease = Lease("s-0", owner="a", epoch=1, checkpoint=Position("101"))
    writes = [
        WriteEvent(20.0, 20.0, OPERATOR, OPERATOR, "delete", "s-0", held_lease, None, done=True),
        WriteEvent(30.0, 30.0, "b", "b", "create", "s-0", None, Lease("s-0", checkpoint=LATEST), done=True),
    ]
    events = [start_event(5, "a"), *records(6, "a", 1), ends(15, "a", how=how)]
    incidents = [Incident(0.0, "start", "a"), Incident(25.0, "start", "b"), Incident(90.0, "end")]
    sent_records = [SentRecord("s-0", number, digest("s-0", number)) for number in (1, 2)]
    events = [evolve(item, key="s-0", digest=digest("s-0", 1)) if item.event == "record" else item for item in events]
    history = RunHistory((), sent_records, events, writes, incidents=incidents, end=90.0)
    assert ("lost" in {item.what for item in judge_history(history, JudgeLimits())}) is is_reported


def test_records_with_superseded_tokens_are_counted() -> None:
    """`fenced` counts the records that a handler that compares tokens would reject."""
    tokens = {"a": 3, "b": 5}
    events = [
        start_event(0, "a"),
        *records(10, "a", 1, 2),
        start_event(30, "b"),
        *records(40, "b", 3),
        *records(60, "a", 3),
    ]
    result = verdict(sent(1, 2, 3), [evolve(event, token=tokens[event.worker]) for event in events])
    assert (result.fenced, result.faults) == (1, ())


def test_a_child_waits_for_its_parent() -> None:
    events = [start_event(0, "a"), start_event(1, "b", "s-1"), *records(5, "b", 9, shard="s-1"), *records(10, "a", 1)]
    result = verdict([*sent(1), *sent(9)], events, parents={"s-0": (), "s-1": ("s-0",)})
    assert "out of order: b dispatched 109 of s-1 before 101 of s-0, its parent" in describe_faults(result)


@pytest.mark.parametrize(("start", "is_reported"), [(0.0, True), (3.0, False)])
def test_joining_worker_treats_a_deleted_lease_as_finished(start: float, is_reported: bool) -> None:
    """Only a worker that read the table before the deletion can know that the parent is unfinished."""
    events = [start_event(4, "b", "s-1"), *records(5, "b", 9, shard="s-1"), start_event(6, "a"), *records(10, "a", 1)]
    deletion = WriteEvent(2.0, 2.0, OPERATOR, OPERATOR, "delete", "s-0", Lease("s-0"), None, done=True)
    start_incident = Incident(start, "start", events[0].process)
    parents: dict[str, tuple[str, ...]] = {"s-0": (), "s-1": ("s-0",)}
    history = RunHistory(
        (), [*sent(1), *sent(9)], events, [deletion], incidents=[start_incident], parents=parents, end=10.0
    )
    expected = "out of order: b dispatched 109 of s-1 before 101 of s-0, its parent"
    assert (expected in describe_faults(judge_finished_run(history))) is is_reported


@pytest.mark.parametrize("holder", [None, "a"])
def test_records_before_latest_may_stay_unfinished_if_no_worker_held_the_row(holder: str | None) -> None:
    """A group that starts at LATEST may skip a batch only if no worker held the lease when its row was deleted."""
    row = Lease("s-0", owner=holder, checkpoint=Position("100"))
    at_latest = Lease("s-0", checkpoint=LATEST)
    claimed_lease, advanced_lease = evolve(at_latest, owner="b"), Lease("s-0", owner="b", checkpoint=Position("102"))
    writes = [
        WriteEvent(20.0, 20.0, OPERATOR, OPERATOR, "delete", "s-0", row, None, done=True),
        WriteEvent(27.0, 27.0, "b", "b", "create", "s-0", None, at_latest, done=True),
        WriteEvent(28.0, 28.0, "b", "b", "claim", "s-0", at_latest, claimed_lease, done=True),
        WriteEvent(31.0, 31.0, "b", "b", "checkpoint", "s-0", claimed_lease, advanced_lease, done=True),
    ]
    events = [start_event(0, "a"), *records(10, "a", 1), start_event(28, "b"), *records(30, "b", 2)]
    events += [evolve(event, t=30.5, event="finished") for event in records(30, "b", 2)]
    incidents = [Incident(0.0, "start", "a"), Incident(21.0, "start", "b")]
    history = RunHistory((), sent(1, 2), events, writes, incidents=incidents, end=40.0)
    breaches = [breach.what for breach in judge_history(history, JudgeLimits()) if breach.what == "unfinished"]
    assert breaches == ([] if holder is None else ["unfinished"])


@pytest.mark.parametrize("anew", [0.0, 8.0])
def test_shards_of_a_former_stream_are_not_parents(anew: float) -> None:
    """A recreated stream reuses the ids of former shards, which may have had other parents."""
    events = [
        start_event(0, "a"),
        start_event(1, "b", "s-1"),
        *records(5, "b", 9, shard="s-1"),
        *records(10, "a", 1, key="l"),
    ]
    sent_records = [evolve(record, t=4.0) for record in sent(9)] + [
        evolve(record, t=9.0) for record in sent(1, key="l")
    ]
    history = RunHistory(
        sent=sent_records, events=events, parents={"s-0": (), "s-1": ("s-0",)}, recreated_at=anew, end=10.0
    )
    unexpected = "out of order: b dispatched 109 of s-1 before 101 of s-0, its parent"
    assert (unexpected in describe_faults(judge_finished_run(history))) is (anew == 0.0)


def test_unfinished_record_may_be_repeated() -> None:
    """A record may be repeated until a handler has finished it."""
    finished_events = [evolve(event, t=11, event="finished") for event in records(10, "a", 1)]
    events = [start_event(0, "a"), *records(10, "a", 1, 2), *finished_events, *records(12, "a", 2)]
    assert faults(events, 2) == ()
    expected_fault = "repeated: a dispatched 1 records of s-0 twice without a change of owner"
    assert faults([*events, *records(13, "a", 1)], 2) == (expected_fault,)


def test_event_line_is_parsed() -> None:
    """The judge parses the format of `leasehold consume --events`."""
    line = (
        b'{"t": 17, "worker": "a", "event": "record", "shard": "s-0", "sequence_number": "101", '
        b'"sub_sequence_number": 2, "partition_key": null, "sha1": "f00", "epoch": 7}'
    )
    assert parse_event(line) == ReadingEvent(0.017, "a", "record", "s-0", (101, 2), "", "f00", 7)
    assert parse_event('{"t": 18, "worker": "a", "event": "lease-lost", "shard": "s-0"}') == ends(
        0.018, "a", how="lease-lost"
    )


def test_finished_leases_may_count_as_load() -> None:
    """The workers of the Java KCL own fewer open shards while finished leases remain in the table."""
    open_claims = [
        WriteEvent(1.0, 1.0, "a", "a", "claim", f"s-{n}", None, Lease(f"s-{n}", owner="a"), done=True) for n in range(2)
    ]
    finished_lease = Lease("s-2", owner="b", checkpoint=SHARD_END)
    writes = [*open_claims, WriteEvent(2.0, 2.0, "b", "b", "checkpoint", "s-2", None, finished_lease, done=True)]
    incidents = [Incident(0.0, "start", "a"), Incident(0.0, "start", "b")]
    for counts_ended in (True, False):
        run = RunHistory(writes=writes, incidents=incidents, end=50.0)
        breaches = {breach.what for breach in judge_history(run, JudgeLimits(settled=40.0, counts_ended=counts_ended))}
        assert ("uneven" in breaches) is not counts_ended
