"""Workers with many leases and a slow store renew each lease in time, or log the reason if they cannot."""

import logging

import pytest

from leasehold.balancer.config import Config
from leasehold_lab.judge.rights import find_owner_changes
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Member, Network, Scenario, name_group_workers

SLOW_SECONDS = 0.5
"""The latency of the store in seconds.

With ten concurrent renewals, twenty leases are renewed per second, and 106 in the interval between renewals.
"""


def count_owner_changes(leases: int, seconds: float = 40.0) -> int:
    """Return the number of owner changes in a fleet of two workers with this many leases each, without deaths."""
    names = name_group_workers(0, 2)
    members = tuple(Member(name, Config(), present=True) for name in names)
    network = Network(latency=(SLOW_SECONDS, SLOW_SECONDS), stall=0.0, unanswered=0.0)
    return len([*find_owner_changes(run(Scenario(1, names * leases, members, seconds, network=network)).writes)])


def test_concurrent_renewals_grow_with_the_latency_of_the_store(caplog: pytest.LogCaptureFixture) -> None:
    """A worker renews as many leases at the same time as needed, so that no lease expires because of a slow store."""
    with caplog.at_level(logging.WARNING, "leasehold.runner"):
        assert count_owner_changes(300) == 0
    assert not caplog.messages


def test_worker_with_too_many_leases_logs_it_once(caplog: pytest.LogCaptureFixture) -> None:
    """If a worker cannot renew all of its leases in time, the log explains once why leases expire."""
    with caplog.at_level(logging.WARNING, "leasehold.runner"):
        count_owner_changes(700, seconds=20.0)
    warnings = [text for text in caplog.messages if "renewals at a time are too few" in text]
    assert len(warnings) == 2, "each worker once"
