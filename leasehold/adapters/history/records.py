"""The laws of records: every one is handed over, in order, to one reader by token, and again only where that is due.

Law 1: what the stream took is handed over, and nothing else. Law 2: within a key, and from a parent to its child, no
record is handed over before an earlier one has been once. Law 3: within one tenure a record comes again only if no
handler had finished with it; a later tenure begins behind the checkpoint that it took the shard with. Law 4: of one
shard, a token is given to one process alone, so that whoever compares tokens hears one reader at a time. A finished
lease whose row was deleted, and made anew by a request that arrived late, begins at its first token again.

The times in which each process read each shard, and the records that it handed over meanwhile.

The life of each process: when it started, was told to go, and ended.

How often a shard left a living reader, against the least that any balanced division would have needed.

A history is cut at each incident. What is read at the end of a part, and by whom at its start, says how few moves
would have done: shards that are new, or whose reader died, go where they are wanted for nothing.

The cost of each change of a shard's reader: records handed over again.
"""

import math
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from attrs import Factory, define, evolve, frozen

from leasehold.adapters.history.breach import Breach, Limits
from leasehold.adapters.history.events import (
    Incident,
    ReadingEvent,
    RecordPlace,
    RunHistory,
    Sent,
    WriteVerb,
    worker_of,
)
from leasehold.balancer.rules.shares import least_moves

ENDINGS = frozenset({"lease-lost", "shard-ended", "stopped"})


@define
class Tenure:
    """The reading of a shard by one process, from `initialize` to its end.

    end      infinity while it goes on
    how      the event that ended it, "cut" where the process died or began anew without one, "" while it goes on
    records  in the order in which they were handed over
    finished the places of the records that a handler has finished with, where that was told
    again    the records that were handed over although a handler had finished with them
    """

    process: str
    shard: str
    begin: float
    end: float = math.inf
    how: str = ""
    records: list[ReadingEvent] = Factory(list)
    finished: set[RecordPlace] = Factory(set)
    again: list[ReadingEvent] = Factory(list)

    @property
    def worker(self) -> str:
        """The worker whose process it is."""
        return worker_of(self.process)


@define
class TenureHistory:
    """Tenures folded from events; those of one process must come in its own order.

    tenures  in the order they began
    outside  records that a process handed over while it did not read their shard
    """

    tenures: list[Tenure] = Factory(list)
    outside: list[ReadingEvent] = Factory(list)
    _open: dict[tuple[str, str], Tenure] = Factory(dict)

    def add(self, event: ReadingEvent) -> None:
        """Take in one event."""
        place = (event.process, event.shard)
        tenure = self._open.get(place)
        if event.event == "initialize":
            self._close(tenure, event.t, "cut")
            self._open[place] = Tenure(event.process, event.shard, event.t)
            self.tenures.append(self._open[place])
        elif event.event == "record":
            (self.outside if tenure is None else tenure.records).append(event)
            if tenure is not None and event.place in tenure.finished:
                tenure.again.append(event)
        elif event.event in {"finished", "buried"} and tenure is not None:
            tenure.finished.add(event.place)
        elif event.event in ENDINGS:
            self._close(tenure, event.t, event.event)

    def died(self, process: str, t: float) -> None:
        """A process died then: what it had begun to read it reads no more."""
        for tenure in [each for each in self._open.values() if each.process == process and each.begin <= t]:
            self._close(tenure, t, "cut")

    def owner(self, shard: str) -> str | None:
        """The worker that reads this shard now, as far as events tell."""
        return next((tenure.worker for tenure in self._open.values() if tenure.shard == shard), None)

    def _close(self, tenure: Tenure | None, t: float, how: str) -> None:
        if tenure is not None:
            tenure.end, tenure.how = t, how
            del self._open[tenure.process, tenure.shard]


def reading_of(history: RunHistory) -> TenureHistory:
    """The tenures of a whole history; a process that crashed reads no more from then on."""
    reading = TenureHistory()
    for event in history.events:
        reading.add(event)
    for incident in history.incidents:
        if incident.what == "crash":
            reading.died(incident.subject, incident.t)
    return reading


def by_shard(tenures: Iterable[Tenure]) -> Mapping[str, list[Tenure]]:
    """Each shard's tenures, in the order they began."""
    found: dict[str, list[Tenure]] = defaultdict(list)
    for tenure in sorted(tenures, key=lambda tenure: tenure.begin):
        found[tenure.shard].append(tenure)
    return found


@frozen
class Life:
    """A process of a worker, from its start to its end; `leaves` is when it was told to go."""

    worker: str
    process: str
    start: float
    leaves: float = math.inf
    end: float = math.inf


def lives(incidents: Iterable[Incident]) -> tuple[Life, ...]:
    """Every process, in order of start; of two of one name the later begins when the earlier is over."""
    found: list[Life] = []
    latest: dict[str, int] = {}
    for incident in sorted(incidents, key=lambda incident: incident.t):
        match incident.what:
            case "start":
                latest[incident.subject] = len(found)
                found.append(Life(worker_of(incident.subject), incident.subject, incident.t))
            case "leave" | "crash" | "gone" if incident.subject in latest:
                life = found[latest[incident.subject]]
                end = life.end if incident.what == "leave" else incident.t
                found[latest[incident.subject]] = evolve(life, leaves=min(life.leaves, incident.t), end=end)
            case _:
                pass
    return tuple(found)


def alive_at(all_lives: Iterable[Life], t: float) -> frozenset[str]:
    """The workers that run then and have not been told to go."""
    return frozenset(life.worker for life in all_lives if life.start <= t < life.leaves)


def moves(history: RunHistory, tenures: Mapping[str, list[Tenure]]) -> tuple[int, int]:
    """Moves made, and the least possible, up to the incident called end."""
    done = least = 0
    all_lives = lives(history.incidents)
    for incident, following in pairwise(sorted(history.incidents, key=lambda incident: incident.t)):
        if incident.what == "end":
            break
        living = alive_at(all_lives, incident.t)
        done += sum(
            before.worker in living and before.worker != after.worker
            for readers in tenures.values()
            for before, after in pairwise(readers)
            if incident.t <= after.begin < following.t
        )
        there = [readers for readers in tenures.values() if _reader_at(readers, following.t) is not None]
        least += least_moves({each[0].shard: _reader_at(each, incident.t) for each in there}, living)
    return done, least


def _reader_at(readers: list[Tenure], t: float) -> str | None:
    return next((tenure.worker for tenure in reversed(readers) if tenure.begin < t <= tenure.end), None)


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


RecordId = tuple[str, str]
"""A record's key and digest."""


def lost(history: RunHistory) -> list[Sent]:
    """The records that were sent and never handed over."""
    got = {(event.key, event.digest) for event in history.events if event.event == "record"}
    return [each for each in history.sent if (each.key, each.digest) not in got]


def strangers(history: RunHistory) -> list[RecordId]:
    """The records that were handed over and never sent."""
    got = {(event.key, event.digest) for event in history.events if event.event == "record"}
    return sorted(got - {(each.key, each.digest) for each in history.sent})


def record_breaches(history: RunHistory, reading: TenureHistory, limits: Limits, *, all_due: bool) -> Iterator[Breach]:
    """The breaches of these laws; `all_due`: a worker was there to the end, so that all had to be handed over."""
    tenures = by_shard(reading.tenures)
    if all_due and (missing := lost(history)):
        first = f"the first is number {missing[0].number} of {missing[0].key}"
        yield Breach("lost", history.end, f"{len(missing)} records were never handed over, {first}")
    if unknown := strangers(history):
        why = f"{len(unknown)} records were handed over and never sent, one of them of {unknown[0][0]}"
        yield Breach("stranger", history.end, why)
    if reading.outside:
        first_out, count = reading.outside[0], len(reading.outside)
        why = f"{first_out.process} handed over {count} records while not reading, as of {first_out.shard}"
        yield Breach("handed over unheld", first_out.t, why)
    yield from _repeated(history, reading.tenures)
    yield from _again(history, tenures, limits)
    numbers = {(each.key, each.digest): each.number for each in history.sent}
    for tenure in reading.tenures:
        yield from _disordered(tenure, numbers)
    yield from _overtaken(history, numbers)
    yield from _before_the_parents(history, tenures)
    yield from _shared_tokens(history, tenures)


def _repeated(history: RunHistory, tenures: Iterable[Tenure]) -> Iterator[Breach]:
    """Where handlers do not say when they have finished, they count as having finished at once."""
    told = any(event.event == "finished" for event in history.events)
    for tenure in tenures:
        again = tenure.again if told else _seen_before(tenure.records)
        if again:
            why = f"{tenure.process} handed over {len(again)} records of {tenure.shard} twice without a change of owner"
            yield Breach("repeated", again[0].t, why)


def _seen_before(records: Iterable[ReadingEvent]) -> list[ReadingEvent]:
    seen: set[RecordPlace] = set()
    again: list[ReadingEvent] = []
    for record in records:
        if record.place in seen:
            again.append(record)
        seen.add(record.place)
    return again


def _again(history: RunHistory, tenures: Mapping[str, list[Tenure]], limits: Limits) -> Iterator[Breach]:
    for change in reader_changes(history, tenures):
        if change.replayed or (change.duplicates and not limits.duplicates):
            count = change.replayed if limits.duplicates else change.duplicates
            behind = "that were checkpointed when it took it" if change.replayed else f"after {change.before}"
            why = f"{change.after} handed over {count} records of {change.shard} again {behind}"
            yield Breach("handed over again", change.t, why)


def _disordered(tenure: Tenure, numbers: Mapping[RecordId, int]) -> Iterator[Breach]:
    reached: dict[str, int] = {}
    seen: set[RecordPlace] = set()
    for record in tenure.records:
        number = numbers.get((record.key, record.digest))
        if number is None or record.place in seen:
            continue  # a stranger, or repeated: named elsewhere
        seen.add(record.place)
        if number < reached.get(record.key, number):
            after = f"after number {reached[record.key]}, both of {tenure.shard}"
            why = f"{tenure.process} handed over number {number} of {record.key} {after}"
            yield Breach("out of order", record.t, why)
            return
        reached[record.key] = number


def _overtaken(history: RunHistory, numbers: Mapping[RecordId, int]) -> Iterator[Breach]:
    """Across all owners and shards, no record may come before an earlier one of its key has come once."""
    first: dict[tuple[str, int], float] = {}
    for record in history.told("record"):
        number = numbers.get((record.key, record.digest))
        if number is not None:
            first.setdefault((record.key, number), record.t)
    reached: dict[str, tuple[float, int]] = {}
    for (key, number), t in sorted(first.items()):
        latest, other = reached.get(key, (t, number))
        if t < latest:
            yield Breach("out of order", t, f"number {number} of {key} was handed over before number {other}")
            return
        reached[key] = (t, number)


def _before_the_parents(history: RunHistory, tenures: Mapping[str, list[Tenure]]) -> Iterator[Breach]:
    first: dict[str, ReadingEvent] = {}
    last_new: dict[str, ReadingEvent] = {}
    seen: set[tuple[str, RecordPlace]] = set()
    for record in history.told("record"):
        first.setdefault(record.shard, record)
        if (record.shard, record.place) not in seen:
            seen.add((record.shard, record.place))
            last_new[record.shard] = record
    for shard in tenures:
        for parent in history.parents.get(shard, ()):
            if shard in first and parent in last_new and last_new[parent].t > first[shard].t:
                early, late = first[shard], last_new[parent]
                why = f"{early.process} handed over {early.place[0]} of {shard} before {late.place[0]} of {parent}"
                yield Breach("out of order", early.t, f"{why}, its parent")


def _shared_tokens(history: RunHistory, tenures: Mapping[str, list[Tenure]]) -> Iterator[Breach]:
    deleted = [(write.before.shard, write.t) for write in history.writes if write.before and write.after is None]
    deleted += [(each.shard, each.sent) for each in history.answers if each.verb == "delete" and each.done]
    for shard, readers in tenures.items():
        ends = sorted(t for of, t in deleted if of == shard)
        given: dict[tuple[int, int], str] = {}
        for record in (record for tenure in readers for record in tenure.records if record.token is not None):
            other = given.setdefault((bisect(ends, record.t), record.token or 0), record.process)
            if other != record.process:
                yield Breach("token", record.t, f"{record.process} read {shard} under {record.token}, as {other} did")
                break


def behind_a_later_token(history: RunHistory) -> int:
    """Count records under a lower token than an earlier one of their shard; a handler that compares refuses them."""
    highest: Counter[str] = Counter()
    refused = 0
    for record in history.told("record"):
        if record.token is not None:
            refused += record.token < highest[record.shard]
            highest[record.shard] = max(highest[record.shard], record.token)
    return refused
