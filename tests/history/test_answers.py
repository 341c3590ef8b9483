"""The judge detects each broken law in the responses to writes, as processes recorded them."""

from collections.abc import Sequence

import pytest
from attrs import evolve

from leasehold.balancer.model import SHARD_END
from leasehold_lab.judge.breach import JudgeLimits
from leasehold_lab.judge.events import Incident, ReadingEvent, RunHistory, WriteAnswer, WriteVerb
from leasehold_lab.judge.explanations import judge_history
from leasehold_lab.judge.run import OPERATOR

LIMITS = JudgeLimits(lease_seconds={"a": 6.0, "b": 6.0}, notice_seconds=2.0)


def confirmed_write(
    t: float, process: str, verb: WriteVerb, counter: int, position: int = 0, *, took: float = 0.1
) -> WriteAnswer:
    """Return a write that was confirmed at `t`, with the lease's counter and its checkpoint after the write."""
    owner = None if verb == "release" else process[0]
    return WriteAnswer(t, t - took, process, verb, "s-0", "done", owner, str(counter), counter, (1, position, 0))


def unconfirmed_write(t: float, process: str, verb: WriteVerb) -> WriteAnswer:
    """Return a write that got no response."""
    return WriteAnswer(t, t - 0.1, process, verb, "s-0", "unknown")


def describe_breaches(
    *answers: WriteAnswer,
    records: Sequence[ReadingEvent] = (),
    naps: Sequence[Incident] = (),
    limits: JudgeLimits = LIMITS,
) -> list[str]:
    history = RunHistory(events=list(records), incidents=list(naps), end=100.0, answers=list(answers))
    return [f"{breach.what}: {breach.why}" for breach in judge_history(history, limits) if breach.what != "stranger"]


def test_orderly_changes_of_owner_break_no_law() -> None:
    """Steals, gifts and lost responses are no breaches."""
    assert (
        describe_breaches(
            confirmed_write(1, "a#1", "claim", 1),
            confirmed_write(2, "a#1", "checkpoint", 2, 10),
            unconfirmed_write(3, "a#1", "renew"),
            confirmed_write(4, "b#1", "steal", 4, 10),
            confirmed_write(4.05, "a#1", "checkpoint-late", 4, 12),  # This was sent before the steal was confirmed.
            confirmed_write(5, "b#1", "checkpoint", 5, 12),
            confirmed_write(6, "b#1", "give", 6, 13),
            confirmed_write(7, "a#1", "claim", 7, 13),
            confirmed_write(8, "a#1", "checkpoint", 8, 14),
        )
        == []
    )


def test_two_writers_of_one_version_are_reported() -> None:
    """The store never reports two workers as owners of the same lease at the same time."""
    expected_breach = "two holders: b#1 by a claim and a#1 by a claim were both told that they made s-0 7"
    assert describe_breaches(confirmed_write(1, "a#1", "claim", 7), confirmed_write(1, "b#1", "claim", 7)) == [
        expected_breach
    ]


def test_falling_counter_is_reported() -> None:
    """No fencing number is issued twice."""
    expected_breach = "counter: of s-0: 9 was answered to a#1, and 8 to the later claim of b#1"
    assert describe_breaches(confirmed_write(1, "a#1", "claim", 9), confirmed_write(2, "b#1", "claim", 8)) == [
        expected_breach
    ]
    overlapping_claim = confirmed_write(2, "b#1", "claim", 8, took=1.5)
    assert describe_breaches(confirmed_write(1, "a#1", "claim", 9), overlapping_claim) == []


@pytest.mark.parametrize("verb", ["claim", "steal", "checkpoint", "give"])
def test_lost_checkpoint_is_reported(verb: WriteVerb) -> None:
    """Every later write sees the checkpoints that were confirmed before it, so no checkpoint is lost or goes back."""
    faults = describe_breaches(
        confirmed_write(1, "a#1", "claim", 1),
        confirmed_write(2, "a#1", "checkpoint-late", 1, 10),
        confirmed_write(3, "a#2", verb, 2, 9),
    )
    expected_reason = f"of s-0: (1, 10, 0) was answered to a#1, and (1, 9, 0) to the later {verb} of a#2"
    assert faults == [f"checkpoint went back: {expected_reason}"]


def test_checkpoint_after_loss_of_lease_is_reported() -> None:
    claims = (confirmed_write(1, "a#1", "claim", 1), confirmed_write(4, "b#1", "steal", 2))
    late_checkpoint = confirmed_write(5, "a#1", "checkpoint", 3, 5)
    expected_breach = "checkpoint of another: a#1 wrote a checkpoint of s-0, and b#1 had taken it 0.900 s before"
    assert describe_breaches(*claims, late_checkpoint) == [expected_breach]
    assert describe_breaches(*claims, late_checkpoint, limits=JudgeLimits(owned_checkpoints=False)) == []
    assert (
        describe_breaches(
            *claims, confirmed_write(4.5, "a#1", "take-back", 3), confirmed_write(5, "a#1", "checkpoint", 4, 5)
        )
        == []
    )
    assert describe_breaches(*claims, unconfirmed_write(4.5, "a#1", "claim"), late_checkpoint) == []
    assert describe_breaches(*claims, unconfirmed_write(3.9, "a#1", "claim"), late_checkpoint) == []


def test_dispatch_without_recent_write_is_reported() -> None:
    """A worker dispatches records only while its renewals are confirmed or may still have been applied."""
    claim = confirmed_write(1, "a#1", "claim", 1)

    def dispatch_events(t: float, process: str = "a#1") -> list[ReadingEvent]:
        start_event = ReadingEvent(t, process, "initialize", "s-0")
        return [start_event, ReadingEvent(t, process, "record", "s-0", (5, 0), "k", "digest")]

    assert describe_breaches(claim, records=dispatch_events(8.8)) == []
    expected_breach = (
        "dispatched unheld: a#1 dispatched 5 of s-0, and wrote 8.200 s before for the last time of the lease"
    )
    assert describe_breaches(claim, records=dispatch_events(9.1)) == [expected_breach]
    assert describe_breaches(claim, records=dispatch_events(9.1), naps=[Incident(2, "nap", "a", 6.5)]) == []
    assert describe_breaches(claim, unconfirmed_write(2, "a#1", "renew"), records=dispatch_events(9.1)) == []
    never_wrote = "dispatched unheld: b#1 dispatched 5 of s-0, and never wrote of the lease"
    assert describe_breaches(claim, records=dispatch_events(2, "b#1")) == [never_wrote]


def test_early_claim_is_reported() -> None:
    """A worker with a wrong clock must not claim the leases of living workers."""

    def claim_write(t: float, seen_owner: str | None = "a") -> WriteAnswer:
        return evolve(confirmed_write(t, "b#1", "claim", 3), seen=seen_owner)

    start_incidents = [Incident(0, "start", "a#1"), Incident(0, "start", "b#1")]
    renewals = confirmed_write(1, "a#1", "claim", 1), confirmed_write(3, "a#1", "renew", 2)
    expected_breach = "two holders: b#1 claimed s-0, which a#1 held for 0.994 s more by its renew"
    assert describe_breaches(*renewals, claim_write(8.0), naps=start_incidents) == [expected_breach]
    assert describe_breaches(*renewals, claim_write(9.0), naps=start_incidents) == []
    assert describe_breaches(*renewals, claim_write(8.0, None), naps=start_incidents) == []
    assert describe_breaches(*renewals, claim_write(8.0), naps=[*start_incidents, Incident(5, "crash", "a#1")]) == []
    assert describe_breaches(*renewals, evolve(claim_write(8.0), verb="steal"), naps=start_incidents) == []


def test_recreated_lease_may_start_its_counter_again() -> None:
    """If a late request recreates a deleted row, the row's counter may start again."""
    deletion = confirmed_write(2, "a#1", "delete", 5)
    assert (
        describe_breaches(confirmed_write(1, "a#1", "claim", 5, 9), deletion, confirmed_write(3, "b#1", "claim", 1))
        == []
    )


def test_rereading_of_finished_shard_is_reported() -> None:
    """A worker that wakes up must not read a finished shard again, unless an operator deleted the row of its lease."""

    def read_events(t: float, process: str) -> list[ReadingEvent]:
        start_event = ReadingEvent(t, process, "initialize", "s-0")
        return [start_event, ReadingEvent(t, process, "record", "s-0", (5, 0), "k", "digest")]

    end = evolve(confirmed_write(5, "b#1", "checkpoint", 3), checkpoint=SHARD_END.order)
    deletion, creation = confirmed_write(6, "b#1", "delete", 3), confirmed_write(7, "a#1", "create", 4)
    records = [*read_events(2, "b#1"), *read_events(8, "a#1")]
    writes = confirmed_write(1, "b#1", "claim", 2), end, deletion, creation, confirmed_write(7.5, "a#1", "claim", 5)
    expected_breach = "dispatched again: a#1 dispatched 1 records of s-0 after its end was checkpointed"
    assert describe_breaches(*writes, records=records) == [expected_breach]
    assert describe_breaches(*writes, evolve(deletion, t=6.5, process=OPERATOR), records=records) == []
    assert describe_breaches(*writes, unconfirmed_write(6.5, "b#1", "create"), records=records) == []
    assert describe_breaches(*writes, records=records[:2]) == []
