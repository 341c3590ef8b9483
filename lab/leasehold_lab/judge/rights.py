"""The laws of writes: one holder of a lease at a time, what is held is read, and a fleet at rest writes nothing more.

As the table took them. Law 1: only what has expired by its owner's own clock is claimed. Law 2: each change of owner
adds one to the counter, so that a former owner always notices, and no checkpoint goes back. Law 3: no record is behind
a checkpoint that a handler has not finished with, or a dead letter taken. Law 4: records are handed over by who holds
the lease, or has held it until a moment ago. Law 5: a held lease is read, or its process lets it go, within
UNREAD_SECONDS.

As their processes saw them, beside the hand-overs. A write took effect between the moments when it was sent and
answered, so only a write that was sent after another's answer is known to be the later one. Law 6: no two processes are
told of one version of a lease that their write made it. Law 7: its counter never falls. Law 8: a process that takes a
lease, or checkpoints it, is told of no checkpoint before one that was answered already. Law 9: a worker checkpoints
nothing after another has taken the lease from it. Law 10: a process hands over only for as long as the last write it
sent keeps the lease. Law 11: only what has expired by its owner's own clock is claimed. A lease that was deleted is not
judged any more, since its next row begins at its first version; nor are the checkpoints of one that was reset, as where
its stream was made anew. Law 12: once the end of a shard was checkpointed, no later reading hands over its records
again, even if the row was deleted since.

At rest (`at_rest`): everything has a living owner, nothing is written but renewals, and all is even. The owners of each
lease over time come from its writes (`written_spans`) or from its readers (`read_spans`).
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any

from attrs import define, evolve, frozen

from leasehold.balancer.model import SHARD_END
from leasehold.balancer.rules.shares import least_moves, uneven
from leasehold_lab.judge.breach import Breach, BreachKind
from leasehold_lab.judge.events import (
    REFUSABLE,
    RecordPlace,
    RunHistory,
    WriteAnswer,
    WriteEvent,
    WriteVerb,
    worker_of,
)
from leasehold_lab.judge.run import OPERATOR, TAKES, JudgedRun, Life, PositionOrder, alive_at, lives
from leasehold_lab.judge.tenures import Tenure

VERSIONLESS: frozenset[WriteVerb] = frozenset({"request", "withdraw", "annotate", "checkpoint-late", "delete"})
"""The writes that leave the version alone, at least in some layouts, and so restart nobody's clock."""

CLOCK_RATE = 0.999
"""How much slower a worker's clock may run than another's."""

UNREAD_SECONDS = 75.0
"""An outage of 15 s, the waits after faults, those for a parent's end, and the time-outs of 5, 10 and 20 s before an
answer that takes 25 s lie within it."""

SILENT_SECONDS = 30.0
"""A process that has written nothing of a lease for so long holds it no more: it has expired by its own clock.

Where the length of its leases is known, that counts instead.
"""


def one_holder_at_a_time(run: JudgedRun) -> Iterator[Breach]:
    """Laws 1 and 2, write by write."""
    last: dict[str, WriteEvent] = {}
    for write in run.history.writes:
        before, after = write.before, write.after
        if not write.done or before is None or after is None or write.verb == "delete":
            continue
        kept = last.get(write.key)
        # Claims and releases alone are judged: a thief knows that the lease is held, and a gift is its owner's own act.
        if (
            write.verb in {"claim", "release"}
            and kept is not None
            and before.owner == kept.worker
            and before.owner != write.worker
        ):
            until = kept.sent + CLOCK_RATE * run.limits.lease_seconds.get(kept.worker, 0.0)
            running = any(life.process == kept.process and life.end > write.t for life in run.lives)
            if running and write.t < until:
                held = f"which {kept.process} held until {until:.3f} by its {kept.verb} of {kept.sent:.3f}"
                yield Breach("two holders", write.t, f"{write.process} claimed {write.key}, {held}")
        if before.owner != after.owner and after.epoch != before.epoch + 1:
            change = f"its counter went from {before.epoch} to {after.epoch}, not by one"
            yield Breach("counter", write.t, f"{write.key} passed to {after.owner} and {change}")
        if after.checkpoint.order < before.checkpoint.order:
            back = f"{before.checkpoint.sequence} became {after.checkpoint.sequence}"
            yield Breach("checkpoint went back", write.t, f"of {write.key}: {back}, written by {write.process}")
        if write.verb not in VERSIONLESS:
            last[write.key] = write


def nothing_unfinished_is_checkpointed(run: JudgedRun) -> Iterator[Breach]:
    """Law 3, where handlers say when they have finished."""
    finished: dict[str, dict[RecordPlace, float]] = defaultdict(dict)
    for event in run.history.told("finished", "dead-lettered", "acknowledged"):
        finished[event.shard].setdefault(event.place, event.t)
    if not finished and not run.limits.acknowledged:
        return
    places: dict[str, list[PositionOrder]] = defaultdict(list)
    for shard, place in sorted({(event.shard, event.place) for event in run.records}):
        places[shard].append((1, *place))
    # By shard and place: when everything up to there had been finished with.
    done = {
        shard: list(accumulate((finished[shard].get(order[1:], math.inf) for order in orders), max))
        for shard, orders in places.items()
    }
    for write in run.history.writes:
        # What a new group skips at LATEST, because nobody could tell it of the deleted row, no handler finishes.
        known = write.after is not None and write.after.shard not in run.forgotten
        if known and write.done and write.before and write.after and write.verb != "delete":
            shard, order = write.after.shard, write.after.checkpoint.order
            passed = bisect_right(places[shard], order)
            if order > write.before.checkpoint.order and passed and done[shard][passed - 1] > write.t:
                late = next(place for place, t in zip(places[shard], done[shard], strict=True) if t > write.t)
                why = f"{write.process} checkpointed {write.after.checkpoint.sequence} of {write.key}"
                yield Breach("unfinished", write.t, f"{why}, and no handler has finished {late[1]}")


def only_holders_hand_over(run: JudgedRun) -> Iterator[Breach]:
    """Law 4: walk along the writes, and say of each batch whether its process had a right to hand it over."""
    history, limits = run.history, run.limits
    if not history.writes or not limits.lease_seconds:
        return
    rights: dict[tuple[str, str], float] = {}
    owners = {row.key: row.owner for row in history.first}
    writes = iter(history.writes)
    write = next(writes, None)
    for (t, process, shard), records in groupby(run.records, lambda each: (each.t, each.process, each.shard)):
        while write is not None and write.t <= t:
            if write.done and write.after is not None:
                owners[write.key] = None if write.verb == "delete" else write.after.owner
                if write.after.owner == write.worker:
                    rights[write.process, write.key] = write.sent + limits.lease_seconds.get(write.worker, 0.0)
            write = next(writes, None)
        until = rights.get((process, shard), 0.0)
        # Who sleeps cannot notice that its right is over; nor can it notice at once when it wakes.
        asleep = any(who == process and begin <= t and end > t - limits.notice_seconds for who, begin, end in run.naps)
        if owners.get(shard) != worker_of(process) and t > until + limits.notice_seconds and not asleep:
            held = f"held until {until:.3f}" if until else "never held"
            why = f"{process} handed over {next(records).place[0]} of {shard}, which it {held}"
            yield Breach("handed over unheld", t, f"{why}; its owner is {owners.get(shard)}")


def everything_held_is_read(run: JudgedRun) -> Iterator[Breach]:
    """Law 5, where each reading was recorded."""
    if not any(event.event == "read" for event in run.history.events):
        return
    active: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in run.history.told("read", "record", "finished", "dead-lettered"):
        active[event.process, event.shard].append(event.t)
    for span in ownership_spans(run):
        inside = [t for t in active[span.process, span.key] if span.begin < t < span.end]
        for since, until in pairwise((span.begin, *inside, span.end)):
            slept = (
                end - begin for who, begin, end in run.naps if who == span.process and begin < until and end > since
            )
            if until - since - sum(slept) > UNREAD_SECONDS:
                why = f"{span.process} held {span.key} from {since:.3f} and did not read it"
                yield Breach("held unread", until, why)


@define
class OwnershipSpan:
    """A lease in the hands of one process, from then to then; `written` is when the process last wrote it."""

    process: str
    key: str
    begin: float
    end: float
    written: float


def ownership_spans(run: JudgedRun) -> Iterator[OwnershipSpan]:
    """The times in which a process held a lease, by the writes; a child is held from the end of its parents on."""
    history = run.history
    ended = {write.key: write.t for write in history.writes if write.done and write.after and write.after.ended}
    open_spans: dict[str, OwnershipSpan] = {}
    over: list[OwnershipSpan] = []

    def silent(worker: str) -> float:
        return run.limits.lease_seconds.get(worker, SILENT_SECONDS)

    for write in history.writes:
        if not write.done or write.after is None:
            continue
        owner = None if write.verb == "delete" or write.after.ended else write.after.owner
        span = open_spans.get(write.key)
        if span is not None:
            worker = worker_of(span.process)
            # A process that was started again under the same id holds the lease for itself.
            if owner != worker or (write.worker == worker and write.process != span.process):
                span.end = write.t
                over.append(open_spans.pop(write.key))
        # A worker holds a lease from its own first write of it: a gift is not held until the heir has claimed it.
        if owner == write.worker and write.key not in open_spans:
            parents = [ended.get(parent, history.end) for parent in history.parents.get(write.key, ())]
            begin = max((write.t, *parents))
            open_spans[write.key] = OwnershipSpan(write.process, write.key, begin, history.end, write.t)
        elif (now := open_spans.get(write.key)) is not None and now.process == write.process:
            if write.t - now.written > silent(write.worker):
                # It let go when its lease expired, and took up the same lease later.
                over.append(evolve(now, end=write.t))
                now.begin = write.t
            now.written = write.t
    ends = {life.process: life.end for life in run.lives}
    for span in (*over, *open_spans.values()):
        # A process that died or fell silent held nothing any more, though nobody else had taken it yet.
        silence = silent(worker_of(span.process))
        last = min(span.end, ends.get(span.process, span.end), span.written + silence)
        span.end = max(span.begin, last)
        yield span


MOVES: frozenset[WriteVerb] = frozenset({"checkpoint", "checkpoint-late", "give"})
"""The writes that move a checkpoint."""

END = SHARD_END.order

KEEPS: frozenset[WriteVerb] = TAKES | {"renew", "checkpoint"}
"""The writes after which their writer holds the lease."""


def answers_agree(run: JudgedRun) -> Iterator[Breach]:
    """Laws 6 to 9 and 11, lease by lease; of each law and lease the first breach."""
    by_shard: dict[str, list[WriteAnswer]] = defaultdict(list)
    for each in sorted(run.history.answers, key=lambda each: each.sent):
        by_shard[each.shard].append(each)
    for shard, written in by_shard.items():
        deleted = min((each.sent for each in written if each.verb == "delete"), default=math.inf)
        answers = [each for each in written if each.t < deleted]
        done = [each for each in answers if each.done]
        made: dict[str, WriteAnswer] = {}
        for each in done:
            if each.version and each.verb not in VERSIONLESS:
                other = made.setdefault(each.version, each)
                if other.process != each.process:
                    told = f"{each.process} by a {each.verb} and {other.process} by a {other.verb}"
                    yield Breach("two holders", each.t, f"{told} were both told that they made {shard} {each.version}")
                    break
        yield from _falls("counter", done, done, lambda each: each.epoch)
        reset = min((each.sent for each in written if each.verb == "reset"), default=math.inf)
        moved = [each for each in done if each.verb in MOVES and each.t < reset]
        placed = [each for each in done if each.verb in TAKES | MOVES - {"checkpoint-late"} and each.t < reset]
        yield from _falls("checkpoint went back", moved, placed, lambda each: each.checkpoint)
        if run.limits.owned_checkpoints:
            yield from checkpoints_of_another(shard, answers)
        yield from claimed_early(run, shard, done)


def finished_stays_finished(run: JudgedRun) -> Iterator[Breach]:
    """Law 12, unless an operator deleted or reset the row, or a creation may have arrived late."""
    written: dict[str, list[WriteAnswer]] = defaultdict(list)
    for each in run.history.answers:
        written[each.shard].append(each)
    for shard, answers in written.items():
        ends = [each.t for each in answers if each.done and each.verb == "checkpoint" and each.checkpoint == END]
        void = [
            each.sent
            for each in answers
            if each.verb == "reset"
            or (each.verb == "delete" and each.process == OPERATOR)
            or (each.verb == "create" and each.outcome == "unknown")
        ]
        end = min((t for t in ends if t > run.history.anew), default=math.inf)
        readings = run.tenures.get(shard, ())
        handed = {(record.place, record.digest) for each in readings for record in each.records if record.t <= end}
        for later in (each for each in readings if end < each.begin < min(void, default=math.inf)):
            again = [record for record in later.records if (record.place, record.digest) in handed]
            if again:
                why = f"{later.process} handed over {len(again)} records of {shard} after its end was checkpointed"
                yield Breach("handed over again", again[0].t, why)
                break


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


def checkpoints_of_another(shard: str, answers: Sequence[WriteAnswer]) -> Iterator[Breach]:
    """Law 9: look for a taking by another between a worker's own last and its checkpoint."""
    takes = [each for each in answers if each.verb in TAKES]
    for each in answers:
        if not each.done or each.verb not in {"checkpoint", "give"}:
            continue
        own = [take for take in takes if take.worker == each.worker and take.sent < each.t]
        # A taking without an answer may have taken effect at any time since.
        since = max((take.t if take.done else math.inf for take in own if take.outcome != "lost"), default=-math.inf)
        others = (take for take in takes if take.done and take.worker != each.worker)
        taken = next((take for take in others if take.sent > since and take.t < each.sent), None)
        if taken is not None:
            took = f"{taken.process} had taken it {each.sent - taken.t:.3f} s before"
            why = f"{each.process} wrote a {each.verb} of {shard}, and {took}"
            yield Breach("checkpoint of another", each.t, why)
            return


def claimed_early(run: JudgedRun, shard: str, done: Sequence[WriteAnswer]) -> Iterator[Breach]:
    """Law 11, of claims alone: a thief knows that the lease is held."""
    for each in done:
        if each.verb != "claim" or each.seen in {None, each.worker}:
            continue
        # Who saw the owner's last write waits from then on.
        kept = [of for of in done if of.worker == each.seen and of.verb in KEEPS and of.t < each.sent]
        last = kept[-1] if kept else None
        if last is None or not any(life.process == last.process and life.end > each.t for life in run.lives):
            continue
        until = last.sent + CLOCK_RATE * run.limits.lease_seconds.get(last.worker, 0.0)
        if each.sent < until:
            why = f"{each.process} claimed {shard}, which {last.process} held for {until - each.sent:.3f} s more"
            yield Breach("two holders", each.t, f"{why} by its {last.verb}")
            return


def writers_hand_over(run: JudgedRun) -> Iterator[Breach]:
    """Law 10; of each process and lease the first breach."""
    history, limits = run.history, run.limits
    if not history.answers or not limits.lease_seconds:
        return
    kept: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in sorted(history.answers, key=lambda each: each.sent):
        if each.outcome != "lost" and each.verb in KEEPS:
            kept[each.process, each.shard].append(each.sent)
    told: set[tuple[str, str]] = set()
    for record in run.records:
        place = record.process, record.shard
        times = kept[place]
        last = times[found - 1] if (found := bisect_right(times, record.t)) else -math.inf
        right = last + limits.lease_seconds.get(record.worker, math.inf)
        asleep = any(
            who in {record.process, record.worker} and begin <= record.t and end > right for who, begin, end in run.naps
        )
        if record.t > right + limits.notice_seconds and not asleep and place not in told:
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
    found: dict[str, OwnerSpans] = {}
    for shard in {*tenures, *parents}:
        readers = tenures.get(shard, [])
        last = [tenures[parent][-1] for parent in parents.get(shard, ()) if tenures.get(parent)]
        finished = last and len(last) == len(parents[shard]) and all(tenure.how == "shard-ended" for tenure in last)
        marks: OwnerSpans = [(max(tenure.end for tenure in last), None)] if finished else []
        for reader in readers:
            marks.append((reader.begin, reader.worker))
            # An end within another's tenure leaves the shard to that one.
            if not any(other.begin < reader.end < other.end for other in readers):
                marks.append((reader.end, OVER if reader.how == "shard-ended" else None))
        for t, owner in sorted(marks, key=lambda mark: mark[0]):
            _change(found.setdefault(shard, []), t, owner)
    return found


def _change(spans: OwnerSpans, t: float, owner: str | None) -> None:
    if not spans or spans[-1][1] != owner:
        spans.append((t, owner))


def owners_at(history: RunHistory, t: float) -> dict[str, str | None]:
    """The owner of each unended lease at `t`."""
    spans = written_spans(history).items()
    found = {key: next((owner for since, owner in reversed(owned) if since <= t), OVER) for key, owned in spans}
    return {key: owner for key, owner in found.items() if owner != OVER}


def unowned(history: RunHistory, end: float, since: float = 0.0) -> dict[str, float]:
    """By lease: the longest time in seconds, between these moments, in which it had no living owner."""
    return longest_unowned(written_spans(history), since, end, lives(history.incidents))


def longest_unowned(
    spans: Mapping[str, OwnerSpans], since: float, end: float, all_lives: Iterable[Life] | None = None
) -> dict[str, float]:
    """The longest time without a living owner by these spans; without any lives every owner counts as living."""
    living: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for life in all_lives or ():
        living[life.worker].append((life.start, life.end))
    always, found = [(-math.inf, math.inf)], {}
    for key, spans_of_key in spans.items():
        owned = [span for span in spans_of_key if span[0] <= end]
        if not owned:
            continue
        stops = [t for t, _ in owned[1:]] + [end]
        # The times in which an owner was there to hold the lease; nobody is needed once it is over.
        held = sorted(
            (max(begin, start), min(stop, over))
            for (begin, owner), stop in zip(owned, stops, strict=True)
            for start, over in (
                always if owner == OVER or (owner is not None and all_lives is None) else living[owner or ""]
            )
        )
        longest, reached = 0.0, max(owned[0][0], since)
        for start, stop in held:
            if stop > start:
                longest, reached = max(longest, start - reached), max(reached, stop)
        found[key] = max(longest, end - reached)
    return found


def refused(writes: Iterable[WriteEvent]) -> int:
    """Count the writes that another worker's write defeated; a repetition of one's own unanswered write is none."""
    return sum(
        not write.done and write.verb in REFUSABLE and (write.before is None or write.before.owner != write.worker)
        for write in writes
    )


QUIET_VERBS: frozenset[WriteVerb] = frozenset({"renew", "checkpoint", "checkpoint-late", "annotate", "take-back"})
"""The writes of a fleet at rest; the last two only end a planned move that has been counted."""


def at_rest(run: JudgedRun) -> Iterator[Breach]:
    """The breaches as of `settled`: a restless fleet, and, if a worker that plans is there, one that is uneven."""
    history, settled = run.history, run.limits.settled
    if settled is None:
        return
    for write in history.writes:
        # The lease of an ended shard may be deleted whenever a worker lists the shards.
        cleared = write.verb == "delete" and write.before is not None and write.before.ended
        if write.t > settled and write.verb not in QUIET_VERBS and not cleared:
            lease = f"{write.key} ({write.before.owner if write.before else None})"
            why = f"{write.process} wrote a {write.verb} of {lease}, {'done' if write.done else 'refused'}"
            yield Breach("action at balance", write.t, why)
    if not run.planners:
        return
    for key, seconds in unowned(history, history.end, settled).items():
        if seconds > 0.0:
            why = f"{key} had no living owner for {seconds:.3f} s, when everybody had long been left in peace"
            yield Breach("held by nobody", history.end, why)
    if run.limits.even:
        owners = owners_at(history, history.end)
        held = Counter(owner for owner in owners.values() if owner is not None)
        counts = {worker: held[worker] for worker in alive_at(run.lives, history.end - 1e-9) | run.planners}
        rows = {write.key: write.after for write in history.writes if write.done}
        loaded = run.limits.counts_ended and any(row is not None and row.ended for row in rows.values())
        # One that never plans takes nothing, and so may well hold less.
        why = uneven(counts, run.planners, len(owners), run.limits.groups)
        if why and not loaded:
            yield Breach("uneven", history.end, why)


def no_needless_move(run: JudgedRun) -> Iterator[Breach]:
    """Blame the last of the moves beyond the least: no single move can be called needless."""
    if run.limits.settled is None or run.limits.moves is None:
        return
    since, more = run.limits.moves
    workers = alive_at(run.lives, run.history.end - 1e-9)
    least = least_moves(owners_at(run.history, since), workers, run.limits.groups)
    moved = [
        change
        for change in changes(run.history.writes)
        if change.t >= since and change.before in alive_at(run.lives, change.t)
    ]
    for place, change in enumerate(moved[least + more :], least + more + 1):
        why = f"{change.key} from {change.before} to {change.after} is move {place}, and {least} would have done"
        yield Breach("needless move", change.t, why)
