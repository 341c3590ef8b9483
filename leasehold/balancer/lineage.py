"""Decides which leases of a stream to create and which to delete, based on its shards and existing leases (`family`).

Leases are created for new streams, for orphans (open shards without a lease whose ancestors have no leases either), and
for the children of finished shards (L3 to L7). The start position of a lease matters. If the child of a finished shard
started at LATEST, its first records would be silently skipped. Therefore, if a lease shows that an ancestor of a shard
has been read, the shard starts at its beginning. A shard none of whose ancestors has a lease starts at the configured
initial position. L3 and L5 preserve AT_TIMESTAMP.

A lease is deleted when its shard has been read to the end and reading of its children has begun, or when its shard is
no longer listed (L8 to L10).

Source: HierarchicalShardSyncer, ShutdownTask, PeriodicShardSyncManager and LeaseCleanupManager of the Kinesis Client
Library 2.7, and the README of kcl-rust. There are two differences. In the KCL, only the worker that has finished a
shard creates the leases of the shard's children. Here, every worker creates missing leases (L3). In the KCL, this
worker also keeps the list of leases to delete in memory, so the list is lost if the worker dies. Here, every worker
computes the list from the table.
"""

from bisect import bisect
from collections.abc import Collection, Iterable, Mapping
from graphlib import TopologicalSorter

from attrs import evolve

from leasehold.balancer.actions import Create, Delete
from leasehold.balancer.chance import digest_under
from leasehold.balancer.config import Config
from leasehold.balancer.family import Family
from leasehold.balancer.model import LATEST, TRIM_HORIZON, Annotations, History, Hole, Lease, Position, Shard

NOT_STARTED = frozenset({"TRIM_HORIZON", "AT_TIMESTAMP"})
"""The checkpoints that a shard may have if no record has been read from it yet (L8).

A shard whose checkpoint is LATEST counts as started.
"""

UNSEEN_EPOCHS_MAX = 1_000_000
"""The amount added to a lease's epoch when its row is recreated after another program deleted it (L13).

The row may have changed after we last read it, so the new epoch must exceed every epoch that may have been assigned
since then.
"""

HOLE_CONFIDENCE = 3
"""The number of consecutive full reads that must show a hole before leases are created for it (L7)."""


def readable(lease: Lease, leases: Mapping[str, Lease]) -> bool:
    """Return whether the owner of a lease may read its shard (L12).

    The owner may read the shard if the lease of every parent is at SHARD_END or does not exist.

    `leases` contains all leases by key.

    Examples:
        >>> from leasehold import Lease
        >>> from leasehold.planner import readable
        >>> parent, child = Lease("shard-0"), Lease("shard-1", parents=("shard-0",))
        >>> readable(child, {"shard-0": parent, "shard-1": child})  # the parent has not been read to its end yet
        False
    """
    return all(parent not in leases or leases[parent].ended for parent in lease.parents)


def deletable(leases: Collection[Lease], worker: str) -> frozenset[str]:
    """Return the keys of the finished leases that this worker should delete (L8).

    The worker must list the shards before it deletes these leases.

    A hash ring assigns each key to one worker, so that only one worker tries to delete the lease.

    Finished leases should be deleted soon, because KCL 2.x workers count them. Until they are deleted, such workers
    hold fewer unfinished leases than their share.
    """
    ended_keys = {lease.key for lease in leases if lease.ended}
    if not ended_keys:
        return frozenset()
    keys, all_children_started = {lease.key for lease in leases}, dict[str, bool]()
    for child in leases:
        for parent in ended_keys.intersection(child.parents):
            all_children_started[parent] = (
                all_children_started.get(parent, True) and child.checkpoint.sequence not in NOT_STARTED
            )
    roots = {lease.key for lease in leases if keys.isdisjoint(lease.parents)}
    key_digest = digest_under("")
    owners_by_digest = sorted(
        (key_digest(name), name) for name in {lease.owner for lease in leases if lease.yields and lease.owner}
    )
    if all(name != worker for _, name in owners_by_digest):
        return frozenset()
    deletable_keys = (key for key, is_started in all_children_started.items() if is_started and key in roots)
    return frozenset(
        key
        for key in deletable_keys
        if owners_by_digest[bisect(owners_by_digest, (key_digest(key), "")) % len(owners_by_digest)][1] == worker
    )


def leases_of_unlisted_shards(family: Family, worker: str, expired_keys: Collection[str]) -> tuple[Lease, ...]:
    """Return the leases of unlisted shards that are not held by another living worker, sorted by key (L10).

    The result contains leases that belong to this worker, have no owner, have ended, or are in `expired_keys`.
    """
    return tuple(
        lease
        for key, lease in sorted(family.leases.items())
        if key not in family.shards and (lease.owner in {None, worker} or lease.ended or key in expired_keys)
    )


def deletions(family: Family, unlisted_leases: Collection[Lease]) -> tuple[Delete, ...]:
    """Return a `Delete` for each lease that is no longer needed.

    The listing of the stream's shards must have no faults.

    Other workers may have read the table before a finished lease's row existed. Therefore, a worker deletes the row
    only after it has known for longer than `lease_seconds` that the lease is finished.

    A listing may be out of date. Therefore, before a worker deletes the lease of an unlisted shard, it looks the shard
    up in the source. The shard is certain to be gone only if the stream exists and the source returns ResourceNotFound.
    """
    finished_deletions = (
        Delete(lease, rule="L8")
        for _, lease in sorted(family.leases.items())
        if lease.ended
        and lease.key in family.shards
        and (children := family.children.get(lease.key))
        # Reading of every child must have begun. The leases of all parents must have been deleted before, because their
        # deletion depends on this lease in the same way.
        and all(
            child in family.leases and family.leases[child].checkpoint.sequence not in NOT_STARTED for child in children
        )
        and family.leases.keys().isdisjoint({*lease.parents, *family.shards[lease.key].parents})
    )
    unlisted_deletions = (
        Delete(lease, rule="L10")
        for lease in unlisted_leases
        if all(child in family.leases for child in family.children.get(lease.key, ()))  # L9
    )
    return (*finished_deletions, *unlisted_deletions)


def creations(
    family: Family, unlisted_leases: Collection[Lease], history: History, config: Config
) -> tuple[Create, ...]:
    """Return a `Create` for each missing lease of a stream, sorted by shard id.

    The listing of the stream's shards must have no faults.

    `unlisted_leases` is the result of the function `leases_of_unlisted_shards`.
    """
    deleted_leases = {lease.key: lease for lease in history.gone if lease.stream == family.stream}
    # The rules delete the lease of a listed shard only if the shard is finished and reading of its children has begun
    # (L8). Therefore, if a lease is missing and a descendant of its shard has been read, the lease was finished. Any
    # other missing lease was deleted by another program, and must be created again.
    leases_to_recreate = {
        key: lease
        for key, lease in deleted_leases.items()
        if key in family.shards
        and key not in family.leases
        and not lease.ended
        and not _descendant_was_read(key, family)
    }
    # L13: compute the lowest epoch for a new lease. If another program has deleted rows, the shard may have had a row
    #      that we never read, whose epochs may have been passed to handlers. We assume that rows were deleted if a
    #      lease must be created again, or if the high epoch of a row shows that the row was recreated.
    highest_epoch = max((lease.epoch for lease in (*family.leases.values(), *leases_to_recreate.values())), default=0)
    lowest_epoch = (
        highest_epoch + UNSEEN_EPOCHS_MAX
        if leases_to_recreate
        else highest_epoch
        if highest_epoch >= UNSEEN_EPOCHS_MAX
        else 0
    )
    creates_by_key = {
        **_create_for_holes(family, history.holes, config),
        **_create_orphans(family, deleted_leases, leases_to_recreate, config),
        **_create_added_partitions(family),
        # The rules for children come last so that they override the others, because LATEST would skip a child's first
        # records.
        **_create_orphaned_children(family, unlisted_leases, config),
        **_create_missing_children(family, config),
        **_recreate_leases(leases_to_recreate),
    }
    creates = (creates_by_key[name] for name in sorted(creates_by_key))
    return tuple(
        evolve(create, lease=evolve(create.lease, epoch=max(create.lease.epoch, lowest_epoch))) for create in creates
    )


def child_position(config: Config) -> Position:
    """Return the position at which the child of a finished shard starts.

    The child starts at its beginning, because all its records were written after those of its parent. The rule set
    `kcl-rust` is an exception: if the initial position is AT_TIMESTAMP, every lease starts at that time.
    """
    starts_at_timestamp = config.rules.starts_at_time and config.initial_position.sequence == "AT_TIMESTAMP"
    return config.initial_position if starts_at_timestamp else TRIM_HORIZON


def children_to_create(
    parent: Lease, children: Iterable[Shard], leases: Mapping[str, Lease], listed: Collection[str], config: Config
) -> tuple[Create, ...]:
    """Return the leases that a worker must create at the end of a shard, before it writes SHARD_END (L3).

    If SHARD_END were written first, a crash after that write would leave the children without leases.

    The lease of a merged shard is created only if each of its other parents has a lease or is no longer listed.

    Args:
        parent: The lease of the shard that has been read to its end.
        children: The child shards of the shard of `parent`.
        leases: All leases by key.
        listed: The ids of the listed shards.
        config: The settings of the group of workers.

    Examples:
        >>> from leasehold import Config, Lease, Shard
        >>> from leasehold.planner import children_to_create
        >>> child = Shard("shard-1", parents=("shard-0",))
        >>> listed = {"shard-0", "shard-1"}
        >>> [made.lease.key for made in children_to_create(Lease("shard-0"), [child], {}, listed, Config())]
        ['shard-1']
    """
    return tuple(
        _create_action(child, child_position(config), "L3")
        for child in sorted(children, key=lambda child: child.id)
        if child.id not in leases
        and all(
            parent_id == parent.key or parent_id in leases or parent_id not in listed for parent_id in child.parents
        )
    )


def new_lease_for(shard: Shard, position: Position, annotations: Annotations = ()) -> Lease:
    """Return a new lease, without an owner, for a shard."""
    return Lease(
        key=shard.id,
        stream=shard.stream,
        shard=shard.id.removeprefix(f"{shard.stream}:"),  # KCL's multi-stream keys
        parents=shard.parents,
        checkpoint=position,
        hash_range=shard.hash_range,
        annotations=annotations,
    )


def _create_action(shard: Shard, position: Position, rule: str) -> Create:
    return Create(new_lease_for(shard, position), rule=rule)


def _recreate_leases(leases_to_recreate: Mapping[str, Lease]) -> dict[str, Create]:
    """Recreate leases that another program deleted, each at the checkpoint that was last read (L13).

    The lease of a child from which no record has been read must wait until the leases of its parents have been
    recreated. A parent without a lease counts as finished, so the child would be read before its parent (L12).
    """
    return {
        key: Create(evolve(lease, epoch=lease.epoch + UNSEEN_EPOCHS_MAX), rule="L13")
        for key, lease in leases_to_recreate.items()
        if lease.checkpoint.sequence not in NOT_STARTED or leases_to_recreate.keys().isdisjoint(lease.parents)
    }


def _descendant_was_read(shard_id: str, family: Family) -> bool:
    """Return whether a descendant of this shard has been read."""
    to_visit, visited = list(family.children.get(shard_id, ())), set[str]()
    while to_visit:
        if (child_id := to_visit.pop()) in visited:
            continue
        visited.add(child_id)
        lease = family.leases.get(child_id)
        if lease is not None and lease.checkpoint.sequence not in NOT_STARTED:
            return True
        to_visit += family.children.get(child_id, ())
    return False


def _create_missing_children(family: Family, config: Config) -> dict[str, Create]:
    """Create the leases of the children of finished shards (L3).

    The lease of a child is created if at least one parent has ended, and each of the other parents has ended, or is
    unlisted and has no lease.
    """
    create_actions = {}
    for shard in family.shards.values():
        if shard.id in family.leases:
            continue
        parent_ended = [parent in family.leases and family.leases[parent].ended for parent in shard.parents]
        parent_missing = [parent not in family.leases and parent not in family.shards for parent in shard.parents]
        if any(parent_ended) and all(
            is_ended or is_missing for is_ended, is_missing in zip(parent_ended, parent_missing, strict=True)
        ):
            create_actions[shard.id] = _create_action(shard, child_position(config), "L3")
    return create_actions


def _create_orphaned_children(family: Family, unlisted_leases: Collection[Lease], config: Config) -> dict[str, Create]:
    """Create leases for the children of shards that disappeared before they were read to the end (L9).

    A shard that has disappeared can never be read to its end, so without this rule, the leases of its children would
    never be created.

    The other parent of a merged shard must have a lease first. A parent without a lease would count as finished, and
    the child would be read before this parent.
    """
    return {
        child: _create_action(family.shards[child], child_position(config), "L9")
        for lease in unlisted_leases
        for child in family.children.get(lease.key, ())
        if child not in family.leases
        and not lease.ended
        and all(parent in family.leases or parent not in family.shards for parent in family.shards[child].parents)
    }


def _create_added_partitions(family: Family) -> dict[str, Create]:
    """Create the leases of partitions that were added to a stream that has already been read (L6).

    Each of these leases starts at the beginning of its partition, so that no events are lost.
    """
    has_only_partitions = all(not shard.parents and shard.hash_range is None for shard in family.shards.values())
    if not (has_only_partitions and any(lease.checkpoint.numbered for lease in family.leases.values())):
        return {}
    return {
        shard.id: _create_action(shard, TRIM_HORIZON, "L6")
        for shard in family.shards.values()
        if shard.id not in family.leases
    }


def _create_orphans(
    family: Family, deleted_leases: Mapping[str, Lease], leases_to_recreate: Mapping[str, Lease], config: Config
) -> dict[str, Create]:
    """Create the leases that are needed so that every open shard is read (L4, L5).

    From each open shard without a lease, the function walks up to the nearest ancestors with a lease, or to the oldest
    ancestors that are listed. It then visits these shards, parents before children, and decides for each of them:

    - A shard *descends* if it has a lease or if one of its parents *counts*.
    - A shard *begins* a line if none of its parents counts and the initial position is not LATEST. Under LATEST it
    begins a line only if it is in `missed_shards`, because the workers missed it during an outage.

    A parent *counts* if it descends or begins a line. If one parent of a shard counts, leases are also created for
    those of the shard's parents that have no lease and do not descend. Without these leases, the parents' hash keys
    would not be read from the requested start.

    A deleted lease is treated like an existing one (L13). Unless the lease is in `leases_to_recreate`, it was finished,
    and the children of its shard start at their beginning. The children's leases had existed before and were deleted as
    well, except for a merged shard whose other parent has not ended.
    """
    create_actions, position = dict[str, Create](), config.initial_position
    # During a long outage, all shards with leases, and even their children, may disappear from the listing. If the
    # stream has been read before, LATEST would skip the records that remain in later descendants, or in a hash range
    # that no lease covers.
    missed_shards = (
        family.find_unread_shards(deleted_leases) if position == LATEST and family.has_been_read else frozenset[str]()
    )
    tips = family.tips
    if not family.leases.keys() <= family.shards.keys() or family.leases.keys().isdisjoint(tips):
        # After such an outage, a closed shard without listed children must be read as well. Shards don't always
        # disappear from the listing in the order in which they were closed, so the children may have disappeared
        # already.
        tips |= {shard_id for shard_id in missed_shards if not family.children.get(shard_id)}
    descends_by_shard: dict[
        str, bool
    ] = {}  # whether the shard descends from a lease or from a shard that begins a line
    line_starts: set[str] = set()
    for shard_id in _tips_and_ancestors(tips, family):
        if shard_id in family.leases or shard_id in deleted_leases:
            descends_by_shard[shard_id] = True
            continue
        shard, parents = family.shards[shard_id], family.parents(family.shards[shard_id])
        counting_parents = [parent for parent in parents if descends_by_shard[parent] or parent in line_starts]
        descends_by_shard[shard_id] = bool(counting_parents)
        if not counting_parents and (position != LATEST or shard_id in missed_shards):
            line_starts.add(shard_id)
        for parent in parents if counting_parents else ():
            if (
                parent not in family.leases
                and parent not in deleted_leases
                and (parent in line_starts or not descends_by_shard[parent])
            ):  # L5
                start_position = TRIM_HORIZON if parent in missed_shards else position
                create_actions[parent] = _create_action(family.shards[parent], start_position, "L5")
        finished_parents = {
            parent for parent in shard.parents if parent in deleted_leases and parent not in leases_to_recreate
        }
        # The other parent of a merged shard must have a lease first. Without a lease, this parent would count as
        # finished (L12).
        if finished_parents and all(
            other_parent in finished_parents or other_parent in family.leases or other_parent not in family.shards
            for other_parent in shard.parents
        ):  # L13
            create_actions[shard_id] = _create_action(shard, child_position(config), "L13")
        if shard_id in tips and not counting_parents:  # L4
            create_actions[shard_id] = _create_action(
                shard, TRIM_HORIZON if shard_id in missed_shards else position, "L4"
            )
    return create_actions


def _tips_and_ancestors(tips: Collection[str], family: Family) -> tuple[str, ...]:
    """Return the tips without a lease, together with their ancestors, parents before children.

    Each line of ancestors ends with the nearest ancestor that has a lease.
    """
    parents_of: dict[str, list[str]] = {}
    to_visit = [shard for shard in tips if shard not in family.leases]
    while to_visit:
        shard_id = to_visit.pop()
        if shard_id not in parents_of:
            parents_of[shard_id] = [] if shard_id in family.leases else family.parents(family.shards[shard_id])
            to_visit += parents_of[shard_id]
    return tuple(TopologicalSorter(parents_of).static_order())


def _create_for_holes(family: Family, holes: Collection[Hole], config: Config) -> dict[str, Create]:
    """Create leases for shards that cover a hole in the hash keys, if three consecutive full reads have shown it (L7).

    A lease may be created while a parent shard is still being read, because the child is not read before the parent
    (L12).
    """
    confirmed_holes = [hole for hole in holes if hole.stream == family.stream and hole.times >= HOLE_CONFIDENCE]
    return {
        shard.id: _create_action(shard, child_position(config), "L7")
        for shard in family.shards.values()
        if shard.id not in family.leases
        and any(parent in family.leases for parent in shard.parents)
        and all(parent in family.leases or parent not in family.shards for parent in shard.parents)
        and shard.hash_range is not None  # a shard whose range is unknown might not cover the hole
        and any(shard.hash_range[0] <= hole.last and hole.first <= shard.hash_range[1] for hole in confirmed_holes)
    }
