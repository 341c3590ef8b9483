"""A fleet keeps its laws while its lease table is repeatedly swapped with another store and workers are killed."""

import math
import random

import pytest
from attrs import evolve

from leasehold.balancer.config import Config
from leasehold.balancer.model import Lease, Position
from leasehold.stores import swap
from leasehold_lab.judge.breach import Breach, JudgeLimits
from leasehold_lab.judge.explanations import judge_history
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Member, MemberEnding, Network, Scenario
from leasehold_lab.simulator.world.world import SimulatedHistory

WORKERS, LEASES, LEASE_SECONDS = ("ann", "bob", "cid", "dan"), 8, 10.0
TURN_SECONDS = 900.0
"""The time between two swaps in seconds, and the mean lifetime of a worker."""
ENDINGS: tuple[MemberEnding, ...] = ("crash", "crash", "leave")
FAULTS = Network(lost=0.001, unanswered=0.002, late=0.001)


def make_swap_scenario(seed: int, turns: int, *, sessions: bool, turn_seconds: float = TURN_SECONDS) -> Scenario:
    """Return a scenario of four workers that die or leave in every turn and return, while leases are swapped and back.

    If `sessions` is True, the second table has the layout `sessions`.
    """
    rng, seconds, quiet_seconds = random.Random(seed), turns * turn_seconds, turn_seconds / 3  # noqa: S311  a seed is the point
    members = []
    for worker in WORKERS:
        start_time = rng.uniform(0.0, 1.0)
        while start_time < seconds - quiet_seconds:
            end_time = start_time + rng.expovariate(1 / turn_seconds)
            end_time = end_time if end_time < seconds - quiet_seconds else math.inf
            members.append(Member(worker, Config(), starts=start_time, ends=end_time, ending=rng.choice(ENDINGS)))
            start_time = end_time + rng.uniform(1.0, 30.0)
    return Scenario(
        seed,
        (None,) * LEASES,
        tuple(sorted(members, key=lambda member: member.starts)),
        seconds,
        calm=seconds - quiet_seconds / 2,
        network=FAULTS,
        reading=True,
        checkpoints=1.0,
        read_seconds=10.0,
        full=True,
        sessions=sessions,
        swaps=tuple(turn_seconds * (number + 1 / 6) for number in range(turns)),
    )


def breaches(history: SimulatedHistory) -> tuple[Breach, ...]:
    """Return the breaches that the judge finds in the history."""
    return judge_history(history, JudgeLimits(lease_seconds=dict.fromkeys(WORKERS, LEASE_SECONDS)))


def check_scenario(scenario: Scenario) -> None:
    """Run the scenario, and check that each swap finished, no record was lost, and no shard had two readers."""
    history = run(scenario)
    assert breaches(history) == ()
    assert [start_time for start_time, _ in history.swaps] == list(scenario.swaps)
    assert all(end_time - start_time < TURN_SECONDS / 2 for start_time, end_time in history.swaps)
    dispatched_records = {(event.key, event.digest) for event in history.select_events("record")}
    assert dispatched_records == {(sent_record.key, sent_record.digest) for sent_record in history.sent}


@pytest.mark.slow
@pytest.mark.parametrize("sessions", [False, pytest.param(True, marks=pytest.mark.more)])
def test_swap_and_back_once(*, sessions: bool) -> None:
    """A death in the middle of a swap, or a late response, loses no record and causes no second reader."""
    check_scenario(make_swap_scenario(1, 2, sessions=sessions))


@pytest.mark.more
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sessions", [False, True])
def test_swap_and_back_twelve_times(*, sessions: bool) -> None:
    """Repeated swaps work although both tables contain rows of earlier swaps."""
    check_scenario(make_swap_scenario(2, 24, sessions=sessions, turn_seconds=600.0))


@pytest.mark.more
@pytest.mark.slow
def test_swap_that_skips_a_record_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge reports a lost record if a planted fault skips a record in a swap."""
    original_copy = swap._copy_without_owner  # noqa: SLF001  the step that is broken

    def skip_record(row: Lease) -> Lease:
        copied_row = original_copy(row)
        checkpoint = copied_row.checkpoint
        later_checkpoint = Position(str(int(checkpoint.sequence) + 1000)) if checkpoint.numbered else checkpoint
        return evolve(copied_row, checkpoint=later_checkpoint)

    monkeypatch.setattr(swap, "_copy_without_owner", skip_record)
    breaches_found = breaches(run(make_swap_scenario(1, 1, sessions=False)))
    assert {breach.what for breach in breaches_found} >= {"lost"}
