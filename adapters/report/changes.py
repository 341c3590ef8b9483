"""What changed from each snapshot of a lease table to the next: owners, workers, checkpoints; pure.

A lease table knows no clock. What snapshots can tell of lag is how long a checkpoint has stood
still, at least: since the first of the snapshots in a row that show it where it is now. A shard
into which nobody writes stands still as well.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from attrs import frozen

from balancer.model import Lease, Position


@frozen
class Snapshot:
    """The leases as they were at one time, in seconds since 1970; `malformed` rows could not be read."""

    at: float
    leases: tuple[Lease, ...]
    malformed: int = 0


@frozen
class Change:
    """What one snapshot shows that the one before it did not.

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
class Still:
    """An unfinished lease, and for how many seconds at least its checkpoint has stood still."""

    key: str
    owner: str | None
    seconds: float


@frozen
class Lag:
    """How long checkpoints had stood still at one snapshot: half of them at most `median` seconds."""

    at: float
    median: float
    most: float


def changes(snapshots: Sequence[Snapshot]) -> tuple[Change, ...]:
    """One for each two neighbours; snapshots are in the order of time."""
    return tuple(_change(before, after) for before, after in pairwise(snapshots))


def _change(before: Snapshot, after: Snapshot) -> Change:
    old, new = ({lease.key: lease for lease in each.leases} for each in (before, after))
    kept = [(old[key], lease) for key, lease in new.items() if key in old]
    owners = [(was.owner, now.owner) for was, now in kept if not now.ended]
    return Change(
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


def standstill(snapshots: Sequence[Snapshot]) -> tuple[Still, ...]:
    """The unfinished leases at the last snapshot, those that have stood still longest first."""
    *_, last = _stills(snapshots)
    return tuple(sorted(last, key=lambda still: (-still.seconds, still.key)))


def lags(snapshots: Sequence[Snapshot]) -> tuple[Lag, ...]:
    """One for each snapshot but the first, which cannot know."""
    followed = list(zip(snapshots, _stills(snapshots), strict=True))[1:]
    return tuple(
        Lag(snapshot.at, median(still.seconds for still in stills), max(still.seconds for still in stills))
        for snapshot, stills in followed
        if stills
    )


def _stills(snapshots: Sequence[Snapshot]) -> Iterator[list[Still]]:
    since: dict[str, tuple[Position, float]] = {}
    for snapshot in snapshots:
        since = {
            lease.key: _since(since.get(lease.key), lease.checkpoint, snapshot.at)
            for lease in snapshot.leases
            if not lease.ended
        }
        yield [
            Still(lease.key, lease.owner, snapshot.at - since[lease.key][1])
            for lease in snapshot.leases
            if lease.key in since
        ]


def _since(before: tuple[Position, float] | None, checkpoint: Position, at: float) -> tuple[Position, float]:
    return before if before is not None and before[0] == checkpoint else (checkpoint, at)
