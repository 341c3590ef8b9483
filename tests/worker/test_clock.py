"""The clock by which leases are held includes the time that the machine is suspended."""

import time

import pytest
from virtual_fleet import FaultyStore

from leasehold.adapters.threads import read_boot_clock
from leasehold.adapters.worker.worker import Worker
from leasehold_lab.simulator.world.world import ListSource


def test_worker_clock_counts_suspended_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases expire while the machine is suspended."""
    monkeypatch.setattr(time, "CLOCK_BOOTTIME", 7, raising=False)
    monkeypatch.setattr(time, "clock_gettime", {7: 5000.0}.__getitem__)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    assert Worker(store=FaultyStore(), source=ListSource(), me="a-1").clock() == 5000.0


def test_monotonic_clock_is_used_without_boottime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    assert read_boot_clock() == 100.0
