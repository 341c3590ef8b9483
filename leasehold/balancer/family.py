"""The family tree of a stream's shards beside the leases there are: who follows whom, and what is wrong with it.

Rule 1: lease keys, shard ids and the names of parents are one name space per stream.
Rule 2: a listing of shards is complete; a shard that is not listed is past its retention.
"""

from collections.abc import Collection, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

from attrs import frozen

from leasehold.balancer.model import HASH_KEYS, HashRange, Hole, Lease, Problem, Shard


def first_hole(ranges: Iterable[HashRange]) -> HashRange | None:
    """The first stretch of hash keys that none of these ranges covers, or None; overlaps are fine.

    Source: KCL's PeriodicShardSyncManager. It also sees a hole where a wide range comes before a
    narrow one that does not reach the last key; that is no hole, and is not reported here.
    """
    reach = HASH_KEYS[0] - 1
    for first, last in sorted(ranges):
        if first > reach + 1:
            return (reach + 1, first - 1)
        reach = max(reach, last)
    return None if reach >= HASH_KEYS[1] else (reach + 1, HASH_KEYS[1])


def holes_after(leases: Iterable[Lease], earlier: tuple[Hole, ...]) -> tuple[Hole, ...]:
    """The first hole of each stream in a full reading, with how many readings in a row showed it (L7).

    A different hole counts from 1 again. A stream with an unended lease of unknown range says nothing.
    """
    times = {(hole.stream, hole.first, hole.last): hole.times for hole in earlier}
    streams: dict[str, list[HashRange | None]] = {}
    for lease in leases:
        ranges = streams.setdefault(lease.stream, [])
        if not lease.ended:
            ranges.append(lease.hash_range)
    found = []
    for stream, ranges in sorted(streams.items()):
        known = [each for each in ranges if each is not None]
        hole = first_hole(known) if len(known) == len(ranges) else None
        if hole is not None:
            found.append(Hole(stream, *hole, times=times.get((stream, *hole), 0) + 1))
    return tuple(found)


@frozen
class Family:
    """A family is one stream: its listed shards, their children, and its leases, each by name."""

    stream: str
    shards: Mapping[str, Shard]
    children: Mapping[str, tuple[str, ...]]
    leases: Mapping[str, Lease]

    @property
    def settled(self) -> bool:
        """Whether every shard has its lease, every lease its shard, and none is finished."""
        same = self.shards.keys() == self.leases.keys()
        return same and not any(lease.ended for lease in self.leases.values())

    @property
    def tips(self) -> frozenset[str]:
        """The shards at which lines end: the open ones; of a stream that was disabled, those without children."""
        found = frozenset(shard.id for shard in self.shards.values() if shard.open)
        return found or frozenset(shard for shard in self.shards if not self.children.get(shard))

    @property
    def read(self) -> bool:
        """Whether a lease shows that the stream has been read."""
        return any(lease.checkpoint.numbered or lease.ended for lease in self.leases.values())

    def unread(self, gone: Mapping[str, Lease]) -> frozenset[str]:
        """Return the listed shards without a lease, of which no descendant has one; `gone` ones had a row before."""
        had = {**gone, **self.leases}
        parents = {key: lease.parents for key, lease in had.items()}
        parents |= {key: shard.parents for key, shard in self.shards.items()}
        leased, todo = set(had), list(had)
        while todo:
            new = set(parents.get(todo.pop(), ())) - leased
            leased |= new
            todo += new
        return frozenset(self.shards.keys() - leased)

    def parents(self, shard: Shard) -> list[str]:
        """The parents of a shard that are still listed or leased.

        KCL looks at the listed ones alone, and starts the child of an unlisted parent with an
        unfinished lease at the initial position; under LATEST its first records would be lost (L9).
        """
        return [parent for parent in shard.parents if parent in self.shards or parent in self.leases]


def families(shards: Iterable[Shard], leases: Iterable[Lease] = ()) -> tuple[Family, ...]:
    """The streams that have a listed shard (L1), in order of name; leases of other streams are left out."""
    by_stream: dict[str, dict[str, Shard]] = {}
    for shard in sorted(shards, key=lambda shard: shard.id):
        by_stream.setdefault(shard.stream, {})[shard.id] = shard
    leased: dict[str, dict[str, Lease]] = {stream: {} for stream in by_stream}
    for lease in leases:
        if lease.stream in leased:
            leased[lease.stream][lease.key] = lease
    found = []
    for stream, listed in sorted(by_stream.items()):
        children: dict[str, tuple[str, ...]] = {}  # a parent that is no longer listed has an entry too
        for shard in listed.values():
            for parent in dict.fromkeys(shard.parents):
                children[parent] = (*children.get(parent, ()), shard.id)
        found.append(Family(stream, listed, children, leased[stream]))
    return tuple(found)


def problems(shards: Iterable[Shard]) -> tuple[Problem, ...]:
    """Everything that is wrong with a complete listing: open parents of listed children, cycles, holes.

    The first two stop creation and deletion for their stream (L2); a hole among the open shards is
    only said, since leases may be right where one listing was not.

    Examples:
        >>> from leasehold import Shard, problems
        >>> problems([Shard("shard-0")])
        ()
    """
    found: list[Problem] = []
    for family in families(shards):
        found += faults(family)
        ranges = [shard.hash_range for shard in family.shards.values() if shard.open]
        known = [each for each in ranges if each is not None]
        # With a shard of unknown range nothing can be said.
        hole = first_hole(known) if known and len(known) == len(ranges) else None
        if hole is not None:
            found.append(Problem(family.stream, "", f"no open shard covers hash keys {hole[0]} to {hole[1]}"))
    return tuple(found)


def faults(family: Family) -> tuple[Problem, ...]:
    """The problems that leave no safe way to create or delete a lease of this stream (L2)."""
    # An open shard can have no children; its own entry or the child's is out of date.
    found = [
        Problem(family.stream, parent, f"is open but has a child, {children[0]}: one of the two is out of date")
        for parent, children in sorted(family.children.items())
        if parent in family.shards and family.shards[parent].open
    ]
    try:
        # A shard without parents stands in no ring: of ten thousand shards that were never split, none is sorted.
        TopologicalSorter({shard.id: shard.parents for shard in family.shards.values() if shard.parents}).prepare()
    except CycleError as error:  # a shard that is its own ancestor would wait for itself for ever
        ring = sorted(set(error.args[1]))
        found.append(Problem(family.stream, ring[0], f"is its own ancestor, by way of {', '.join(ring)}"))
    return tuple(found)


def apart(shards: Collection[Shard], unread: Collection[str]) -> tuple[Shard, ...]:
    """The shards that are no kin of these: neither ancestors nor descendants, nor kin of such.

    Where the lease of a shard begins depends on the leases of its line (L3 to L9). Of partitions,
    which have no line, it depends on all others of their stream (L6).
    """
    kin: dict[str, set[str]] = {}
    for shard in shards if unread else ():
        partition = not shard.parents and shard.hash_range is None
        for other in (*shard.parents, *((f"partitions of {shard.stream}",) if partition else ())):
            kin.setdefault(shard.id, set()).add(other)
            kin.setdefault(other, set()).add(shard.id)
    met, todo = set(unread), list(unread)
    while todo:
        new = kin.get(todo.pop(), set()) - met
        met |= new
        todo += new
    return tuple(shard for shard in shards if shard.id not in met)
