"""Plans the remaining steps of hand-offs: the owner releases the lease, and the next owner takes it (H3 and H4).

Every rule set uses these functions, because a group of workers may change its rule set during a hand-off. Only
`minimal` requests hand-offs (H2, H5), and only `minimal` plans with the division of leases that they will lead to (H1).

A hand-off has three steps. The next owner writes its name on the lease. The owner sees the name, finishes its batch,
and releases the lease to the next owner. The next owner accepts it. If the owner dies in the meantime, the next owner
claims the expired lease. If the owner lives but does not release the lease, the next owner steals it after
`lease_seconds` + 30 s. If it does not, and still holds no lease one cycle later, its request is ignored.
"""

from collections.abc import Mapping

from leasehold.balancer.actions import Claim, Release, RequestHandoff, Steal
from leasehold.balancer.census import Census
from leasehold.balancer.model import Lease
from leasehold.balancer.rule_set import FleetSeconds

STUCK_SECONDS = 30.0
"""How much longer than `lease_seconds` a living owner may take to drain before its lease is stolen (H4)."""


def handoffs(census: Census, config: FleetSeconds) -> tuple[Claim | Release | Steal, ...]:
    """Return this worker's actions for hand-offs in progress, sorted by lease key."""
    expired = {lease.key for lease in census.expired}
    moves = (_move(lease, census.worker, config, dead=lease.key in expired) for lease in census.moving)
    return tuple(sorted((move for move in moves if move is not None), key=lambda move: move.lease.key))


def renewed_request(request: Lease, lease: Lease) -> RequestHandoff | None:
    """Return a new request if the owner released the lease and took it back because the next owner was late (H4).

    Args:
        request: The lease as the request left it.
        lease: The lease as it is now.
    """
    taken_back = lease.owner == request.owner and lease.next_owner is None and lease.yields and not lease.ended
    return RequestHandoff(lease, lease.owner or "", "H4") if taken_back else None


def handed_counts(census: Census, config: FleetSeconds) -> Mapping[str, int]:
    """Return the number of leases of each worker, with hand-offs in progress counted as done (H1)."""
    moves = live_moves(census, config)
    if not moves:
        return census.counts
    counts = dict(census.counts)
    for owner, next_owner in moves.values():
        counts[owner] -= 1
        counts[next_owner] = counts.get(next_owner, 0) + 1
    return counts


def live_moves(census: Census, config: FleetSeconds) -> dict[str, tuple[str, str]]:
    """Return the owner and next owner, by key, of the held leases that will be handed off (H1).

    A request counts if its next owner holds a lease, if it was made recently, as by a newcomer without a lease, or if a
    KCL 3.x leader made it.
    """
    expired_keys = {lease.key for lease in census.expired} if census.moving else set()
    # The limit is one cycle after the next owner would steal the lease (H4). If requests were given up earlier, two
    # next owners could replace each other forever.
    request_limit = config.lease_seconds + STUCK_SECONDS + config.cycle_seconds
    return {
        lease.key: (lease.owner, lease.next_owner)
        for lease in census.moving
        if lease.owner is not None
        and lease.next_owner is not None
        and lease.key not in expired_keys
        and (lease.leaving or lease.next_owner in census.counts or lease.next_owner_idle < request_limit)
    }


def _move(lease: Lease, worker: str, config: FleetSeconds, *, dead: bool) -> Claim | Release | Steal | None:
    """Return the step of this hand-off that this worker must take now, if any."""
    if lease.owner is None or lease.owner == lease.next_owner or lease.ended:
        return None
    if lease.owner == worker:
        # H3: the owner drains the shard, then releases the lease. If our lease has expired, we claim it again first.
        return None if dead else Release(lease, rule="H3", next_owner=lease.next_owner)
    if lease.next_owner != worker:
        return None
    if dead:
        return Claim(lease, rule="H4")
    is_stuck = lease.next_owner_idle >= config.lease_seconds + STUCK_SECONDS
    return Steal(lease, from_owner=lease.owner, rule="H4") if is_stuck else None
