"""A pause of the store does not extend the leases of workers that die afterwards."""

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
EVERY = 1.0
"""Seconds between two readings."""


def renewed(pauses: Sequence[tuple[float, float]], phase: float, pace: float, until: float) -> list[float]:
    """Return the times at which an owner renews, if requests get no response between these times (began, ended)."""
    times, t = [], phase
    while t < until:
        ended = next((end for begin, end in pauses if begin <= t < end), None)
        t = t if ended is None else ended + phase / 10
        times.append(t)
        t += pace
    return times


def table(signs: dict[str, list[float]], t: float) -> list[Lease]:
    """Return one lease of each owner; the version of a lease is the number of its renewals."""
    return [
        Lease(f"s-{owner}", owner=owner, version=Version(str(sum(each <= t for each in times))))
        for owner, times in signs.items()
    ]


def lived(signs: dict[str, list[float]], pauses: Sequence[tuple[float, float]], until: float) -> tuple[float, set[str]]:
    """Return the time when the lease of "a" first counted as expired, and the workers that were reported as slow."""
    watch, t, slow = Watch(), 0.0, set[str]()
    while t < until:
        if not any(begin <= t < end for begin, end in pauses):
            watch, leases = watch.look(table(signs, t), t, t + 0.01)
            me = Me("me", history=watch.history)
            slow |= {owner for owner, _ in slow_owners(me, CONFIG)}
            if any(lease.owner == "a" for lease in take_census(leases, me, CONFIG).expired) and t > max(signs["a"]):
                return t, slow
        t += EVERY
    return t, slow


@pytest.mark.parametrize("seconds", [30.0, 600.0, 3600.0])
@pytest.mark.parametrize("ours", [True, False])
def test_pause_of_the_store_does_not_extend_leases_of_dead_workers(seconds: float, ours: bool) -> None:
    """After a pause of the store, the lease of a dead worker expires as soon as usual."""
    pauses = [(60.0, 60.0 + seconds)]
    signs = {owner: renewed(pauses, 1.0 + place, 5.3, 2 * seconds + 200.0) for place, owner in enumerate(OWNERS)}
    last = next(t for t in signs["a"] if t >= pauses[0][1])
    signs["a"] = [t for t in signs["a"] if t <= last]
    if not ours:
        del signs["me"]
    died, slow = lived(signs, pauses, 20 * seconds)
    assert died <= last + 1.05 * CONFIG.lease_seconds + 2 * EVERY
    assert slow == set()


@given(
    st.lists(st.tuples(st.floats(12.0, 60.0), st.floats(1.0, 400.0)), max_size=3),
    st.lists(st.floats(0.0, 5.3), min_size=3, max_size=3),
)
def test_repeated_pauses_of_the_store_have_a_limited_effect(
    gaps: list[tuple[float, float]], phases: list[float]
) -> None:
    """After several pauses of the store, the lease of a dead worker still expires within a fixed limit."""
    pauses: list[tuple[float, float]] = []
    for calm, seconds in gaps:
        begin = (pauses[-1][1] if pauses else 0.0) + calm
        pauses.append((begin, begin + seconds))
    signs = {owner: renewed(pauses, phase, 5.3, 2000.0) for owner, phase in zip(OWNERS, phases, strict=True)}
    over = pauses[-1][1] if pauses else 60.0
    last = next(t for t in signs["a"] if t >= over)
    signs["a"] = [t for t in signs["a"] if t <= last]
    died, _ = lived(signs, pauses, last + 100 * CONFIG.lease_seconds)
    assert died <= last + GAP_EXPIRY_MAX * CONFIG.lease_seconds + 2 * EVERY
    if len(pauses) <= 1:
        assert died <= last + 1.05 * CONFIG.lease_seconds + 2 * EVERY


def test_two_gaps_determine_an_owners_interval() -> None:
    """An owner gets longer limits if it renewed late twice. A single stall does not count."""
    row = Lease("s-0", owner="slow", version=Version("0"))
    watch, _ = Watch().look([row], 0.0, 0.0)
    known = []
    for t in range(1, 26):
        watch, (lease,) = watch.look([evolve(row, version=Version(str(t // 8)))], float(t), float(t))
        known.append(dict(slow_owners(Me("me", history=watch.history), CONFIG)))
    assert known[14] == {}
    assert known[15] == known[24] == {"slow": 7.0}
    census = take_census([evolve(lease, idle=20.9)], Me("me", history=watch.history), CONFIG)
    assert census.expired == ()
    assert take_census([evolve(lease, idle=21.1)], Me("me", history=watch.history), CONFIG).expired


def test_clock_step_of_the_store_is_not_an_owners_interval() -> None:
    """If the ages of all rows jump at the same time, no owner is reported as slow."""
    watch, slow = Watch(), set[str]()
    for t in range(120):
        stepped = 3603.0 if t in {44, 84} else 0.0
        rows = [Lease(f"s-{o}", owner=o, version=Version(str(t // 5)), idle=t % 5 + stepped) for o in OWNERS]
        watch, _ = watch.look(rows, float(t), float(t))
        slow |= {owner for owner, _ in slow_owners(Me("me", history=watch.history), Config(rules=Kcl()))}
    assert slow == set()


def test_gap_shared_with_this_worker_does_not_count() -> None:
    """A gap in which this worker could not renew either is not counted against other owners."""
    pauses = [(40.0, 70.0), (76.0, 106.0), (112.0, 142.0)]
    signs = {owner: renewed(pauses, 1.0 + place, 7.0, 300.0) for place, owner in enumerate(OWNERS)}
    assert lived(signs, pauses, 260.0)[1] == set()


@given(st.text(max_size=30) | st.sampled_from(["9" * 4301 + " 1 1", "1 1 " + "9" * 10_000, "7 " * 3, "٣ 1 1"]))
def test_any_annotation_can_be_read(text: str) -> None:
    """A read of the table succeeds whatever an annotation contains."""
    row = Lease("s-0", owner="a", annotations=((BULLETIN, text),))
    watch, (lease,) = Watch(bulletins=BulletinTracker()).look([row], 0.0, 1.0)
    assert lease.annotations == row.annotations
    assert watch.history.hearing is not None
