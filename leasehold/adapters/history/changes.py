"""The cost of each change of a shard's reader: records handed over again."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

from attrs import frozen

from leasehold.adapters.history.events import RecordPlace, RunHistory, WriteVerb
from leasehold.adapters.history.tenures import Tenure

TAKES: frozenset[WriteVerb] = frozenset({"claim", "steal", "take-back"})
"""The writes in whose reply a process finds the checkpoint that it starts from."""

PositionOrder = tuple[int, int, int]


@frozen
class ReaderChange:
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


def reader_changes(history: RunHistory, tenures: Mapping[str, list[Tenure]]) -> tuple[ReaderChange, ...]:
    """Every change of reader, in order of time."""
    starts = _Starts(history)
    found = [change for readers in tenures.values() for change in _of_shard(readers, starts)]
    return tuple(sorted(found, key=lambda change: (change.t, change.shard)))


class _Starts:
    """Where a reader had to start: at the checkpoint in its claim's reply, else at the last one seen before.

    Of a row that was deleted and made anew only what was written since counts.
    """

    def __init__(self, history: RunHistory) -> None:
        self._taken: dict[tuple[str, str], list[tuple[float, PositionOrder]]] = defaultdict(list)
        self._seen: dict[str, list[tuple[float, PositionOrder]]] = defaultdict(list)
        self._made: dict[str, list[float]] = defaultdict(list)
        for write in history.writes:
            if write.done and write.after is not None and write.verb == "create":
                self._made[write.after.shard].append(write.t)
            if write.done and write.after is not None and write.verb in TAKES:
                self._taken[write.process, write.after.shard].append((write.t, write.after.checkpoint.order))
        for row in history.rows:
            self._seen[row.shard].append((row.t, row.checkpoint.order))

    def of(self, tenure: Tenure) -> PositionOrder:
        """The position that all records of this tenure must lie behind."""
        known = self._taken.get((tenure.process, tenure.shard)) or self._seen.get(tenure.shard, [])
        made = max((t for t in self._made.get(tenure.shard, ()) if t <= tenure.begin), default=0.0)
        return max((order for t, order in known if made <= t <= tenure.begin), default=(0, 0, 0))


def _of_shard(readers: list[Tenure], starts: _Starts) -> list[ReaderChange]:
    earlier: set[RecordPlace] = set()
    found = []
    for before, after in pairwise(readers):
        earlier.update(record.place for record in before.records)
        start = starts.of(after)
        again = earlier.intersection(record.place for record in after.records)
        found.append(
            ReaderChange(
                t=after.begin,
                shard=after.shard,
                before=before.process,
                after=after.process,
                how=before.how,
                duplicates=len(again),
                since=sum((1, *place) > start for place in earlier),
                replayed=sum((1, *place) <= start for place in again),
            )
        )
    return found
