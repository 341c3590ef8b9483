"""Fleets keep their limits when they start, and after deaths, also next to KCL workers, and save writes."""

import pytest
from attrs import evolve

from leasehold.balancer.census import our_workers
from leasehold_lab.simulator.question import SimulationQuestion, build_fleet, simulate_question
from leasehold_lab.simulator.run import run

pytestmark = pytest.mark.slow

CRASH = SimulationQuestion(40, (8,), kind="crash", cycles=4.0)


def test_few_workers_claim_the_same_lease_at_the_start() -> None:
    """C15: If many workers start at the same time, few of them claim the same lease."""
    assert simulate_question(SimulationQuestion(100, (40,), start="together", cycles=2.0)).failed_writes <= 1


@pytest.mark.parametrize("dated", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_leases_are_owned_within_an_expiry_and_a_cycle_after_a_death(seed: int, *, dated: bool) -> None:
    """C16: A worker that finds a late owner reads the table again when the owner's leases may have expired.

    With dated rows, one read of the table is enough to find the expired leases.
    """
    outcome = simulate_question(evolve(CRASH, seed=seed, dated=dated))
    assert outcome.unowned_lease_cycles_max <= 1.62
    assert (outcome.claims, outcome.moves, outcome.failed_writes) == (5, 0, 0)


BESIDE_KCL = SimulationQuestion(60, (12,), kind="crash", pace="own", peer="kcl", cycles=4.0)


def test_death_beside_kcl_takes_no_longer() -> None:
    """M15: In a fleet with KCL workers, leases are owned again after a death as soon as in a fleet without them."""
    assert simulate_question(BESIDE_KCL).unowned_lease_cycles_max * 20.05 <= 18.0


def test_simulated_kcl_worker_does_not_sign_its_leases() -> None:
    """A simulated worker of another library writes none of our attributes, so it never becomes the lookout."""
    history = run(build_fleet(BESIDE_KCL).scenario)
    rows = {row.key: row for row in history.first} | {write.key: write.after for write in history.writes if write.after}
    members = build_fleet(BESIDE_KCL).scenario.members
    assert our_workers(rows.values()) <= {member.worker for member in members if not member.foreign}


def test_checkpoint_counts_as_renewal() -> None:
    """C2: A checkpoint also renews the lease, so no renewal follows it sooner than after a full interval."""
    steady = SimulationQuestion(60, (6,), kind="steady", pace="own", checkpoints=5.0, cycles=3.0)
    minimal_units, kcl_units = (
        simulate_question(evolve(steady, rules=rules)).traffic.write_units for rules in ("minimal", "kcl")
    )
    assert minimal_units <= 0.65 * kcl_units
