"""The laws of records: every one is handed over, in order, to one reader by token, and again only where that is due.

Law 1: what the stream took is handed over, and nothing else. Law 2: within a key, and from a parent to its child, no
record is handed over before an earlier one has been once. Law 3: within one tenure a record comes again only if no
handler had finished with it; a later tenure begins behind the checkpoint that it took the shard with. Law 4: of one
shard, a token is given to one process alone, so that whoever compares tokens hears one reader at a time. A finished
lease whose row was deleted, and made anew by a request that arrived late, begins at its first token again.

The times in which each process read each shard, and the records that it handed over meanwhile.
"""

import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from attrs import Factory, define

from leasehold.adapters.history.breach import Breach
from leasehold.adapters.history.events import ReadingEvent, RecordPlace, RunHistory, worker_of
from leasehold.adapters.history.run import JudgedRun


def all_that_was_sent(run: JudgedRun) -> Iterator[Breach]:
    """Law 1; and a process hands over only shards that it has begun to read."""
    # Where nobody plans at the end, the last records may have had nobody to read them.
    due = run.limits.settled is None or run.planners
    if due and run.lost:
        first = f"the first is number {run.lost[0].number} of {run.lost[0].key}"
        yield Breach("lost", run.history.end, f"{len(run.lost)} records were never handed over, {first}")
    if run.strangers:
        why = f"{len(run.strangers)} records were handed over and never sent, one of them of {run.strangers[0][0]}"
        yield Breach("stranger", run.history.end, why)
    if outside := run.reading.outside:
        why = f"{outside[0].process} handed over {len(outside)} records while not reading, as of {outside[0].shard}"
        yield Breach("handed over unheld", outside[0].t, why)


def in_order_within_a_key(run: JudgedRun) -> Iterator[Breach]:
    """Law 2 of one key: within each tenure, then across all owners and shards."""
    for tenure in run.reading.tenures:
        reached: dict[str, int] = {}
        seen: set[RecordPlace] = set()
        for record in tenure.records:
            number = run.numbers.get((record.key, record.digest))
            if number is None or record.place in seen:
                continue  # a stranger, or repeated: named by another law
            seen.add(record.place)
            if number < reached.get(record.key, number):
                after = f"after number {reached[record.key]}, both of {tenure.shard}"
                why = f"{tenure.process} handed over number {number} of {record.key} {after}"
                yield Breach("out of order", record.t, why)
                break
            reached[record.key] = number
    first: dict[tuple[str, int], float] = {}
    for record in run.records:
        number = run.numbers.get((record.key, record.digest))
        if number is not None:
            first.setdefault((record.key, number), record.t)
    latest: dict[str, tuple[float, int]] = {}
    for (key, number), t in sorted(first.items()):
        before, other = latest.get(key, (t, number))
        if t < before:
            yield Breach("out of order", t, f"number {number} of {key} was handed over before number {other}")
            return
        latest[key] = (t, number)


def parents_before_children(run: JudgedRun) -> Iterator[Breach]:
    """Law 2 across a split or merge, where keys need not be known."""
    first: dict[str, ReadingEvent] = {}
    last_new: dict[str, ReadingEvent] = {}
    seen: set[tuple[str, RecordPlace]] = set()
    for record in run.records:
        first.setdefault(record.shard, record)
        # A parent's records may come again while its child is read; what comes for the first time may not.
        if (record.shard, record.place) not in seen:
            seen.add((record.shard, record.place))
            last_new[record.shard] = record
    for shard in run.tenures:
        for parent in run.history.parents.get(shard, ()):
            if shard in first and parent in last_new and last_new[parent].t > first[shard].t:
                early, late = first[shard], last_new[parent]
                why = f"{early.process} handed over {early.place[0]} of {shard} before {late.place[0]} of {parent}"
                yield Breach("out of order", early.t, f"{why}, its parent")


def again_only_where_due(run: JudgedRun) -> Iterator[Breach]:
    """Law 3: within a tenure, then from one tenure to the next."""
    # Where handlers do not say when they have finished, they count as having finished at once.
    told = any(event.event == "finished" for event in run.history.events)
    for tenure in run.reading.tenures:
        first = {record.place: record for record in reversed(tenure.records)}
        again = tenure.again if told else [each for each in tenure.records if first[each.place] is not each]
        if again:
            why = f"{tenure.process} handed over {len(again)} records of {tenure.shard} twice without a change of owner"
            yield Breach("repeated", again[0].t, why)
    for change in run.reader_changes:
        if change.replayed or (change.duplicates and not run.limits.duplicates):
            count = change.replayed if run.limits.duplicates else change.duplicates
            behind = "that were checkpointed when it took it" if change.replayed else f"after {change.before}"
            why = f"{change.after} handed over {count} records of {change.shard} again {behind}"
            yield Breach("handed over again", change.t, why)


def one_process_for_each_token(run: JudgedRun) -> Iterator[Breach]:
    """Law 4, apart for each row that the shard has had."""
    deleted = [(write.before.shard, write.t) for write in run.history.writes if write.before and write.after is None]
    deleted += [(each.shard, each.sent) for each in run.history.answers if each.verb == "delete" and each.done]
    for shard, readers in run.tenures.items():
        ends = sorted(t for of, t in deleted if of == shard)
        given: dict[tuple[int, int], str] = {}
        for record in (record for tenure in readers for record in tenure.records if record.token is not None):
            other = given.setdefault((bisect(ends, record.t), record.token or 0), record.process)
            if other != record.process:
                yield Breach("token", record.t, f"{record.process} read {shard} under {record.token}, as {other} did")
                break


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
