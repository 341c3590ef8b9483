"""Plans the remaining steps of hand-offs that were requested (H3 and H4).

Every rule set finishes the hand-offs that are in progress, because a group of workers may change its rule set at any
time. Only `minimal` requests hand-offs (H2, H5), and only `minimal` counts them as done when it computes shares (H1).

A hand-off has three steps. First, the next owner writes its name on the lease. Then the owner reads this name, finishes
its batch, and gives the lease to the next owner. Finally, the next owner reads that the row names it as the owner, and
adopts the lease by a claim. This module does not plan that claim, which is the same as after a restart
(`worker/holdings.py`).

If the owner dies before it releases the lease, the next owner claims the lease when it expires. If the owner lives but
does not release the lease, the next owner steals the lease once its request is `lease_seconds` + 30 s old. If it has
not done so when the request is one cycle older, and holds no other lease, it is assumed to be dead, and its request no
longer counts.
"""

from collections.abc import Mapping

from leasehold.balancer.actions import Claim, Release, RequestHandoff, Steal
from leasehold.balancer.census import Census
from leasehold.balancer.model import Lease
from leasehold.balancer.rule_set import FleetSeconds

STUCK_SECONDS = 30.0
"""How long, in addition to `lease_seconds`, the next owner waits before it steals a lease from a living owner (H4)."""


def handoff_actions(census: Census, config: FleetSeconds) -> tuple[Claim | Release | Steal, ...]:
    """Return this worker's actions for hand-offs in progress, sorted by lease key."""
    expired_keys = {lease.key for lease in census.expired}
    steps = (_next_step(lease, census.worker, config, is_expired=lease.key in expired_keys) for lease in census.moving)
    return tuple(sorted((action for action in steps if action is not None), key=lambda action: action.lease.key))


def repeat_request(request: Lease, lease: Lease) -> RequestHandoff | None:
    """Return a new request if the owner has released the lease and then taken it back (H4).

    An owner takes a lease back if the next owner does not claim it in time.

    Args:
        request: The lease after the request was written.
        lease: The lease as it is now.
    """
    # `yields` is true if a worker of this library has taken the lease, so its owner responds to requests.
    is_taken_back = lease.owner == request.owner and lease.next_owner is None and lease.yields and not lease.ended
    return RequestHandoff(lease, lease.owner or "", "H4") if is_taken_back else None


def counts_after_handoffs(census: Census, config: FleetSeconds) -> Mapping[str, int]:
    """Return the number of leases of each worker, with hand-offs in progress counted as done (H1)."""
    handoffs = pending_handoffs(census, config)
    if not handoffs:
        return census.counts
    counts = dict(census.counts)
    for owner, next_owner in handoffs.values():
        counts[owner] -= 1
        counts[next_owner] = counts.get(next_owner, 0) + 1
    return counts


def pending_handoffs(census: Census, config: FleetSeconds) -> dict[str, tuple[str, str]]:
    """Map the key of each held lease that will be handed off to its owner and next owner (H1).

    A request is ignored if it is old and its next owner holds no lease, because the next owner is probably dead. A
    request that was made by a KCL 3.x leader always counts.
    """
    expired_keys = {lease.key for lease in census.expired} if census.moving else set()
    # A request that is not fulfilled expires one cycle after its next owner would have stolen the lease (H4). It must
    # not expire before that steal, because two workers that both want the lease could then replace each other's
    # requests forever.
    request_limit = config.lease_seconds + STUCK_SECONDS + config.cycle_seconds
    return {
        lease.key: (lease.owner, lease.next_owner)
        for lease in census.moving
        if lease.owner is not None
        and lease.next_owner is not None
        and lease.key not in expired_keys
        and (lease.leaving or lease.next_owner in census.counts or lease.next_owner_idle < request_limit)
    }


def _next_step(lease: Lease, worker: str, config: FleetSeconds, *, is_expired: bool) -> Claim | Release | Steal | None:
    """Return the next step of this hand-off if this worker must take it now, or None."""
    if lease.owner is None or lease.owner == lease.next_owner or lease.ended:
        return None
    if lease.owner == worker:
        # H3: the owner finishes its batch, and then releases the lease. If the lease has expired, this worker must
        #     first claim it again.
        return None if is_expired else Release(lease, rule="H3", next_owner=lease.next_owner)
    if lease.next_owner != worker:
        return None
    if is_expired:
        return Claim(lease, rule="H4")
    is_stuck = lease.next_owner_idle >= config.lease_seconds + STUCK_SECONDS
    return Steal(lease, from_owner=lease.owner, rule="H4") if is_stuck else None
