"""The laws of writes: one holder at a time, counters and checkpoints that only grow, and what is held is read.

Law 1: only what has expired by its owner's own clock is claimed. Law 2: each change of owner adds one to the counter,
so that a former owner always notices. Law 3: no record is behind a checkpoint that a handler has not finished with,
or a dead letter taken. Law 4: a held lease is read, or its process lets it go, within UNREAD_SECONDS.

The laws of writes as their processes saw them, beside the hand-overs: what no two answers of one table can say.

A write took effect between the moments when it was sent and answered, so only a write that was sent after another's
answer is known to be the later one. Law 1: no two processes are told of one version of a lease that their write made
it. Law 2: its counter never falls. Law 3: who takes a lease, or checkpoints it, is told of no checkpoint before one
that was answered already. Law 4: a worker checkpoints nothing after another has taken the lease from it. Law 5: a
process hands over only for as long as the last write it sent keeps the lease. Law 6: only what has expired by its
owner's own clock is claimed. A lease that was deleted is judged no more: whoever makes it anew begins at its first
version. Nor are the checkpoints of one that was reset, as where its stream was made anew.

The owners of each lease over time, by its writes or by its readers.

The laws of a fleet at rest: everything has a living owner, nothing is written but renewals, and all is even.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any

from attrs import define, frozen

from leasehold.adapters.history.breach import Breach, BreachKind, Limits
from leasehold.adapters.history.events import (
    REFUSABLE,
    RecordPlace,
    RunHistory,
    WriteAnswer,
    WriteEvent,
    WriteVerb,
    worker_of,
)
from leasehold.adapters.history.records import TAKES, Life, PositionOrder, Tenure, alive_at, lives
from leasehold.balancer.rules.shares import least_moves

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


VERSIONLESS: frozenset[WriteVerb] = frozenset({"request", "withdraw", "annotate", "checkpoint-late", "delete"})
"""The writes that leave the version alone, at least in some layouts."""

MOVES: frozenset[WriteVerb] = frozenset({"checkpoint", "checkpoint-late", "give"})
"""The writes that move a checkpoint."""

KEEPS: frozenset[WriteVerb] = TAKES | {"renew", "checkpoint"}
"""The writes after which their writer holds the lease."""


def answer_breaches(history: RunHistory, limits: Limits) -> Iterator[Breach]:
    """The breaches of these laws."""
    by_shard: dict[str, list[WriteAnswer]] = defaultdict(list)
    all_lives = lives(history.incidents)
    for each in sorted(history.answers, key=lambda each: each.sent):
        by_shard[each.shard].append(each)
    for shard, written in by_shard.items():
        deleted = min((each.sent for each in written if each.verb == "delete"), default=math.inf)
        answers = [each for each in written if each.t < deleted]
        yield from _one_version(shard, answers)
        done = [each for each in answers if each.done]
        yield from _falls("counter", done, done, lambda each: each.epoch)
        reset = min((each.sent for each in written if each.verb == "reset"), default=math.inf)
        moved = [each for each in done if each.verb in MOVES and each.t < reset]
        placed = [each for each in done if each.verb in TAKES | MOVES - {"checkpoint-late"} and each.t < reset]
        yield from _falls("checkpoint went back", moved, placed, lambda each: each.checkpoint)
        if limits.owned_checkpoints:
            yield from _of_another(shard, answers)
        yield from _claimed_early(shard, done, all_lives, limits)
    if history.answers and limits.lease_seconds:
        yield from _answers_unheld(history, by_shard, limits)


def _one_version(shard: str, answers: Sequence[WriteAnswer]) -> Iterator[Breach]:
    made: dict[str, WriteAnswer] = {}
    for each in answers:
        if each.done and each.version and each.verb not in VERSIONLESS:
            other = made.setdefault(each.version, each)
            if other.process != each.process:
                told = f"{each.process} by a {each.verb} and {other.process} by a {other.verb}"
                yield Breach("two holders", each.t, f"{told} were both told that they made {shard} {each.version}")
                return


def _falls(
    what: BreachKind, before: Sequence[WriteAnswer], after: Sequence[WriteAnswer], value: Callable[[WriteAnswer], Any]
) -> Iterator[Breach]:
    """Walk along the answers that came before each of `after`, which are in the order of their sending, was sent."""
    waiting = sorted(before, key=lambda each: each.t, reverse=True)
    highest: WriteAnswer | None = None
    for each in after:
        while waiting and waiting[-1].t < each.sent:
            came = waiting.pop()
            highest = came if highest is None else max(highest, came, key=value)
        if highest is not None and value(each) < value(highest):
            fell = f"of {each.shard}: {value(highest)} was answered to {highest.process}"
            why = f"{fell}, and {value(each)} to the later {each.verb} of {each.process}"
            yield Breach(what, each.t, why)
            return


def _of_another(shard: str, answers: Sequence[WriteAnswer]) -> Iterator[Breach]:
    takes = [each for each in answers if each.verb in TAKES]
    for each in answers:
        if not each.done or each.verb not in {"checkpoint", "give"}:
            continue
        own = [take for take in takes if take.worker == each.worker and take.sent < each.t]
        # A taking without an answer may have taken effect at any time since.
        since = max((take.t if take.done else math.inf for take in own if take.outcome != "lost"), default=-math.inf)
        between = [
            take
            for take in takes
            if take.done and take.worker != each.worker and take.sent > since and take.t < each.sent
        ]
        if between:
            took = f"{between[0].process} had taken it {each.sent - between[0].t:.3f} s before"
            why = f"{each.process} wrote a {each.verb} of {shard}, and {took}"
            yield Breach("checkpoint of another", each.t, why)
            return


def _claimed_early(
    shard: str, done: Sequence[WriteAnswer], all_lives: Sequence[Life], limits: Limits
) -> Iterator[Breach]:
    """Judge claims alone: a thief knows that the lease is held. Who saw the owner's last write waits from then on."""
    for each in done:
        if each.verb != "claim" or each.seen in {None, each.worker}:
            continue
        kept = [of for of in done if of.worker == each.seen and of.verb in KEEPS and of.t < each.sent]
        last = kept[-1] if kept else None
        if last is None or not any(life.process == last.process and life.end > each.t for life in all_lives):
            continue
        until = last.sent + CLOCK_RATE * limits.lease_seconds.get(last.worker, 0.0)
        if each.sent < until:
            why = f"{each.process} claimed {shard}, which {last.process} held for {until - each.sent:.3f} s more"
            yield Breach("two holders", each.t, f"{why} by its {last.verb}")
            return


def _answers_unheld(
    history: RunHistory, by_shard: Mapping[str, Sequence[WriteAnswer]], limits: Limits
) -> Iterator[Breach]:
    kept: dict[tuple[str, str], list[float]] = defaultdict(list)
    for shard, answers in by_shard.items():
        for each in answers:
            if each.outcome != "lost" and each.verb in KEEPS:
                kept[each.process, shard].append(each.sent)
    naps = [(nap.subject, nap.t, nap.t + nap.seconds) for nap in history.incidents if nap.what == "nap"]
    told: set[tuple[str, str]] = set()
    for record in history.told("record"):
        place = record.process, record.shard
        times = kept[place]
        last = times[found - 1] if (found := bisect_right(times, record.t)) else -math.inf
        until = last + limits.lease_seconds.get(record.worker, math.inf) + limits.notice_seconds
        asleep = any(
            who in {record.process, record.worker} and begin <= record.t and end > until - limits.notice_seconds
            for who, begin, end in naps
        )
        if record.t > until and not asleep and place not in told:
            told.add(place)
            wrote = f"wrote {record.t - last:.3f} s before for the last time" if times else "never wrote"
            why = f"{record.process} handed over {record.place[0]} of {record.shard}, and {wrote} of the lease"
            yield Breach("handed over unheld", record.t, why)


OVER = "nobody is needed"
"""In the place of an owner: the lease has ended, or is deleted."""

OwnerSpans = list[tuple[float, str | None]]
"""The owners of one lease, each with the time as of which it has it; None: nobody."""


@frozen
class OwnerChange:
    """A lease passed from one owner (None: nobody) to another."""

    t: float
    key: str
    before: str | None
    after: str | None
    verb: str


def changes(writes: Iterable[WriteEvent]) -> Iterator[OwnerChange]:
    """Every change of owner, in order of time; the end or removal of a lease is none."""
    for write in writes:
        before = write.before.owner if write.before else None
        after = write.after.owner if write.after and write.verb != "delete" else None
        ended = write.after is not None and write.after.ended
        if write.done and before != after and not ended and write.verb != "delete":
            yield OwnerChange(write.t, write.key, before, after, write.verb)


def settled(passed: Iterable[OwnerChange]) -> tuple[OwnerChange, ...]:
    """Leave out gifts that were taken back: only the giver ever read the lease (H3)."""
    kept: dict[str, list[OwnerChange]] = {}
    for change in passed:
        of_one = kept.setdefault(change.key, [])
        if change.verb == "take-back" and of_one and of_one[-1].verb == "give":
            of_one.pop()
        else:
            of_one.append(change)
    return tuple(sorted((change for of_one in kept.values() for change in of_one), key=lambda change: change.t))


def written_spans(history: RunHistory) -> dict[str, OwnerSpans]:
    """The owners of each lease by its writes."""
    spans: dict[str, OwnerSpans] = {row.key: [(0.0, row.owner)] for row in history.first}
    for write in history.writes:
        if write.done:
            over = write.verb == "delete" or write.after is None or write.after.ended
            _change(spans.setdefault(write.key, []), write.t, OVER if over or not write.after else write.after.owner)
    return spans


def read_spans(tenures: Mapping[str, list[Tenure]], parents: Mapping[str, tuple[str, ...]]) -> dict[str, OwnerSpans]:
    """The readers of each shard that was read, or whose parents were read to their end."""
    return {shard: spans for shard in {*tenures, *parents} if (spans := _read(shard, tenures, parents))}


def _read(shard: str, tenures: Mapping[str, list[Tenure]], parents: Mapping[str, tuple[str, ...]]) -> OwnerSpans:
    readers = tenures.get(shard, [])
    last = [tenures[parent][-1] for parent in parents.get(shard, ()) if tenures.get(parent)]
    finished = last and len(last) == len(parents[shard]) and all(tenure.how == "shard-ended" for tenure in last)
    marks: OwnerSpans = [(max(tenure.end for tenure in last), None)] if finished else []
    for reader in readers:
        marks.append((reader.begin, reader.worker))
        if not any(other.begin < reader.end < other.end for other in readers):
            marks.append((reader.end, OVER if reader.how == "shard-ended" else None))
    spans: OwnerSpans = []
    for t, owner in sorted(marks, key=lambda mark: mark[0]):
        _change(spans, t, owner)
    return spans


def _change(spans: OwnerSpans, t: float, owner: str | None) -> None:
    if not spans or spans[-1][1] != owner:
        spans.append((t, owner))


def owners_at(history: RunHistory, t: float) -> dict[str, str | None]:
    """The owner of each unended lease at `t`."""
    found = {key: owner_at(spans, t) for key, spans in written_spans(history).items()}
    return {key: owner for key, owner in found.items() if owner != OVER}


def owner_at(spans: OwnerSpans, t: float) -> str | None:
    """The owner at `t`; OVER before the first and after the end."""
    return next((owner for since, owner in reversed(spans) if since <= t), OVER)


def unowned(history: RunHistory, end: float, since: float = 0.0) -> dict[str, float]:
    """By lease: the longest time in seconds, between these moments, in which it had no living owner."""
    return longest_unowned(written_spans(history), since, end, lives(history.incidents))


def longest_unowned(
    spans: Mapping[str, OwnerSpans], since: float, end: float, all_lives: Iterable[Life] | None = None
) -> dict[str, float]:
    """The longest time without a living owner by these spans; without any lives every owner counts as living."""
    by_worker: dict[str, list[Life]] = {}
    for life in all_lives or ():
        by_worker.setdefault(life.worker, []).append(life)
    living = None if all_lives is None else by_worker
    before = {key: [span for span in owned if span[0] <= end] for key, owned in spans.items()}
    return {key: _longest(owned, living, since, end) for key, owned in before.items() if owned}


def _longest(owned: OwnerSpans, living: Mapping[str, list[Life]] | None, begin: float, end: float) -> float:
    """The longest part of the time from `begin` to `end` in which no owner was alive."""
    stops = [t for t, _ in owned[1:]] + [end]
    held = sorted(
        (max(since, start), min(stop, over))
        for (since, owner), stop in zip(owned, stops, strict=True)
        for start, over in _times(owner, living)
    )
    longest, reached = 0.0, max(owned[0][0], begin)
    for start, stop in held:
        if stop > start:
            longest, reached = max(longest, start - reached), max(reached, stop)
    return max(longest, end - reached)


def _times(owner: str | None, living: Mapping[str, list[Life]] | None) -> list[tuple[float, float]]:
    """The times in which this owner was there to hold a lease."""
    if owner == OVER or (owner is not None and living is None):
        return [(-math.inf, math.inf)]
    return [(life.start, life.end) for life in (living or {}).get(owner or "", ())]


def refused(writes: Iterable[WriteEvent]) -> int:
    """Count the writes that another worker's write defeated; a repetition of one's own unanswered write is none."""
    return sum(
        not write.done and write.verb in REFUSABLE and (write.before is None or write.before.owner != write.worker)
        for write in writes
    )


QUIET_VERBS: frozenset[WriteVerb] = frozenset({"renew", "checkpoint", "checkpoint-late", "annotate", "take-back"})
"""The writes of a fleet at rest; the last two only end a planned move that has been counted."""


def planners(history: RunHistory, t: float) -> frozenset[str]:
    """The workers that run then and plan: without one nothing can be asked of a fleet."""
    zombies = {worker_of(each.subject) for each in history.incidents if each.what == "zombie"}
    return alive_at(lives(history.incidents), t) - zombies


def rest_breaches(history: RunHistory, limits: Limits, settled: float) -> Iterator[Breach]:
    """The breaches as of `settled`, if a worker that plans is alive then."""
    yield from _restless(history, settled)
    yield from _needless(history, limits)
    there = planners(history, settled)
    if not there:
        return
    for key, seconds in unowned(history, history.end, settled).items():
        if seconds > 0.0:
            why = f"{key} had no living owner for {seconds:.3f} s, when everybody had long been left in peace"
            yield Breach("held by nobody", history.end, why)
    if limits.even:
        yield from _uneven(history, there)


def _restless(history: RunHistory, settled: float) -> Iterator[Breach]:
    for write in history.writes:
        # The lease of an ended shard may be deleted whenever a worker lists the shards.
        cleared = write.verb == "delete" and write.before is not None and write.before.ended
        if write.t > settled and write.verb not in QUIET_VERBS and not cleared:
            lease = f"{write.key} ({write.before.owner if write.before else None})"
            why = f"{write.process} wrote a {write.verb} of {lease}, {'done' if write.done else 'refused'}"
            yield Breach("action at balance", write.t, why)


def _uneven(history: RunHistory, there: frozenset[str]) -> Iterator[Breach]:
    workers = alive_at(lives(history.incidents), history.end - 1e-9)
    held = Counter(owner for owner in owners_at(history, history.end).values() if owner is not None)
    most = max(workers, key=lambda worker: (held[worker], worker))
    least = min(there, key=lambda worker: (held[worker], worker))
    if held[most] - held[least] > 1:
        yield Breach("uneven", history.end, f"{most} holds {held[most]} leases, and {least} {held[least]}")


def _needless(history: RunHistory, limits: Limits) -> Iterator[Breach]:
    """Blame the last of the moves beyond the least: no single move can be called needless."""
    if limits.moves is None:
        return
    since, more = limits.moves
    all_lives = lives(history.incidents)
    workers = alive_at(all_lives, history.end - 1e-9)
    least = least_moves(owners_at(history, since), workers, limits.groups)
    moved = [
        change
        for change in changes(history.writes)
        if change.t >= since and change.before in alive_at(all_lives, change.t)
    ]
    for place, change in enumerate(moved[least + more :], least + more + 1):
        why = f"{change.key} from {change.before} to {change.after} is move {place}, and {least} would have done"
        yield Breach("needless move", change.t, why)
