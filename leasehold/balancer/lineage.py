"""Decides which leases of a stream to create and which to delete, given the tree of its shards (`family`).

Leases are created for new streams, for orphans (open shards without a lease of their own or of an ancestor), and for
the children of finished shards (L3 to L7). The position at which a lease starts must be chosen with care. If the child
of a finished shard started at LATEST, its first records would be skipped without any error. If a lease shows that an
ancestor has been read, the child starts at its beginning. A shard without a leased ancestor starts at the configured
initial position. L3 and L5 preserve AT_TIMESTAMP.

A lease is deleted once it is finished and reading of its children has begun, or if its shard is long gone (L8 to L10).

Source: HierarchicalShardSyncer, ShutdownTask, PeriodicShardSyncManager and LeaseCleanupManager of the Kinesis Client
Library 2.7, and the README of kcl-rust. There are two differences. KCL leaves the creation of a child to the worker
that finished its parent, while here every worker creates missing children (L3). KCL keeps the list of leases to clean
up in the memory of the worker that finished the shard, so the list is lost with that worker, while here it is computed
from the table.
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
"""The checkpoints of a child shard from which no record has been read yet (L8). LATEST counts as started."""

EPOCHS_UNSEEN = 1_000_000
"""The amount added to a lease's epoch when its row is recreated as it was last read (L13).

The amount must exceed the number of epochs that other writers of the row may have issued since that read.
"""

HOLE_CONFIDENCE = 3
"""The number of consecutive full reads that must show a hole before leases are created for it (L7)."""


def readable(lease: Lease, leases: Mapping[str, Lease]) -> bool:
    """Return whether a held lease may be read: every parent's lease is absent or at SHARD_END (L12).

    `leases` maps keys to leases.

    Examples:
        >>> from leasehold import Lease
        >>> from leasehold.planner import readable
        >>> parent, child = Lease("shard-0"), Lease("shard-1", parents=("shard-0",))
        >>> readable(child, {"shard-0": parent, "shard-1": child})  # its parent is not read to its end yet
        False
    """
    return all(parent not in leases or leases[parent].ended for parent in lease.parents)


def deletable(leases: Collection[Lease], worker: str) -> frozenset[str]:
    """Return the finished leases that this worker should delete after it has listed the shards (L8).

    For each key, a single worker of ours does this on behalf of all: the one that follows the key's digest on a hash
    ring. Finished leases should be deleted soon, because workers of KCL 2.x count them as load and hold fewer
    unfinished leases than their share until then.
    """
    ended = {lease.key for lease in leases if lease.ended}
    if not ended:
        return frozenset()
    keys, children_started = {lease.key for lease in leases}, dict[str, bool]()
    for child in leases:
        for parent in ended.intersection(child.parents):
            children_started[parent] = (
                children_started.get(parent, True) and child.checkpoint.sequence not in NOT_STARTED
            )
    roots = {lease.key for lease in leases if keys.isdisjoint(lease.parents)}
    digest = digest_under("")
    ring = sorted((digest(name), name) for name in {lease.owner for lease in leases if lease.yields and lease.owner})
    if all(name != worker for _, name in ring):
        return frozenset()
    deletable_keys = (key for key, started in children_started.items() if started and key in roots)
    return frozenset(key for key in deletable_keys if ring[bisect(ring, (digest(key), "")) % len(ring)][1] == worker)


def garbage(family: Family, worker: str, expired: Collection[str]) -> tuple[Lease, ...]:
    """Return the leases of unlisted shards that can be deleted without taking them from a living worker (L10).

    The result contains this worker's own leases and those that have no owner, are in `expired`, or have ended, sorted
    by key.
    """
    return tuple(
        lease
        for key, lease in sorted(family.leases.items())
        if key not in family.shards and (lease.owner in {None, worker} or lease.ended or key in expired)
    )


def deletions(family: Family, garbage: Collection[Lease]) -> tuple[Delete, ...]:
    """Return the deletions of the leases that are no longer needed. The listing of their stream must have no faults.

    Before a worker deletes the lease of an unlisted shard, it looks the shard up in the source, because a listing may
    be out of date. If the source returns ResourceNotFound for the shard while the stream exists, the shard is certainly
    gone.
    """
    finished = (
        Delete(lease, rule="L8")
        for _, lease in sorted(family.leases.items())
        if lease.ended
        and lease.key in family.shards
        and (children := family.children.get(lease.key))
        # Reading of every child has begun, and no parent's lease still needs this lease to prove that its child is
        # done.
        and all(
            child in family.leases and family.leases[child].checkpoint.sequence not in NOT_STARTED for child in children
        )
        and family.leases.keys().isdisjoint({*lease.parents, *family.shards[lease.key].parents})
    )
    unlisted = (
        Delete(lease, rule="L10")
        for lease in garbage
        if all(child in family.leases for child in family.children.get(lease.key, ()))  # L9
    )
    return (*finished, *unlisted)


def creations(family: Family, garbage: Collection[Lease], history: History, config: Config) -> tuple[Create, ...]:
    """Return the leases that are missing in a stream whose listing has no faults, sorted by shard id.

    `garbage` is the result of the function of that name.
    """
    deleted_leases = {lease.key: lease for lease in history.gone if lease.stream == family.stream}
    # Our rules delete a row only if its lease is finished and reading of its children has begun (L8), or if its shard
    # is not listed (L10). So if the row of a listed shard is gone and a descendant has been read, the lease was
    # finished. Any other missing row was deleted by another program, and its lease must be created again.
    due_again = {
        key: lease
        for key, lease in deleted_leases.items()
        if key in family.shards
        and key not in family.leases
        and not lease.ended
        and not _descendant_was_read(key, family)
    }
    # L13: compute the lowest epoch for a new lease. If rows were deleted, the shard may have had a row that we never
    # saw, whose epochs were passed to handlers. Deletions show in leases that must be created again, and in rows whose
    # epochs are far above normal because they were recreated.
    highest = max((lease.epoch for lease in (*family.leases.values(), *due_again.values())), default=0)
    lowest_epoch = highest + EPOCHS_UNSEEN if due_again else highest if highest >= EPOCHS_UNSEEN else 0
    creates_by_key = {
        **_covering_holes(family, history.holes, config),
        **_orphans(family, deleted_leases, due_again, config),
        **_partitions(family),
        # The rules for children come last so that they take precedence, because LATEST would skip a child's first
        # records.
        **_orphaned_children(family, garbage, config),
        **_missing_children(family, config),
        **_recreated_leases(due_again),
    }
    creates = (creates_by_key[name] for name in sorted(creates_by_key))
    return tuple(
        evolve(create, lease=evolve(create.lease, epoch=max(create.lease.epoch, lowest_epoch))) for create in creates
    )


def child_position(config: Config) -> Position:
    """Return where the child of a finished shard starts.

    The child starts at its beginning, because all its records were written after those of its parent. If kcl-rust was
    started AT_TIMESTAMP, every lease starts at that time, even those of later shards.
    """
    starts_there = config.rules.starts_at_time and config.initial_position.sequence == "AT_TIMESTAMP"
    return config.initial_position if starts_there else TRIM_HORIZON


def children_to_create(
    parent: Lease, children: Iterable[Shard], leases: Mapping[str, Lease], listed: Collection[str], config: Config
) -> tuple[Create, ...]:
    """Return the leases that a worker must create at the end of a shard before it writes SHARD_END (L3).

    With this order, a crash between the two writes leaves no child without a lease. The child of a merge waits until
    every other parent has a lease or is no longer listed.

    Args:
        parent: The lease that reached its end.
        children: The child shards of `parent`.
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
        _create(child, child_position(config), "L3")
        for child in sorted(children, key=lambda child: child.id)
        if child.id not in leases
        and all(other == parent.key or other in leases or other not in listed for other in child.parents)
    )


def lease_of(shard: Shard, position: Position, annotations: Annotations = ()) -> Lease:
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


def _create(shard: Shard, position: Position, rule: str) -> Create:
    return Create(lease_of(shard, position), rule=rule)


def _recreated_leases(due: Mapping[str, Lease]) -> dict[str, Create]:
    """Recreate the leases whose rows were deleted, each at the checkpoint that was last read (L13).

    If a child has not been started, its parents are recreated before it. While their rows are missing, they count as
    finished, and the child would be read first (L12).
    """
    return {
        key: Create(evolve(lease, epoch=lease.epoch + EPOCHS_UNSEEN), rule="L13")
        for key, lease in due.items()
        if lease.checkpoint.sequence not in NOT_STARTED or due.keys().isdisjoint(lease.parents)
    }


def _descendant_was_read(shard: str, family: Family) -> bool:
    """Return whether a descendant of this shard has been read."""
    to_visit, visited = list(family.children.get(shard, ())), set[str]()
    while to_visit:
        if (child := to_visit.pop()) in visited:
            continue
        visited.add(child)
        lease = family.leases.get(child)
        if lease is not None and lease.checkpoint.sequence not in NOT_STARTED:
            return True
        to_visit += family.children.get(child, ())
    return False


def _missing_children(family: Family, config: Config) -> dict[str, Create]:
    """Create the children of finished shards (L3).

    At least one parent must have ended. Each of the others must have ended too, or have neither a lease nor a listed
    shard.
    """
    created = {}
    for shard in family.shards.values():
        if shard.id in family.leases:
            continue
        ended_parents = [parent in family.leases and family.leases[parent].ended for parent in shard.parents]
        missing_parents = [parent not in family.leases and parent not in family.shards for parent in shard.parents]
        if any(ended_parents) and all(
            finished or missing for finished, missing in zip(ended_parents, missing_parents, strict=True)
        ):
            created[shard.id] = _create(shard, child_position(config), "L3")
    return created


def _orphaned_children(family: Family, garbage: Collection[Lease], config: Config) -> dict[str, Create]:
    """Create the children of a shard that disappeared before its lease was finished (L9).

    No worker will finish such a shard and create its children.

    After a merge, the other parent must have a lease first, because a parent without one counts as finished once the
    child has a lease.
    """
    return {
        child: _create(family.shards[child], child_position(config), "L9")
        for lease in garbage
        for child in family.children.get(lease.key, ())
        if child not in family.leases
        and not lease.ended
        and all(parent in family.leases or parent not in family.shards for parent in family.shards[child].parents)
    }


def _partitions(family: Family) -> dict[str, Create]:
    """Create the leases of partitions that appear later, at their beginning so that no events are lost (L6)."""
    unrelated = all(not shard.parents and shard.hash_range is None for shard in family.shards.values())
    if not (unrelated and any(lease.checkpoint.numbered for lease in family.leases.values())):
        return {}
    return {
        shard.id: _create(shard, TRIM_HORIZON, "L6")
        for shard in family.shards.values()
        if shard.id not in family.leases
    }


def _orphans(family: Family, gone: Mapping[str, Lease], due: Mapping[str, Lease], config: Config) -> dict[str, Create]:
    """Create the leases that are needed so that each open shard without a lease will be read (L4, L5).

    From each such shard, we walk up to the ancestors that have a lease or begin a line. Parents are visited before
    children, so that each shard can use the results for its parents:

    - A shard *descends* if it has a lease or if one of its parents counts.
    - A shard *begins* a line if none of its parents counts, and the initial position is not LATEST or the shard was
      never read because of an outage (`unread`).

    A parent counts if it descends or if it begins a line. If one parent of a shard counts, leases are created for all
    of its parents that have none and do not descend. Otherwise the hash keys of these parents would not be read from
    the requested start.

    A lease whose row was deleted counts as a lease here (L13). Unless it is in `due`, it was finished, and its children
    start at their beginning. The worker that finished it had created their leases before, so those rows were deleted as
    well. The exception is a merge whose other parent has not ended, because its child had not been created yet.
    """
    created, position = dict[str, Create](), config.initial_position
    # During a long outage, all shards that have leases, and their children, may disappear. If the stream had been read
    # before, LATEST would skip the remaining records of their descendants, or of a hash range that no lease covers.
    unread = family.unread(gone) if position == LATEST and family.read else frozenset[str]()
    tips = family.tips
    if not family.leases.keys() <= family.shards.keys() or family.leases.keys().isdisjoint(tips):
        # After such an outage, a closed shard ends a line if its children are not listed. Shards may leave a listing in
        # another order than the one in which they were closed.
        tips |= {name for name in unread if not family.children.get(name)}
    descends: dict[str, bool] = {}  # whether it descends from a lease or from a shard that begins a line
    begins: set[str] = set()
    for name in _unleased_lines(tips, family):
        if name in family.leases or name in gone:
            descends[name] = True
            continue
        shard, parents = family.shards[name], family.parents(family.shards[name])
        counting_parents = [parent for parent in parents if descends[parent] or parent in begins]
        descends[name] = bool(counting_parents)
        if not counting_parents and (position != LATEST or name in unread):
            begins.add(name)
        for parent in parents if counting_parents else ():
            if parent not in family.leases and parent not in gone and (parent in begins or not descends[parent]):  # L5
                start = TRIM_HORIZON if parent in unread else position
                created[parent] = _create(family.shards[parent], start, "L5")
        finished_parents = {parent for parent in shard.parents if parent in gone and parent not in due}
        # The other parent of a merge needs a row first, because without one it would count as finished (L12).
        if finished_parents and all(
            other in finished_parents or other in family.leases or other not in family.shards for other in shard.parents
        ):  # L13
            created[name] = _create(shard, child_position(config), "L13")
        if name in tips and not counting_parents:  # L4
            created[name] = _create(shard, TRIM_HORIZON if name in unread else position, "L4")
    return created


def _unleased_lines(tips: Collection[str], family: Family) -> tuple[str, ...]:
    """Return the tips without a lease, and their ancestors up to the nearest ones with a lease, parents first."""
    parents_of: dict[str, list[str]] = {}
    to_visit = [shard for shard in tips if shard not in family.leases]
    while to_visit:
        name = to_visit.pop()
        if name not in parents_of:
            parents_of[name] = [] if name in family.leases else family.parents(family.shards[name])
            to_visit += parents_of[name]
    return tuple(TopologicalSorter(parents_of).static_order())


def _covering_holes(family: Family, holes: Collection[Hole], config: Config) -> dict[str, Create]:
    """Create leases for shards that cover a hole which three consecutive full reads have shown (L7).

    A lease is created even if a parent is still being read, because L12 ensures that the parent is read first.
    """
    confirmed_holes = [hole for hole in holes if hole.stream == family.stream and hole.times >= HOLE_CONFIDENCE]
    return {
        shard.id: _create(shard, child_position(config), "L7")
        for shard in family.shards.values()
        if shard.id not in family.leases
        and any(parent in family.leases for parent in shard.parents)
        and all(parent in family.leases or parent not in family.shards for parent in shard.parents)
        and shard.hash_range is not None  # a shard of unknown range might not cover the hole
        and any(shard.hash_range[0] <= hole.last and hole.first <= shard.hash_range[1] for hole in confirmed_holes)
    }
