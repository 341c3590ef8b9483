"""Everybody's share of one reading, and the line in which leases wait for those that lack some (M1, M2, M4, M6, M7).

A share is the floor of the mean, or one more for the workers that `favoured` names, within `max_leases`. What a
worker holds is counted with the moves under way made (H1), so that no share changes while the fleet carries moves out.

The line: free leases stand in front, in an order that a digest gives them; behind them stands the surplus of each
donor, donors by name, and each donor's own leases again by digest (M4). The workers that lack something stand along
the line by name, each before as many leases as it lacks. All that read alike see the same line and the same places, so
that no two of them choose one lease. Workers that write no bulletin, KCL 2.x among them, have the last places, for they
come in their own time: nobody should wait behind them (M15).

Example: a holds s-1 to s-5, b holds s-6 to s-8, c and d hold one each, and s-11 is free. Eleven leases on four workers
make a floor of 2 and three extras. They go to a and b, which hold more than the floor already, and to c or d by digest,
say to c: the shares are 3, 3, 3 and 2. The line is s-11, then a's surplus of two, say s-2 and s-4. c lacks two and
takes s-11 and s-2; d lacks one and takes s-4.

Shares are even if workers and their groups differ least (M2). Every worker's share is the floor of the mean or one
more, and every group's total is the floor of its share or one more, at every level of the tree (S8). Among all such
shares these ask for the fewest moves, and they do not change while the moves they ask for are under way (S4).

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

A newcomer waits for others who join now, before it takes leases from the living (C10).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from heapq import nsmallest
from itertools import groupby
from typing import Any, Literal

from attrs import frozen

from leasehold.balancer.census import Census, signers
from leasehold.balancer.chance import digest_under, order_under
from leasehold.balancer.handoff import live_moves
from leasehold.balancer.model import History, Lease, Me
from leasehold.balancer.rule_set import FleetSeconds
from leasehold.balancer.rules.loads import BAND, average, loads_of, weight_of

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


def least_moves(owners: Mapping[Any, str | None], workers: Iterable[str], groups: Groups = None) -> int:
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


def uneven(counts: Mapping[str, int], takers: Iterable[str], leases: int, groups: Groups = None) -> str:
    """The reason why a division is not even (S8), or "" if it is: a judge's words, for no rule asks this.

    counts  leases by worker; takers: those of them that could take one more, without whom nothing can be asked
    leases  all of them, those that belong to nobody included
    """
    least = min(takers, key=lambda worker: (counts[worker], worker), default=None)
    if least is None:
        return ""
    most = max(counts, key=lambda worker: (counts[worker], worker))
    if counts[most] - counts[least] > 1:
        return f"{most} holds {counts[most]} leases, and {least} {counts[least]}"
    # A worker counts for the groups of every level that it belongs to.
    held: dict[tuple[str, ...], list[int]] = {}
    for worker, count in counts.items():
        path = path_of(worker, groups)
        for depth in range(1, len(path) + 1):
            held.setdefault(path[:depth], []).append(count)
    for group, of in held.items():
        if abs(sum(of) - leases * len(of) / len(counts)) >= 1:
            share = f"{sum(of)} of {leases} leases, with {len(of)} of {len(counts)} workers"
            return f"group {'/'.join(group)} holds {share}"
    return ""


donation_order = order_under("minimal")
"""M4: the order in which leases are given up, and free ones are claimed."""


@frozen
class Shares:
    """A reading of the table, with the share of each worker.

    census     who holds what
    counts     leases by worker, with the moves under way made (H1)
    floor      what everybody should hold at least
    extras     how many leases the floor leaves over
    limit      most leases of one worker (M7)
    tolerance  how far counts may differ for the sake of loads (M13)
    apart      whether workers that write no bulletin come last (M15)
    """

    census: Census
    config: FleetSeconds
    counts: Mapping[str, int]
    floor: int
    extras: int
    groups: Groups
    limit: int
    tolerance: int
    apart: bool

    @cached_property
    def lacking(self) -> dict[str, int]:
        """The number of leases that each worker lacks; below zero it is a surplus."""
        usual, more, chosen = min(self.floor, self.limit), min(self.floor + 1, self.limit), self._favoured
        return {worker: (more if worker in chosen else usual) - count for worker, count in self.counts.items()}

    def share(self, worker: str) -> int:
        """The number of leases that this worker should hold (M1, M2, M7)."""
        return min(self.floor + (worker in self._favoured), self.limit)

    @cached_property
    def _favoured(self) -> frozenset[str]:
        return favoured(self.counts, self.floor, self.extras, self.groups)

    @cached_property
    def non_bulletin_workers(self) -> frozenset[str]:
        """Workers that write no bulletin (KCL 2.x), where that matters."""
        others = frozenset(self.census.counts) - {self.census.worker} if self.apart else frozenset()
        return others - signers(self.census.leases) if others else others

    def place(self, worker: str) -> int:
        """The number of leases that the workers before this one still lack; workers without a bulletin come last."""
        strangers = self.non_bulletin_workers
        here = worker in strangers, worker
        return sum(lack for other, lack in self.lacking.items() if lack > 0 and (other in strangers, other) < here)

    def surplus(self, start: int, stop: int) -> tuple[Lease, ...]:
        """The surpluses of the donors, by name, fill the line; these places of it are wanted."""
        surplus = {worker: -lack for worker, lack in self.lacking.items() if lack < 0}
        start, place = max(start, 0), 0
        wanted = {}
        for donor in sorted(surplus):
            end = place + surplus[donor]
            if place < stop and end > start:
                wanted[donor] = slice(max(start - place, 0), min(stop, end) - place)
            place = end
        return self.donated(wanted)

    def donated(self, wanted: Mapping[str, slice]) -> tuple[Lease, ...]:
        """Each donor gives this part of its leases, in the order of M4; none that is on its way (H5)."""
        held: dict[str | None, list[Lease]] = {donor: [] for donor in sorted(wanted)}
        moving = live_moves(self.census, self.config)
        for lease in self.census.held_by(wanted):
            if lease.key not in moving:
                held[lease.owner].append(lease)
        return tuple(
            lease
            for donor, leases in held.items()
            for lease in nsmallest(wanted[donor or ""].stop, leases, key=donation_order)[wanted[donor or ""]]
        )

    @cached_property
    def _unknown(self) -> int:
        return average(self.census.leases)

    @cached_property
    def _loads(self) -> dict[str, int]:
        return loads_of(self.census, self.counts, live_moves(self.census, self.config), self._unknown)

    @cached_property
    def _everybodys(self) -> int:
        return sum(weight_of(lease, self._unknown) for lease in self.census.leases)

    def loaded(self, worker: str) -> bool:
        """M13: whether a worker has its load, or a tenth less, for measures wander; no where loads are unknown."""
        if not self.tolerance:
            return False
        return self._loads[worker] * len(self.counts) >= (1 - BAND) * self._everybodys

    def short(self, worker: str) -> bool:
        """Whether this worker, seen or led, takes from the living for its count's sake (M6, M14)."""
        here = self.census.counts.get(worker, 0) > 0 or worker in self.census.led
        return here and self.lacking[worker] > self.tolerance and not self.loaded(worker)


GATHER = 0.5
"""A newcomer waits for so many `lease_seconds` after each change of the fleet for the next change (C10)."""
MOST_SECONDS = 10.0
"""The most that a newcomer without bulletins waits: leases may be long because renewals are dear."""


def awaits_joiners(leases: Iterable[Lease], me: Me, config: FleetSeconds) -> bool:
    """C10: whether this worker, new here, waits for others who join now before it takes from the living.

    Shares computed without them would be taken, and taken away again. The wait ends a cycle after its first lease.
    """
    history = me.history
    # 0.8: whoever reads once a cycle waits a cycle for everybody else already.
    seldom = history.hearing is None and history.full_apart >= 0.8 * config.cycle_seconds
    # 0.8: four of the five seconds, for readings measure a little less than the whole wait.
    if seldom or history.fleet_still >= 0.8 * GATHER * _scale(history, config):
        return False
    here = max((lease.held for lease in leases if lease.owner == me.worker), default=0.0)
    return here < config.cycle_seconds


def until_gathered(history: History, config: FleetSeconds) -> float:
    """C10: a newcomer lists again soon after a listing that showed a change, else when the wait is over.

    Those who start together would otherwise see each other only when the waiting should be over, and wait once more.
    """
    scale = _scale(history, config)
    wait, stood = GATHER * scale, history.fleet_still - history.full_still
    if stood <= 0:
        # 0.1: a second, in which others that start now take their first lease and are seen.
        return 0.1 * scale
    return wait - stood if stood < wait else wait


def _scale(history: History, config: FleetSeconds) -> float:
    return config.lease_seconds if history.hearing is not None else min(config.lease_seconds, MOST_SECONDS)
