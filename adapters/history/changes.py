"""What each change of a shard's owner cost: records handed over again, and time in which nobody read."""

from collections.abc import Iterable, Mapping
from itertools import pairwise

from attrs import frozen

from adapters.history.tenures import Tenure
from adapters.history.told import Place, Seen


@frozen
class Change:
    """A shard passed from one reader to the next.

    duplicates     records of the next that earlier readers had handed over already
    since          what earlier readers had handed over since the checkpoint last seen before the change
    replayed       duplicates at or before that checkpoint: these nothing excuses
    """

    t: float
    shard: str
    before: str
    after: str
    how: str
    duplicates: int
    since: int
    replayed: int


@frozen
class Gap:
    """How long nobody read a shard, in seconds."""

    seconds: float
    shard: str
    t: float


def changes(tenures: Mapping[str, list[Tenure]], rows: Iterable[Seen]) -> tuple[Change, ...]:
    """Every change of reader, in order of time."""
    stored = _by_shard(rows)
    found = [change for shard, readers in tenures.items() for change in _of_shard(readers, stored.get(shard, []))]
    return tuple(sorted(found, key=lambda change: (change.t, change.shard)))


def _by_shard(rows: Iterable[Seen]) -> dict[str, list[Seen]]:
    found: dict[str, list[Seen]] = {}
    for row in rows:
        found.setdefault(row.shard, []).append(row)
    return found


def _of_shard(readers: list[Tenure], rows: list[Seen]) -> list[Change]:
    earlier: set[Place] = set()
    found = []
    for before, after in pairwise(readers):
        earlier.update(record.place for record in before.records)
        checkpoint = max((row.checkpoint.order for row in rows if row.t <= after.begin), default=(0, 0, 0))
        again = earlier.intersection(record.place for record in after.records)
        found.append(
            Change(
                t=after.begin,
                shard=after.shard,
                before=before.worker,
                after=after.worker,
                how=before.how,
                duplicates=len(again),
                since=sum((1, *place) > checkpoint for place in earlier),
                replayed=sum((1, *place) <= checkpoint for place in again),
            )
        )
    return found


def longest_gap(tenures: Mapping[str, list[Tenure]], parents: Mapping[str, tuple[str, ...]], end: float) -> Gap | None:
    """The longest time in which a shard that had been read (or whose parents had) was read by nobody."""
    gaps = [gap for shard in {*tenures, *parents} for gap in _gaps(shard, tenures, parents.get(shard, ()), end)]
    return max(gaps, key=lambda gap: (gap.seconds, gap.shard), default=None)


def _gaps(shard: str, tenures: Mapping[str, list[Tenure]], parents: tuple[str, ...], end: float) -> list[Gap]:
    readers = tenures.get(shard, [])
    left = _finished(parents, tenures)
    gaps = []
    for reader in readers:
        if left is not None and left < reader.begin < end:
            gaps.append(Gap((reader.begin - left) / 1000, shard, left))
        left = max(left or 0.0, reader.end)
    forgotten = left is not None and left < end and not (readers and readers[-1].how == "shard-ended")
    return [*gaps, Gap((end - left) / 1000, shard, left)] if forgotten and left is not None else gaps


def _finished(parents: tuple[str, ...], tenures: Mapping[str, list[Tenure]]) -> float | None:
    """When the last parent was read to its end; None if one was not, or there are none."""
    ends = [tenures[parent][-1] for parent in parents if tenures.get(parent)]
    done = bool(ends) and len(ends) == len(parents) and all(tenure.how == "shard-ended" for tenure in ends)
    return max(tenure.end for tenure in ends) if done else None
