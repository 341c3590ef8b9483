"""Judges a real or simulated run by its history, and explains delays and repeated dispatches by the faults of the run.

`Explanations` finds the faults that explain why a record waited, or why it was dispatched again. A fault can explain
delays and repetitions while it lasts, and for `reach_seconds` afterwards, which is the time that another worker needs
to
take over a shard. A fault of one worker explains only effects on shards that this worker read or owned. A fault without
a subject explains effects on any shard.

Four rules hold:

1. The judge uses only the history, which the program that ran the fleet recorded. It has no access to the stream, the
   table, the workers or a clock.
2. A breach contains its kind, its time and a description.
3. A law is checked only if the events that it concerns were recorded. Sent and dispatched records are enough to check
   losses, order, duplicates, tokens and gaps. The other laws need the writes, and the times of reads and of
   finished handlers. Writes are recorded either by the table or by the processes that sent them. Of two writes recorded
   by processes, one counts as earlier only if its response arrived before the other was sent.
4. The program that causes a fault also records it. A long wait or a repeated dispatch is a breach if no recorded fault
   explains it.

`judge_finished_run` returns the verdict on a finished run, which contains its figures and all breaches.
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from attrs import asdict, field, frozen

from leasehold.balancer.rules.shares import least_moves
from leasehold_lab.judge import records, rights
from leasehold_lab.judge.breach import Breach, JudgeLimits
from leasehold_lab.judge.events import IncidentKind, ReadingEvent, RecordPlace, RunHistory, parse_worker_id
from leasehold_lab.judge.rights import list_reader_spans, measure_longest_unowned
from leasehold_lab.judge.run import JudgedRun, ReaderChange, find_workers_alive_at
from leasehold_lab.judge.tenures import Tenure

FAULTS: frozenset[IncidentKind] = frozenset({"start", "crash", "leave", "nap", "split", "merge", "trouble"})
"""The kinds of incidents that can delay the reading of a shard.

"gone" is not one of them: at that time, the process has already drained.
"""


@frozen
class RecordWait:
    """The time that a record waited, from its acknowledgment by the stream to its first dispatch.

    Attributes:
        faults: Descriptions of the faults that may have contributed to the wait.
        unexplained: The part of the wait that no fault explains, in seconds.
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
class _FaultEffect:
    begin: float
    end: float
    subjects: frozenset[str]
    note: str

    def may_explain(self, since: float, until: float, shards_and_workers: frozenset[str]) -> bool:
        """Return whether the fault may explain an effect on these subjects between `since` and `until`."""
        return (
            self.begin < until and self.end > since and (not self.subjects or bool(self.subjects & shards_and_workers))
        )


@frozen
class Explanations:
    """Explains delays and repeated dispatches by the faults of a run and the workers that read each shard."""

    _history: RunHistory
    _tenures: Mapping[str, list[Tenure]]
    _limits: JudgeLimits
    _fault_effects: Sequence[_FaultEffect] = field(init=False)
    _owners: Mapping[str, list[tuple[float, str]]] = field(init=False)

    @_fault_effects.default
    def _compute_fault_effects(self) -> Sequence[_FaultEffect]:
        return [
            _FaultEffect(
                incident.t,
                incident.t + (incident.seconds if incident.what == "trouble" else 0.0) + self._limits.reach_seconds,
                frozenset(parse_worker_id(word) for word in incident.subject.split()),
                incident.note or f"{incident.what} {incident.subject}".strip(),
            )
            for incident in self._history.incidents
            if incident.what in FAULTS
        ]

    @_owners.default
    def _collect_observed_owners(self) -> Mapping[str, list[tuple[float, str]]]:
        owners: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for row in sorted(self._history.rows, key=lambda row: row.t):
            if row.owner is not None:
                owners[row.shard].append((row.t, row.owner))
        return owners

    def list_record_waits(self) -> Iterator[RecordWait]:
        """Yield the wait of each record whose times of acknowledgment and dispatch are known."""
        first_dispatches: dict[tuple[str, str], ReadingEvent] = {}
        for event in self._history.select_events("record"):
            first_dispatches.setdefault((event.key, event.digest), event)
        for sent_record in self._history.sent:
            first_event = first_dispatches.get((sent_record.key, sent_record.digest))
            if sent_record.t is not None and first_event is not None:
                yield RecordWait(first_event.shard, sent_record.t, max(sent_record.t, first_event.t))

    def find_longest_wait(self) -> RecordWait | None:
        """Return the longest wait with its explanation, or None if no times are known."""
        longest_wait = max(self.list_record_waits(), key=lambda wait: wait.seconds, default=None)
        return None if longest_wait is None else self.explain_wait(longest_wait)

    def explain_wait(self, wait: RecordWait) -> RecordWait:
        """Return a copy of the wait that contains the faults that explain it and the number of unexplained seconds."""
        shards_and_workers = self._find_subjects_between(wait.shard, wait.since, wait.until)
        relevant_faults = [
            fault for fault in self._fault_effects if fault.may_explain(wait.since, wait.until, shards_and_workers)
        ]
        explained_seconds, explained_until = 0.0, wait.since
        for fault in sorted(relevant_faults, key=lambda known_fault: known_fault.begin):
            # Faults may overlap, so add only the part of this fault that earlier faults have not covered.
            begin, end = max(fault.begin, explained_until), min(fault.end, wait.until)
            if end > begin:
                explained_seconds, explained_until = explained_seconds + end - begin, end
        fault_notes = tuple(fault.note for fault in relevant_faults)
        return RecordWait(wait.shard, wait.since, wait.until, fault_notes, wait.seconds - explained_seconds)

    def find_breaches(self) -> Iterator[Breach]:
        """Yield each shard's longest unexplained wait, if it is above the limit, and each unexplained repetition."""
        if self._limits.wait_seconds == math.inf:
            return
        longest_by_shard: dict[str, RecordWait] = {}
        for wait in self.list_record_waits():
            if wait.seconds > self._limits.wait_seconds:
                explained_wait = self.explain_wait(wait)
                longest_by_shard[wait.shard] = max(
                    longest_by_shard.get(wait.shard, explained_wait),
                    explained_wait,
                    key=lambda shard_wait: shard_wait.unexplained,
                )
        for wait in longest_by_shard.values():
            if wait.unexplained > self._limits.wait_seconds:
                description = f"a record of {wait.shard} waited for {wait.seconds:.1f} s from {wait.since:.3f}"
                unexplained_part = (
                    f"of which {wait.unexplained:.1f} s lie outside {', '.join(wait.faults) or 'all faults'}"
                )
                yield Breach("unread", wait.until, f"{description}, {unexplained_part}")
        last_dispatches: dict[tuple[str, RecordPlace], ReadingEvent] = {}
        reported_pairs: set[tuple[str, str]] = set()
        for record in self._history.select_events("record"):
            previous_dispatch = last_dispatches.get((record.shard, record.place))
            last_dispatches[record.shard, record.place] = record
            # `records.check_repetitions` checks repetitions by the same process.
            if (
                previous_dispatch is None
                or previous_dispatch.process == record.process
                or (record.process, record.shard) in reported_pairs
            ):
                continue
            shards_and_workers = self._find_subjects_between(record.shard, previous_dispatch.t, record.t)
            if not any(
                fault.may_explain(previous_dispatch.t, record.t, shards_and_workers) for fault in self._fault_effects
            ):
                reported_pairs.add((record.process, record.shard))
                description = (
                    f"{record.process} dispatched {record.place[0]} of {record.shard} "
                    f"after {previous_dispatch.process} had"
                )
                delay = f"{record.t - previous_dispatch.t:.1f} s later; no fault explains it"
                yield Breach("dispatched again", record.t, f"{description}, {delay}")

    def _find_subjects_between(self, shard: str, since: float, until: float) -> frozenset[str]:
        """Return the shard, its parents, and the workers that read or owned any of them between the two times.

        The last reader and the last owner before `since` are included.
        """
        shards = {shard, *self._history.parents.get(shard, ())}
        shards_and_workers = set(shards)
        for relevant_shard in shards:
            readers = self._tenures.get(relevant_shard, ())
            shards_and_workers |= {tenure.worker for tenure in readers if tenure.begin <= until and tenure.end >= since}
            last_reader = max(
                (tenure for tenure in readers if tenure.end < since), key=lambda tenure: tenure.end, default=None
            )
            shards_and_workers |= {last_reader.worker} if last_reader else set()
            owners = self._owners.get(relevant_shard, [])
            first_index = max(0, bisect_left(owners, (since, "")) - 1)
            shards_and_workers |= {owner for owned_since, owner in owners[first_index:] if owned_since <= until}
        return frozenset(shards_and_workers)


def check_everything_is_explained(run: JudgedRun) -> Iterator[Breach]:
    """Check that faults explain all long waits and repetitions (rule 4), and that every exception was handled."""
    yield from Explanations(run.history, run.tenures, run.limits).find_breaches()
    if not run.limits.callable_faults:
        yield from (Breach("unforeseen", run.history.end, fault) for fault in run.history.faults)


LAWS: tuple[Callable[[JudgedRun], Iterator[Breach]], ...] = (
    records.check_sent_records_are_dispatched,
    records.check_repetitions,
    records.check_order_within_keys,
    records.check_parents_before_children,
    records.check_one_process_per_token,
    check_everything_is_explained,
    rights.check_table_writes,
    rights.check_only_finished_is_checkpointed,
    rights.check_only_holders_dispatch,
    rights.check_held_leases_are_read,
    rights.check_responses_agree,
    rights.check_finished_stays_finished,
    rights.check_only_writers_dispatch,
    rights.check_fleet_at_rest,
    rights.check_needless_moves,
)
"""The laws that the judge checks in every run."""


def check_laws(run: JudgedRun) -> tuple[Breach, ...]:
    """Check all laws, and return the breaches in order of time."""
    return tuple(sorted((breach for law in LAWS for breach in law(run)), key=lambda breach: breach.t))


def judge_history(history: RunHistory, limits: JudgeLimits) -> tuple[Breach, ...]:
    """Check all laws in a history, and return the breaches in order of time."""
    return check_laws(JudgedRun(history, limits))


UNLIMITED = JudgeLimits()


@frozen
class RunVerdict:
    """The judge's verdict on a run.

    Attributes:
        produced: The number of records that the stream acknowledged.
        delivered: The number of these records that were dispatched at least once.
        lost: The number of these records that were never dispatched.
        strangers: The number of dispatched records that the stream never acknowledged.
        duplicates: The number of repeated dispatches.
        fenced: The number of records whose token was lower than the token of an earlier record of the shard. A handler
        that compares tokens rejects such records.
            compares tokens rejects such records.
        shards: The number of shards that were read.
        unowned_seconds_max: The longest time during which a shard had no reader.
        unowned_shard: The shard that had no reader for that time.
        moves: How many times a shard moved away from a living reader.
        moves_least: The least possible number of such moves.
        owner_changes: The changes of readers, with the number of records that were dispatched again.
        faults: All breaches. A good run has none.
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
        owner_changes = [{**asdict(change), "t": round(change.t * 1000)} for change in self.owner_changes]
        return {
            "ok": self.ok,
            **asdict(self),
            "owner_changes": owner_changes,
            "faults": [str(breach) for breach in self.faults],
        }


def judge_finished_run(history: RunHistory, limits: JudgeLimits = UNLIMITED) -> RunVerdict:
    """Return the verdict on a finished run. After an incident "end" in the history, shards need no readers."""
    run = JudgedRun(history, limits)
    end_time = min((incident.t for incident in history.incidents if incident.what == "end"), default=history.end)
    unread_seconds = measure_longest_unowned(list_reader_spans(run.tenures, history.parents), 0.0, end_time)
    shard, seconds = max(
        unread_seconds.items(),
        key=lambda shard_and_seconds: (shard_and_seconds[1], shard_and_seconds[0]),
        default=("", 0.0),
    )
    move_count, least_move_count = count_moves(run)
    # A handler that compares tokens rejects a record whose token is lower than the highest token so far in the shard.
    highest_tokens, fenced_count = Counter[str](), 0
    for record in run.dispatches:
        if record.token is not None:
            fenced_count += record.token < highest_tokens[record.shard]
            highest_tokens[record.shard] = max(highest_tokens[record.shard], record.token)
    return RunVerdict(
        produced=len(history.sent),
        delivered=len(history.sent) - len(run.undispatched_records),
        lost=len(run.undispatched_records),
        strangers=len(run.unsent_records),
        duplicates=len(run.dispatches) - len({(event.shard, event.place, event.digest) for event in run.dispatches}),
        fenced=fenced_count,
        shards=len(run.tenures),
        unowned_seconds_max=round(seconds, 3),
        unowned_shard=shard if seconds else "",
        moves=move_count,
        moves_least=least_move_count,
        owner_changes=run.reader_changes,
        faults=check_laws(run),
    )


def count_moves(run: JudgedRun) -> tuple[int, int]:
    """Return how many moves were made before the incident "end", and how few would have sufficed.

    A move takes a shard away from a living reader. The least number is computed for each period between two incidents,
    and
    the numbers are added. In each period, the least number depends on the shards that are read at the end of the period
    and
    on their readers at its start. A shard that is new or whose reader has died needs no move.
    """
    move_count = least_move_count = 0
    for incident, next_incident in pairwise(sorted(run.history.incidents, key=lambda incident: incident.t)):
        if incident.what == "end":
            break
        living_workers = find_workers_alive_at(run.lifetimes, incident.t)
        move_count += sum(
            earlier_tenure.worker in living_workers and earlier_tenure.worker != later_tenure.worker
            for readers in run.tenures.values()
            for earlier_tenure, later_tenure in pairwise(readers)
            if incident.t <= later_tenure.begin < next_incident.t
        )
        readers_of_read_shards = [
            readers for readers in run.tenures.values() if _find_reader_at(readers, next_incident.t) is not None
        ]
        least_move_count += least_moves(
            {readers[0].shard: _find_reader_at(readers, incident.t) for readers in readers_of_read_shards},
            living_workers,
        )
    return move_count, least_move_count


def _find_reader_at(readers: list[Tenure], time: float) -> str | None:
    return next((tenure.worker for tenure in reversed(readers) if tenure.begin < time <= tenure.end), None)
