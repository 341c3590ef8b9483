"""Judges a run, real or simulated, by its history alone, and explains delays and repetitions by the faults of the run.

`Explanations` has the faults that explain why a record waited or was dispatched again. A wait or a repetition that no
fault explains is a breach. A fault explains what happens while it lasts and for as long afterwards as a fleet may need
to take a shard over, that is until its lease has expired, plus one look. A fault of one worker explains what happens to
the shards that the worker read at that time, or owned according to the table; a fault without a subject explains
everything.

Four rules hold:

1. The judge reads no stream, table or clock, and calls no worker; the program that ran the fleet recorded everything.
2. A breach contains what, when and why, and is never just False.
3. A law is judged only if what it is about was recorded. Records sent and dispatched are enough for losses, order,
   duplicates, tokens and gaps; the other laws need writes, and the times of reads and of finished handlers. Writes come
   as the table applied them, or as each process saw the responses to its own. Two of the latter are compared only if
   one was answered before the other was sent.
4. A fault is recorded by the program that caused it. A long wait or a repetition that no fault explains is a breach.

`verdict_on` returns the verdict on a finished run, for people and programs: its figures, and every breach.
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
"""Incidents that may keep a shard from being read. "gone" is not among them: such a process has drained first."""


@frozen
class RecordWait:
    """How long a record waited, from when the stream acknowledged it to its first dispatch.

    Attributes:
        faults: Descriptions of the faults that may have played a part.
        unexplained: How many seconds of the wait lie outside the reach of all faults.
    """

    shard: str
    since: float
    until: float
    faults: tuple[str, ...] = ()
    unexplained: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole wait, in seconds."""
        return self.until - self.since


@frozen
class _FaultReach:
    begin: float
    end: float
    subjects: frozenset[str]
    note: str

    def touches(self, since: float, until: float, subjects: frozenset[str]) -> bool:
        """Whether the fault may explain something that happened to these subjects at that time."""
        return self.begin < until and self.end > since and (not self.subjects or bool(self.subjects & subjects))


@frozen
class Explanations:
    """The faults of a run, and the workers that each shard depended on over time."""

    _history: RunHistory
    _tenures: Mapping[str, list[Tenure]]
    _limits: Limits
    _reaches: Sequence[_FaultReach] = field(init=False)
    _owners: Mapping[str, list[tuple[float, str]]] = field(init=False)

    @_reaches.default
    def _all_reaches(self) -> Sequence[_FaultReach]:
        return [
            _FaultReach(
                incident.t,
                incident.t + (incident.seconds if incident.what == "trouble" else 0.0) + self._limits.reach_seconds,
                frozenset(worker_of(word) for word in incident.subject.split()),
                incident.note or f"{incident.what} {incident.subject}".strip(),
            )
            for incident in self._history.incidents
            if incident.what in FAULTS
        ]

    @_owners.default
    def _observed(self) -> Mapping[str, list[tuple[float, str]]]:
        owners: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for row in sorted(self._history.rows, key=lambda row: row.t):
            if row.owner is not None:
                owners[row.shard].append((row.t, row.owner))
        return owners

    def waits(self) -> Iterator[RecordWait]:
        """Yield the wait of each record whose times are known."""
        first: dict[tuple[str, str], ReadingEvent] = {}
        for event in self._history.of_kinds("record"):
            first.setdefault((event.key, event.digest), event)
        for sent in self._history.sent:
            dispatched = first.get((sent.key, sent.digest))
            if sent.t is not None and dispatched is not None:
                yield RecordWait(dispatched.shard, sent.t, max(sent.t, dispatched.t))

    def longest(self) -> RecordWait | None:
        """Explain the longest wait, or return None if no times are known."""
        longest = max(self.waits(), key=lambda wait: wait.seconds, default=None)
        return None if longest is None else self.explained(longest)

    def explained(self, wait: RecordWait) -> RecordWait:
        """Return the wait with the faults that explain it."""
        concerned = self._concerned(wait.shard, wait.since, wait.until)
        near = [fault for fault in self._reaches if fault.touches(wait.since, wait.until, concerned)]
        covered, reached = 0.0, wait.since
        for fault in sorted(near, key=lambda each: each.begin):
            # The reaches of faults overlap, so each counts from the end of those before it.
            begin, end = max(fault.begin, reached), min(fault.end, wait.until)
            if end > begin:
                covered, reached = covered + end - begin, end
        faults = tuple(fault.note for fault in near)
        return RecordWait(wait.shard, wait.since, wait.until, faults, wait.seconds - covered)

    def breaches(self) -> Iterator[Breach]:
        """Yield, for each shard, the wait with the weakest explanation, and each repetition without one."""
        if self._limits.wait_seconds == math.inf:
            return
        worst: dict[str, RecordWait] = {}
        for wait in self.waits():
            if wait.seconds > self._limits.wait_seconds:
                explained = self.explained(wait)
                worst[wait.shard] = max(worst.get(wait.shard, explained), explained, key=lambda each: each.unexplained)
        for wait in worst.values():
            if wait.unexplained > self._limits.wait_seconds:
                why = f"a record of {wait.shard} waited for {wait.seconds:.1f} s from {wait.since:.3f}"
                within = f"of which {wait.unexplained:.1f} s lie outside {', '.join(wait.faults) or 'all faults'}"
                yield Breach("unread", wait.until, f"{why}, {within}")
        last: dict[tuple[str, RecordPlace], ReadingEvent] = {}
        named: set[tuple[str, str]] = set()
        for record in self._history.of_kinds("record"):
            before = last.get((record.shard, record.place))
            last[record.shard, record.place] = record
            # If the process did not lose the lease in between, the laws of records report the repetition.
            if before is None or before.process == record.process or (record.process, record.shard) in named:
                continue
            concerned = self._concerned(record.shard, before.t, record.t)
            if not any(fault.touches(before.t, record.t, concerned) for fault in self._reaches):
                named.add((record.process, record.shard))
                why = f"{record.process} handed over {record.place[0]} of {record.shard} after {before.process} had"
                late = f"{record.t - before.t:.1f} s later; no fault explains it"
                yield Breach("handed over again", record.t, f"{why}, {late}")

    def _concerned(self, shard: str, since: float, until: float) -> frozenset[str]:
        """Return the shard, its parents, and the workers that dealt with them since the last reader before `since`."""
        shards = {shard, *self._history.parents.get(shard, ())}
        concerned = set(shards)
        for relevant_shard in shards:
            readers = self._tenures.get(relevant_shard, ())
            concerned |= {tenure.worker for tenure in readers if tenure.begin <= until and tenure.end >= since}
            last = max(
                (tenure for tenure in readers if tenure.end < since), key=lambda tenure: tenure.end, default=None
            )
            concerned |= {last.worker} if last else set()
            owners = self._owners.get(relevant_shard, [])
            begin = max(0, bisect_left(owners, (since, "")) - 1)
            concerned |= {owner for t, owner in owners[begin:] if t <= until}
        return frozenset(concerned)


def nothing_unexplained(run: JudgedRun) -> Iterator[Breach]:
    """Check rule 4, and that no unforeseen exception was raised."""
    yield from Explanations(run.history, run.tenures, run.limits).breaches()
    if not run.limits.callable_faults:
        yield from (Breach("unforeseen", run.history.end, fault) for fault in run.history.faults)


LAWS: tuple[Callable[[JudgedRun], Iterator[Breach]], ...] = (
    records.everything_sent_was_dispatched,
    records.again_only_where_due,
    records.in_order_within_a_key,
    records.parents_before_children,
    records.one_process_for_each_token,
    nothing_unexplained,
    rights.one_holder_at_a_time,
    rights.nothing_unfinished_is_checkpointed,
    rights.only_holders_dispatch,
    rights.everything_held_is_read,
    rights.responses_agree,
    rights.finished_stays_finished,
    rights.only_writers_dispatch,
    rights.at_rest,
    rights.no_needless_move,
)
"""The laws of every run, each in the file of its subject. A verdict consists of their breaches and some figures."""


def breaches(run: JudgedRun) -> tuple[Breach, ...]:
    """Return every breach, in order of time. A good run has none."""
    return tuple(sorted((breach for law in LAWS for breach in law(run)), key=lambda breach: breach.t))


def judge(history: RunHistory, limits: Limits) -> tuple[Breach, ...]:
    """Return the breaches in a history."""
    return breaches(JudgedRun(history, limits))


UNLIMITED = Limits()


@frozen
class RunVerdict:
    """The findings on a run's history.

    Attributes:
        produced: Records that the stream acknowledged.
        delivered: Of these, how many were dispatched at least once.
        lost: Of these, how many were never dispatched.
        strangers: Records dispatched that the stream never acknowledged.
        duplicates: Repeated dispatches; each one counts.
        fenced: Records dispatched under a lower token than an earlier record of the shard. A handler that compares
            tokens rejects them.
        owner_changes: The changes of a shard's reader, and what each cost.
        unowned_seconds_max: The longest time that a shard had no reader.
        moves: How many times a shard left a living reader.
        moves_least: How many times would have been enough.
        faults: Every breach; empty for a good run.
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
        """Whether there were no breaches."""
        return not self.faults

    def as_json(self) -> dict[str, object]:
        """Return values that `json.dumps` accepts, with times in milliseconds, as in event lines."""
        changes = [{**asdict(change), "t": round(change.t * 1000)} for change in self.owner_changes]
        return {
            "ok": self.ok,
            **asdict(self),
            "owner_changes": changes,
            "faults": [str(breach) for breach in self.faults],
        }


def verdict_on(history: RunHistory, limits: Limits = UNLIMITED) -> RunVerdict:
    """Return the verdict on a run that is over, in which shards should have been read up to the "end" incident."""
    run = JudgedRun(history, limits)
    end = min((incident.t for incident in history.incidents if incident.what == "end"), default=history.end)
    unread = longest_unowned(read_spans(run.tenures, history.parents), 0.0, end)
    shard, seconds = max(unread.items(), key=lambda gap: (gap[1], gap[0]), default=("", 0.0))
    done, least = moves(run)
    # A handler that compares tokens rejects every token below the highest that it has seen for the shard.
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
    """Return how often a shard left a living reader before the "end" incident, and how few times would have sufficed.

    The history is cut at each incident. The least number of moves in each part is worked out from the shards that are
    read at its end and their readers at its start. Shards that are new, or whose reader died, cost no move.
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
        still_read = [readers for readers in run.tenures.values() if _reader_at(readers, following.t) is not None]
        least += least_moves({readers[0].shard: _reader_at(readers, incident.t) for readers in still_read}, living)
    return done, least


def _reader_at(readers: list[Tenure], t: float) -> str | None:
    return next((tenure.worker for tenure in reversed(readers) if tenure.begin < t <= tenure.end), None)
