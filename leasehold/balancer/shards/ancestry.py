"""The family tree of a stream's shards beside the leases there are: who follows whom, and what is wrong.

Rule 1: lease keys, shard ids and the names of parents are one name space per stream.
Rule 2: a listing of shards is complete; a shard that is not listed is past its retention.
"""

from collections.abc import Collection, Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

from attrs import frozen

from leasehold.balancer.model import Lease, Problem, Shard
from leasehold.balancer.shards.holes import first_hole


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
    return tuple(
        Family(stream, listed, _children(listed), leased[stream]) for stream, listed in sorted(by_stream.items())
    )


def _children(shards: Mapping[str, Shard]) -> dict[str, tuple[str, ...]]:
    """The listed children of each shard, by its id; a parent that is no longer listed has an entry too."""
    children: dict[str, tuple[str, ...]] = {}
    for shard in shards.values():
        for parent in dict.fromkeys(shard.parents):
            children[parent] = (*children.get(parent, ()), shard.id)
    return children


def problems(shards: Iterable[Shard]) -> tuple[Problem, ...]:
    """Everything that is wrong with a complete listing: open parents of listed children, cycles, holes.

    The first two stop creation and deletion for their stream (L2); a hole among the open shards is
    only said, since leases may be right where one listing was not.
    """
    return tuple(problem for family in families(shards) for problem in (*faults(family), *_hole(family)))


def faults(family: Family) -> tuple[Problem, ...]:
    """The problems that leave no safe way to create or delete a lease of this stream (L2)."""
    return (*_open_parents(family), *_cycle(family))


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


def _open_parents(family: Family) -> list[Problem]:
    """L2: an open shard can have no children; its own entry or the child's is out of date."""
    return [
        Problem(family.stream, parent, f"is open but has a child, {children[0]}: one of the two is out of date")
        for parent, children in sorted(family.children.items())
        if parent in family.shards and family.shards[parent].open
    ]


def _cycle(family: Family) -> list[Problem]:
    """L2: a shard that is its own ancestor would wait for itself for ever."""
    try:
        # A shard without parents stands in no ring: of ten thousand shards that were never split, none is sorted.
        TopologicalSorter({shard.id: shard.parents for shard in family.shards.values() if shard.parents}).prepare()
    except CycleError as error:
        ring = sorted(set(error.args[1]))
        return [Problem(family.stream, ring[0], f"is its own ancestor, by way of {', '.join(ring)}")]
    return []


def _hole(family: Family) -> list[Problem]:
    """Open shards that leave hash keys uncovered; with a shard of unknown range nothing can be said."""
    ranges = [shard.hash_range for shard in family.shards.values() if shard.open]
    known = [each for each in ranges if each is not None]
    hole = first_hole(known) if known and len(known) == len(ranges) else None
    return (
        [] if hole is None else [Problem(family.stream, "", f"no open shard covers hash keys {hole[0]} to {hole[1]}")]
    )


def readable(lease: Lease, leases: Mapping[str, Lease]) -> bool:
    """L12: a held lease is read only when each parent's lease is absent or at SHARD_END; `leases` by key."""
    return all(parent not in leases or leases[parent].ended for parent in lease.parents)
