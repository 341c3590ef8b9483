"""Even shares: how many leases each worker should hold, so that workers and their groups differ least.

Every worker's share is the floor of the mean or one more, and every group's total is the floor of
its share or one more, at every level of the tree (S8). Among all such shares these ask for the
fewest moves, and they do not change while the moves they ask for are under way (S4).
"""

from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from itertools import groupby
from typing import Literal

from attrs import frozen

from balancer.chance import digest_under

Groups = Literal["prefix"] | tuple[str, ...] | None

_digest = digest_under("minimal")


def path_of(worker: str, groups: Groups) -> tuple[str, ...]:
    """The groups a worker belongs to, outermost first, as its id says.

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
    """Who holds more than the floor keeps it, then by digest; a digest only where there is a choice."""
    above = [worker for worker in workers if counts[worker] > floor]
    chosen = _first(above, extras)
    below = [] if len(above) >= extras else [worker for worker in workers if counts[worker] <= floor]
    return chosen + _first(below, extras - len(chosen))


def _first(workers: list[str], count: int) -> list[str]:
    if len(workers) <= count:
        return workers
    return nsmallest(count, workers, key=lambda worker: (_digest(worker), worker)) if count > 0 else []


@frozen
class _Group:
    """One node of the tree.

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
        # Savings are taken first, so the next part in line says whether one more extra saves a move.
        line = least - sum(part.least for part in parts)
        return _Group(name, workers, least, fraction, fraction > 0 and parts[line].wants, tuple(parts))

    def favoured(self, group: _Group, extras: int) -> list[str]:
        if not group.parts:
            return _leaf(group.workers, self.counts, self.floor, extras)
        line = extras - sum(part.least for part in group.parts)
        return [
            worker
            for place, part in enumerate(group.parts)
            for worker in self.favoured(part, part.least + (place < line))
        ]
