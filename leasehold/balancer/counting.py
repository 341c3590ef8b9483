"""Takes the census of one reading for every rule set alike: the living workers, and the leases that each holds.

Rule 1: every rule set is counted for here and nowhere else, so that all agree on who is alive.
Rule 2: the passes run at C speed; most turns are balanced, and a balanced turn ends here.

A lease is free without an owner, expired if its version stood still for longer than its rule set allows, and held
otherwise. Two kinds of owners get more time, because they live and are merely slow:
    workers of a fleet with a longer `lease_seconds` than ours, by their own gaps between renewals (`slow_owners`);
    a KCL 3.x worker that was just given a lease and finds it only at its next poll (M14).
An owner that was slow once gets no more: the store may have paused, and two slow renewals in a row make a habit.
Workers are known by what they hold. A worker without a lease is invisible, except to itself and, with a KCL 3.x
leader, by its reports.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import cast

from leasehold.balancer.census import Census, Known
from leasehold.balancer.census import odd as odd_of
from leasehold.balancer.config import Config
from leasehold.balancer.model import Lease, Me

PATIENCE_MAX = 6
"""No owner is spared for longer, in `lease_seconds`, however slowly it seems to renew.

A fleet set to six times our seconds renews every two of ours, and is spared for three renewals of its own.
"""


def take_census(leases: Iterable[Lease], me: Me, config: Config) -> Census:
    """Count one reading; `leases` have distinct keys."""
    reading = leases if isinstance(leases, Known) else tuple(leases)
    limit = expires_above(config)
    # Few leases are anything but held and alive: this one pass finds them, the rest only looks at them.
    odd = reading.odd(limit) if isinstance(reading, Known) else odd_of(reading, limit)
    out = set(_waiting(reading, odd)) if config.rules.children_later else set[str]()
    if not config.rules.counts_ended:
        out |= {lease.key for lease in odd if lease.ended}
    if out:
        within = reading.without(out) if isinstance(reading, Known) else None
        reading = tuple(lease for lease in reading if lease.key not in out) if within is None else within
        odd = [lease for lease in odd if lease.key not in out]
    patience = {owner: patience_with(gap, config) for owner, gap in slow_owners(me, config)}
    led_by = {worker for worker, _ in me.history.led}
    expired = [
        lease
        for lease in odd
        if lease.owner is not None
        and lease.idle > limit
        and lease.idle > patience.get(lease.owner, limit)
        # M14: a new owner of a KCL 3.x leader renews at its next poll; KCL's come every lease_seconds.
        and not (lease.owner in led_by and lease.held <= lease.idle <= 2 * limit)
    ]
    by_owner = reading.counts() if isinstance(reading, Known) else Counter(map(attrgetter("owner"), reading))
    by_owner.pop(None, None)
    # Counting all and taking off the expired is faster than asking of each lease whether it expired.
    for lease in expired:
        by_owner[lease.owner] -= 1
    counts = cast("dict[str, int]", by_owner)
    led = _led(expired, me, config)
    for worker in (me.worker, *led):
        counts.setdefault(worker, 0)
    if not all(counts.values()):
        counts = {owner: count for owner, count in counts.items() if count or owner == me.worker or owner in led}
    dead = {lease.key for lease in expired}
    mine = reading.owned_by(me.worker) if isinstance(reading, Known) else reading
    return Census(
        worker=me.worker,
        leases=reading,
        free=tuple(lease for lease in odd if lease.owner is None),
        expired=tuple(expired),
        mine=tuple([lease for lease in mine if lease.owner == me.worker and lease.key not in dead]),
        moving=tuple(lease for lease in odd if lease.next_owner is not None),
        counts=counts,
        led=led,
    )


def _waiting(reading: Collection[Lease], odd: Collection[Lease]) -> frozenset[str]:
    """M1: free leases that nobody may read yet (L12), for a parent is still being read.

    Claimed early they would count for a share, and when that parent ends the counts would be uneven.
    """
    young = [lease for lease in odd if lease.owner is None and lease.parents]
    names = {name for lease in young for name in lease.parents}
    found = map(reading.get, names) if isinstance(reading, Known) else reading if names else ()
    unread = {lease.key for lease in found if lease is not None and lease.key in names and not lease.ended}
    return frozenset(lease.key for lease in young if not unread.isdisjoint(lease.parents))


def _led(expired: list[Lease], me: Me, config: Config) -> tuple[str, ...]:
    """M14: led workers that report and may still be given leases.

    A led worker that lets a lease expire is left out, and so is one that was given none for too long.
    """
    limit = config.rules.overdue_seconds(config.lease_seconds, config.cycle_seconds)
    if limit is None or not me.history.led:
        return ()
    dying = {lease.owner for lease in expired}
    return tuple(worker for worker, waited in me.history.led if waited <= limit and worker not in dying)


def expires_above(config: Config) -> float:
    """A lease idle for more seconds than this has no living owner."""
    return config.rules.expires_above(config.lease_seconds)


def slow_owners(me: Me, config: Config) -> tuple[tuple[str, float], ...]:
    """Living owners that renew too slowly for our `lease_seconds`, with the longest gap measured.

    Their fleet is set to a longer `lease_seconds` (failoverTimeMillis, expiry) than ours. Too slow is
    slower than half of `lease_seconds`, and clearly slower than we renew ourselves; where our own leases
    stood still as long, the store had paused for all, and only what was longer by `lease_seconds` counts.

    Examples:
        >>> from leasehold import Config, History, Me, slow_owners
        >>> slow_owners(Me("worker-a", history=History(gaps=(("worker-b", 12.0),))), Config(lease_seconds=10))
        (('worker-b', 12.0),)
    """
    return _slower(me.history.gaps, me, config)


def late_owners(me: Me, config: Config) -> frozenset[str]:
    """C16: owners that renewed too seldom between two readings, and are not known for it: they may have died."""
    late, known = (dict(_slower(measured, me, config)) for measured in (me.history.paces, me.history.gaps))
    return frozenset(late) - frozenset(known)


def _slower(measured: tuple[tuple[str, float], ...], me: Me, config: Config) -> tuple[tuple[str, float], ...]:
    # 1.25: an owner is clearly slower than we renew ourselves if its gaps are a quarter longer.
    fair = max(config.lease_seconds / 2, 1.25 * config.renew_seconds)
    ours = dict(measured).get(me.worker, 0.0)
    least = ours + config.lease_seconds if ours > fair else fair
    return tuple((owner, seconds) for owner, seconds in measured if seconds > least and owner != me.worker)


def patience_with(gap: float, config: Config) -> float:
    """The owner with this gap counts as dead after so many seconds.

    The limit is capped, for gaps can also come of pauses of the store.
    """
    return min(3 * gap, PATIENCE_MAX * config.lease_seconds)
