"""Tests the owners, the time without an owner and the least number of moves that are computed from a history."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold.balancer.model import Lease
from leasehold.balancer.rules.shares import least_moves
from leasehold_lab.judge.breach import JudgeLimits
from leasehold_lab.judge.events import Incident, ReadingEvent, RunHistory, WriteEvent
from leasehold_lab.judge.explanations import judge_history
from leasehold_lab.judge.rights import (
    UNREAD_SECONDS,
    OwnerChange,
    count_rejected_writes,
    drop_taken_back_handoffs,
    measure_unowned_seconds,
)


def divisions(leases: int, workers: int) -> list[tuple[int, ...]]:
    """Return all ways to give each worker its share, which is the mean rounded down, or one more."""
    floor, extras = divmod(leases, workers)
    return [
        tuple(floor + extra for extra in extra_per_worker)
        for extra_per_worker in product((0, 1), repeat=workers)
        if sum(extra_per_worker) == extras
    ]


def is_fair(division: tuple[int, ...], groups: tuple[str, ...]) -> bool:
    """Return whether every group has its share rounded down, or one more."""
    total = sum(division)
    for group in set(groups):
        leases_of_group = sum(count for count, name in zip(division, groups, strict=True) if name == group)
        share = total * groups.count(group) / len(groups)
        if abs(leases_of_group - share) >= 1:
            return False
    return True


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(0, 3), st.data())
def test_least_moves_equals_the_true_minimum(counts: list[int], free: int, data: st.DataObject) -> None:
    """The moves of a rule set are compared with the true minimum."""
    groups = tuple(data.draw(st.sampled_from("xy")) for _ in counts)
    workers = [f"{group}-{index}" for index, group in enumerate(groups)]
    lease_owners = [worker for worker, count in zip(workers, counts, strict=True) for _ in range(count)]
    owners: dict[str, str | None] = {f"s-{index}": owner for index, owner in enumerate([*lease_owners, *[None] * free])}
    moves_by_division = {
        division: sum(max(count - share, 0) for count, share in zip(counts, division, strict=True))
        for division in divisions(len(owners), len(workers))
    }
    assert least_moves(owners, workers) == min(moves_by_division.values())
    moves_of_fair_divisions = [moves for division, moves in moves_by_division.items() if is_fair(division, groups)]
    assert least_moves(owners, workers, "prefix") == min(moves_of_fair_divisions)


def test_a_lease_is_unowned_while_its_owner_is_dead_or_there_is_none() -> None:
    row = Lease("s-0", owner="a-0")
    history = RunHistory(
        first=(row,),
        incidents=[Incident(0.0, "start", "a-0#0"), Incident(10.0, "crash", "a-0#0"), Incident(5.0, "start", "b-0#1")],
        writes=[
            WriteEvent(25.0, 24.9, "b-0", "b-0#1", "claim", "s-0", row, Lease("s-0", owner="b-0"), done=True),
            WriteEvent(
                30.0, 29.9, "b-0", "b-0#1", "release", "s-0", Lease("s-0", owner="b-0"), Lease("s-0"), done=True
            ),
        ],
        end=50.0,
    )
    assert measure_unowned_seconds(history, 29.0) == {"s-0": 15.0}
    assert measure_unowned_seconds(history, 50.0) == {"s-0": 20.0}
    assert measure_unowned_seconds(history, 50.0, since=40.0) == {"s-0": 10.0}


def test_gift_that_was_taken_back_is_not_a_move() -> None:
    """If the next owner's request stalls, a gift that is taken back and then repeated counts as one move."""
    first_handoff = OwnerChange(1.0, "s-0", "a", "b", "give")
    take_back = OwnerChange(3.0, "s-0", "b", "a", "take-back")
    repeated_handoff = OwnerChange(5.0, "s-0", "a", "b", "give")
    other_handoff = OwnerChange(2.0, "s-1", "a", "b", "give")
    assert drop_taken_back_handoffs([first_handoff, other_handoff, take_back, repeated_handoff]) == (
        other_handoff,
        repeated_handoff,
    )


def test_only_writes_rejected_because_of_other_workers_count() -> None:
    """If a worker repeats a write after a lost response, the rejection does not count as a lost race for the lease."""

    def claim(owner: str) -> WriteEvent:
        row = Lease("s-0", owner=owner)
        return WriteEvent(1.0, 0.9, "a", "a#0", "claim", "s-0", row, row, done=False)

    assert (count_rejected_writes([claim("a")]), count_rejected_writes([claim("b")])) == (0, 1)


@pytest.mark.parametrize(("late", "told"), [(0.0, []), (0.5, ["held unread"])])
def test_held_lease_that_is_not_read_in_time_is_reported(late: float, told: list[str]) -> None:
    """A lease that is held but not read for more than `UNREAD_SECONDS` is a breach."""
    rows = [Lease("s-0"), *(Lease("s-0", owner="a-0", epoch=number) for number in range(1, 20))]
    writes = [
        WriteEvent(
            10.0 * (index + 1),
            10.0 * index,
            "a-0",
            "a-0#0",
            "renew" if index else "claim",
            "s-0",
            rows[index],
            rows[index + 1],
            done=True,
        )
        for index in range(19)
    ]
    reads = (11.0, 11.0 + UNREAD_SECONDS + late)
    history = RunHistory(
        first=(rows[0],),
        incidents=[Incident(0.0, "start", "a-0#0")],
        writes=writes,
        events=[ReadingEvent(t, "a-0#0", "read", "s-0") for t in reads],
        end=reads[-1] + 1.0,
    )
    assert [breach.what for breach in judge_history(history, JudgeLimits())] == told
    assert UNREAD_SECONDS == 75.0


@pytest.mark.parametrize(("lease", "told"), [(10.0, []), (25.0, ["held unread"])])
def test_lease_that_expired_by_its_owners_clock_was_not_held(lease: float, told: list[str]) -> None:
    """A worker that lost a lease in an outage and took it again is not blamed for the time of the outage."""
    row = Lease("s-0", owner="a-0")
    times = [0.0, 8.0, 16.0, 24.0, 32.0, 40.0, 60.0, 68.0, 76.0]  # nothing is written from 40 to 60 s
    writes = [
        WriteEvent(t, t, "a-0", "a-0#0", "renew" if t else "claim", "s-0", row if t else Lease("s-0"), row, done=True)
        for t in times
    ]
    history = RunHistory(
        first=(Lease("s-0"),),
        incidents=[Incident(0.0, "start", "a-0#0")],
        writes=writes,
        events=[ReadingEvent(t, "a-0#0", "read", "s-0") for t in (1.0, 3.0 + UNREAD_SECONDS)],
        end=4.0 + UNREAD_SECONDS,
    )
    breaches = judge_history(history, JudgeLimits(lease_seconds={"a-0": lease}))
    assert [breach.what for breach in breaches if breach.what == "held unread"] == told
