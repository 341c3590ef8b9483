"""Planned moves under way: the owner gives what it is asked for, the heir takes what it was promised (H3 and H4).

These belong to every rule set, for a fleet may change rules while a move is under way. Asking for one
(H2, H5) is `minimal`'s own, and so is what goes by how leases will be divided then (H1).

A move has three steps. The heir writes its name on the lease; the owner sees it, finishes its batch, and releases the
lease to the heir; the heir accepts. If the owner dies meanwhile, the heir claims the expired lease; if it lives and
does not give, the heir steals after `lease_seconds` + 30 s. A cycle after
that, a request stops counting if its heir still holds nothing.
"""

from collections.abc import Mapping

from leasehold.balancer.actions import Claim, Release, RequestHandoff, Steal
from leasehold.balancer.census import Census
from leasehold.balancer.model import Lease
from leasehold.balancer.rule_set import FleetSeconds

STUCK_SECONDS = 30.0
"""A living owner may take `lease_seconds` and this much more to drain, before its lease is stolen (H4)."""


def handoffs(census: Census, config: FleetSeconds) -> tuple[Claim | Release | Steal, ...]:
    """The leases with an heir ask this worker to do these things, in order of key."""
    expired = {lease.key for lease in census.expired}
    moves = (_move(lease, census.worker, config, dead=lease.key in expired) for lease in census.moving)
    return tuple(sorted((move for move in moves if move is not None), key=lambda move: move.lease.key))


def asked_again(asked: Lease, found: Lease) -> RequestHandoff | None:
    """H4: the request anew, for what its owner gave and took back because the heir was late to accept it.

    asked  the lease as the request left it
    found  as it is now
    """
    taken_back = found.owner == asked.owner and found.next_owner is None and found.yields and not found.ended
    return RequestHandoff(found, found.owner or "", "H4") if taken_back else None


def handed_counts(census: Census, config: FleetSeconds) -> Mapping[str, int]:
    """Leases by worker once the planned moves under way are made (H1)."""
    moves = live_moves(census, config)
    if not moves:
        return census.counts
    counts = dict(census.counts)
    for owner, next_owner in moves.values():
        counts[owner] -= 1
        counts[next_owner] = counts.get(next_owner, 0) + 1
    return counts


def live_moves(census: Census, config: FleetSeconds) -> dict[str, tuple[str, str]]:
    """Owner and heir, by key, of the held leases that will be handed over (H1).

    Their heir holds a lease, or was named lately (a newcomer announces itself so), or a KCL 3.x leader named it.
    """
    dead = {lease.key for lease in census.expired} if census.moving else set()
    # A cycle later than the heir steals (H4): given up any earlier, two heirs replace each other for ever.
    given_up = config.lease_seconds + STUCK_SECONDS + config.cycle_seconds
    return {
        lease.key: (lease.owner, lease.next_owner)
        for lease in census.moving
        if lease.owner is not None
        and lease.next_owner is not None
        and lease.key not in dead
        and (lease.leaving or lease.next_owner in census.counts or lease.next_owner_idle < given_up)
    }


def _move(lease: Lease, worker: str, config: FleetSeconds, *, dead: bool) -> Claim | Release | Steal | None:
    """The one step of this move that is now this worker's to make, if any."""
    if lease.owner is None or lease.owner == lease.next_owner or lease.ended:
        return None
    if lease.owner == worker:
        # H3: the owner drains first, and releases then. A lease of ours that expired is claimed anew before.
        return None if dead else Release(lease, rule="H3", next_owner=lease.next_owner)
    if lease.next_owner != worker:
        return None
    if dead:
        return Claim(lease, rule="H4")
    stuck = lease.next_owner_idle >= config.lease_seconds + STUCK_SECONDS
    return Steal(lease, from_owner=lease.owner, rule="H4") if stuck else None
