"""Takes the census, which shows the living workers and the leases that each of them holds. All rule sets use it.

Rule 1: only this module counts leases, so that all rule sets agree on which workers are alive.
Rule 2: loops over all leases use fast built-ins such as `Counter`. In most turns the leases are balanced, and the
planner has little to do except count them.

A lease is free if it has no owner. It is expired if its version has not changed for longer than the rule set allows,
and otherwise it is held. Two kinds of owners get more time, because they are alive and merely slow: Workers configured
with longer `lease_seconds` than ours, recognized by their gaps between renewals (`slow_owners`). KCL 3.x workers that
were just given a lease and find it only at their next poll (M14). An owner that was slow only once gets no additional
time, because the store may have paused. Only two slow renewals in a row show that the owner is slow.

Workers know of each other only as owners of leases, so a worker without a lease is invisible to the others. Workers of
a KCL 3.x leader are an exception, because they also write reports.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from operator import attrgetter
from typing import cast

from leasehold.balancer.census import Census, KnownLeases
from leasehold.balancer.census import select_unsettled as unsettled_of
from leasehold.balancer.config import Config
from leasehold.balancer.model import Lease, Me

GAP_EXPIRY_MAX = 6
"""Leases of a slow owner expire after this multiple of our `lease_seconds` at the latest.

Example: a worker is configured with six times our `lease_seconds`, and renews its leases three times in that period.
Because the multiple is 6, its leases expire after three missed renewals.
"""


def take_census(leases: Iterable[Lease], me: Me, config: Config) -> Census:
    """Return the census of these leases, which must have distinct keys."""
    known_leases = leases if isinstance(leases, KnownLeases) else tuple(leases)
    limit = expires_above(config)
    # Nearly all leases are held by a living owner and need no action. Find the few others in one pass, so that the
    # later steps need not visit all leases.
    unsettled_leases = (
        known_leases.unsettled(limit) if isinstance(known_leases, KnownLeases) else unsettled_of(known_leases, limit)
    )
    omitted_keys = (
        set(_unreadable_children(known_leases, unsettled_leases)) if config.rules.children_later else set[str]()
    )
    if not config.rules.counts_ended:
        omitted_keys |= {lease.key for lease in unsettled_leases if lease.ended}
    if omitted_keys:
        remaining_leases = known_leases.without(omitted_keys) if isinstance(known_leases, KnownLeases) else None
        known_leases = (
            tuple(lease for lease in known_leases if lease.key not in omitted_keys)
            if remaining_leases is None
            else remaining_leases
        )
        unsettled_leases = [lease for lease in unsettled_leases if lease.key not in omitted_keys]
    limit_by_gap = {owner: expires_above_gap(gap, config) for owner, gap in slow_owners(me, config)}
    reporting_workers = {worker for worker, _ in me.history.led}
    expired = [
        lease
        for lease in unsettled_leases
        if lease.owner is not None
        and lease.idle > limit
        and lease.idle > limit_by_gap.get(lease.owner, limit)
        # M14: after a KCL 3.x leader has given a lease to a worker, the worker renews the lease only at its next poll.
        #      The KCL polls every `lease_seconds`, so such a lease expires later.
        and not (lease.owner in reporting_workers and lease.held <= lease.idle <= 2 * limit)
    ]
    counts_by_owner = (
        known_leases.counts()
        if isinstance(known_leases, KnownLeases)
        else Counter(map(attrgetter("owner"), known_leases))
    )
    counts_by_owner.pop(None, None)
    # Subtract the expired leases from the counts of all leases, which is faster than testing each lease.
    for lease in expired:
        counts_by_owner[lease.owner] -= 1
    counts = cast("dict[str, int]", counts_by_owner)
    led_workers = _led_workers(expired, me, config)
    for worker in (me.worker, *led_workers):
        counts.setdefault(worker, 0)
    if not all(counts.values()):
        counts = {
            owner: count for owner, count in counts.items() if count or owner == me.worker or owner in led_workers
        }
    expired_keys = {lease.key for lease in expired}
    own_leases = known_leases.owned_by(me.worker) if isinstance(known_leases, KnownLeases) else known_leases
    return Census(
        worker=me.worker,
        leases=known_leases,
        free=tuple(lease for lease in unsettled_leases if lease.owner is None),
        expired=tuple(expired),
        mine=tuple([lease for lease in own_leases if lease.owner == me.worker and lease.key not in expired_keys]),
        moving=tuple(lease for lease in unsettled_leases if lease.next_owner is not None),
        counts=counts,
        led=led_workers,
    )


def _unreadable_children(leases: Collection[Lease], unsettled_leases: Collection[Lease]) -> frozenset[str]:
    """Return the free leases that cannot be read yet because a parent shard is still being read (L12, M1).

    Child leases must not be claimed before their parents end. A claimed lease counts toward its owner's share, so the
    division of leases would become uneven when the parent's lease ends.
    """
    free_children = [lease for lease in unsettled_leases if lease.owner is None and lease.parents]
    parent_keys = {parent_key for lease in free_children for parent_key in lease.parents}
    possible_parents = (
        map(leases.get, parent_keys) if isinstance(leases, KnownLeases) else leases if parent_keys else ()
    )
    unread_parents = {
        lease.key for lease in possible_parents if lease is not None and lease.key in parent_keys and not lease.ended
    }
    return frozenset(lease.key for lease in free_children if not unread_parents.isdisjoint(lease.parents))


def _led_workers(expired: list[Lease], me: Me, config: Config) -> tuple[str, ...]:
    """Return the workers to which their KCL 3.x leader may still give leases (M14).

    The result does not contain a worker if one of its leases has expired, or if the leader has not given it a lease for
    too long.
    """
    wait_limit = config.rules.overdue_seconds(config.lease_seconds, config.cycle_seconds)
    if wait_limit is None or not me.history.led:
        return ()
    workers_with_expired_leases = {lease.owner for lease in expired}
    return tuple(
        worker
        for worker, seconds_waited in me.history.led
        if seconds_waited <= wait_limit and worker not in workers_with_expired_leases
    )


def expires_above(config: Config) -> float:
    """Return the number of seconds without a renewal above which a lease is expired."""
    return config.rules.expires_above(config.lease_seconds)


def slow_owners(me: Me, config: Config) -> tuple[tuple[str, float], ...]:
    """Return the living owners that renew too slowly for our `lease_seconds`, each with its longest renewal gap.

    A slow owner is configured with longer `lease_seconds` (failoverTimeMillis, expiry) than ours. A renewal gap is too
    long if it exceeds half of `lease_seconds` and is clearly longer than our own renewal interval.

    If our own leases have long gaps as well, the cause is probably a pause of the store. In this case, a gap is too
    long only if it exceeds our own longest gap by more than `lease_seconds`.

    Examples:
        >>> from leasehold import Config, Me
        >>> from leasehold.planner import History, slow_owners
        >>> slow_owners(Me("worker-a", history=History(gaps=(("worker-b", 12.0),))), Config(lease_seconds=10))
        (('worker-b', 12.0),)
    """
    return _owners_above_gap_limit(me.history.gaps, me, config)


def late_owners(me: Me, config: Config) -> frozenset[str]:
    """Return the owners that missed renewals between two reads of the table, although they are not slow owners (C16).

    A late owner may have died.
    """
    late_gaps, slow_gaps = (
        dict(_owners_above_gap_limit(intervals, me, config)) for intervals in (me.history.paces, me.history.gaps)
    )
    return frozenset(late_gaps) - frozenset(slow_gaps)


def _owners_above_gap_limit(
    gaps: tuple[tuple[str, float], ...], me: Me, config: Config
) -> tuple[tuple[str, float], ...]:
    # With the factor 1.25, an owner counts as slower than this worker if its gaps exceed our renewal interval by more
    # than a quarter.
    threshold = max(config.lease_seconds / 2, 1.25 * config.renew_seconds)
    our_gap = dict(gaps).get(me.worker, 0.0)
    limit = our_gap + config.lease_seconds if our_gap > threshold else threshold
    return tuple((owner, seconds) for owner, seconds in gaps if seconds > limit and owner != me.worker)


def expires_above_gap(gap: float, config: Config) -> float:
    """Return the number of seconds without a renewal after which an owner with this renewal gap counts as dead.

    The result is at most `GAP_EXPIRY_MAX` times `lease_seconds`, because a long gap may also be caused by a pause of
    the store.
    """
    return min(3 * gap, GAP_EXPIRY_MAX * config.lease_seconds)
