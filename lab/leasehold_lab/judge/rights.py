"""Checks the laws about the ownership of leases and about the writes of workers.

Laws 1 to 5 are checked on the writes that the table recorded (`RunHistory.writes`):

1. A lease is claimed only after it has expired by its owner's own clock.
2. Each change of owner increments the lease counter (`Lease.epoch`) by one, so a former owner always notices the
   change. A checkpoint never goes back.
3. A checkpoint passes a record only after a handler has finished with the record, or after it became a dead letter.
4. A process dispatches records only while it holds the lease, or shortly after it has lost it.
5. A process reads every lease that it holds, or releases it, within `UNREAD_SECONDS`.

Laws 6 to 12 are checked on what the processes recorded about their writes, which is when they sent each write and when
they received which response (`RunHistory.answers`), and on the dispatched records. A write may be applied at any time
between its request and its response. One write is therefore known to be later than another only if it was sent after
the response to the other had arrived:

6. No two processes receive a response that confirms the same version of a lease.
7. The counter of a lease never falls.
8. Once a checkpoint is confirmed, each write sent later that takes the lease or writes its checkpoint gets a response
   with that checkpoint or a later one. The responses to late checkpoints are not checked.
9. A worker writes no checkpoint of a lease after another worker has taken it.
10. A process dispatches records only until `lease_seconds` after it sent its last write of the lease, or shortly after
    that.
11. The same as law 1, checked on the responses.
12. Once the end of a shard is checkpointed, no later reader dispatches the shard's records again, even if the row of
    its lease was deleted.

Laws 6 to 9 and 11 are no longer checked after a lease was deleted, because the versions of its next row start over. Law
8 is no longer checked after a lease was reset, for example because its stream was recreated.

The group is at rest (`check_fleet_at_rest`) when every lease has a living owner, only renewals are written, and the
load is even. The owners of a lease over time are found either from its writes (`list_written_owner_spans`) or from its
readers (`list_reader_spans`).
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any

from attrs import define, evolve, frozen

from leasehold.balancer.model import SHARD_END
from leasehold.balancer.rules.shares import describe_imbalance, least_moves
from leasehold_lab.judge.breach import Breach, BreachKind
from leasehold_lab.judge.events import (
    VERBS_REJECTED_IN_RACES,
    RecordPlace,
    RunHistory,
    WriteAnswer,
    WriteEvent,
    WriteVerb,
    parse_worker_id,
)
from leasehold_lab.judge.run import (
    OPERATOR,
    TAKING_VERBS,
    JudgedRun,
    PositionOrder,
    ProcessLifetime,
    find_lifetimes,
    find_workers_alive_at,
)
from leasehold_lab.judge.tenures import Tenure

VERBS_WITHOUT_VERSION_CHANGE: frozenset[WriteVerb] = frozenset(
    {"request", "withdraw", "annotate", "checkpoint-late", "delete"}
)
"""Writes that do not change the version of a lease in some layouts, and therefore do not postpone its expiry."""

CLOCK_RATE = 0.999
"""The lowest rate of a worker's clock, relative to another worker's clock, for which the laws must hold."""

UNREAD_SECONDS = 75.0
"""The longest time in seconds for which a held lease may remain unread.

The time covers an outage of 15 s, the waits after faults and for the end of a parent shard, and timeouts after 5, 10
and 20 s when a response takes 25 s.
"""

SILENT_SECONDS = 30.0
"""For how many seconds after its last write of a lease a process still counts as the holder.

The limit is used only if the lease duration of the worker is unknown.
"""


def check_table_writes(run: JudgedRun) -> Iterator[Breach]:
    """Check that no write took or released a held lease (law 1), and that counters and checkpoints grew (law 2)."""
    last_writes: dict[str, WriteEvent] = {}
    for write in run.history.writes:
        row_before, row_after = write.before, write.after
        if not write.done or row_before is None or row_after is None or write.verb == "delete":
            continue
        previous_write = last_writes.get(write.key)
        # Law 1 is checked only for claims, and for releases by other workers, because a steal may take a lease that is
        # held, and a hand-off is written by the owner. If the owner's `lease_seconds` are unknown, the lease counts as
        # expired.
        if (
            write.verb in {"claim", "release"}
            and previous_write is not None
            and row_before.owner == previous_write.worker
            and row_before.owner != write.worker
        ):
            held_until_time = previous_write.sent + CLOCK_RATE * run.limits.lease_seconds.get(
                previous_write.worker, 0.0
            )
            is_holder_running = any(
                lifetime.process == previous_write.process and lifetime.end > write.t for lifetime in run.lifetimes
            )
            if is_holder_running and write.t < held_until_time:
                holding_period = (
                    f"until {held_until_time:.3f} by its {previous_write.verb} of {previous_write.sent:.3f}"
                )
                description = (
                    f"{write.process} claimed {write.key}, which {previous_write.process} held {holding_period}"
                )
                yield Breach("two holders", write.t, description)
        if row_before.owner != row_after.owner and row_after.epoch != row_before.epoch + 1:
            counter_change = f"its counter went from {row_before.epoch} to {row_after.epoch}, not by one"
            yield Breach("counter", write.t, f"{write.key} passed to {row_after.owner} and {counter_change}")
        if row_after.checkpoint.order < row_before.checkpoint.order:
            checkpoint_change = f"{row_before.checkpoint.sequence} became {row_after.checkpoint.sequence}"
            yield Breach(
                "checkpoint went back", write.t, f"of {write.key}: {checkpoint_change}, written by {write.process}"
            )
        if write.verb not in VERBS_WITHOUT_VERSION_CHANGE:
            last_writes[write.key] = write


def check_only_finished_is_checkpointed(run: JudgedRun) -> Iterator[Breach]:
    """Check that checkpoints pass only finished records (law 3), if handlers report the records that they finish."""
    finish_times: dict[str, dict[RecordPlace, float]] = defaultdict(dict)
    for event in run.history.select_events("finished", "dead-lettered", "acknowledged"):
        finish_times[event.shard].setdefault(event.place, event.t)
    if not finish_times and not run.limits.acknowledged:
        return
    positions: dict[str, list[PositionOrder]] = defaultdict(list)
    for shard, record_place in sorted({(event.shard, event.place) for event in run.dispatches}):
        positions[shard].append((1, *record_place))
    # For each record of a shard, in order, compute the time by which that record and all earlier ones were finished.
    all_finished_times = {
        shard: list(accumulate((finish_times[shard].get(order[1:], math.inf) for order in orders), max))
        for shard, orders in positions.items()
    }
    for write in run.history.writes:
        # If no worker remembers a deleted row, a worker may create it again at LATEST. No handler finishes the records
        # that are skipped in this way.
        is_row_remembered = write.after is not None and write.after.shard not in run.forgotten_shards
        if is_row_remembered and write.done and write.before and write.after and write.verb != "delete":
            shard, order = write.after.shard, write.after.checkpoint.order
            passed_count = bisect_right(positions[shard], order)
            if (
                order > write.before.checkpoint.order
                and passed_count
                and all_finished_times[shard][passed_count - 1] > write.t
            ):
                unfinished_place = next(
                    record_place
                    for record_place, finished_at in zip(positions[shard], all_finished_times[shard], strict=True)
                    if finished_at > write.t
                )
                description = f"{write.process} checkpointed {write.after.checkpoint.sequence} of {write.key}"
                yield Breach("unfinished", write.t, f"{description}, and no handler has finished {unfinished_place[1]}")


def check_only_holders_dispatch(run: JudgedRun) -> Iterator[Breach]:
    """Replay the writes, and check that each batch was dispatched by a process that held the lease (law 4)."""
    history, limits = run.history, run.limits
    if not history.writes or not limits.lease_seconds:
        return
    expiry_times: dict[tuple[str, str], float] = {}
    owners = {row.key: row.owner for row in history.first}
    writes = iter(history.writes)
    write = next(writes, None)
    for (dispatch_time, process, shard), records in groupby(
        run.dispatches, lambda dispatch: (dispatch.t, dispatch.process, dispatch.shard)
    ):
        while write is not None and write.t <= dispatch_time:
            if write.done and write.after is not None:
                owners[write.key] = None if write.verb == "delete" else write.after.owner
                if write.after.owner == write.worker:
                    expiry_times[write.process, write.key] = write.sent + limits.lease_seconds.get(write.worker, 0.0)
            write = next(writes, None)
        expiry_time = expiry_times.get((process, shard), 0.0)
        # A paused process cannot notice that it has lost the lease. After the pause, it needs a moment to notice.
        was_paused = any(
            paused_process == process and begin <= dispatch_time and end > dispatch_time - limits.notice_seconds
            for paused_process, begin, end in run.pauses
        )
        if (
            owners.get(shard) != parse_worker_id(process)
            and dispatch_time > expiry_time + limits.notice_seconds
            and not was_paused
        ):
            holding_period = f"held until {expiry_time:.3f}" if expiry_time else "never held"
            description = f"{process} dispatched {next(records).place[0]} of {shard}, which it {holding_period}"
            yield Breach("dispatched unheld", dispatch_time, f"{description}; its owner is {owners.get(shard)}")


def check_held_leases_are_read(run: JudgedRun) -> Iterator[Breach]:
    """Check that each held lease is read or released in time (law 5), if reads were recorded."""
    if not any(event.event == "read" for event in run.history.events):
        return
    activity_times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in run.history.select_events("read", "record", "finished", "dead-lettered"):
        activity_times[event.process, event.shard].append(event.t)
    for span in find_ownership_spans(run):
        times_in_span = [
            activity_time
            for activity_time in activity_times[span.process, span.key]
            if span.begin < activity_time < span.end
        ]
        for gap_start, gap_end in pairwise((span.begin, *times_in_span, span.end)):
            pause_durations = (
                end - begin
                for paused_process, begin, end in run.pauses
                if paused_process == span.process and begin < gap_end and end > gap_start
            )
            if gap_end - gap_start - sum(pause_durations) > UNREAD_SECONDS:
                description = f"{span.process} held {span.key} from {gap_start:.3f} and did not read it"
                yield Breach("held unread", gap_end, description)


@define
class OwnershipSpan:
    """A period in which a process holds a lease. `written` is the time of the process's last write of the lease."""

    process: str
    key: str
    begin: float
    end: float
    written: float


def find_ownership_spans(run: JudgedRun) -> Iterator[OwnershipSpan]:
    """Yield the periods in which a process held a lease, according to its writes.

    For a child shard, the period starts only when the parents have ended.
    """
    history = run.history
    end_times = {write.key: write.t for write in history.writes if write.done and write.after and write.after.ended}
    open_spans: dict[str, OwnershipSpan] = {}
    finished_spans: list[OwnershipSpan] = []

    def find_silence_limit(worker: str) -> float:
        return run.limits.lease_seconds.get(worker, SILENT_SECONDS)

    for write in history.writes:
        if not write.done or write.after is None:
            continue
        owner = None if write.verb == "delete" or write.after.ended else write.after.owner
        span = open_spans.get(write.key)
        if span is not None:
            worker = parse_worker_id(span.process)
            # The period ends when the worker is no longer the owner. If another process of the same worker writes the
            # lease, a new period starts.
            if owner != worker or (write.worker == worker and write.process != span.process):
                span.end = write.t
                finished_spans.append(open_spans.pop(write.key))
        # A worker counts as the holder from its own first write. After a hand-off, a lease therefore has no holder
        # until the next owner has claimed it.
        if owner == write.worker and write.key not in open_spans:
            parent_end_times = [end_times.get(parent, history.end) for parent in history.parents.get(write.key, ())]
            begin_time = max((write.t, *parent_end_times))
            open_spans[write.key] = OwnershipSpan(write.process, write.key, begin_time, history.end, write.t)
        elif (current_span := open_spans.get(write.key)) is not None and current_span.process == write.process:
            if write.t - current_span.written > find_silence_limit(write.worker):
                # The lease had expired, so the process dropped it, and took it again with this write. End the period,
                # and begin another one in the same object.
                finished_spans.append(evolve(current_span, end=write.t))
                current_span.begin = write.t
            current_span.written = write.t
    process_ends = {lifetime.process: lifetime.end for lifetime in run.lifetimes}
    for span in (*finished_spans, *open_spans.values()):
        # A process that died or stopped renewing no longer held the lease, even if no other process took it.
        silence_seconds = find_silence_limit(parse_worker_id(span.process))
        last_holding_time = min(span.end, process_ends.get(span.process, span.end), span.written + silence_seconds)
        span.end = max(span.begin, last_holding_time)
        yield span


CHECKPOINT_VERBS: frozenset[WriteVerb] = frozenset({"checkpoint", "checkpoint-late", "give"})
"""Writes that may move a checkpoint."""

SHARD_END_ORDER = SHARD_END.order

HOLDING_VERBS: frozenset[WriteVerb] = TAKING_VERBS | {"renew", "checkpoint"}
"""Writes whose sender holds the lease afterwards."""


def check_responses_agree(run: JudgedRun) -> Iterator[Breach]:
    """Check that responses to writes agree (laws 6 to 9 and 11), and yield the first breach of each law per lease."""
    answers_by_shard: dict[str, list[WriteAnswer]] = defaultdict(list)
    for answer in sorted(run.history.answers, key=lambda write_answer: write_answer.sent):
        answers_by_shard[answer.shard].append(answer)
    for shard, shard_answers in answers_by_shard.items():
        deletion_time = min((answer.sent for answer in shard_answers if answer.verb == "delete"), default=math.inf)
        answers_before_deletion = [answer for answer in shard_answers if answer.t < deletion_time]
        applied_answers = [answer for answer in answers_before_deletion if answer.done]
        first_writers: dict[str, WriteAnswer] = {}
        for answer in applied_answers:
            if answer.version and answer.verb not in VERBS_WITHOUT_VERSION_CHANGE:
                first_writer = first_writers.setdefault(answer.version, answer)
                if first_writer.process != answer.process:
                    writers = f"{answer.process} by a {answer.verb} and {first_writer.process} by a {first_writer.verb}"
                    yield Breach(
                        "two holders", answer.t, f"{writers} were both told that they made {shard} {answer.version}"
                    )
                    break
        yield from _find_decrease("counter", applied_answers, applied_answers, lambda write_answer: write_answer.epoch)
        reset_time = min((answer.sent for answer in shard_answers if answer.verb == "reset"), default=math.inf)
        checkpoint_answers = [
            answer for answer in applied_answers if answer.verb in CHECKPOINT_VERBS and answer.t < reset_time
        ]
        answers_with_checkpoint = [
            answer
            for answer in applied_answers
            if answer.verb in TAKING_VERBS | CHECKPOINT_VERBS - {"checkpoint-late"} and answer.t < reset_time
        ]
        yield from _find_decrease(
            "checkpoint went back",
            checkpoint_answers,
            answers_with_checkpoint,
            lambda write_answer: write_answer.checkpoint,
        )
        if run.limits.owned_checkpoints:
            yield from check_checkpoints_after_takes(shard, answers_before_deletion)
        yield from check_early_claims(run, shard, applied_answers)


def check_finished_stays_finished(run: JudgedRun) -> Iterator[Breach]:
    """Check that no reader repeats records of a shard whose end was checkpointed (law 12).

    A lease is exempt once an operator has deleted its row, once it was reset, or once a request without a response may
    have created its row again.
    """
    answers_by_shard: dict[str, list[WriteAnswer]] = defaultdict(list)
    for answer in run.history.answers:
        answers_by_shard[answer.shard].append(answer)
    for shard, shard_answers in answers_by_shard.items():
        end_times = [
            write.t
            for write in shard_answers
            if write.done and write.verb == "checkpoint" and write.checkpoint == SHARD_END_ORDER
        ]
        exempt_times = [
            answer.sent
            for answer in shard_answers
            if answer.verb == "reset"
            or (answer.verb == "delete" and answer.process == OPERATOR)
            or (answer.verb == "create" and answer.outcome == "unknown")
        ]
        end_time = min((time for time in end_times if time > run.history.recreated_at), default=math.inf)
        tenures = run.tenures.get(shard, ())
        records_read_before = {
            (record.place, record.digest) for tenure in tenures for record in tenure.records if record.t <= end_time
        }
        for later_tenure in (
            tenure for tenure in tenures if end_time < tenure.begin < min(exempt_times, default=math.inf)
        ):
            repeated_records = [
                record for record in later_tenure.records if (record.place, record.digest) in records_read_before
            ]
            if repeated_records:
                description = f"{later_tenure.process} dispatched {len(repeated_records)} records of {shard}"
                yield Breach("dispatched again", repeated_records[0].t, f"{description} after its end was checkpointed")
                break


def _find_decrease(
    kind: BreachKind,
    earlier_answers: Sequence[WriteAnswer],
    later_answers: Sequence[WriteAnswer],
    get_value: Callable[[WriteAnswer], Any],
) -> Iterator[Breach]:
    """Yield a breach for the first write whose value is lower than that of an earlier write.

    A write in `earlier_answers` is earlier than one in `later_answers` if its response arrived before the other write
    was sent. `later_answers` must be sorted by `sent`.
    """
    earlier_answers_left = sorted(earlier_answers, key=lambda other_answer: other_answer.t, reverse=True)
    highest_answer: WriteAnswer | None = None
    for answer in later_answers:
        while earlier_answers_left and earlier_answers_left[-1].t < answer.sent:
            earlier_answer = earlier_answers_left.pop()
            highest_answer = (
                earlier_answer if highest_answer is None else max(highest_answer, earlier_answer, key=get_value)
            )
        if highest_answer is not None and get_value(answer) < get_value(highest_answer):
            first_value = f"of {answer.shard}: {get_value(highest_answer)} was answered to {highest_answer.process}"
            description = f"{first_value}, and {get_value(answer)} to the later {answer.verb} of {answer.process}"
            yield Breach(kind, answer.t, description)
            return


def check_checkpoints_after_takes(shard: str, answers: Sequence[WriteAnswer]) -> Iterator[Breach]:
    """Check that no other worker took the lease between a worker's own take and its checkpoint (law 9)."""
    takes = [answer for answer in answers if answer.verb in TAKING_VERBS]
    for answer in answers:
        if not answer.done or answer.verb not in {"checkpoint", "give"}:
            continue
        own_takes = [take for take in takes if take.worker == answer.worker and take.sent < answer.t]
        # If a take has no response, it may have been applied at any later time, so no other take is known to come after
        # it.
        own_take_time = max(
            (take.t if take.done else math.inf for take in own_takes if take.outcome != "lost"), default=-math.inf
        )
        other_takes = (take for take in takes if take.done and take.worker != answer.worker)
        other_take = next((take for take in other_takes if take.sent > own_take_time and take.t < answer.sent), None)
        if other_take is not None:
            take_description = f"{other_take.process} had taken it {answer.sent - other_take.t:.3f} s before"
            description = f"{answer.process} wrote a {answer.verb} of {shard}, and {take_description}"
            yield Breach("checkpoint of another", answer.t, description)
            return


def check_early_claims(run: JudgedRun, shard: str, applied_answers: Sequence[WriteAnswer]) -> Iterator[Breach]:
    """Check that claims take only expired leases (law 11). Steals may take leases that are held."""
    for claim in applied_answers:
        if claim.verb != "claim" or claim.seen in {None, claim.worker}:
            continue
        # The lease expires a fixed time after the owner's last write that was confirmed before the claim was sent.
        owner_writes = [
            answer
            for answer in applied_answers
            if answer.worker == claim.seen and answer.verb in HOLDING_VERBS and answer.t < claim.sent
        ]
        last_write = owner_writes[-1] if owner_writes else None
        if last_write is None or not any(
            lifetime.process == last_write.process and lifetime.end > claim.t for lifetime in run.lifetimes
        ):
            continue
        held_until_time = last_write.sent + CLOCK_RATE * run.limits.lease_seconds.get(last_write.worker, 0.0)
        if claim.sent < held_until_time:
            description = f"{claim.process} claimed {shard}, which {last_write.process} held"
            remaining_time = f"for {held_until_time - claim.sent:.3f} s more by its {last_write.verb}"
            yield Breach("two holders", claim.t, f"{description} {remaining_time}")
            return


def check_only_writers_dispatch(run: JudgedRun) -> Iterator[Breach]:
    """Check that only holders dispatch (law 10), and yield the first breach for each process and lease."""
    history, limits = run.history, run.limits
    if not history.answers or not limits.lease_seconds:
        return
    write_times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for answer in sorted(history.answers, key=lambda write_answer: write_answer.sent):
        if answer.outcome != "lost" and answer.verb in HOLDING_VERBS:
            write_times[answer.process, answer.shard].append(answer.sent)
    reported_pairs: set[tuple[str, str]] = set()
    for record in run.dispatches:
        process_and_shard = record.process, record.shard
        own_write_times = write_times[process_and_shard]
        last_write_time = (
            own_write_times[earlier_write_count - 1]
            if (earlier_write_count := bisect_right(own_write_times, record.t))
            else -math.inf
        )
        expiry_time = last_write_time + limits.lease_seconds.get(record.worker, math.inf)
        was_paused = any(
            paused_process in {record.process, record.worker} and begin <= record.t and end > expiry_time
            for paused_process, begin, end in run.pauses
        )
        if (
            record.t > expiry_time + limits.notice_seconds
            and not was_paused
            and process_and_shard not in reported_pairs
        ):
            reported_pairs.add(process_and_shard)
            last_write = (
                f"wrote {record.t - last_write_time:.3f} s before for the last time"
                if own_write_times
                else "never wrote"
            )
            description = (
                f"{record.process} dispatched {record.place[0]} of {record.shard}, and {last_write} of the lease"
            )
            yield Breach("dispatched unheld", record.t, description)


NO_OWNER_NEEDED = "nobody is needed"
"""The value used as the owner of a lease that has ended or was deleted, and therefore needs no owner."""

OwnerTimeline = list[tuple[float, str | None]]
"""The owners of one lease, each with the time when it became the owner. None means that the lease had no owner."""


@frozen
class OwnerChange:
    """A change of a lease's owner. None means that the lease had no owner."""

    t: float
    key: str
    before: str | None
    after: str | None
    verb: str


def find_owner_changes(writes: Iterable[WriteEvent]) -> Iterator[OwnerChange]:
    """Yield all changes of owners, in order of time. Writes that end or delete a lease do not count as changes."""
    for write in writes:
        owner_before = write.before.owner if write.before else None
        owner_after = write.after.owner if write.after and write.verb != "delete" else None
        is_ended = write.after is not None and write.after.ended
        if write.done and owner_before != owner_after and not is_ended and write.verb != "delete":
            yield OwnerChange(write.t, write.key, owner_before, owner_after, write.verb)


def drop_taken_back_handoffs(owner_changes: Iterable[OwnerChange]) -> tuple[OwnerChange, ...]:
    """Leave out hand-offs that were taken back, because the next owner never started to read those leases (H3)."""
    changes_of_leases: dict[str, list[OwnerChange]] = {}
    for change in owner_changes:
        changes_of_lease = changes_of_leases.setdefault(change.key, [])
        if change.verb == "take-back" and changes_of_lease and changes_of_lease[-1].verb == "give":
            changes_of_lease.pop()
        else:
            changes_of_lease.append(change)
    return tuple(
        sorted(
            (change for changes_of_lease in changes_of_leases.values() for change in changes_of_lease),
            key=lambda change: change.t,
        )
    )


def list_written_owner_spans(history: RunHistory) -> dict[str, OwnerTimeline]:
    """Return the owners of each lease over time, according to the writes."""
    spans: dict[str, OwnerTimeline] = {row.key: [(0.0, row.owner)] for row in history.first}
    for write in history.writes:
        if write.done:
            needs_no_owner = write.verb == "delete" or write.after is None or write.after.ended
            _append_owner(
                spans.setdefault(write.key, []),
                write.t,
                NO_OWNER_NEEDED if needs_no_owner or not write.after else write.after.owner,
            )
    return spans


def list_reader_spans(
    tenures: Mapping[str, list[Tenure]], parents: Mapping[str, tuple[str, ...]]
) -> dict[str, OwnerTimeline]:
    """Return the readers of each shard over time. Unread shards are included if their parents were read to the end."""
    spans: dict[str, OwnerTimeline] = {}
    for shard in {*tenures, *parents}:
        readers = tenures.get(shard, [])
        last_parent_readers = [tenures[parent][-1] for parent in parents.get(shard, ()) if tenures.get(parent)]
        are_parents_finished = (
            last_parent_readers
            and len(last_parent_readers) == len(parents[shard])
            and all(tenure.how == "shard-ended" for tenure in last_parent_readers)
        )
        owners_with_times: OwnerTimeline = (
            [(max(tenure.end for tenure in last_parent_readers), None)] if are_parents_finished else []
        )
        for reader in readers:
            owners_with_times.append((reader.begin, reader.worker))
            # If another process is reading the shard when this reader stops, the other process remains the reader.
            if not any(other_reader.begin < reader.end < other_reader.end for other_reader in readers):
                owners_with_times.append((reader.end, NO_OWNER_NEEDED if reader.how == "shard-ended" else None))
        for time, owner in sorted(owners_with_times, key=lambda time_and_owner: time_and_owner[0]):
            _append_owner(spans.setdefault(shard, []), time, owner)
    return spans


def _append_owner(spans: OwnerTimeline, time: float, owner: str | None) -> None:
    if not spans or spans[-1][1] != owner:
        spans.append((time, owner))


def find_owners_at(history: RunHistory, time: float) -> dict[str, str | None]:
    """Return the owners, at time `time`, of all leases that have not ended."""
    spans = list_written_owner_spans(history).items()
    owners = {
        key: next((owner for owned_since, owner in reversed(owners_of_lease) if owned_since <= time), NO_OWNER_NEEDED)
        for key, owners_of_lease in spans
    }
    return {key: owner for key, owner in owners.items() if owner != NO_OWNER_NEEDED}


def measure_unowned_seconds(history: RunHistory, end: float, since: float = 0.0) -> dict[str, float]:
    """Return each lease's longest time in seconds without a living owner, between `since` and `end`."""
    return measure_longest_unowned(list_written_owner_spans(history), since, end, find_lifetimes(history.incidents))


def measure_longest_unowned(
    spans: Mapping[str, OwnerTimeline], since: float, end: float, lifetimes: Iterable[ProcessLifetime] | None = None
) -> dict[str, float]:
    """Return the longest time for which each lease had no living owner.

    If `lifetimes` is None, all owners count as living.
    """
    life_periods: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for lifetime in lifetimes or ():
        life_periods[lifetime.worker].append((lifetime.start, lifetime.end))
    always_living, longest_by_key = [(-math.inf, math.inf)], {}
    for key, spans_of_key in spans.items():
        spans_until_end = [span for span in spans_of_key if span[0] <= end]
        if not spans_until_end:
            continue
        span_ends = [span_start for span_start, _ in spans_until_end[1:]] + [end]
        # These are the periods in which a living worker owned the lease, or in which the ended lease needed no owner.
        owned_periods = sorted(
            (max(begin, start), min(period_end, life_end))
            for (begin, owner), period_end in zip(spans_until_end, span_ends, strict=True)
            for start, life_end in (
                always_living
                if owner == NO_OWNER_NEEDED or (owner is not None and lifetimes is None)
                else life_periods[owner or ""]
            )
        )
        # Pass over the periods in order. Until `covered_until`, every gap has been measured.
        longest_seconds, covered_until = 0.0, max(spans_until_end[0][0], since)
        for start, period_end in owned_periods:
            if period_end > start:
                longest_seconds, covered_until = (
                    max(longest_seconds, start - covered_until),
                    max(covered_until, period_end),
                )
        longest_by_key[key] = max(longest_seconds, end - covered_until)
    return longest_by_key


def count_rejected_writes(writes: Iterable[WriteEvent]) -> int:
    """Return the number of writes that were rejected because another worker wrote first.

    If a worker retries its own write, and the first attempt was applied after all, the rejected retry does not count.
    """
    return sum(
        not write.done
        and write.verb in VERBS_REJECTED_IN_RACES
        and (write.before is None or write.before.owner != write.worker)
        for write in writes
    )


QUIET_VERBS: frozenset[WriteVerb] = frozenset({"renew", "checkpoint", "checkpoint-late", "annotate", "take-back"})
"""Kinds of writes that are allowed once leases should no longer move.

The verbs "annotate" and "take-back" only finish a hand-off that was already counted as a move.
"""


def check_fleet_at_rest(run: JudgedRun) -> Iterator[Breach]:
    """Check that the group is at rest after the time `JudgeLimits.settled`.

    Only the writes of `QUIET_VERBS` and deletions of ended leases are allowed after that time. If a worker that plans
    is running, all leases must have owners and be evenly divided.
    """
    history, settled_time = run.history, run.limits.settled
    if settled_time is None:
        return
    for write in history.writes:
        # A worker may delete the lease of an ended shard whenever it lists the shards.
        is_expected_deletion = write.verb == "delete" and write.before is not None and write.before.ended
        if write.t > settled_time and write.verb not in QUIET_VERBS and not is_expected_deletion:
            lease_description = f"{write.key} ({write.before.owner if write.before else None})"
            description = (
                f"{write.process} wrote a {write.verb} of {lease_description}, {'done' if write.done else 'refused'}"
            )
            yield Breach("action at balance", write.t, description)
    if not run.planning_workers:
        return
    for key, seconds in measure_unowned_seconds(history, history.end, settled_time).items():
        if seconds > 0.0:
            description = f"{key} had no living owner for {seconds:.3f} s, although the faults had long ended"
            yield Breach("held by nobody", history.end, description)
    if run.limits.even:
        owners = find_owners_at(history, history.end)
        lease_counts = Counter(owner for owner in owners.values() if owner is not None)
        lease_counts_of_workers = {
            worker: lease_counts[worker]
            for worker in find_workers_alive_at(run.lifetimes, history.end - 1e-9) | run.planning_workers
        }
        rows = {write.key: write.after for write in history.writes if write.done}
        are_ended_leases_counted = run.limits.counts_ended and any(
            row is not None and row.ended for row in rows.values()
        )
        # A worker that does not plan takes no leases, so it may have fewer leases than the others. If the rule set
        # counts ended leases and there are some, evenness is not checked, because the counts here do not include them.
        description = describe_imbalance(lease_counts_of_workers, run.planning_workers, len(owners), run.limits.groups)
        if description and not are_ended_leases_counted:
            yield Breach("uneven", history.end, description)


def check_needless_moves(run: JudgedRun) -> Iterator[Breach]:
    """Yield a breach for each move after the allowed number of moves."""
    if run.limits.settled is None or run.limits.moves is None:
        return
    count_from, allowed_extra = run.limits.moves
    workers = find_workers_alive_at(run.lifetimes, run.history.end - 1e-9)
    least_move_count = least_moves(find_owners_at(run.history, count_from), workers, run.limits.groups)
    moves = [
        change
        for change in find_owner_changes(run.history.writes)
        if change.t >= count_from and change.before in find_workers_alive_at(run.lifetimes, change.t)
    ]
    for move_number, change in enumerate(
        moves[least_move_count + allowed_extra :], least_move_count + allowed_extra + 1
    ):
        description = f"{change.key} from {change.before} to {change.after} is move {move_number}"
        yield Breach("needless move", change.t, f"{description}, and {least_move_count} would have done")
