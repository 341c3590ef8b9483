"""Tests that a pause of the store does not extend the leases of workers that die after it."""

from collections.abc import Sequence

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from leasehold.balancer.bulletin import BULLETIN, BulletinTracker
from leasehold.balancer.config import Config
from leasehold.balancer.counting import GAP_EXPIRY_MAX, slow_owners, take_census
from leasehold.balancer.model import Lease, Me, Version
from leasehold.balancer.rules.kcl import Kcl
from leasehold.balancer.rules.minimal import Minimal
from leasehold.balancer.watch import Watch

CONFIG = Config(rules=Minimal(), lease_seconds=10.0)
OWNERS = ("me", "a", "b")
READ_INTERVAL = 1.0
"""The seconds between two reads of the table."""


def compute_renewal_times(
    pauses: Sequence[tuple[float, float]], phase: float, interval: float, until: float
) -> list[float]:
    """Return the times at which an owner renews. During the pauses (begin, end), requests get no response."""
    times, time = [], phase
    while time < until:
        pause_end = next((end for begin, end in pauses if begin <= time < end), None)
        time = time if pause_end is None else pause_end + phase / 10
        times.append(time)
        time += interval
    return times


def table(renewal_times: dict[str, list[float]], t: float) -> list[Lease]:
    """Return a table with one lease of each owner. A lease's version is the number of its renewals until `t`."""
    return [
        Lease(f"s-{owner}", owner=owner, version=Version(str(sum(renewed_at <= t for renewed_at in times))))
        for owner, times in renewal_times.items()
    ]


def watch_until_expiry(
    renewal_times: dict[str, list[float]], pauses: Sequence[tuple[float, float]], until: float
) -> tuple[float, set[str]]:
    """Return the time at which a's lease first counted as expired, and the workers that were reported as slow."""
    watch, t, reported_slow = Watch(), 0.0, set[str]()
    while t < until:
        if not any(begin <= t < end for begin, end in pauses):
            watch, leases = watch.look(table(renewal_times, t), t, t + 0.01)
            me = Me("me", history=watch.history)
            reported_slow |= {owner for owner, _ in slow_owners(me, CONFIG)}
            if any(lease.owner == "a" for lease in take_census(leases, me, CONFIG).expired) and t > max(
                renewal_times["a"]
            ):
                return t, reported_slow
        t += READ_INTERVAL
    return t, reported_slow


@pytest.mark.parametrize("seconds", [30.0, 600.0, 3600.0])
@pytest.mark.parametrize("ours", [True, False])
def test_pause_of_the_store_does_not_extend_leases_of_dead_workers(seconds: float, ours: bool) -> None:
    """After a pause of the store, the lease of a dead worker expires as soon as usual."""
    pauses = [(60.0, 60.0 + seconds)]
    renewal_times = {
        owner: compute_renewal_times(pauses, 1.0 + index, 5.3, 2 * seconds + 200.0)
        for index, owner in enumerate(OWNERS)
    }
    last_renewal = next(t for t in renewal_times["a"] if t >= pauses[0][1])
    renewal_times["a"] = [t for t in renewal_times["a"] if t <= last_renewal]
    if not ours:
        del renewal_times["me"]
    expired_at, reported_slow = watch_until_expiry(renewal_times, pauses, 20 * seconds)
    assert expired_at <= last_renewal + 1.05 * CONFIG.lease_seconds + 2 * READ_INTERVAL
    assert reported_slow == set()


@given(
    st.lists(st.tuples(st.floats(12.0, 60.0), st.floats(1.0, 400.0)), max_size=3),
    st.lists(st.floats(0.0, 5.3), min_size=3, max_size=3),
)
def test_repeated_pauses_of_the_store_have_a_limited_effect(
    gaps: list[tuple[float, float]], phases: list[float]
) -> None:
    """After several pauses of the store, the lease of a dead worker still expires within a fixed time."""
    pauses: list[tuple[float, float]] = []
    for quiet_seconds, seconds in gaps:
        begin = (pauses[-1][1] if pauses else 0.0) + quiet_seconds
        pauses.append((begin, begin + seconds))
    renewal_times = {
        owner: compute_renewal_times(pauses, phase, 5.3, 2000.0) for owner, phase in zip(OWNERS, phases, strict=True)
    }
    last_pause_end = pauses[-1][1] if pauses else 60.0
    last_renewal = next(t for t in renewal_times["a"] if t >= last_pause_end)
    renewal_times["a"] = [t for t in renewal_times["a"] if t <= last_renewal]
    expired_at, _ = watch_until_expiry(renewal_times, pauses, last_renewal + 100 * CONFIG.lease_seconds)
    assert expired_at <= last_renewal + GAP_EXPIRY_MAX * CONFIG.lease_seconds + 2 * READ_INTERVAL
    if len(pauses) <= 1:
        assert expired_at <= last_renewal + 1.05 * CONFIG.lease_seconds + 2 * READ_INTERVAL


def test_two_gaps_determine_an_owners_interval() -> None:
    """An owner gets longer limits if it renewed late twice. A single stall does not count."""
    row = Lease("s-0", owner="slow", version=Version("0"))
    watch, _ = Watch().look([row], 0.0, 0.0)
    reported_by_time = []
    for t in range(1, 26):
        watch, (lease,) = watch.look([evolve(row, version=Version(str(t // 8)))], float(t), float(t))
        reported_by_time.append(dict(slow_owners(Me("me", history=watch.history), CONFIG)))
    assert reported_by_time[14] == {}
    assert reported_by_time[15] == reported_by_time[24] == {"slow": 7.0}
    census = take_census([evolve(lease, idle=20.9)], Me("me", history=watch.history), CONFIG)
    assert census.expired == ()
    assert take_census([evolve(lease, idle=21.1)], Me("me", history=watch.history), CONFIG).expired


def test_clock_step_of_the_store_is_not_an_owners_interval() -> None:
    """If the ages of all rows jump at the same time, no owner is reported as slow."""
    watch, reported_slow = Watch(), set[str]()
    for t in range(120):
        clock_step = 3603.0 if t in {44, 84} else 0.0
        rows = [
            Lease(f"s-{name}", owner=name, version=Version(str(t // 5)), idle=t % 5 + clock_step) for name in OWNERS
        ]
        watch, _ = watch.look(rows, float(t), float(t))
        reported_slow |= {owner for owner, _ in slow_owners(Me("me", history=watch.history), Config(rules=Kcl()))}
    assert reported_slow == set()


def test_gap_shared_with_this_worker_does_not_count() -> None:
    """If this worker could not renew its own leases during a gap, the gap does not count against other owners."""
    pauses = [(40.0, 70.0), (76.0, 106.0), (112.0, 142.0)]
    renewal_times = {
        owner: compute_renewal_times(pauses, 1.0 + index, 7.0, 300.0) for index, owner in enumerate(OWNERS)
    }
    assert watch_until_expiry(renewal_times, pauses, 260.0)[1] == set()


@given(st.text(max_size=30) | st.sampled_from(["9" * 4301 + " 1 1", "1 1 " + "9" * 10_000, "7 " * 3, "٣ 1 1"]))
def test_any_annotation_can_be_read(text: str) -> None:
    """A read of the table succeeds whatever an annotation contains."""
    row = Lease("s-0", owner="a", annotations=((BULLETIN, text),))
    watch, (lease,) = Watch(bulletins=BulletinTracker()).look([row], 0.0, 1.0)
    assert lease.annotations == row.annotations
    assert watch.history.hearing is not None
