"""Tests exactly how long a newcomer waits for other joiners (C10)."""

import pytest
from attrs import evolve

from leasehold.balancer.config import Config
from leasehold.balancer.model import BulletinState, History, Lease, Me
from leasehold.balancer.rules.minimal import Minimal
from leasehold.balancer.rules.shares import awaits_joiners, seconds_until_joined

CONFIG = Config(rules=Minimal(), lease_seconds=10.0, cycle_seconds=20.0)
LONG = Config(rules=Minimal(), lease_seconds=60.0, cycle_seconds=20.0)
HEARD = BulletinState()
OFTEN = Me("a", history=History(full_apart=1.0))
"""A worker that has read the table twice within a second."""


@pytest.mark.parametrize(
    ("history", "config", "waits"),
    [
        (History(full_apart=15.9), CONFIG, True),
        (History(full_apart=16.0), CONFIG, False),
        (History(full_apart=16.0, hearing=HEARD), CONFIG, True),
        (History(fleet_still=3.9, full_apart=1.0), CONFIG, True),
        (History(fleet_still=4.0, full_apart=1.0), CONFIG, False),
        (History(fleet_still=4.0, hearing=HEARD), LONG, True),
        (History(fleet_still=24.0, hearing=HEARD), LONG, False),
        (History(fleet_still=4.0, full_apart=1.0), LONG, False),
    ],
)
def test_newcomer_waits_until_the_fleet_is_still(history: History, config: Config, waits: bool) -> None:
    """A newcomer takes leases from others only when no more workers have joined for a while."""
    assert awaits_joiners([], Me("a", history=history), config) is waits


def test_wait_ends_a_cycle_after_the_first_lease() -> None:
    """A newcomer waits for at most a cycle. So the fleet is balanced even if workers keep joining."""
    other_lease = Lease("1", owner="b", held=90.0)
    assert awaits_joiners([Lease("0", owner="a", held=19.9), other_lease], OFTEN, CONFIG)
    assert not awaits_joiners([Lease("0", owner="a", held=20.0), other_lease], OFTEN, CONFIG)


def test_worker_without_leases_is_new() -> None:
    """A worker without leases counts as new, however short the cycle is, and does not steal at its first read."""
    config = Config(rules=Minimal(), lease_seconds=10.0, cycle_seconds=0.5)
    assert awaits_joiners([], evolve(OFTEN, history=History(full_apart=0.3)), config)


@pytest.mark.parametrize(
    ("history", "config", "seconds"),
    [
        (History(fleet_still=0.0), CONFIG, 1.0),
        (History(fleet_still=3.0, full_still=3.0), CONFIG, 1.0),
        (History(fleet_still=0.5), CONFIG, 4.5),
        (History(fleet_still=2.0), CONFIG, 3.0),
        (History(fleet_still=5.0), CONFIG, 5.0),
        (History(fleet_still=8.0), CONFIG, 5.0),
        (History(fleet_still=8.0), LONG, 5.0),
        (History(fleet_still=8.0, hearing=HEARD), LONG, 22.0),
    ],
)
def test_newcomer_reads_the_table_when_its_wait_ends(history: History, config: Config, seconds: float) -> None:
    """Workers that start together wait only once."""
    assert seconds_until_joined(history, config) == seconds
