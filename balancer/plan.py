"""The seam: leases in, actions out."""

from collections.abc import Collection, Iterable
from typing import assert_never

from balancer import event_hubs, kcl, kcl_rust, minimal
from balancer.actions import Action, Claim, Create, Delete, Look, Renew, RequestHandoff, Steal, Taking
from balancer.ancestry import families, faults
from balancer.cadence import appointment, reaps, settle_seconds, until_gathered, until_late_judged
from balancer.census import Census, take_census
from balancer.cleanup import deletions, garbage
from balancer.config import Config, EventHubs, Kcl, KclRust, Minimal
from balancer.handoff import handoffs
from balancer.lineage import creations
from balancer.model import Lease, Me, Shard

HANDOFF_POLL_SECONDS = 0.125
"""How often an heir looks at the leases it asked for: one read each, and no longer a pause than this.

That may be as they were a moment ago, for half the price: what takes them up is a write under its own condition.
"""


def plan(leases: Iterable[Lease], shards: Iterable[Shard] | None, me: Me, config: Config) -> tuple[Action, ...]:
    """What this worker should do now.

    leases  every known lease, as `Watch.look` answers them; distinct keys
    shards  a complete listing of the shards of every stream it names; None or empty: nothing is
            created or deleted
    The same input gives the same answer on every machine, whatever the order of leases and shards.
    No key is spoken of twice, alternates included.
    """
    reading = tuple(leases)
    census = take_census(reading, me, config)
    tended = lifecycle(reading, shards, census, me, config) if shards else ()
    going = {action.lease.key for action in tended if isinstance(action, Delete)}
    if going:
        reading = tuple(lease for lease in reading if lease.key not in going)
        census = take_census(reading, me, config)
    # What others hold may have changed since all was read: a reading of a few rows serves the moves under way (H2).
    taken = _take(census, me, config) if me.history.full_still <= 0 else ()
    spoken = going | _keys(taken)
    moves = tuple(move for move in handoffs(census, config) if move.lease.key not in spoken)
    spoken |= {move.lease.key for move in moves}
    freed = _reaps(census, reading, me, config, spoken)
    renewed = tuple(renew for renew in _renewals(census, config) if renew.lease.key not in spoken)
    return (*renewed, *tended, *moves, *taken, *freed)


def renewals(leases: Iterable[Lease], me: Me, config: Config) -> tuple[Renew, ...]:
    """The leases to renew now: mine, unexpired, idle for `renew_seconds`; in order of key.

    For calling more often than `plan`, which includes them. A lease that is being drained for its
    heir is renewed here too, until it is handed over.
    """
    return _renewals(take_census(leases, me, config), config)


def look_again(actions: Iterable[Action], leases: Iterable[Lease], me: Me, config: Config) -> Look:
    """When to look next after these actions of `plan`, and at which leases.

    Leases asked for are looked at alone, until they are handed over; but the whole table is read every
    `cycle_seconds` meanwhile. `me.history` tells whether `leases` come from a reading of all or of a few.
    """
    did, reading, history, rules = tuple(actions), tuple(leases), me.history, config.rules
    asked = {lease.key for lease in reading if lease.heir == me.worker and lease.owner not in {None, me.worker}}
    asked |= _keys([action for action in did if isinstance(action, RequestHandoff)])
    if asked:
        # C10: who joins waits for its first lease and for other joiners at the same time.
        most = config.cycle_seconds if history.hearing is None else until_gathered(history, config)
        whole = history.full_still >= most
        return Look(HANDOFF_POLL_SECONDS, keys=None if whole else tuple(sorted(asked)), stale_ok=not whole)
    if history.hearing is not None and isinstance(rules, Minimal):
        return appointment(did, reading, me, config, history.hearing)
    if history.full_still > 0:
        return Look(0.0)  # what was asked for is settled: now see the whole
    return Look(min(_pause(did, config), until_late_judged(reading, me, config), config.cycle_seconds))


def lifecycle(
    leases: Collection[Lease], shards: Iterable[Shard], census: Census, me: Me, config: Config
) -> tuple[Create | Delete, ...]:
    """What the listed shards ask for: leases created (L3 to L7, L9) and deleted (L8, L10)."""
    expired = {lease.key for lease in census.expired}
    actions: list[Create | Delete] = []
    for family in families(shards, leases):
        if family.settled or faults(family):  # L2
            continue
        gone = garbage(family, me.worker, expired)
        actions += creations(family, gone, me.history.holes, config)
        actions += deletions(family, gone)
    return _without_twins(actions, leases)


def _without_twins(actions: list[Create | Delete], leases: Iterable[Lease]) -> tuple[Create | Delete, ...]:
    """Keys are unique in a table; a source that does not tell its streams' shards apart must not break that."""
    if not actions:
        return ()
    taken = {lease.key for lease in leases}
    created = {action.lease.key: action for action in reversed(actions) if action.lease.key not in taken}
    deleted = [action for action in actions if action.lease.key in taken and isinstance(action, Delete)]
    return (*(created[key] for key in sorted(created)), *deleted)


def _take(census: Census, me: Me, config: Config) -> tuple[Action, ...]:
    match config.rules:
        case Kcl():
            return kcl.take(census, me, config, config.rules)
        case KclRust():
            return kcl_rust.take(census, me, config, config.rules)
        case EventHubs():
            return event_hubs.take(census, me, config, config.rules)
        case Minimal():
            return minimal.take(census, me, config, config.rules)
        case _:
            assert_never(config.rules)


def _reaps(
    census: Census, leases: tuple[Lease, ...], me: Me, config: Config, spoken: Collection[str]
) -> tuple[Action, ...]:
    if not isinstance(config.rules, Minimal):
        return ()
    return tuple(reap for reap in reaps(census, leases, me, config, config.rules) if reap.lease.key not in spoken)


def _keys(actions: Collection[Action]) -> set[str]:
    """Every key spoken of, alternates included."""
    several = (action for action in actions if isinstance(action, Taking) and action.alternates)
    others = {other.lease.key for action in several for other in action.alternates}
    return others | {action.lease.key for action in actions}


def _renewals(census: Census, config: Config) -> tuple[Renew, ...]:
    rule = _renewal_rule(config)
    due = (lease for lease in census.mine if lease.idle >= config.renew_seconds)
    return tuple(Renew(lease, rule=rule) for lease in sorted(due, key=lambda lease: lease.key))


def _renewal_rule(config: Config) -> str:
    match config.rules:
        case Kcl():
            return "K10"
        case KclRust():
            return "R3"
        case EventHubs():
            return "E7"
        case Minimal():
            return "C2"
        case _:
            assert_never(config.rules)


def _pause(actions: tuple[Action, ...], config: Config) -> float:
    """Seconds until the next look, `cycle_seconds` at most."""
    rules, takes = config.rules, any(isinstance(action, Claim | Steal) for action in actions)
    if isinstance(rules, EventHubs) and takes and rules.mode == "greedy" and rules.dialect in {"dotnet", "java"}:
        return 0.0  # E4, E5: the greedy mode is the same rule again, as long as something was taken
    if isinstance(rules, Minimal) and (soon := settle_seconds(actions, config)) is not None:
        return soon  # C10: see what became of it, then fill up
    if any(isinstance(action, Create) for action in actions):
        return 1.0  # a lease just made waits for nobody but us
    return config.cycle_seconds
