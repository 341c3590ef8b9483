"""The laws of records: every one is handed over, in order, to one reader by token, and again only where that is due.

Law 1: what the stream took is handed over, and nothing else. Law 2: within a key, and from a parent to its child, no
record is handed over before an earlier one has been once. Law 3: within one tenure a record comes again only if no
handler had finished with it; a later tenure begins behind the checkpoint that it took the shard with. Law 4: of one
shard, a token is given to one process alone, so that whoever compares tokens hears one reader at a time. A finished
lease whose row was deleted, and made anew by a request that arrived late, begins at its first token again.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from leasehold.adapters.history.breach import Breach, Limits
from leasehold.adapters.history.changes import reader_changes
from leasehold.adapters.history.events import ReadingEvent, RecordPlace, RunHistory, Sent, WriteEvent
from leasehold.adapters.history.tenures import Tenure, TenureHistory, by_shard

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
    yield from _shared_tokens(tenures, history.writes)


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


def _shared_tokens(tenures: Mapping[str, list[Tenure]], writes: Iterable[WriteEvent]) -> Iterator[Breach]:
    deleted = [(write.before.shard, write.t) for write in writes if write.before and write.after is None]
    for shard, readers in tenures.items():
        ends = [t for of, t in deleted if of == shard]
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
