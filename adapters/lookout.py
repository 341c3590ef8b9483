"""What a worker has to do with bulletins (C4): whether to hear them, and which of its leases carries its own."""

from collections.abc import Iterable

from adapters.holding import Holding
from balancer.actions import Look, Renew
from balancer.bulletins import Ear
from balancer.cadence import beat, beat_seconds, bulletin_row
from balancer.config import Config, Minimal
from balancer.model import Lease, Me
from balancer.plan import renewals
from balancer.watch import Watch
from stores.protocol import Promises


def first_watch(config: Config, promises: Promises) -> Watch:
    """C14: where a note moves the version, a bulletin would look like a renewal, and all list the table."""
    hears = isinstance(config.rules, Minimal) and promises.free_notes
    return Watch(ear=Ear() if hears else None)


def due_renewals(
    held: Iterable[Holding], now: float, me: Me, config: Config, look: Look
) -> list[tuple[Holding, Renew]]:
    """The leases to renew now; the bulletin's row more often, while this worker has something to say on it."""
    by_key = {holding.key: holding for holding in held}
    mine = tuple(_aged(holding, now) for holding in by_key.values())
    due = [*renewals(mine, me, config)]
    if look.notes:
        # C4: checkpoints carry no notes, and a lease that they alone renew would carry no bulletin.
        unsaid = [holding for holding in by_key.values() if now - holding.renewed >= config.renew_seconds]
        due += [*beat(mine, me, config), *(Renew(holding.lease, "C4") for holding in unsaid)]
    wanted = {action.lease.key: action for action in due}
    return [(by_key[key], action) for key, action in wanted.items()]


def _aged(holding: Holding, now: float) -> Lease:
    lease = holding.lease
    return lease.watched(max(0.0, now - holding.confirmed), lease.held, lease.heir_idle)


def renew_pause(watch: Watch, config: Config) -> float:
    """Who may become the lookout at any time must not sleep through its first beats."""
    return config.renew_seconds if watch.ear is None else beat_seconds(config)


def news(held: Iterable[Holding], me: str, look: Look) -> list[tuple[Holding, Renew]]:
    """The bulletin's row, to be written at once: what the lookout has to say should not wait for the next beat."""
    by_key = {holding.key: holding for holding in held}
    row = bulletin_row([holding.lease for holding in by_key.values()], me) if look.notes else None
    return [] if row is None else [(by_key[row.key], Renew(row, "C4"))]
