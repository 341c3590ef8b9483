"""The part of a worker in bulletins (C4): whether it reads them, and which of its leases carries its own."""

from collections.abc import Iterable

from leasehold.adapters.worker.holding import Holding
from leasehold.balancer.actions import Look, Renew
from leasehold.balancer.config import Config
from leasehold.balancer.looking.bulletin import BulletinTracker
from leasehold.balancer.looking.ranks import bulletin_row, heartbeat, heartbeat_seconds
from leasehold.balancer.looking.watch import Watch
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.plan import renewals
from leasehold.stores.protocol import Promises


def first_watch(config: Config, promises: Promises) -> Watch:
    """Start the watch; where a note moves the version, without bulletins: each would look like a renewal (C14)."""
    hears = config.rules.keeps_lookout and promises.free_notes
    return Watch(bulletins=BulletinTracker() if hears else None)


def due_renewals(
    held: Iterable[Holding], now: float, me: Me, config: Config, look: Look
) -> list[tuple[Holding, Renew]]:
    """The leases to renew now; the row with the bulletin more often, while this worker writes one."""
    by_key = {holding.key: holding for holding in held}
    mine = tuple(_aged(holding, now) for holding in by_key.values())
    due = [*renewals(mine, me, config)]
    # Checkpoints carry no notes: a lease that they alone renew would never say how far behind it is.
    due += [Renew(holding.lease, config.rules.renewal_rule) for holding in by_key.values() if holding.reach.untold(now)]
    if look.notes:
        # C4: checkpoints carry no notes, and a lease that they alone renew would carry no bulletin.
        unsaid = [holding for holding in by_key.values() if now - holding.renewed >= config.renew_seconds]
        due += [*heartbeat(mine, me, config), *(Renew(holding.lease, "C4") for holding in unsaid)]
    wanted = {action.lease.key: action for action in due}
    return [(by_key[key], action) for key, action in wanted.items()]


def _aged(holding: Holding, now: float) -> Lease:
    lease = holding.lease
    return lease.watched(max(0.0, now - holding.confirmed), lease.held, lease.heir_idle)


def renew_pause(watch: Watch, config: Config) -> float:
    """The longest wait between two calls: any worker may become the lookout, so it wakes at heartbeat intervals."""
    return config.renew_seconds if watch.bulletins is None else heartbeat_seconds(config)


def news(held: Iterable[Holding], me: str, look: Look) -> list[tuple[Holding, Renew]]:
    """The row with the bulletin, to be written at once: the lookout's news should not wait for the next heartbeat."""
    by_key = {holding.key: holding for holding in held}
    row = bulletin_row([holding.lease for holding in by_key.values()], me) if look.notes else None
    return [] if row is None else [(by_key[row.key], Renew(row, "C4"))]
