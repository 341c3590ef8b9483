"""The leases that a stream should have by the family tree of its shards (`family`): what to create, what to delete.

The leases to create are those of new streams, of orphans, and of the children of finished shards (L3 to L7). Why the
start of a lease matters: under LATEST a child of a finished shard that started there would skip its first records, and
nobody would notice. Where a lease shows that its line has been read, the child starts at its beginning. A shard that
descends from no lease starts where the fleet was told to start; AT_TIMESTAMP is kept by L3 and L5.

The leases to delete are finished ones whose children are under way, and those of shards long gone (L8 to L10).

Source: HierarchicalShardSyncer, ShutdownTask, PeriodicShardSyncManager and LeaseCleanupManager of the Kinesis Client
Library 2.7, and the README of kcl-rust. Where KCL leaves a child to the worker that finished its parent, here every
worker creates what that worker did not (L3). KCL remembers what to clean in the worker that finished the shard, and
forgets it with that worker; here it is read from the table.
"""

from bisect import bisect
from collections.abc import Collection, Iterable, Mapping
from graphlib import TopologicalSorter

from attrs import evolve

from leasehold.balancer.actions import Create, Delete
from leasehold.balancer.chance import digest_under
from leasehold.balancer.config import Config
from leasehold.balancer.family import Family
from leasehold.balancer.model import LATEST, TRIM_HORIZON, History, Hole, Lease, Notes, Position, Shard

NOT_STARTED = frozenset({"TRIM_HORIZON", "AT_TIMESTAMP"})
"""Checkpoints of a child that nobody has read from (L8); LATEST counts as started."""

EPOCHS_UNSEEN = 1_000_000
"""A row written again from a reading goes on above every number that its writers may have given since (L13)."""

HOLE_CONFIDENCE = 3
"""Full readings in a row that must show a hole before it is believed (L7)."""


def readable(lease: Lease, leases: Mapping[str, Lease]) -> bool:
    """L12: a held lease is read only when each parent's lease is absent or at SHARD_END; `leases` by key.

    Examples:
        >>> from leasehold import Lease, readable
        >>> parent, child = Lease("shard-0"), Lease("shard-1", parents=("shard-0",))
        >>> readable(child, {"shard-0": parent, "shard-1": child})  # its parent is not read to its end yet
        False
    """
    return all(parent not in leases or leases[parent].ended for parent in lease.parents)


def ripe(leases: Collection[Lease], worker: str) -> frozenset[str]:
    """Finished leases that only a listing of shards keeps from being deleted (L8), where that falls to this worker.

    One worker of those that share by our rules lists for all: the next one to the key's digest on a ring of theirs.
    KCL 2.x counts finished leases as load, and its workers settle for fewer shards than their share while any is there.
    """
    ended = {lease.key for lease in leases if lease.ended}
    if not ended:
        return frozenset()
    keys, begun = {lease.key for lease in leases}, dict[str, bool]()
    for child in leases:
        for parent in ended.intersection(child.parents):
            begun[parent] = begun.get(parent, True) and child.checkpoint.sequence not in NOT_STARTED
    roots = {lease.key for lease in leases if keys.isdisjoint(lease.parents)}
    digest = digest_under("")
    ring = sorted((digest(name), name) for name in {lease.owner for lease in leases if lease.yields and lease.owner})
    if all(name != worker for _, name in ring):
        return frozenset()
    due = (key for key, done in begun.items() if done and key in roots)
    return frozenset(key for key in due if ring[bisect(ring, (digest(key), "")) % len(ring)][1] == worker)


def garbage(family: Family, worker: str, expired: Collection[str]) -> tuple[Lease, ...]:
    """L10: leases of unlisted shards that rob nobody: mine, unowned, expired (by key) or ended; in order of key."""
    return tuple(
        lease
        for key, lease in sorted(family.leases.items())
        if key not in family.shards and (lease.owner in {None, worker} or lease.ended or key in expired)
    )


def deletions(family: Family, garbage: Collection[Lease]) -> tuple[Delete, ...]:
    """The leases of a stream without faults that have nothing more to say.

    A worker that deletes an unlisted one first asks the source: a listing may be behind, but a ResourceNotFound
    for the shard, while its stream answers, is certain.
    """
    finished = (
        Delete(lease, rule="L8")
        for _, lease in sorted(family.leases.items())
        if lease.ended
        and lease.key in family.shards
        and (children := family.children.get(lease.key))
        # Every child has begun, and no parent needs this lease as the proof that its child is done.
        and all(
            child in family.leases and family.leases[child].checkpoint.sequence not in NOT_STARTED for child in children
        )
        and family.leases.keys().isdisjoint({*lease.parents, *family.shards[lease.key].parents})
    )
    gone = (
        Delete(lease, rule="L10")
        for lease in garbage
        if all(child in family.leases for child in family.children.get(lease.key, ()))  # L9
    )
    return (*finished, *gone)


def creations(family: Family, garbage: Collection[Lease], history: History, config: Config) -> tuple[Create, ...]:
    """The leases that a stream without faults is short of, in order of id; `garbage` as in `cleanup`."""
    gone = {lease.key: lease for lease in history.gone if lease.stream == family.stream}
    # A row goes by our own rules once its lease is finished and its children are under way (L8), or its shard is not
    # listed (L10). So a closed shard below which anything has begun counts as finished; others were deleted behind the
    # fleet's back, and are due again.
    due = {
        key: lease
        for key, lease in gone.items()
        if key in family.shards and key not in family.leases and not lease.ended and not _begun_below(key, family)
    }
    # L13: the least number that a new lease begins with. Where rows were deleted, one that came and went between two
    # readings may have been among them, and its numbers were given to handlers. A table shows that by rows that are due
    # again, or that were written again far above.
    highest = max((lease.epoch for lease in (*family.leases.values(), *due.values())), default=0)
    above = highest + EPOCHS_UNSEEN if due else highest if highest >= EPOCHS_UNSEEN else 0
    created = {
        **_behind_holes(family, history.holes, config),
        **_orphans(family, gone, due, config),
        **_partitions(family),
        # Last, for these know best: LATEST would skip a child's first records.
        **_orphaned_children(family, garbage, config),
        **_missing_children(family, config),
        **_remembered(due),
    }
    found = (created[name] for name in sorted(created))
    return tuple(evolve(each, lease=evolve(each.lease, epoch=max(each.lease.epoch, above))) for each in found)


def child_position(config: Config) -> Position:
    """Where the child of a finished shard starts: at its beginning, for all of it came after its parent.

    kcl-rust started AT_TIMESTAMP starts every lease there, those of later shards too.
    """
    starts_there = config.rules.starts_at_time and config.initial_position.sequence == "AT_TIMESTAMP"
    return config.initial_position if starts_there else TRIM_HORIZON


def births(
    parent: Lease, children: Iterable[Shard], leases: Mapping[str, Lease], listed: Collection[str], config: Config
) -> tuple[Create, ...]:
    """The worker that reached a shard's end creates these before it writes SHARD_END (L3).

    A crash between the two writes then strands nobody. A merge child waits until every other parent is
    leased or no longer listed. `leases` by key; `listed` are the ids of the listed shards.

    Examples:
        >>> from leasehold import Config, Lease, Shard, births
        >>> child = Shard("shard-1", parents=("shard-0",))
        >>> [made.lease.key for made in births(Lease("shard-0"), [child], {}, {"shard-0", "shard-1"}, Config())]
        ['shard-1']
    """
    return tuple(
        _create(child, child_position(config), "L3")
        for child in sorted(children, key=lambda child: child.id)
        if child.id not in leases
        and all(other == parent.key or other in leases or other not in listed for other in child.parents)
    )


def lease_of(shard: Shard, position: Position, notes: Notes = ()) -> Lease:
    """The lease of a shard that nobody owns yet."""
    return Lease(
        key=shard.id,
        stream=shard.stream,
        shard=shard.id.removeprefix(f"{shard.stream}:"),  # KCL's multi-stream keys
        parents=shard.parents,
        checkpoint=position,
        hash_range=shard.hash_range,
        notes=notes,
    )


def _create(shard: Shard, position: Position, rule: str) -> Create:
    return Create(lease_of(shard, position), rule=rule)


def _remembered(due: Mapping[str, Lease]) -> dict[str, Create]:
    """L13: leases that are due again begin where they were last seen.

    A lease that nobody has begun comes after its parents: without their rows it would be read before them (L12).
    """
    return {
        key: Create(evolve(lease, epoch=lease.epoch + EPOCHS_UNSEEN), rule="L13")
        for key, lease in due.items()
        if lease.checkpoint.sequence not in NOT_STARTED or due.keys().isdisjoint(lease.parents)
    }


def _begun_below(shard: str, family: Family) -> bool:
    """Whether a descendant of this shard has been read."""
    todo, met = list(family.children.get(shard, ())), set[str]()
    while todo:
        if (child := todo.pop()) in met:
            continue
        met.add(child)
        lease = family.leases.get(child)
        if lease is not None and lease.checkpoint.sequence not in NOT_STARTED:
            return True
        todo += family.children.get(child, ())
    return False


def _missing_children(family: Family, config: Config) -> dict[str, Create]:
    """L3: children of which each parent is ended, or neither leased nor listed, and at least one is ended."""
    created = {}
    for shard in family.shards.values():
        if shard.id in family.leases:
            continue
        ended = [parent in family.leases and family.leases[parent].ended for parent in shard.parents]
        gone = [parent not in family.leases and parent not in family.shards for parent in shard.parents]
        if any(ended) and all(done or lost for done, lost in zip(ended, gone, strict=True)):
            created[shard.id] = _create(shard, child_position(config), "L3")
    return created


def _orphaned_children(family: Family, garbage: Collection[Lease], config: Config) -> dict[str, Create]:
    """L9: children of a shard that is gone before its lease was finished; nobody else will create them.

    The other parent of a merge has a row first: once the child has one, that parent would count as finished.
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
    """L6: a partition that turns up after reading has begun starts at its beginning, or its first events are lost."""
    unrelated = all(not shard.parents and shard.hash_range is None for shard in family.shards.values())
    if not (unrelated and any(lease.checkpoint.numbered for lease in family.leases.values())):
        return {}
    return {
        shard.id: _create(shard, TRIM_HORIZON, "L6")
        for shard in family.shards.values()
        if shard.id not in family.leases
    }


def _orphans(family: Family, gone: Mapping[str, Lease], due: Mapping[str, Lease], config: Config) -> dict[str, Create]:
    """L4 and L5: walk up from each open shard without a lease to where its line is leased, or begins.

    Parents come before children, so that each shard can ask what was decided of its parents:
        descends  it is leased, or a parent of it counts
        begins    no parent of it counts, and the initial position is not LATEST: its line begins here
    A parent counts if it descends or begins a line. Of a shard with such a parent, those parents without a lease are
    created that begin a line or do not count, or their hash keys would not be read from where the past begins.
    A lease whose row is gone counts as leased here (L13). Unless it is due again it is finished, and its children begin
    at their beginning: the worker that finished it had made them before, so their rows were deleted, too. Where the
    other parent of a merge has not ended, nobody had made the child.
    """
    created, position = dict[str, Create](), config.initial_position
    # An outage may outlive every shard that has a lease, and its children. Once the stream was read, LATEST would skip
    # what is left of their descendants, and of a part of the hash range that no lease covers.
    unread = family.unread(gone) if position == LATEST and family.read else frozenset[str]()
    tips = family.tips
    if not family.leases.keys() <= family.shards.keys() or family.leases.keys().isdisjoint(tips):
        # After such an outage, a closed shard ends a line if its children are not listed. Shards need not leave a
        # listing in the order in which they were closed.
        tips |= {name for name in unread if not family.children.get(name)}
    descends: dict[str, bool] = {}  # from a lease, or from a shard that begins a line
    begins: set[str] = set()
    for name in _lines_above(tips, family):
        if name in family.leases or name in gone:
            descends[name] = True
            continue
        shard, parents = family.shards[name], family.parents(family.shards[name])
        counted = [parent for parent in parents if descends[parent] or parent in begins]
        descends[name] = bool(counted)
        if not counted and (position != LATEST or name in unread):
            begins.add(name)
        for parent in parents if counted else ():
            if parent not in family.leases and parent not in gone and (parent in begins or not descends[parent]):  # L5
                start = TRIM_HORIZON if parent in unread else position
                created[parent] = _create(family.shards[parent], start, "L5")
        finished = {parent for parent in shard.parents if parent in gone and parent not in due}
        # The other parent of a merge has a row first: without one it would count as finished (L12).
        if finished and all(
            p in finished or p in family.leases or p not in family.shards for p in shard.parents
        ):  # L13
            created[name] = _create(shard, child_position(config), "L13")
        if name in tips and not counted:  # L4
            created[name] = _create(shard, TRIM_HORIZON if name in unread else position, "L4")
    return created


def _lines_above(tips: Collection[str], family: Family) -> tuple[str, ...]:
    """Return the tips without a lease and their listed ancestors up to the first leased, parents first."""
    above: dict[str, list[str]] = {}
    todo = [shard for shard in tips if shard not in family.leases]
    while todo:
        name = todo.pop()
        if name not in above:
            above[name] = [] if name in family.leases else family.parents(family.shards[name])
            todo += above[name]
    return tuple(TopologicalSorter(above).static_order())


def _behind_holes(family: Family, holes: Collection[Hole], config: Config) -> dict[str, Create]:
    """L7: shards behind a hole seen three times, though a parent is still being read; L12 keeps the order."""
    lasting = [hole for hole in holes if hole.stream == family.stream and hole.times >= HOLE_CONFIDENCE]
    return {
        shard.id: _create(shard, child_position(config), "L7")
        for shard in family.shards.values()
        if shard.id not in family.leases
        and any(parent in family.leases for parent in shard.parents)
        and all(parent in family.leases or parent not in family.shards for parent in shard.parents)
        and shard.hash_range is not None  # one of unknown range covers nothing for certain
        and any(shard.hash_range[0] <= hole.last and hole.first <= shard.hash_range[1] for hole in lasting)
    }
