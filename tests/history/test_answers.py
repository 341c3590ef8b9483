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


def done(t: float, process: str, verb: WriteVerb, counter: int, place: int = 0, *, took: float = 0.1) -> WriteAnswer:
    """Return a write that was confirmed at `t`, with the lease's counter and its checkpoint after the write."""
    owner = None if verb == "release" else process[0]
    return WriteAnswer(t, t - took, process, verb, "s-0", "done", owner, str(counter), counter, (1, place, 0))


def unknown(t: float, process: str, verb: WriteVerb) -> WriteAnswer:
    """Return a write that got no response."""
    return WriteAnswer(t, t - 0.1, process, verb, "s-0", "unknown")


def said(
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
        said(
            done(1, "a#1", "claim", 1),
            done(2, "a#1", "checkpoint", 2, 10),
            unknown(3, "a#1", "renew"),
            done(4, "b#1", "steal", 4, 10),
            done(4.05, "a#1", "checkpoint-late", 4, 12),  # This was sent before the steal was confirmed.
            done(5, "b#1", "checkpoint", 5, 12),
            done(6, "b#1", "give", 6, 13),
            done(7, "a#1", "claim", 7, 13),
            done(8, "a#1", "checkpoint", 8, 14),
        )
        == []
    )


def test_two_writers_of_one_version_are_reported() -> None:
    """The store never reports two workers as owners of the same lease at the same time."""
    expected = "two holders: b#1 by a claim and a#1 by a claim were both told that they made s-0 7"
    assert said(done(1, "a#1", "claim", 7), done(1, "b#1", "claim", 7)) == [expected]


def test_falling_counter_is_reported() -> None:
    """No fencing number is issued twice."""
    expected = "counter: of s-0: 9 was answered to a#1, and 8 to the later claim of b#1"
    assert said(done(1, "a#1", "claim", 9), done(2, "b#1", "claim", 8)) == [expected]
    overlapping = done(2, "b#1", "claim", 8, took=1.5)
    assert said(done(1, "a#1", "claim", 9), overlapping) == []


@pytest.mark.parametrize("verb", ["claim", "steal", "checkpoint", "give"])
def test_lost_checkpoint_is_reported(verb: WriteVerb) -> None:
    """Every later write sees the checkpoints that were confirmed before it, so no checkpoint is lost or goes back."""
    faults = said(done(1, "a#1", "claim", 1), done(2, "a#1", "checkpoint-late", 1, 10), done(3, "a#2", verb, 2, 9))
    expected = f"of s-0: (1, 10, 0) was answered to a#1, and (1, 9, 0) to the later {verb} of a#2"
    assert faults == [f"checkpoint went back: {expected}"]


def test_checkpoint_after_loss_of_lease_is_reported() -> None:
    takes = (done(1, "a#1", "claim", 1), done(4, "b#1", "steal", 2))
    late_checkpoint = done(5, "a#1", "checkpoint", 3, 5)
    expected = "checkpoint of another: a#1 wrote a checkpoint of s-0, and b#1 had taken it 0.900 s before"
    assert said(*takes, late_checkpoint) == [expected]
    assert said(*takes, late_checkpoint, limits=JudgeLimits(owned_checkpoints=False)) == []
    assert said(*takes, done(4.5, "a#1", "take-back", 3), done(5, "a#1", "checkpoint", 4, 5)) == []
    assert said(*takes, unknown(4.5, "a#1", "claim"), late_checkpoint) == []
    assert said(*takes, unknown(3.9, "a#1", "claim"), late_checkpoint) == []


def test_dispatch_without_recent_write_is_reported() -> None:
    """A worker dispatches records only while its renewals are confirmed or may still have been applied."""
    claim = done(1, "a#1", "claim", 1)

    def handed(t: float, process: str = "a#1") -> list[ReadingEvent]:
        begins = ReadingEvent(t, process, "initialize", "s-0")
        return [begins, ReadingEvent(t, process, "record", "s-0", (5, 0), "k", "digest")]

    assert said(claim, records=handed(8.8)) == []
    expected = "handed over unheld: a#1 handed over 5 of s-0, and wrote 8.200 s before for the last time of the lease"
    assert said(claim, records=handed(9.1)) == [expected]
    assert said(claim, records=handed(9.1), naps=[Incident(2, "nap", "a", 6.5)]) == []
    assert said(claim, unknown(2, "a#1", "renew"), records=handed(9.1)) == []
    never_wrote = "handed over unheld: b#1 handed over 5 of s-0, and never wrote of the lease"
    assert said(claim, records=handed(2, "b#1")) == [never_wrote]


def test_early_claim_is_reported() -> None:
    """A worker with a wrong clock must not claim the leases of living workers."""

    def claimed(t: float, seen: str | None = "a") -> WriteAnswer:
        return evolve(done(t, "b#1", "claim", 3), seen=seen)

    starts = [Incident(0, "start", "a#1"), Incident(0, "start", "b#1")]
    renewals = done(1, "a#1", "claim", 1), done(3, "a#1", "renew", 2)
    expected = "two holders: b#1 claimed s-0, which a#1 held for 0.994 s more by its renew"
    assert said(*renewals, claimed(8.0), naps=starts) == [expected]
    assert said(*renewals, claimed(9.0), naps=starts) == []
    assert said(*renewals, claimed(8.0, None), naps=starts) == []
    assert said(*renewals, claimed(8.0), naps=[*starts, Incident(5, "crash", "a#1")]) == []
    assert said(*renewals, evolve(claimed(8.0), verb="steal"), naps=starts) == []


def test_recreated_lease_may_start_its_counter_again() -> None:
    """If a late request recreates a deleted row, the row's counter may start again."""
    deletion = done(2, "a#1", "delete", 5)
    assert said(done(1, "a#1", "claim", 5, 9), deletion, done(3, "b#1", "claim", 1)) == []


def test_rereading_of_finished_shard_is_reported() -> None:
    """A worker that wakes up must not read a finished shard again, unless an operator deleted the row of its lease."""

    def read(t: float, process: str) -> list[ReadingEvent]:
        begins = ReadingEvent(t, process, "initialize", "s-0")
        return [begins, ReadingEvent(t, process, "record", "s-0", (5, 0), "k", "digest")]

    end = evolve(done(5, "b#1", "checkpoint", 3), checkpoint=SHARD_END.order)
    deletion, creation = done(6, "b#1", "delete", 3), done(7, "a#1", "create", 4)
    records = [*read(2, "b#1"), *read(8, "a#1")]
    answers = done(1, "b#1", "claim", 2), end, deletion, creation, done(7.5, "a#1", "claim", 5)
    expected = "handed over again: a#1 handed over 1 records of s-0 after its end was checkpointed"
    assert said(*answers, records=records) == [expected]
    assert said(*answers, evolve(deletion, t=6.5, process=OPERATOR), records=records) == []
    assert said(*answers, unknown(6.5, "b#1", "create"), records=records) == []
    assert said(*answers, records=records[:2]) == []
