"""The changes from each snapshot of a lease table to the next: owners, workers, checkpoints; pure.

How far behind a lease is, its owner writes into the row. Where no row tells, snapshots can only tell how long a
checkpoint has stood still, at least: since the first of the snapshots in a row that show it where it is now. A shard
into which nobody writes stands still as well, so that this is not called lag.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from attrs import frozen

from leasehold.adapters.reading.status import lags_of
from leasehold.balancer.model import Lease, Position


@frozen
class Snapshot:
    """The leases as they were at one time, in seconds since 1970; `malformed` rows could not be read."""

    at: float
    leases: tuple[Lease, ...]
    malformed: int = 0


@frozen
class SnapshotChange:
    """The difference between a snapshot and the one before it.

    at          the later one's time, in seconds since 1970
    seconds     between the two
    moved       leases that went from one owner to another
    claimed     leases that had no owner, and have one
    freed       leases that had an owner, and have none, other than by ending
    ended       leases finished since
    created, deleted  leases
    joined, left      workers
    advanced    unfinished leases whose checkpoint moved
    """

    at: float
    seconds: float
    moved: int = 0
    claimed: int = 0
    freed: int = 0
    ended: int = 0
    created: int = 0
    deleted: int = 0
    joined: int = 0
    left: int = 0
    advanced: int = 0

    @property
    def owner_changes(self) -> int:
        """Leases that have another owner than before, or one at last, or none any more."""
        return self.moved + self.claimed + self.freed


@frozen
class StalledLease:
    """An unfinished lease, and for how many seconds at least its checkpoint has stood still."""

    key: str
    owner: str | None
    seconds: float


@frozen
class CheckpointLag:
    """How far behind leases were at one snapshot, or how long they had stood still: half at most `median` seconds."""

    at: float
    median: float
    most: float


def changes(snapshots: Sequence[Snapshot]) -> tuple[SnapshotChange, ...]:
    """The changes between neighbouring snapshots, which are in the order of time."""
    return tuple(_change(before, after) for before, after in pairwise(snapshots))


def _change(before: Snapshot, after: Snapshot) -> SnapshotChange:
    old, new = ({lease.key: lease for lease in each.leases} for each in (before, after))
    kept = [(old[key], lease) for key, lease in new.items() if key in old]
    owners = [(was.owner, now.owner) for was, now in kept if not now.ended]
    return SnapshotChange(
        at=after.at,
        seconds=after.at - before.at,
        moved=sum(None not in (was, now) and was != now for was, now in owners),
        claimed=sum(was is None and now is not None for was, now in owners),
        freed=sum(was is not None and now is None for was, now in owners),
        ended=sum(now.ended and not was.ended for was, now in kept),
        created=len(new.keys() - old.keys()),
        deleted=len(old.keys() - new.keys()),
        joined=len(_workers(after) - _workers(before)),
        left=len(_workers(before) - _workers(after)),
        advanced=sum(was.checkpoint != now.checkpoint and not now.ended for was, now in kept),
    )


def _workers(snapshot: Snapshot) -> set[str]:
    return {lease.owner for lease in snapshot.leases if lease.owner is not None and not lease.ended}


def standstill(snapshots: Sequence[Snapshot]) -> tuple[StalledLease, ...]:
    """The unfinished leases at the last snapshot, those that have stood still longest first."""
    *_, last = _stills(snapshots)
    return tuple(sorted(last, key=lambda still: (-still.seconds, still.key)))


def lags(snapshots: Sequence[Snapshot]) -> tuple[CheckpointLag, ...]:
    """How far behind the leases of each snapshot were, as the rows tell; nothing of one whose rows tell nothing."""
    told = ((snapshot.at, _told(snapshot)) for snapshot in snapshots)
    return tuple(CheckpointLag(at, median(seconds), max(seconds)) for at, seconds in told if seconds)


def _told(snapshot: Snapshot) -> list[float]:
    found = lags_of(snapshot.leases, snapshot.at, math.inf).values()
    return [lag.seconds for lag in found if lag.seconds is not None]


def standstills(snapshots: Sequence[Snapshot]) -> tuple[CheckpointLag, ...]:
    """How long checkpoints had stood still at each snapshot but the first, which has none before it."""
    followed = list(zip(snapshots, _stills(snapshots), strict=True))[1:]
    return tuple(
        CheckpointLag(snapshot.at, median(still.seconds for still in stills), max(still.seconds for still in stills))
        for snapshot, stills in followed
        if stills
    )


def _stills(snapshots: Sequence[Snapshot]) -> Iterator[list[StalledLease]]:
    since: dict[str, tuple[Position, float]] = {}
    for snapshot in snapshots:
        since = {
            lease.key: _since(since.get(lease.key), lease.checkpoint, snapshot.at)
            for lease in snapshot.leases
            if not lease.ended
        }
        yield [
            StalledLease(lease.key, lease.owner, snapshot.at - since[lease.key][1])
            for lease in snapshot.leases
            if lease.key in since
        ]


def _since(before: tuple[Position, float] | None, checkpoint: Position, at: float) -> tuple[Position, float]:
    return before if before is not None and before[0] == checkpoint else (checkpoint, at)
