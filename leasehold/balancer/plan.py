"""Plans a worker's actions from the leases that it has read.

`plan` decides what a worker does now, and `look_again` decides when the worker plans next. Neither of them reads a
clock, calls a store or keeps state between calls. Times are part of the leases, randomness comes from `Me.turn`, and
`Me.history` contains the facts from earlier reads. Each action contains the lease as it was read, and a store applies
the action only if the lease has not changed since then. If a plan is made from outdated leases, the store rejects the
actions that no longer apply, so the plan does no harm (S1).
"""

from collections.abc import Collection, Iterable

from leasehold.balancer.actions import Action, Claim, Create, Delete, Look, Renew, RequestHandoff, Steal, Taking
from leasehold.balancer.census import Census, KnownLeases
from leasehold.balancer.config import Config
from leasehold.balancer.counting import expires_above, take_census
from leasehold.balancer.family import blocking_problems, families
from leasehold.balancer.handoff import handoff_actions
from leasehold.balancer.lineage import creations, deletions, leases_of_unlisted_shards
from leasehold.balancer.lookout import (
    called_claims,
    free_expired,
    is_renewal_overdue,
    next_look,
    seconds_to_results,
    seconds_until_late_owners_expire,
    wants_more_leases,
)
from leasehold.balancer.model import Lease, Me, Shard
from leasehold.balancer.rules.shares import awaits_joiners, seconds_until_joined

HANDOFF_POLL_SECONDS = 0.125
"""The time between two reads of the leases that a worker has requested from their owners.

After a hand-off, the worker notices within this time that the lease is free. The reads are eventually consistent,
because such reads cost half as much. A stale result does no harm, because the write that takes the lease is
conditional.
"""


def plan(leases: Iterable[Lease], shards: Iterable[Shard] | None, me: Me, config: Config) -> tuple[Action, ...]:
    """Return all actions that this worker should take now.

    The plan depends only on the arguments, and not on the order of leases and shards.

    No two actions have the same lease key, including those in `alternates`. If the rules produce several actions for a
    key, the plan contains the first of these: deletion, claim, steal or request, next step of a hand-off, release of an
    expired lease, renewal.

    Args:
        leases: All known leases, as returned by `Watch.look`. The keys must be distinct.
        shards: The shards of one or more streams. For each of these streams, all shards must be included. If `shards`
            is None or empty, no lease is created or deleted.
        me: The worker that plans.
        config: The settings of the group of workers.

    Examples:
        >>> from leasehold import Config, Lease, Me, plan
        >>> leases = [Lease("shard-0", owner="worker-a", idle=2.5), Lease("shard-1", owner="worker-b", idle=31.0)]
        >>> [(action.rule, action.lease.key) for action in plan(leases, None, Me("worker-a"), Config())]
        [('M6', 'shard-1')]
    """
    known_leases = leases if isinstance(leases, KnownLeases) else tuple(leases)
    census = take_census(known_leases, me, config)
    lifecycle_actions = lifecycle(known_leases, shards, census, me, config) if shards else ()
    deleted_keys = {action.lease.key for action in lifecycle_actions if isinstance(action, Delete)}
    if deleted_keys:
        # Do not count a lease that is about to be deleted toward any share. Otherwise, a worker could take a lease that
        # is then deleted.
        known_leases = tuple(lease for lease in known_leases if lease.key not in deleted_keys)
        census = take_census(known_leases, me, config)
    # If only a few rows were read, other leases may have changed since the last full read. In this case, plan only
    # hand-offs in progress (H2), and claims for which the lookout has called this worker (C6).
    taking_actions = (
        config.rules.take(census, me, config) if me.history.full_still <= 0 else called_claims(census, me, config)
    )
    planned_keys = deleted_keys | _action_keys(taking_actions)
    handoff_steps = tuple(move for move in handoff_actions(census, config) if move.lease.key not in planned_keys)
    planned_keys |= {move.lease.key for move in handoff_steps}
    # C6: release expired leases unless another action names them.
    releases = tuple(
        release for release in free_expired(census, known_leases, me, config) if release.lease.key not in planned_keys
    )
    renewal_actions = tuple(renewal for renewal in _renewals(census, config) if renewal.lease.key not in planned_keys)
    return (*renewal_actions, *lifecycle_actions, *handoff_steps, *taking_actions, *releases)


def renewals(leases: Iterable[Lease], me: Me, config: Config) -> tuple[Renew, ...]:
    """Return renewals of this worker's leases that have not been renewed for `renew_seconds`, sorted by key.

    Expired leases are left out.

    `plan` includes these actions, but a worker may also renew its leases between two plans. A lease with a hand-off in
    progress is renewed until its owner releases it.

    Examples:
        >>> from leasehold import Config, Lease, Me, renewals
        >>> mine = [Lease("shard-0", owner="worker-a", idle=6.0), Lease("shard-1", owner="worker-a", idle=1.0)]
        >>> [renew.lease.key for renew in renewals(mine, Me("worker-a"), Config(lease_seconds=10))]
        ['shard-0']
    """
    return _renewals(take_census(leases, me, config), config)


def look_again(actions: Iterable[Action], leases: Iterable[Lease], me: Me, config: Config) -> Look:
    """Return when to read the table next after these actions of `plan`, and which leases to read.

    While this worker waits for leases that it has requested, it reads only the rows of these leases, and the whole
    table every `cycle_seconds`.

    `me.history` must be the history after the read that returned `leases`.

    Examples:
        >>> from leasehold import Config, Kcl, Lease, Me, look_again
        >>> config = Config(rules=Kcl(), lease_seconds=10)
        >>> look_again([], [Lease("shard-0", owner="worker-a")], Me("worker-a"), config).seconds
        20.05
    """
    planned_actions, history, rules = tuple(actions), me.history, config.rules
    known_leases = leases if isinstance(leases, KnownLeases) else tuple(leases)
    unsettled_leases = (
        known_leases.unsettled(expires_above(config)) if isinstance(known_leases, KnownLeases) else known_leases
    )
    requested_keys = {
        lease.key
        for lease in unsettled_leases
        if lease.next_owner == me.worker and lease.owner not in {None, me.worker}
    }
    requested_keys |= _action_keys([action for action in planned_actions if isinstance(action, RequestHandoff)])
    if requested_keys:
        # C10: a newcomer that waits for its first lease also waits for other workers to join. When the latter wait is
        #      over, list the table if this worker would take more leases, or if the owner of a requested lease does not
        #      renew it. This owner may be dead, and may have been the lookout. The listing starts to measure how long
        #      all of the owner's leases stay unchanged (C1).
        join_wait_over = history.hearing is not None and history.full_still >= seconds_until_joined(history, config)
        is_owner_silent = any(
            is_renewal_overdue(lease.idle, config) for lease in unsettled_leases if lease.key in requested_keys
        )
        must_list_table = history.full_still >= config.cycle_seconds or (
            join_wait_over and (is_owner_silent or wants_more_leases(take_census(known_leases, me, config), me, config))
        )
        return Look(
            HANDOFF_POLL_SECONDS,
            keys=None if must_list_table else tuple(sorted(requested_keys)),
            stale_ok=not must_list_table,
        )
    if history.hearing is not None and rules.keeps_lookout:
        return next_look(planned_actions, known_leases, me, config, history.hearing)
    if history.full_still > 0:
        return Look(0.0)  # only a few rows were read, and no request is pending, so list the table now
    seconds = min(
        _seconds_to_next_look(planned_actions, config),
        seconds_until_late_owners_expire(known_leases, me, config),
        config.cycle_seconds,
    )
    if rules.keeps_lookout and awaits_joiners(known_leases, me, config):
        seconds = min(seconds, seconds_until_joined(history, config))
    return Look(seconds)


def lifecycle(
    leases: Collection[Lease], shards: Iterable[Shard], census: Census, me: Me, config: Config
) -> tuple[Create | Delete, ...]:
    """Return the leases to create (L3 to L7, L9) and to delete (L8, L10) for these shards.

    A stream is skipped if its listing has a fault (L2). As an optimization, a stream is also skipped if every shard has
    a lease, every lease has a shard and no lease has ended, which is nearly always the case.
    """
    expired_keys = {lease.key for lease in census.expired}
    actions: list[Create | Delete] = []
    for family in families(shards, leases):
        if family.needs_no_change or blocking_problems(family):  # L2
            continue
        unlisted_leases = leases_of_unlisted_shards(family, me.worker, expired_keys)
        creates = creations(family, unlisted_leases, me.history, config)
        # Delete leases only if no lease must be created. Otherwise, the last lease that proves that a stream was read
        # could be deleted before the leases of the later shards exist (L5).
        actions += creates or deletions(family, unlisted_leases)
    if not actions:
        return ()
    # If a source uses the same id for shards of different streams, create only one lease, because keys must be unique.
    existing_keys = {lease.key for lease in leases}
    created_by_key = {action.lease.key: action for action in reversed(actions) if action.lease.key not in existing_keys}
    delete_actions = [action for action in actions if action.lease.key in existing_keys and isinstance(action, Delete)]
    return (*(created_by_key[key] for key in sorted(created_by_key)), *delete_actions)


def _action_keys(actions: Collection[Action]) -> set[str]:
    """Return the keys of all leases in these actions, including those in alternates."""
    takings_with_alternates = (action for action in actions if isinstance(action, Taking) and action.alternates)
    alternate_keys = {alternate.lease.key for action in takings_with_alternates for alternate in action.alternates}
    return alternate_keys | {action.lease.key for action in actions}


def _renewals(census: Census, config: Config) -> tuple[Renew, ...]:
    due_leases = (lease for lease in census.mine if lease.idle >= config.renew_seconds)
    return tuple(
        Renew(lease, rule=config.rules.renewal_rule) for lease in sorted(due_leases, key=lambda lease: lease.key)
    )


def _seconds_to_next_look(actions: tuple[Action, ...], config: Config) -> float:
    """Return the number of seconds until the next look, which is at most `cycle_seconds`."""
    rules, takes_leases = config.rules, any(isinstance(action, Claim | Steal) for action in actions)
    if takes_leases and rules.again_at_once:
        return 0.0
    if rules.keeps_lookout and (settle_wait := seconds_to_results(actions, config)) is not None:
        return settle_wait  # read the results soon, to take the leases that are still missing
    if any(isinstance(action, Create) for action in actions):
        return 1.0  # after its next look, this worker can claim the new lease
    return config.cycle_seconds
