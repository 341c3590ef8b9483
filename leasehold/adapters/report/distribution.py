"""How the leases of one reading are shared out among workers and groups, and how far they are; pure.

Rule 1: leases are first counted by owner and progress, whoever does the counting, and everything
else is made of these counts; so a cluster and a single process cannot come to different figures.
Rule 2: finished leases are no work, and count for no owner.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import fmean, pstdev
from typing import TypeVar

from attrs import frozen

from leasehold.balancer.model import SENTINELS, SHARD_END, Lease
from leasehold.balancer.rules.shares import Groups, path_of
from leasehold.stores.fields import kilobytes

V = TypeVar("V")
N = TypeVar("N", bound=Hashable)

NUMBER = "NUMBER"
"""The progress of a lease whose checkpoint is a sequence number; that of any other is its sentinel."""


@frozen
class Tally:
    """How many leases have this owner and this progress.

    weight   their throughput in KB/s, as far as it was measured
    weighed  of how many it was measured
    """

    owner: str | None
    progress: str
    leases: int
    weight: float = 0.0
    weighed: int = 0


@frozen
class Share:
    """The part of the unfinished leases that a worker owns; `weight` is in KB/s, None if never measured."""

    worker: str
    leases: int
    weight: float | None


@frozen
class Spread:
    """How far apart some counts of leases are; all 0 of no counts."""

    least: int = 0
    most: int = 0
    mean: float = 0.0
    deviation: float = 0.0

    @property
    def width(self) -> int:
        """The most less the least."""
        return self.most - self.least


@frozen
class GroupShare:
    """The part of the unfinished leases that a group owns; `spread` is among its own workers."""

    path: tuple[str, ...]
    leases: int
    workers: int
    spread: Spread
    weight: float | None


@frozen
class Distribution:
    """How one reading's leases are shared out.

    leases    all of them
    ended     the finished ones; all further figures leave them out
    unowned   those nobody owns
    workers   each owner's share, by name
    spread    among the workers
    levels    each group's share, by name, outermost level of groups first
    progress  how many leases have which progress, the most first; SHARD_END among them
    """

    leases: int
    ended: int
    unowned: int
    workers: tuple[Share, ...]
    spread: Spread
    levels: tuple[tuple[GroupShare, ...], ...]
    progress: tuple[tuple[str, int], ...]

    @property
    def working(self) -> int:
        """The unfinished leases."""
        return self.leases - self.ended


def tallies(leases: Iterable[Lease]) -> tuple[Tally, ...]:
    """The leases counted by owner and progress (rule 1)."""

    def place(lease: Lease) -> tuple[str | None, str]:
        sequence = lease.checkpoint.sequence
        return lease.owner, sequence if sequence in SENTINELS else NUMBER

    found = _gathered(leases, place)
    counted = []
    for (owner, progress), rows in found.items():
        known = [kilobytes(lease.weight) for lease in rows if lease.weight is not None]
        counted.append(Tally(owner, progress, len(rows), math.fsum(known), len(known)))
    return tuple(counted)


def distribution(counted: Iterable[Tally], groups: Groups = "prefix") -> Distribution:
    """How leases counted so are shared out; `groups` says how a worker's name tells its groups."""
    everything = tuple(counted)
    working = [tally for tally in everything if tally.progress != SHARD_END.sequence]  # rule 2
    owned = _gathered((tally for tally in working if tally.owner is not None), lambda tally: str(tally.owner))
    shares = tuple(
        Share(owner, _leases(rows), _weight([row.weight for row in rows if row.weighed]))
        for owner, rows in sorted(owned.items())
    )
    counts = {name: _leases(rows) for name, rows in _gathered(everything, lambda tally: tally.progress).items()}
    return Distribution(
        leases=_leases(everything),
        ended=_leases(everything) - _leases(working),
        unowned=_leases(tally for tally in working if tally.owner is None),
        workers=shares,
        spread=_spread(shares),
        levels=tuple(_level(shares, groups, depth + 1) for depth in range(len(path_of("", groups)))),
        progress=tuple(sorted(counts.items(), key=lambda count: (-count[1], count[0]))),
    )


def _level(shares: Iterable[Share], groups: Groups, depth: int) -> tuple[GroupShare, ...]:
    found = _gathered(shares, lambda share: path_of(share.worker, groups)[:depth])
    return tuple(
        GroupShare(
            path,
            sum(share.leases for share in members),
            len(members),
            _spread(members),
            _weight([share.weight for share in members if share.weight is not None]),
        )
        for path, members in sorted(found.items())
    )


def _spread(shares: Sequence[Share]) -> Spread:
    counts = [share.leases for share in shares]
    return Spread(min(counts), max(counts), fmean(counts), pstdev(counts)) if counts else Spread()


def _weight(weights: Sequence[float]) -> float | None:
    return math.fsum(weights) if weights else None


def _leases(counted: Iterable[Tally]) -> int:
    return sum(tally.leases for tally in counted)


def _gathered(values: Iterable[V], name: Callable[[V], N]) -> dict[N, list[V]]:
    found: dict[N, list[V]] = {}
    for value in values:
        found.setdefault(name(value), []).append(value)
    return found
