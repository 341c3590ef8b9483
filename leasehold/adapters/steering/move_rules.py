"""By which rule a lease changed hands between two readings of a table.

The rule is that of the new owner's plan on the earlier reading. Where owners died or left between the two, the workers
planned without them: so a plan that does not explain a move is asked for once more, with all that those held free.
Newcomers take one lease, wait for others to join, and then take their shares; where the readings are too far apart to
show that, their plan is asked for with the first lease theirs for long.
"""

import math
from collections.abc import Mapping

from attrs import evolve, frozen

from leasehold.adapters.steering.watching import WatchedTable
from leasehold.balancer.actions import RequestHandoff, Steal, Taking
from leasehold.balancer.config import Config
from leasehold.balancer.counting import expires_above
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.plan import plan

FREED = "C6"
GIVEN = "H2"


def moved(before: WatchedTable, after: WatchedTable) -> tuple[tuple[Lease, Lease], ...]:
    """The unfinished leases that changed hands, each as it was and as it is."""
    old = {lease.key: lease for lease in before.leases}
    return tuple(
        (old[lease.key], lease)
        for lease in after.leases
        if lease.key in old and old[lease.key].owner != lease.owner and not lease.ended
    )


def rules_between(before: WatchedTable, after: WatchedTable, config: Config) -> Mapping[str, str]:
    """The rule of each move, by the key of its lease; "" where no plan explains it, as where an owner let it go."""
    moves = moved(before, after)
    if not moves:
        return {}
    readings = _TwoReadings(before, after, config)
    dead = readings.dead()
    freed = tuple(evolve(lease, owner=None) if lease.owner in dead else lease for lease in before.leases)
    movers = {new.owner for _, new in moves if new.owner is not None}
    seen = {worker: _takings(before.leases, worker, before, config) for worker in movers}
    unseen = {worker: _takings(freed, worker, before, config) for worker in movers} if dead else seen
    joined = _joined(freed, moves)
    later = {worker: _takings(joined, worker, before, config) for worker in movers if not unseen[worker]}
    return {
        new.key: readings.freed(old, dead)
        if new.owner is None
        else GIVEN
        if old.heir == new.owner
        else _rule(old, seen[new.owner], unseen[new.owner] or later[new.owner])
        for old, new in moves
    }


@frozen
class _TwoReadings:
    """Two readings, one after the other, and what they tell of owners."""

    before: WatchedTable
    after: WatchedTable
    config: Config

    @property
    def _unseen_seconds(self) -> float:
        """A lease may have stood still for so much longer, when it was taken, than the earlier reading says.

        Its version may be nearly as old as the reading before showed it, and it was taken before the later one.
        """
        return 2 * (self.after.seconds - self.before.seconds)

    def dead(self) -> frozenset[str | None]:
        """The owners that renewed nothing in between, and lost a lease that they were not asked for, or are late."""
        now = {lease.key: lease for lease in self.after.leases}
        silent = {lease.owner for lease in self.before.leases if lease.owner is not None}
        silent -= {
            old.owner
            for old in self.before.leases
            if old.key in now and now[old.key].owner == old.owner and now[old.key].version != old.version
        }
        lost = {old.owner for old, new in moved(self.before, self.after) if old.heir is None or old.heir != new.owner}
        return frozenset(owner for owner in silent if owner in lost or self._late(owner))

    def freed(self, old: Lease, dead: frozenset[str | None]) -> str:
        """The rule by which the lookout freed a lease; "" where its owner let it go."""
        # An owner that lives has renewed by `renew_seconds`: one that was not late there may as well have left.
        overdue = old.idle > self.config.renew_seconds and old.owner in dead and self._late(old.owner)
        return FREED if overdue and self.config.rules.frees_expired else ""

    def _late(self, owner: str | None) -> bool:
        idle = max((lease.idle for lease in self.before.leases if lease.owner == owner), default=0.0)
        return not math.isinf(idle) and idle + self._unseen_seconds > expires_above(self.config)


def _joined(leases: tuple[Lease, ...], moves: tuple[tuple[Lease, Lease], ...]) -> tuple[Lease, ...]:
    """The leases once every new owner has one, and has had what it holds for long."""
    movers = {new.owner for _, new in moves if new.owner is not None}
    firsts = {new.owner: new.key for _, new in reversed(moves)}
    given = {firsts[owner]: owner for owner in movers - {lease.owner for lease in leases}}
    return tuple(
        evolve(lease, owner=owner, idle=0.0, held=math.inf, heir=None) if owner in movers else lease
        for lease in leases
        for owner in [given.get(lease.key, lease.owner)]
    )


def _takings(leases: tuple[Lease, ...], worker: str, table: WatchedTable, config: Config) -> tuple[Taking, ...]:
    found = plan(leases, None, Me(worker, 0, table.history), config)
    return tuple(action for action in found if isinstance(action, Taking))


def _rule(old: Lease, seen: tuple[Taking, ...], unseen: tuple[Taking, ...]) -> str:
    """The rule that names the lease; else one that robs its owner; else whichever its new owner acts by."""
    for action in (*seen, *unseen):
        if old.key in {action.lease.key, *(other.lease.key for other in action.alternates)}:
            return action.rule
    # Where the rules leave a choice to chance, the worker may have chosen another lease of the same owner.
    robbing = [
        action.rule for action in seen if isinstance(action, Steal | RequestHandoff) and action.victim == old.owner
    ]
    return next(iter([*robbing, *(action.rule for action in unseen), *(action.rule for action in seen)]), "")
