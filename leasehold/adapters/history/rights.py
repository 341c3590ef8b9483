"""The laws of writes: one holder at a time, counters and checkpoints that only grow, and what is held is read.

Law 1: only what has expired by its owner's own clock is claimed. Law 2: each change of owner adds one to the counter,
so that a former owner always notices. Law 3: no record is behind a checkpoint that a handler has not finished with,
or a dead letter taken. Law 4: a held lease is read, or its process lets it go, within UNREAD_SECONDS.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import accumulate, groupby, pairwise

from attrs import define

from leasehold.adapters.history.breach import Breach, Limits
from leasehold.adapters.history.changes import PositionOrder
from leasehold.adapters.history.events import RecordPlace, RunHistory, WriteEvent, worker_of
from leasehold.adapters.history.lives import Life, lives

CLOCK_RATE = 0.999
"""How much slower a worker's clock may run than another's."""

UNREAD_SECONDS = 75.0
"""An outage of 15 s, the waits after faults, those for a parent's end, and the time-outs of 5, 10 and 20 s before an
answer that takes 25 s lie within it."""

SILENT_SECONDS = 30.0
"""A process that has written nothing of a lease for so long holds it no more: it has expired by its own clock."""


def write_breaches(history: RunHistory, limits: Limits) -> Iterator[Breach]:
    """The breaches of these laws, and hand-overs by processes that held the lease no longer."""
    last: dict[str, WriteEvent] = {}
    all_lives = lives(history.incidents)
    for write in history.writes:
        if not write.done or write.before is None or write.after is None or write.verb == "delete":
            continue
        yield from _two_holders(write, last.get(write.key), all_lives, limits)
        yield from _counter(write)
        if write.after.checkpoint.order < write.before.checkpoint.order:
            back = f"{write.before.checkpoint.sequence} became {write.after.checkpoint.sequence}"
            yield Breach("checkpoint went back", write.t, f"of {write.key}: {back}, written by {write.process}")
        if write.verb not in {"request", "withdraw", "annotate", "checkpoint-late"}:
            last[write.key] = write
    if history.writes and limits.lease_seconds:
        yield from _unheld(history, limits)
    yield from _unfinished(history)
    yield from _unread(history, all_lives)


def _two_holders(
    write: WriteEvent, last: WriteEvent | None, all_lives: tuple[Life, ...], limits: Limits
) -> Iterator[Breach]:
    """Judge claims and releases alone: a thief knows that the lease is held, and a gift is its owner's own act."""
    before = write.before.owner if write.before else None
    if (
        write.verb not in {"claim", "release"}
        or last is None
        or before in {None, write.worker}
        or last.worker != before
    ):
        return
    until = last.sent + CLOCK_RATE * limits.lease_seconds.get(before or "", 0.0)
    running = any(life.process == last.process and life.end > write.t for life in all_lives)
    if running and write.t < until:
        why = f"{write.process} claimed {write.key}, which {last.process} held until {until:.3f} by its {last.verb}"
        yield Breach("two holders", write.t, f"{why} of {last.sent:.3f}")


def _counter(write: WriteEvent) -> Iterator[Breach]:
    before, after = write.before, write.after
    if before is None or after is None or before.owner == after.owner or after.epoch == before.epoch + 1:
        return
    change = f"from {before.epoch} to {after.epoch}"
    yield Breach("counter", write.t, f"{write.key} passed to {after.owner} and its counter went {change}, not by one")


def _unheld(history: RunHistory, limits: Limits) -> Iterator[Breach]:
    """Walk along the writes, and say of each batch whether its process had a right to hand it over."""
    rights: dict[tuple[str, str], float] = {}
    owners = {row.key: row.owner for row in history.first}
    naps = [(nap.subject, nap.t, nap.t + nap.seconds) for nap in history.incidents if nap.what == "nap"]
    writes = iter(history.writes)
    write = next(writes, None)
    for (t, process, shard), records in groupby(
        history.told("record"), lambda each: (each.t, each.process, each.shard)
    ):
        while write is not None and write.t <= t:
            if write.done and write.after is not None:
                owners[write.key] = None if write.verb == "delete" else write.after.owner
                if write.after.owner == write.worker:
                    rights[write.process, write.key] = write.sent + limits.lease_seconds.get(write.worker, 0.0)
            write = next(writes, None)
        until = rights.get((process, shard), 0.0)
        asleep = any(who == process and begin <= t and end > t - limits.notice_seconds for who, begin, end in naps)
        if owners.get(shard) != worker_of(process) and t > until + limits.notice_seconds and not asleep:
            held = f"held until {until:.3f}" if until else "never held"
            why = f"{process} handed over {next(records).place[0]} of {shard}, which it {held}"
            yield Breach("handed over unheld", t, f"{why}; its owner is {owners.get(shard)}")


def _unfinished(history: RunHistory) -> Iterator[Breach]:
    finished: dict[str, dict[RecordPlace, float]] = defaultdict(dict)
    for event in history.told("finished", "buried"):
        finished[event.shard].setdefault(event.place, event.t)
    if not finished:
        return
    handed = {(event.shard, event.place) for event in history.events if event.event == "record"}
    places: dict[str, list[PositionOrder]] = defaultdict(list)
    for shard, place in sorted(handed):
        places[shard].append((1, *place))
    # By shard and place: when everything up to there had been finished with.
    done = {
        shard: list(accumulate((finished[shard].get(order[1:], math.inf) for order in orders), max))
        for shard, orders in places.items()
    }
    for write in history.writes:
        if write.done and write.before and write.after and write.verb != "delete":
            shard, order = write.after.shard, write.after.checkpoint.order
            passed = bisect_right(places[shard], order)
            if order > write.before.checkpoint.order and passed and done[shard][passed - 1] > write.t:
                late = next(place for place, t in zip(places[shard], done[shard], strict=True) if t > write.t)
                why = f"{write.process} checkpointed {write.after.checkpoint.sequence} of {write.key}"
                yield Breach("unfinished", write.t, f"{why}, and no handler has finished {late[1]}")


@define
class OwnershipSpan:
    """A lease in the hands of one process, from then to then; `written` is when the process last wrote it."""

    process: str
    key: str
    begin: float
    end: float
    written: float


def _unread(history: RunHistory, all_lives: tuple[Life, ...]) -> Iterator[Breach]:
    """Find leases that a process held and did not read for too long, where each reading was recorded."""
    if not any(event.event == "read" for event in history.events):
        return
    active: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in history.told("read", "record", "finished", "buried"):
        active[event.process, event.shard].append(event.t)
    naps = [(nap.subject, nap.t, nap.seconds) for nap in history.incidents if nap.what == "nap"]
    for tenure in _held(history, all_lives):
        inside = [t for t in active[tenure.process, tenure.key] if tenure.begin < t < tenure.end]
        for since, until in pairwise((tenure.begin, *inside, tenure.end)):
            asleep = sum(seconds for who, t, seconds in naps if who == tenure.process and since - seconds < t < until)
            if until - since - asleep > UNREAD_SECONDS:
                why = f"{tenure.process} held {tenure.key} from {since:.3f} and did not read it"
                yield Breach("held unread", until, why)


def _held(history: RunHistory, all_lives: tuple[Life, ...]) -> Iterator[OwnershipSpan]:
    ends = {life.process: life.end for life in all_lives}
    ended = {write.key: write.t for write in history.writes if write.done and write.after and write.after.ended}
    held: dict[str, OwnershipSpan] = {}
    for write in history.writes:
        if not write.done or write.after is None:
            continue
        before = held.get(write.key)
        gone = write.verb == "delete" or write.after.ended
        owner = None if gone else write.after.owner
        # A worker holds a lease from its own first write of it: a gift is not held until the heir has claimed it.
        if before is not None and (owner != worker_of(before.process) or _other(write, before)):
            yield _closed(held.pop(write.key), write.t, ends)
        if owner == write.worker and write.key not in held:
            parents = [ended.get(parent, history.end) for parent in history.parents.get(write.key, ())]
            held[write.key] = OwnershipSpan(write.process, write.key, max((write.t, *parents)), history.end, write.t)
        elif (now := held.get(write.key)) is not None and now.process == write.process:
            now.written = write.t
    for tenure in held.values():
        yield _closed(tenure, history.end, ends)


def _other(write: WriteEvent, before: OwnershipSpan) -> bool:
    return write.worker == worker_of(before.process) and write.process != before.process


def _closed(tenure: OwnershipSpan, t: float, ends: Mapping[str, float]) -> OwnershipSpan:
    tenure.end = max(tenure.begin, min(t, ends.get(tenure.process, t), tenure.written + SILENT_SECONDS))
    return tenure
