"""The leases to create: for new streams, for orphans, and for the children of finished shards (L3 to L7).

Source: HierarchicalShardSyncer, ShutdownTask and PeriodicShardSyncManager of the Kinesis Client
Library 2.7, and the README of kcl-rust. Where KCL leaves a child to the worker that finished its
parent, here every worker creates what that worker did not (L3).

Why the start of a lease matters: under LATEST a child of a finished shard that started there would skip its first
records, and nobody would notice. Where a lease shows that its line has been read, the child starts at its beginning.
A shard that descends from no lease starts where the fleet was told to start; AT_TIMESTAMP is kept by L3 and L5.
"""

from collections.abc import Collection, Iterable, Mapping
from graphlib import TopologicalSorter

from attrs import evolve

from leasehold.balancer.actions import Create
from leasehold.balancer.config import Config
from leasehold.balancer.model import LATEST, TRIM_HORIZON, History, Hole, Lease, Notes, Position, Shard
from leasehold.balancer.shards.ancestry import Family
from leasehold.balancer.shards.cleanup import NOT_STARTED


def creations(family: Family, garbage: Collection[Lease], history: History, config: Config) -> tuple[Create, ...]:
    """The leases that a stream without faults is short of, in order of id; `garbage` as in `cleanup`."""
    gone = {lease.key: lease for lease in history.gone if lease.stream == family.stream}
    created = {
        **_behind_holes(family, history.holes, config),
        **_orphans(family, gone, config),
        **_partitions(family),
        # Last, for these know best: LATEST would skip a child's first records.
        **_orphaned_children(family, garbage, config),
        **_missing_children(family, config),
        **_remembered(family, gone),
    }
    return tuple(created[name] for name in sorted(created))


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


def _remembered(family: Family, gone: Mapping[str, Lease]) -> dict[str, Create]:
    """L13: leases whose row was deleted behind the fleet's back begin where they were last seen.

    A row goes by our own rules once its lease is finished and its children are under way (L8), or its shard is not
    listed (L10). So nothing is made of a closed shard below which anything has begun.
    """
    return {
        key: Create(evolve(lease, epoch=lease.epoch + EPOCHS_UNSEEN), rule="L13")
        for key, lease in gone.items()
        if key in family.shards and key not in family.leases and not lease.ended and not _begun_below(key, family)
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


EPOCHS_UNSEEN = 1_000_000
"""A row made anew from a reading goes on above every number that its writers may have given since (L13)."""


def _missing_children(family: Family, config: Config) -> dict[str, Create]:
    """L3: children whose parents are all done with, and one of them by us."""
    return {
        shard.id: _create(shard, child_position(config), "L3")
        for shard in family.shards.values()
        if shard.id not in family.leases and _follows_the_finished(shard, family)
    }


def _follows_the_finished(shard: Shard, family: Family) -> bool:
    """L3: each parent is ended, or neither leased nor listed, and at least one is ended."""
    ended = [parent in family.leases and family.leases[parent].ended for parent in shard.parents]
    gone = [parent not in family.leases and parent not in family.shards for parent in shard.parents]
    return any(ended) and all(done or lost for done, lost in zip(ended, gone, strict=True))


def _orphaned_children(family: Family, garbage: Collection[Lease], config: Config) -> dict[str, Create]:
    """L9: children of a shard that is gone before its lease was finished; nobody else will create them."""
    return {
        child: _create(family.shards[child], child_position(config), "L9")
        for lease in garbage
        for child in family.children.get(lease.key, ())
        if child not in family.leases and not lease.ended
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


def _orphans(family: Family, gone: Mapping[str, Lease], config: Config) -> dict[str, Create]:
    """L4 and L5: walk up from each open shard without a lease to where its line is leased, or begins.

    Parents come before children, so that each shard can ask what was decided of its parents:
        descends  it is leased, or a parent of it counts
        begins    no parent of it counts, and the initial position is not LATEST: its line begins here
    A parent counts if it descends or begins a line. Of a shard with such a parent, those parents without a lease are
    created that begin a line or do not count, or their hash keys would not be read from where the past begins.
    A lease whose row is gone counts as leased here (L13); children of a finished one begin at their beginning.
    """
    created, position = dict[str, Create](), config.initial_position
    descends: dict[str, bool] = {}  # from a lease, or from a shard that begins a line
    begins: set[str] = set()
    for name in _lines_above_the_open(family):
        if name in family.leases or name in gone:
            descends[name] = True
            continue
        shard, parents = family.shards[name], family.parents(family.shards[name])
        counted = [parent for parent in parents if descends[parent] or parent in begins]
        descends[name] = bool(counted)
        if not counted and position != LATEST:
            begins.add(name)
        for parent in parents if counted else ():
            if parent not in family.leases and parent not in gone and (parent in begins or not descends[parent]):  # L5
                created[parent] = _create(family.shards[parent], position, "L5")
        if any(parent in gone and gone[parent].ended for parent in shard.parents):  # L13
            created[name] = _create(shard, child_position(config), "L13")
        if shard.open and not counted:  # L4
            created[name] = _create(shard, position, "L4")
    return created


def _lines_above_the_open(family: Family) -> tuple[str, ...]:
    """The open shards without a lease and their listed ancestors up to the first leased, parents first."""
    above: dict[str, list[str]] = {}
    todo = [shard.id for shard in family.shards.values() if shard.open and shard.id not in family.leases]
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
        and any(_overlaps(shard, hole) for hole in lasting)
    }


HOLE_CONFIDENCE = 3
"""Full readings in a row that must show a hole before it is believed (L7)."""


def _overlaps(shard: Shard, hole: Hole) -> bool:
    """Whether the shard covers a part of the hole; a shard of unknown range does not."""
    return shard.hash_range is not None and shard.hash_range[0] <= hole.last and hole.first <= shard.hash_range[1]
