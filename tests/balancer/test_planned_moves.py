"""Planned moves under every single fault, and proof that a wrong implementation would be noticed."""

import logging

import pytest
from planned_moves import STARTS, MoveScenario, alone, breaches

from leasehold.balancer.model import Lease
from leasehold.stores.writes import StealLease, TakeBackLease, Write, applied


@pytest.mark.slow
def test_no_write_of_a_planned_move_may_be_lost_or_its_last_with_any_harm(caplog: pytest.LogCaptureFixture) -> None:
    """After any lost response or death during a hand-off, no record is repeated or lost, and no lease is stuck."""
    caplog.set_level(logging.CRITICAL)
    stories = tuple(alone(STARTS[:1]))[::3]  # `make prove` runs all of them, and pairs
    assert len(stories) >= 20
    assert {story: wrong for story in stories if (wrong := breaches(story))} == {}


def careless(write: Write, stored: Lease | None) -> Lease | None:
    """Apply the write, but check only the owner when a gift is taken back."""
    return applied(StealLease(write.lease, write.me) if isinstance(write, TakeBackLease) else write, stored)


def test_a_gift_taken_back_from_the_worker_that_accepted_it_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault takes the gift back if the owner matches, without comparing the version as given."""
    monkeypatch.setattr("leasehold.stores.embedded.memory.applied", careless)
    assert "handed over again" in " ".join(breaches(MoveScenario(STARTS[0])))
