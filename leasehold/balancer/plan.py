"""The seam: leases in, actions out.

`plan` decides what a worker does now, `look_again` when it decides next. Neither reads a clock, calls a store or keeps
anything between two calls: time stands in the leases, chance in `Me.turn`, and memory in `Me.history`. Every action
carries the lease as it was read, and a store carries it out only where that is still true. A plan from an old reading
can therefore be refused, but it can do no harm (S1).
"""

from collections.abc import Collection, Iterable

from leasehold.balancer.actions import Action, Claim, Create, Delete, Look, Renew, RequestHandoff, Steal, Taking
from leasehold.balancer.census import Census, Known
from leasehold.balancer.config import Config
from leasehold.balancer.counting import expires_above, take_census
from leasehold.balancer.family import families, faults
from leasehold.balancer.handoff import handoffs
from leasehold.balancer.lineage import creations, deletions, garbage
from leasehold.balancer.lookout import (
    called_for,
    free_expired,
    next_look,
    overdue,
    settle_seconds,
    takes_more,
    until_late_judged,
)
from leasehold.balancer.model import Lease, Me, Shard
from leasehold.balancer.rules.shares import awaits_joiners, until_gathered

HANDOFF_POLL_SECONDS = 0.125
"""An heir looks at the leases it asked for so often: one read each, and no longer a pause than this.

An older reading is good enough, for half the price: the write that takes such a lease has its own condition.
"""


def plan(leases: Iterable[Lease], shards: Iterable[Shard] | None, me: Me, config: Config) -> tuple[Action, ...]:
    """The answer is everything that this worker should do now.

    leases  every known lease, as `Watch.look` answers them; distinct keys
    shards  a complete listing of the shards of every stream it names; None or empty: nothing is
            created or deleted
    The same input gives the same answer on every machine, whatever the order of leases and shards.
    No action names a key that another names, alternates included. Where two would, the first of these stands: a
    deletion, a taking, a planned move, a release of what has expired, a renewal.

    Examples:
        >>> from leasehold import Config, Lease, Me, plan
        >>> leases = [Lease("shard-0", owner="worker-a", idle=2.5), Lease("shard-1", owner="worker-b", idle=31.0)]
        >>> [(action.rule, action.lease.key) for action in plan(leases, None, Me("worker-a"), Config())]
        [('M6', 'shard-1')]
    """
    reading = leases if isinstance(leases, Known) else tuple(leases)
    census = take_census(reading, me, config)
    lifecycle_actions = lifecycle(reading, shards, census, me, config) if shards else ()
    deleted_keys = {action.lease.key for action in lifecycle_actions if isinstance(action, Delete)}
    if deleted_keys:
        # A lease about to go is nobody's share: counted, it would have been taken only to be deleted.
        reading = tuple(lease for lease in reading if lease.key not in deleted_keys)
        census = take_census(reading, me, config)
    # Other workers' leases may have changed since the whole table was read. A reading of a few rows serves only the
    # moves under way (H2), and what the lookout calls this worker to (C6).
    taken = config.rules.take(census, me, config) if me.history.full_still <= 0 else called_for(census, me, config)
    claimed_keys = deleted_keys | _keys(taken)
    moves = tuple(move for move in handoffs(census, config) if move.lease.key not in claimed_keys)
    claimed_keys |= {move.lease.key for move in moves}
    # C6: the releases of expired leases, without those that another action names.
    freed = tuple(
        release for release in free_expired(census, reading, me, config) if release.lease.key not in claimed_keys
    )
    renewed = tuple(renew for renew in _renewals(census, config) if renew.lease.key not in claimed_keys)
    return (*renewed, *lifecycle_actions, *moves, *taken, *freed)


def renewals(leases: Iterable[Lease], me: Me, config: Config) -> tuple[Renew, ...]:
    """The leases to renew now: mine, unexpired, idle for `renew_seconds`; in order of key.

    A worker may ask this more often than `plan`, which includes them. A lease that is being drained for its
    heir is renewed here too, until it is handed over.

    Examples:
        >>> from leasehold import Config, Lease, Me, renewals
        >>> mine = [Lease("shard-0", owner="worker-a", idle=6.0), Lease("shard-1", owner="worker-a", idle=1.0)]
        >>> [renew.lease.key for renew in renewals(mine, Me("worker-a"), Config(lease_seconds=10))]
        ['shard-0']
    """
    return _renewals(take_census(leases, me, config), config)


def look_again(actions: Iterable[Action], leases: Iterable[Lease], me: Me, config: Config) -> Look:
    """The answer says when to look next after these actions of `plan`, and at which leases.

    Leases asked for are looked at alone, until they are handed over; but the whole table is read every
    `cycle_seconds` meanwhile. `me.history` says whether `leases` come from a reading of all or of a few.

    Examples:
        >>> from leasehold import Config, Kcl, Lease, Me, look_again
        >>> config = Config(rules=Kcl(), lease_seconds=10)
        >>> look_again([], [Lease("shard-0", owner="worker-a")], Me("worker-a"), config).seconds
        20.05
    """
    did, history, rules = tuple(actions), me.history, config.rules
    reading = leases if isinstance(leases, Known) else tuple(leases)
    moving = reading.odd(expires_above(config)) if isinstance(reading, Known) else reading
    asked = {lease.key for lease in moving if lease.next_owner == me.worker and lease.owner not in {None, me.worker}}
    asked |= _keys([action for action in did if isinstance(action, RequestHandoff)])
    if asked:
        # C10: a newcomer waits for its first lease and for other joiners at the same time. Where the worker that was
        # asked is silent, it may be dead, and have been the lookout: a listing starts the clocks of all it held (C1).
        gathered = history.hearing is not None and history.full_still >= until_gathered(history, config)
        silent = any(overdue(lease.idle, config) for lease in moving if lease.key in asked)
        whole = history.full_still >= config.cycle_seconds or (
            gathered and (silent or takes_more(take_census(reading, me, config), me, config))
        )
        return Look(HANDOFF_POLL_SECONDS, keys=None if whole else tuple(sorted(asked)), stale_ok=not whole)
    if history.hearing is not None and rules.keeps_lookout:
        return next_look(did, reading, me, config, history.hearing)
    if history.full_still > 0:
        return Look(0.0)  # the requests are settled: now see the whole
    pause = min(_pause(did, config), until_late_judged(reading, me, config), config.cycle_seconds)
    if rules.keeps_lookout and awaits_joiners(reading, me, config):
        pause = min(pause, until_gathered(history, config))
    return Look(pause)


def lifecycle(
    leases: Collection[Lease], shards: Iterable[Shard], census: Census, me: Me, config: Config
) -> tuple[Create | Delete, ...]:
    """The listed shards ask for these leases to be created (L3 to L7, L9) and deleted (L8, L10).

    A stream with a fault in its listing is left alone (L2). So is a stream where every shard has its lease, every lease
    its shard, and none has ended: nearly every stream, nearly always.
    """
    expired = {lease.key for lease in census.expired}
    actions: list[Create | Delete] = []
    for family in families(shards, leases):
        if family.settled or faults(family):  # L2
            continue
        gone = garbage(family, me.worker, expired)
        created = creations(family, gone, me.history, config)
        # The last lease that shows that a stream was read goes once those that begin where it ended are there (L5).
        actions += created or deletions(family, gone)
    if not actions:
        return ()
    # Keys are unique in a table; a source that does not tell its streams' shards apart must not break that.
    taken = {lease.key for lease in leases}
    made = {action.lease.key: action for action in reversed(actions) if action.lease.key not in taken}
    deleted = [action for action in actions if action.lease.key in taken and isinstance(action, Delete)]
    return (*(made[key] for key in sorted(made)), *deleted)


def _keys(actions: Collection[Action]) -> set[str]:
    """Every key that these actions name, alternates included."""
    several = (action for action in actions if isinstance(action, Taking) and action.alternates)
    others = {other.lease.key for action in several for other in action.alternates}
    return others | {action.lease.key for action in actions}


def _renewals(census: Census, config: Config) -> tuple[Renew, ...]:
    """Each of my leases is renewed once it was idle for `renew_seconds`."""
    due = (lease for lease in census.mine if lease.idle >= config.renew_seconds)
    return tuple(Renew(lease, rule=config.rules.renewal_rule) for lease in sorted(due, key=lambda lease: lease.key))


def _pause(actions: tuple[Action, ...], config: Config) -> float:
    """Seconds until the next look, `cycle_seconds` at most."""
    rules, takes = config.rules, any(isinstance(action, Claim | Steal) for action in actions)
    if takes and rules.again_at_once:
        return 0.0
    if rules.keeps_lookout and (soon := settle_seconds(actions, config)) is not None:
        return soon  # C10: see what became of it, then fill up
    if any(isinstance(action, Create) for action in actions):
        return 1.0  # a lease just made waits for nobody but us
    return config.cycle_seconds
