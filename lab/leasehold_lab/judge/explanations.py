"""Judges a run, real or simulated, by its history alone, and explains what must not be.

`Explanations`: the faults that explain why a record waited, or came again; whatever nothing explains is a breach. A
fault reaches as far as it lasted, and on for as long as a fleet may need to take a shard over: until its lease has
expired, and one look more. A fault of one worker explains what befell the shards that this worker read, or owned by
the table, at that time; a fault of nobody in particular explains everything.

Rule 1: nothing here asks a stream, a table, a worker or a clock; the program that ran the fleet recorded all of it.
Rule 2: a breach says what, when and why, never a mere False.
Rule 3: a law is judged where what it speaks of was recorded. Records sent and handed over are enough for losses,
order, duplicates, tokens and gaps; writes, and the times of readings and of finished handlers, allow the others.
Writes come as the table took them, or as each process saw the answers to its own: then two are compared only where
one was answered before the other was sent.
Rule 4: a fault is named by the program that caused it; a long wait or a repetition that none explains is a breach.

`verdict_on` is the verdict on a finished run, for people and programs: its figures, and every breach.
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from attrs import asdict, field, frozen

from leasehold.balancer.rules.shares import least_moves
from leasehold_lab.judge import records, rights
from leasehold_lab.judge.breach import Breach, Limits
from leasehold_lab.judge.events import IncidentKind, ReadingEvent, RecordPlace, RunHistory, worker_of
from leasehold_lab.judge.rights import longest_unowned, read_spans
from leasehold_lab.judge.run import JudgedRun, ReaderChange, alive_at
from leasehold_lab.judge.tenures import Tenure

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
class _FaultProgress:
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
    _reaches: Sequence[_FaultProgress] = field(init=False)
    _owners: Mapping[str, list[tuple[float, str]]] = field(init=False)

    @_reaches.default
    def _all_reaches(self) -> Sequence[_FaultProgress]:
        return [
            _FaultProgress(
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
        """Add the faults that explain a wait."""
        concerned = self._concerned(wait.shard, wait.since, wait.until)
        near = [each for each in self._reaches if each.touches(wait.since, wait.until, concerned)]
        covered, reached = 0.0, wait.since
        for each in sorted(near, key=lambda each: each.begin):
            # Reaches overlap: each counts from where the ones before it end.
            begin, end = max(each.begin, reached), min(each.end, wait.until)
            if end > begin:
                covered, reached = covered + end - begin, end
        faults = tuple(each.note for each in near)
        return RecordWait(wait.shard, wait.since, wait.until, faults, wait.seconds - covered)

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
        last: dict[tuple[str, RecordPlace], ReadingEvent] = {}
        named: set[tuple[str, str]] = set()
        for record in self._history.told("record"):
            before = last.get((record.shard, record.place))
            last[record.shard, record.place] = record
            # Within a process that did not let go a repetition is found by the laws of records.
            if before is None or before.process == record.process or (record.process, record.shard) in named:
                continue
            concerned = self._concerned(record.shard, before.t, record.t)
            if not any(each.touches(before.t, record.t, concerned) for each in self._reaches):
                named.add((record.process, record.shard))
                why = f"{record.process} handed over {record.place[0]} of {record.shard} after {before.process} had"
                late = f"{record.t - before.t:.1f} s later; no fault explains it"
                yield Breach("handed over again", record.t, f"{why}, {late}")

    def _concerned(self, shard: str, since: float, until: float) -> frozenset[str]:
        """The shard and its parents, and who had to do with them from the last reader before on."""
        shards = {shard, *self._history.parents.get(shard, ())}
        found = set(shards)
        for each in shards:
            readers = self._tenures.get(each, ())
            found |= {tenure.worker for tenure in readers if tenure.begin <= until and tenure.end >= since}
            last = max(
                (tenure for tenure in readers if tenure.end < since), key=lambda tenure: tenure.end, default=None
            )
            found |= {last.worker} if last else set()
            owners = self._owners.get(each, [])
            begin = max(0, bisect_left(owners, (since, "")) - 1)
            found |= {owner for t, owner in owners[begin:] if t <= until}
        return frozenset(found)


def nothing_unexplained(run: JudgedRun) -> Iterator[Breach]:
    """Rule 4; and nothing is raised that nothing provides for."""
    yield from Explanations(run.history, run.tenures, run.limits).breaches()
    if not run.limits.misdeeds:
        yield from (Breach("unforeseen", run.history.end, fault) for fault in run.history.faults)


LAWS: tuple[Callable[[JudgedRun], Iterator[Breach]], ...] = (
    records.all_that_was_sent,
    records.again_only_where_due,
    records.in_order_within_a_key,
    records.parents_before_children,
    records.one_process_for_each_token,
    nothing_unexplained,
    rights.one_holder_at_a_time,
    rights.nothing_unfinished_is_checkpointed,
    rights.only_holders_hand_over,
    rights.everything_held_is_read,
    rights.answers_agree,
    rights.finished_stays_finished,
    rights.writers_hand_over,
    rights.at_rest,
    rights.no_needless_move,
)
"""The laws of every run, each in the file of what it speaks of; a verdict is nothing but their breaches and figures."""


def breaches(run: JudgedRun) -> tuple[Breach, ...]:
    """Every breach, in order of time; none for a good run."""
    return tuple(sorted((breach for law in LAWS for breach in law(run)), key=lambda breach: breach.t))


def judge(history: RunHistory, limits: Limits) -> tuple[Breach, ...]:
    """The breaches in a history."""
    return breaches(JudgedRun(history, limits))


UNLIMITED = Limits()


@frozen
class RunVerdict:
    """The findings on a run's history.

    produced             records the stream acknowledged
    delivered            of these, handed over at least once
    lost                 of these, never handed over
    strangers            handed over, and never acknowledged
    duplicates           handed over again, each time counted
    fenced               handed over under a lower token than one before: whoever compares tokens refuses them
    owner_changes        what each change of a shard's reader cost
    unowned_seconds_max  the longest time nobody read a shard
    moves, moves_least   leases that left a living worker, and how few would have done
    faults               what must not be; empty for a good run
    """

    produced: int
    delivered: int
    lost: int
    strangers: int
    duplicates: int
    fenced: int
    shards: int
    unowned_seconds_max: float
    unowned_shard: str
    moves: int
    moves_least: int
    owner_changes: tuple[ReaderChange, ...] = field(repr=False)
    faults: tuple[Breach, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing happened that must not."""
        return not self.faults

    def as_json(self) -> dict[str, object]:
        """Values that `json.dumps` takes; times are milliseconds, as in the lines of events."""
        told = [{**asdict(change), "t": round(change.t * 1000)} for change in self.owner_changes]
        return {"ok": self.ok, **asdict(self), "owner_changes": told, "faults": [str(each) for each in self.faults]}


def verdict_on(history: RunHistory, limits: Limits = UNLIMITED) -> RunVerdict:
    """The verdict on a run that is over; shards should have been read up to the incident called end."""
    run = JudgedRun(history, limits)
    end = min((each.t for each in history.incidents if each.what == "end"), default=history.end)
    unread = longest_unowned(read_spans(run.tenures, history.parents), 0.0, end)
    shard, seconds = max(unread.items(), key=lambda gap: (gap[1], gap[0]), default=("", 0.0))
    done, least = moves(run)
    # A handler that compares tokens refuses what comes under a lower one than it has seen of the shard.
    highest, fenced = Counter[str](), 0
    for record in run.records:
        if record.token is not None:
            fenced += record.token < highest[record.shard]
            highest[record.shard] = max(highest[record.shard], record.token)
    return RunVerdict(
        produced=len(history.sent),
        delivered=len(history.sent) - len(run.lost),
        lost=len(run.lost),
        strangers=len(run.strangers),
        duplicates=len(run.records) - len({(event.shard, event.place, event.digest) for event in run.records}),
        fenced=fenced,
        shards=len(run.tenures),
        unowned_seconds_max=round(seconds, 3),
        unowned_shard=shard if seconds else "",
        moves=done,
        moves_least=least,
        owner_changes=run.reader_changes,
        faults=breaches(run),
    )


def moves(run: JudgedRun) -> tuple[int, int]:
    """How often a shard left a living reader up to the incident called end, and how few times would have done.

    The history is cut at each incident. What is read at the end of a part, and by whom at its start, says how few
    moves any balanced division needed: shards that are new, or whose reader died, go where they are wanted for nothing.
    """
    done = least = 0
    for incident, following in pairwise(sorted(run.history.incidents, key=lambda incident: incident.t)):
        if incident.what == "end":
            break
        living = alive_at(run.lives, incident.t)
        done += sum(
            before.worker in living and before.worker != after.worker
            for readers in run.tenures.values()
            for before, after in pairwise(readers)
            if incident.t <= after.begin < following.t
        )
        there = [readers for readers in run.tenures.values() if _reader_at(readers, following.t) is not None]
        least += least_moves({each[0].shard: _reader_at(each, incident.t) for each in there}, living)
    return done, least


def _reader_at(readers: list[Tenure], t: float) -> str | None:
    return next((tenure.worker for tenure in reversed(readers) if tenure.begin < t <= tenure.end), None)
