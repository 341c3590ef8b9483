"""Even shares: each worker gets as many leases as makes workers and their groups differ least (M2).

Every worker's share is the floor of the mean or one more, and every group's total is the floor of its share or one
more, at every level of the tree (S8). Among all such shares these ask for the fewest moves, and they do not change
while the moves they ask for are under way (S4).

Without groups the question is which workers get the extras, the leases that the floor leaves over. A worker above the
floor keeps its extra lease without a move, so these come first. The rest is chosen by a digest of the id, which all
workers compute alike. A move never changes the choice: a worker above the floor with an extra stays above it, and a
worker that reaches floor + 1 by an extra is then among those that come first.

With groups the extras go down the tree. A group of n workers, of N in all, has a claim to extras x n / N of them. It
gets the whole part of this, its *least*, in any case. The fractions that are left over sum to whole extras, which the
group above hands out one by one, at most one to each of its parts, and none to a part without a fraction. First come
the parts in which one more extra saves a move, then those with the larger fraction, then by name.

Example, with prefixes as groups: x-1, x-2 and x-3 hold 3, 3 and 2 leases, y-1 and y-2 hold 2 each. Twelve leases on
five workers make a floor of 2 and two extras. Group x has a claim to 2 x 3 / 5 extras, 1 and a fraction of 1/5; group y
to 2 x 2 / 5, none and a fraction of 4/5. One extra goes to x in any case, and one is left. By fractions alone it would
go to y, and a lease would move from x to y. But x has two workers above the floor, more than its least of one, so that
a second extra saves this move: x gets it, and nothing moves. Both divisions are even, for x's 8 and y's 4 are the
ceiling and the floor of 7.2 and 4.8, as 7 and 5 would be the other way round.

A group within a group answers the same question for the group above: would one more extra save a move? The answer is
that of the part which would get it. The parts stand in the order above, the group's least is handed out from the front
of that line, and the first part that it does not reach is the next one in line. Since parts that save a move come
first, a no from that part is a no from all behind it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from itertools import groupby
from typing import Literal

from attrs import frozen

from leasehold.balancer.chance import digest_under

Groups = Literal["prefix"] | tuple[str, ...] | None

_digest = digest_under("minimal")


def path_of(worker: str, groups: Groups) -> tuple[str, ...]:
    """A worker belongs to these groups, outermost first, as its id says.

    "prefix" is the text before the last "-"; separators each end one level's name. A level whose
    separator does not occur has the empty name, which is a group like any other.
    """
    if groups is None:
        return ()
    if groups == "prefix":
        return (worker.rpartition("-")[0],)
    path = []
    for separator in groups:
        name, found, after = worker.partition(separator)
        path.append(name if found else "")
        worker = after if found else worker
    return tuple(path)


def favoured(counts: Mapping[str, int], floor: int, extras: int, groups: Groups) -> frozenset[str]:
    """The `extras` workers whose share is one above `floor` (M2); all, if there are more extras than workers."""
    if not extras:
        return frozenset()
    if groups is None:
        return frozenset(_leaf(counts, counts, floor, extras))
    members = sorted((path_of(worker, groups), worker) for worker in counts)
    tree = _Tree(counts, floor, extras, len(counts), len(groups) if isinstance(groups, tuple) else 1)
    return frozenset(tree.favoured(tree.group(members, 0), extras))


def _leaf(workers: Iterable[str], counts: Mapping[str, int], floor: int, extras: int) -> list[str]:
    """Workers above the floor keep their extra lease, the others get one by digest."""
    above = [worker for worker in workers if counts[worker] > floor]
    chosen = _first(above, extras)
    below = [] if len(above) >= extras else [worker for worker in workers if counts[worker] <= floor]
    return chosen + _first(below, extras - len(chosen))


def _first(workers: list[str], count: int) -> list[str]:
    """Digests choose among more workers than are wanted; without a choice none is computed."""
    if len(workers) <= count:
        return workers
    return nsmallest(count, workers, key=lambda worker: (_digest(worker), worker)) if count > 0 else []


@frozen
class _Group:
    """A group is a node of the tree.

    least     extras it gets in any case: the floor of its share
    fraction  what its share has beyond that, in parts of the fleet's size; 0: it gets no more
    wants     whether one more than the least would save a move
    parts     its subgroups, those first that get a further extra first
    """

    name: str
    workers: tuple[str, ...]
    least: int
    fraction: int
    wants: bool
    parts: tuple["_Group", ...] = ()


@frozen
class _Tree:
    """The tree holds the numbers that every one of its groups is computed from.

    counts  leases by worker
    floor   the share of every worker without an extra
    extras  how many leases the floor leaves over
    size    how many workers there are
    depth   how many levels of groups
    """

    counts: Mapping[str, int]
    floor: int
    extras: int
    size: int
    depth: int

    def group(self, members: Sequence[tuple[tuple[str, ...], str]], level: int, name: str = "") -> _Group:
        """The group of these (path, worker) pairs, which are sorted and agree in all outer levels."""
        workers = tuple(worker for _, worker in members)
        least, fraction = divmod(self.extras * len(workers), self.size)
        if level == self.depth:
            above = sum(self.counts[worker] > self.floor for worker in workers)
            return _Group(name, workers, least, fraction, above > least)
        inner = groupby(members, key=lambda member: member[0][level])
        parts = [self.group(tuple(inside), level + 1, part) for part, inside in inner]
        parts.sort(key=lambda part: (not part.fraction, not part.wants, -part.fraction, part.name))
        # The group's least reaches so far along the line of parts; one more extra would go to the next part in it.
        line = least - sum(part.least for part in parts)
        return _Group(name, workers, least, fraction, fraction > 0 and parts[line].wants, tuple(parts))

    def favoured(self, group: _Group, extras: int) -> list[str]:
        """The workers of this group that get its extras: each part's least, and one more for the first in line."""
        if not group.parts:
            return _leaf(group.workers, self.counts, self.floor, extras)
        line = extras - sum(part.least for part in group.parts)
        return [
            worker
            for place, part in enumerate(group.parts)
            for worker in self.favoured(part, part.least + (place < line))
        ]


def least_moves(owners: Mapping[str, str | None], workers: Iterable[str], groups: Groups = None) -> int:
    """The fewest leases that must leave living workers until all is even, groups of one level included.

    `owners` by lease; whatever belongs to none of the workers is free for the taking (L1).
    """
    held = Counter(owner for owner in owners.values() if owner is not None)
    counts = {worker: held[worker] for worker in workers}
    if not counts:
        return 0
    floor, extras = divmod(len(owners), len(counts))
    surplus = sum(max(count - floor, 0) for count in counts.values())
    members = Counter(path_of(worker, groups) for worker in counts)
    above = Counter(path_of(worker, groups) for worker, count in counts.items() if count > floor)
    kept = wanting = spare = 0
    for group, size in members.items():
        least, fraction = divmod(extras * size, len(counts))
        kept += min(least, above[group])
        spare += least
        wanting += fraction > 0 and above[group] > least
    return surplus - kept - min(extras - spare, wanting)
