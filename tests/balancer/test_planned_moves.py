"""Tests hand-offs with every single fault, and that a wrong implementation is detected."""

import logging

import pytest
from planned_moves import STARTS, MoveScenario, alone, breaches

from leasehold.balancer.model import Lease
from leasehold.stores.writes import StealLease, TakeBackLease, Write, lease_after_write


@pytest.mark.slow
def test_hand_off_survives_every_single_fault(caplog: pytest.LogCaptureFixture) -> None:
    """After any lost response or death during a hand-off, no record is repeated or lost, and no lease is stuck."""
    caplog.set_level(logging.CRITICAL)
    scenarios = tuple(alone(STARTS[:1]))[::3]  # `make prove` runs all scenarios, also with pairs of faults
    assert len(scenarios) >= 20
    assert {scenario: scenario_breaches for scenario in scenarios if (scenario_breaches := breaches(scenario))} == {}


def apply_carelessly(write: Write, stored_lease: Lease | None) -> Lease | None:
    """Apply the write. When a lease is taken back, compare only its owner, which is the planted fault."""
    return lease_after_write(
        StealLease(write.lease, write.me) if isinstance(write, TakeBackLease) else write, stored_lease
    )


def test_gift_taken_back_after_acceptance_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault takes a gift back if the owner matches, without comparing the version of the gift."""
    monkeypatch.setattr("leasehold.stores.embedded.memory.lease_after_write", apply_carelessly)
    assert "dispatched again" in " ".join(breaches(MoveScenario(STARTS[0])))
