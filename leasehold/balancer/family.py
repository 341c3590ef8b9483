"""Groups shards and leases by stream, and finds faults in a listing of shards.

Rule 1: within a stream, the key of a lease is the id of its shard, and parents are also identified by such ids.
Rule 2: every listing of shards is assumed to be complete. If a shard is not listed, all its records have expired.
"""

from collections.abc import Collection, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

from attrs import frozen

from leasehold.balancer.model import HASH_KEYS, HashRange, Hole, Lease, Problem, Shard


def first_hole(ranges: Iterable[HashRange]) -> HashRange | None:
    """Return the first range of hash keys that none of these ranges covers, or None. Ranges may overlap.

    Source: PeriodicShardSyncManager of the KCL. There is one difference. If the range with the greatest start ends
    before the last hash key, the KCL reports a hole even if another range extends to the last hash key. This function
    does not.
    """
    last_covered = HASH_KEYS[0] - 1
    for first_key, last_key in sorted(ranges):
        if first_key > last_covered + 1:
            return (last_covered + 1, first_key - 1)
        last_covered = max(last_covered, last_key)
    return None if last_covered >= HASH_KEYS[1] else (last_covered + 1, HASH_KEYS[1])


def update_holes(leases: Iterable[Lease], previous_holes: tuple[Hole, ...]) -> tuple[Hole, ...]:
    """Return, for each stream, the first range of hash keys that no unfinished lease covers (L7).

    Each `Hole` counts the consecutive reads of the whole table that have shown the same range.

    The count starts at 1 again when the range changes. A stream is skipped if the hash range of any of its unfinished
    leases is unknown.
    """
    times_by_hole = {(hole.stream, hole.first, hole.last): hole.times for hole in previous_holes}
    ranges_by_stream: dict[str, list[HashRange | None]] = {}
    for lease in leases:
        hash_ranges = ranges_by_stream.setdefault(lease.stream, [])
        if not lease.ended:
            hash_ranges.append(lease.hash_range)
    holes = []
    for stream, hash_ranges in sorted(ranges_by_stream.items()):
        known_ranges = [hash_range for hash_range in hash_ranges if hash_range is not None]
        hole = first_hole(known_ranges) if len(known_ranges) == len(hash_ranges) else None
        if hole is not None:
            holes.append(Hole(stream, *hole, times=times_by_hole.get((stream, *hole), 0) + 1))
    return tuple(holes)


@frozen
class Family:
    """The listed shards and the leases of one stream.

    `children` maps each parent, even if it is not listed, to its listed children.
    """

    stream: str
    shards: Mapping[str, Shard]
    children: Mapping[str, tuple[str, ...]]
    leases: Mapping[str, Lease]

    @property
    def needs_no_change(self) -> bool:
        """Whether every shard has a lease, every lease has a shard, and no lease has ended."""
        same_keys = self.shards.keys() == self.leases.keys()
        return same_keys and not any(lease.ended for lease in self.leases.values())

    @property
    def tips(self) -> frozenset[str]:
        """The shards at which the lines of descent end.

        Usually, the tips are the open shards. If no shard is open (DynamoDB closes all shards of a disabled stream),
        the tips are the shards without children.
        """
        open_shards = frozenset(shard.id for shard in self.shards.values() if shard.open)
        return open_shards or frozenset(shard for shard in self.shards if not self.children.get(shard))

    @property
    def has_been_read(self) -> bool:
        """Whether a lease shows that the stream has been read."""
        return any(lease.checkpoint.numbered or lease.ended for lease in self.leases.values())

    def find_unread_shards(self, deleted_leases: Mapping[str, Lease]) -> frozenset[str]:
        """Return the listed shards that have no lease and no descendant with a lease.

        A lease in `deleted_leases` was deleted by another program, and counts as existing.
        """
        leases = {**deleted_leases, **self.leases}
        parents_by_key = {key: lease.parents for key, lease in leases.items()}
        parents_by_key |= {key: shard.parents for key, shard in self.shards.items()}
        covered_keys, keys_to_visit = set(leases), list(leases)
        while keys_to_visit:
            new_parents = set(parents_by_key.get(keys_to_visit.pop(), ())) - covered_keys
            covered_keys |= new_parents
            keys_to_visit += new_parents
        return frozenset(self.shards.keys() - covered_keys)

    def parents(self, shard: Shard) -> list[str]:
        """Return the parents of a shard that are still listed or have a lease.

        The KCL ignores unlisted parents. If an unlisted parent has an unfinished lease, the KCL starts the child at the
        initial position, and LATEST skips the child's first records (L9).
        """
        return [parent for parent in shard.parents if parent in self.shards or parent in self.leases]


def families(shards: Iterable[Shard], leases: Iterable[Lease] = ()) -> tuple[Family, ...]:
    """Return a `Family` for each stream with a listed shard, sorted by name (L1).

    Leases of streams without a listed shard are left out.
    """
    by_stream: dict[str, dict[str, Shard]] = {}
    for shard in sorted(shards, key=lambda shard: shard.id):
        by_stream.setdefault(shard.stream, {})[shard.id] = shard
    leases_by_stream: dict[str, dict[str, Lease]] = {stream: {} for stream in by_stream}
    for lease in leases:
        if lease.stream in leases_by_stream:
            leases_by_stream[lease.stream][lease.key] = lease
    found_families = []
    for stream, shards_by_id in sorted(by_stream.items()):
        children: dict[str, tuple[str, ...]] = {}  # the keys include parents that are not listed
        for shard in shards_by_id.values():
            for parent in dict.fromkeys(shard.parents):
                children[parent] = (*children.get(parent, ()), shard.id)
        found_families.append(Family(stream, shards_by_id, children, leases_by_stream[stream]))
    return tuple(found_families)


def problems(shards: Iterable[Shard]) -> tuple[Problem, ...]:
    """Return the faults of a complete listing of shards: parents that are still open, cycles, and holes.

    If a parent of a listed shard is still open, or if there is a cycle, no leases of the stream are created or deleted
    (L2). A hole among the hash keys of the open shards is only reported, because the leases may cover the hole.

    Examples:
        >>> from leasehold import Shard, problems
        >>> problems([Shard("shard-0")])
        ()
    """
    found_problems: list[Problem] = []
    for family in families(shards):
        found_problems += blocking_problems(family)
        hash_ranges = [shard.hash_range for shard in family.shards.values() if shard.open]
        known_ranges = [hash_range for hash_range in hash_ranges if hash_range is not None]
        # If the hash range of any open shard is unknown, that shard may cover the hole.
        hole = first_hole(known_ranges) if known_ranges and len(known_ranges) == len(hash_ranges) else None
        if hole is not None:
            found_problems.append(Problem(family.stream, "", f"no open shard covers hash keys {hole[0]} to {hole[1]}"))
    return tuple(found_problems)


def blocking_problems(family: Family) -> tuple[Problem, ...]:
    """Return the faults of a listing because of which no leases of this stream may be created or deleted (L2)."""
    # An open shard cannot have children. If the listing contains an open shard and its child, one of the two entries is
    # out of date.
    found_problems = [
        Problem(family.stream, parent, f"is open but has a child, {children[0]}: one of the two is out of date")
        for parent, children in sorted(family.children.items())
        if parent in family.shards and family.shards[parent].open
    ]
    try:
        # Leave out shards without parents, which cannot be part of a cycle. There may be ten thousand shards that were
        # never split.
        TopologicalSorter({shard.id: shard.parents for shard in family.shards.values() if shard.parents}).prepare()
    except CycleError as error:  # a shard on a cycle would wait for its own end forever
        cycle = sorted(set(error.args[1]))
        found_problems.append(Problem(family.stream, cycle[0], f"is its own ancestor, by way of {', '.join(cycle)}"))
    return tuple(found_problems)


def unrelated_shards(shards: Collection[Shard], unread_shard_ids: Collection[str]) -> tuple[Shard, ...]:
    """Return the shards that are related to no shard in `unread_shard_ids`, either directly or through other shards.

    Parents and children are related, and so are all partitions of a stream (L6). The position at which a lease starts
    depends on the leases of related shards (L3 to L9), so the others are not affected by `unread_shard_ids`.
    """
    neighbors: dict[str, set[str]] = {}
    for shard in shards if unread_shard_ids else ():
        is_partition = not shard.parents and shard.hash_range is None
        for neighbor_id in (*shard.parents, *((f"partitions of {shard.stream}",) if is_partition else ())):
            neighbors.setdefault(shard.id, set()).add(neighbor_id)
            neighbors.setdefault(neighbor_id, set()).add(shard.id)
    related_ids, to_visit = set(unread_shard_ids), list(unread_shard_ids)
    while to_visit:
        new_neighbors = neighbors.get(to_visit.pop(), set()) - related_ids
        related_ids |= new_neighbors
        to_visit += new_neighbors
    return tuple(shard for shard in shards if shard.id not in related_ids)
