"""Computes how the leases of one reading are distributed among workers and groups, and their progress.

Rule 1: Leases are first counted by owner and progress, and everything else is computed from these counts. So a cluster
and a single process get the same figures.
Rule 2: Finished leases are no work, and count for no owner.
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
"""The progress of a lease whose checkpoint is a sequence number. The progress of any other lease is its sentinel."""


@frozen
class Tally:
    """The number of leases with the same owner and progress.

    Attributes:
        owner: The owner; None for leases without one.
        progress: NUMBER, or the sentinel of the checkpoint.
        leases: The number of leases.
        weight: The total throughput in KB/s of the leases whose throughput was measured.
        weighed: The number of leases whose throughput was measured.
    """

    owner: str | None
    progress: str
    leases: int
    weight: float = 0.0
    weighed: int = 0


@frozen
class Share:
    """The unfinished leases of a worker. `weight` is their throughput in KB/s, or None if it was never measured."""

    worker: str
    leases: int
    weight: float | None


@frozen
class Spread:
    """The spread of some counts of leases. All values are 0 if there are no counts."""

    least: int = 0
    most: int = 0
    mean: float = 0.0
    deviation: float = 0.0

    @property
    def width(self) -> int:
        """The difference between the most and the least."""
        return self.most - self.least


@frozen
class GroupShare:
    """The unfinished leases of a group's workers. `spread` is that among its workers."""

    path: tuple[str, ...]
    leases: int
    workers: int
    spread: Spread
    weight: float | None


@frozen
class Distribution:
    """The distribution of the leases of one reading.

    Attributes:
        leases: The number of all leases.
        ended: The number of finished leases, which count in none of the following but `progress`.
        unowned: The number of leases without an owner.
        workers: The share of each owner, sorted by name.
        spread: The spread among the workers.
        levels: The share of each group, sorted by name, for each level of groups; the outermost level comes first.
        progress: The number of leases by progress, including SHARD_END, the most frequent first.
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
        """The number of unfinished leases."""
        return self.leases - self.ended


def tallies(leases: Iterable[Lease]) -> tuple[Tally, ...]:
    """Count leases by owner and progress (rule 1)."""

    def place(lease: Lease) -> tuple[str | None, str]:
        sequence = lease.checkpoint.sequence
        return lease.owner, sequence if sequence in SENTINELS else NUMBER

    by_place = _gathered(leases, place)
    counted = []
    for (owner, progress), rows in by_place.items():
        weights = [kilobytes(lease.weight) for lease in rows if lease.weight is not None]
        counted.append(Tally(owner, progress, len(rows), math.fsum(weights), len(weights)))
    return tuple(counted)


def distribution(counted: Iterable[Tally], groups: Groups = "prefix") -> Distribution:
    """Return the distribution of counted leases.

    Args:
        counted: The leases, counted by owner and progress.
        groups: How to derive a worker's groups from its name.
    """
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
    by_path = _gathered(shares, lambda share: path_of(share.worker, groups)[:depth])
    return tuple(
        GroupShare(
            path,
            sum(share.leases for share in members),
            len(members),
            _spread(members),
            _weight([share.weight for share in members if share.weight is not None]),
        )
        for path, members in sorted(by_path.items())
    )


def _spread(shares: Sequence[Share]) -> Spread:
    counts = [share.leases for share in shares]
    return Spread(min(counts), max(counts), fmean(counts), pstdev(counts)) if counts else Spread()


def _weight(weights: Sequence[float]) -> float | None:
    return math.fsum(weights) if weights else None


def _leases(counted: Iterable[Tally]) -> int:
    return sum(tally.leases for tally in counted)


def _gathered(values: Iterable[V], name: Callable[[V], N]) -> dict[N, list[V]]:
    gathered: dict[N, list[V]] = {}
    for value in values:
        gathered.setdefault(name(value), []).append(value)
    return gathered
