"""The faults that explain why a record waited, or came again: whatever nothing explains is a breach.

A fault reaches as far as it lasted, and on for as long as a fleet may need to take a shard over: until its lease has
expired, and one look more. A fault of one worker explains what befell the shards that this worker read, or owned by
the table, at that time; a fault of nobody in particular explains everything.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import field, frozen

from leasehold.adapters.history.breach import Breach, Limits
from leasehold.adapters.history.events import IncidentKind, ReadingEvent, RecordPlace, RunHistory, worker_of
from leasehold.adapters.history.tenures import Tenure

FAULTS: frozenset[IncidentKind] = frozenset({"start", "crash", "leave", "nap", "split", "merge", "trouble"})
"""Events that may keep a shard from being read. A process that is gone was told to leave before."""


@frozen
class RecordWait:
    """How long a record waited, from when the stream acknowledged it to its first hand-over.

    faults       what was in reach meanwhile, for people
    unexplained  how many seconds of it lie outside the reach of all faults
    """

    shard: str
    since: float
    until: float
    faults: tuple[str, ...] = ()
    unexplained: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.until - self.since


@frozen
class _FaultReach:
    begin: float
    end: float
    subjects: frozenset[str]
    note: str

    def touches(self, since: float, until: float, subjects: frozenset[str]) -> bool:
        """Whether it may explain something of these subjects at that time."""
        return self.begin < until and self.end > since and (not self.subjects or bool(self.subjects & subjects))


@frozen
class Explanations:
    """The faults of a run, and whom each shard concerned when."""

    _history: RunHistory
    _tenures: Mapping[str, list[Tenure]]
    _limits: Limits
    _reaches: Sequence[_FaultReach] = field(init=False)
    _owners: Mapping[str, list[tuple[float, str]]] = field(init=False)

    @_reaches.default
    def _all_reaches(self) -> Sequence[_FaultReach]:
        return [
            _FaultReach(
                each.t,
                each.t + (each.seconds if each.what == "trouble" else 0.0) + self._limits.reach_seconds,
                frozenset(worker_of(word) for word in each.subject.split()),
                each.note or f"{each.what} {each.subject}".strip(),
            )
            for each in self._history.incidents
            if each.what in FAULTS
        ]

    @_owners.default
    def _observed(self) -> Mapping[str, list[tuple[float, str]]]:
        owners: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for row in sorted(self._history.rows, key=lambda row: row.t):
            if row.owner is not None:
                owners[row.shard].append((row.t, row.owner))
        return owners

    def waits(self) -> Iterator[RecordWait]:
        """The records whose times are known, each with the wait for its first hand-over."""
        first: dict[tuple[str, str], ReadingEvent] = {}
        for event in self._history.told("record"):
            first.setdefault((event.key, event.digest), event)
        for each in self._history.sent:
            got = first.get((each.key, each.digest))
            if each.t is not None and got is not None:
                yield RecordWait(got.shard, each.t, max(each.t, got.t))

    def longest(self) -> RecordWait | None:
        """The longest wait of all, explained; None where no times are known."""
        found = max(self.waits(), key=lambda wait: wait.seconds, default=None)
        return None if found is None else self.explained(found)

    def explained(self, wait: RecordWait) -> RecordWait:
        """The same with what explains it."""
        concerned = self._concerned(wait.shard, wait.since, wait.until)
        near = [each for each in self._reaches if each.touches(wait.since, wait.until, concerned)]
        left = wait.seconds - _covered(near, wait.since, wait.until)
        return RecordWait(wait.shard, wait.since, wait.until, tuple(each.note for each in near), left)

    def breaches(self) -> Iterator[Breach]:
        """Of each shard the wait of which most is unexplained; and every repetition that no fault explains."""
        if self._limits.wait_seconds == math.inf:
            return
        worst: dict[str, RecordWait] = {}
        for wait in self.waits():
            if wait.seconds > self._limits.wait_seconds:
                told = self.explained(wait)
                worst[wait.shard] = max(worst.get(wait.shard, told), told, key=lambda each: each.unexplained)
        for wait in worst.values():
            if wait.unexplained > self._limits.wait_seconds:
                why = f"a record of {wait.shard} waited for {wait.seconds:.1f} s from {wait.since:.3f}"
                within = f"of which {wait.unexplained:.1f} s lie outside {', '.join(wait.faults) or 'all faults'}"
                yield Breach("unread", wait.until, f"{why}, {within}")
        yield from self._repeated()

    def _repeated(self) -> Iterator[Breach]:
        """Repetitions across processes: one within a process that did not let go is found by the laws of records."""
        last: dict[tuple[str, RecordPlace], ReadingEvent] = {}
        told: set[tuple[str, str]] = set()
        for record in self._history.told("record"):
            before = last.get((record.shard, record.place))
            last[record.shard, record.place] = record
            if before is None or before.process == record.process or (record.process, record.shard) in told:
                continue
            concerned = self._concerned(record.shard, before.t, record.t)
            if not any(each.touches(before.t, record.t, concerned) for each in self._reaches):
                told.add((record.process, record.shard))
                why = f"{record.process} handed over {record.place[0]} of {record.shard} after {before.process} had"
                yield Breach(
                    "handed over again", record.t, f"{why}, {record.t - before.t:.1f} s later; no fault explains it"
                )

    def _concerned(self, shard: str, since: float, until: float) -> frozenset[str]:
        """The shard and its parents, and who had to do with them from the last reader before on."""
        shards = {shard, *self._history.parents.get(shard, ())}
        found = set(shards)
        for each in shards:
            readers = self._tenures.get(each, ())
            found |= {tenure.worker for tenure in readers if tenure.begin <= until and tenure.end >= since}
            found |= {tenure.worker for tenure in _last([t for t in readers if t.end < since])}
            owners = self._owners.get(each, [])
            begin = max(0, bisect_left(owners, (since, "")) - 1)
            found |= {owner for t, owner in owners[begin:] if t <= until}
        return frozenset(found)


def _last(tenures: Sequence[Tenure]) -> Sequence[Tenure]:
    return sorted(tenures, key=lambda tenure: tenure.end)[-1:]


def _covered(reaches: Iterable[_FaultReach], since: float, until: float) -> float:
    """How many of these seconds lie within one reach or several."""
    covered, reached = 0.0, since
    for each in sorted(reaches, key=lambda each: each.begin):
        begin, end = max(each.begin, reached), min(each.end, until)
        if end > begin:
            covered, reached = covered + end - begin, end
    return covered
