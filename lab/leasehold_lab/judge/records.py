"""Checks the laws about records and their dispatch.

1. Every record that the stream acknowledged is dispatched, and no other records are.
2. A record is dispatched for the first time only after all earlier records of its key. The records of a child shard are
   dispatched only after those of its parents.
3. While one process reads a shard, a record is dispatched again only if no handler had finished it. The next reader
   starts after the checkpoint that it received when it took the lease.
4. Each token (fencing number) of a shard belongs to one process, so a handler that compares tokens sees one reader at a
   time. Tokens start over if the row of a finished lease was deleted and a late request created it again.
"""

from bisect import bisect
from collections.abc import Iterator

from leasehold_lab.judge.breach import Breach
from leasehold_lab.judge.events import ReadingEvent, RecordPlace
from leasehold_lab.judge.run import TAKING_VERBS, JudgedRun


def check_sent_records_are_dispatched(run: JudgedRun) -> Iterator[Breach]:
    """Check that every acknowledged record was dispatched (law 1), except in shards that restarted at LATEST (L13).

    Also check that no other records were dispatched, and that each process dispatched only records of shards that it
    was
    reading.
    """
    # If no worker plans at the end of the run, the last records may have no reader.
    must_be_dispatched = run.limits.settled is None or run.planning_workers
    lost_records = [record for record in run.undispatched_records if record.key not in run.forgotten_shards]
    if must_be_dispatched and lost_records:
        first_lost_record = f"the first is number {lost_records[0].number} of {lost_records[0].key}"
        yield Breach("lost", run.history.end, f"{len(lost_records)} records were never dispatched, {first_lost_record}")
    if unsent_records := run.unsent_records:
        description = (
            f"{len(unsent_records)} records were dispatched and never sent, one of them of {unsent_records[0][0]}"
        )
        yield Breach("stranger", run.history.end, description)
    if records_outside_tenures := run.tenure_history.outside:
        first_record = records_outside_tenures[0]
        description = (
            f"{first_record.process} dispatched {len(records_outside_tenures)} records while not reading, "
            f"as of {first_record.shard}"
        )
        yield Breach("dispatched unheld", first_record.t, description)


def check_order_within_keys(run: JudgedRun) -> Iterator[Breach]:
    """Check that the records of each key are in order (law 2), within each tenure and then over all tenures."""
    for tenure in run.tenure_history.tenures:
        last_numbers: dict[str, int] = {}
        seen_places: set[RecordPlace] = set()
        for record in tenure.records:
            record_number = run.record_numbers.get((record.key, record.digest))
            if record_number is None or record.place in seen_places:
                continue  # Other laws report records that were never sent, and repeated records.
            seen_places.add(record.place)
            if record_number < last_numbers.get(record.key, record_number):
                earlier_position = f"after number {last_numbers[record.key]}, both of {tenure.shard}"
                description = f"{tenure.process} dispatched number {record_number} of {record.key} {earlier_position}"
                yield Breach("out of order", record.t, description)
                break
            last_numbers[record.key] = record_number
    first_dispatches: dict[tuple[str, int], float] = {}
    for record in run.dispatches:
        record_number = run.record_numbers.get((record.key, record.digest))
        if record_number is not None and (record.key, record.digest) not in run.former_stream_records:
            first_dispatches.setdefault((record.key, record_number), record.t)
    latest_by_key: dict[str, tuple[float, int]] = {}
    for (key, record_number), dispatch_time in sorted(first_dispatches.items()):
        latest_time, latest_number = latest_by_key.get(key, (dispatch_time, record_number))
        if dispatch_time < latest_time:
            yield Breach(
                "out of order",
                dispatch_time,
                f"number {record_number} of {key} was dispatched before number {latest_number}",
            )
            return
        latest_by_key[key] = (dispatch_time, record_number)


def check_parents_before_children(run: JudgedRun) -> Iterator[Breach]:
    """Check that records of a child shard are dispatched after those of its parents (law 2), regardless of their keys.

    Records of former streams are ignored, because their shards may have the same names as current ones. If an operator
    deleted a parent's row, a process that joins afterwards cannot know that the parent is unfinished, and breaks no
    law.
    """
    first_records: dict[str, ReadingEvent] = {}
    last_new_records: dict[str, ReadingEvent] = {}
    seen_places: set[tuple[str, RecordPlace]] = set()
    for record in run.dispatches:
        if (record.key, record.digest) in run.former_stream_records:
            continue
        first_records.setdefault(record.shard, record)
        # While a child is read, records of its parent may be repeated, but none may be dispatched for the first time.
        if (record.shard, record.place) not in seen_places:
            seen_places.add((record.shard, record.place))
            last_new_records[record.shard] = record
    for shard in run.tenures:
        for parent in run.history.parents.get(shard, ()):
            if (
                shard in first_records
                and parent in last_new_records
                and last_new_records[parent].t > first_records[shard].t
            ):
                child_record, parent_record = first_records[shard], last_new_records[parent]
                if run.must_assume_finished(child_record.process, parent, child_record.t):
                    continue
                description = f"{child_record.process} dispatched {child_record.place[0]} of {shard}"
                parent_position = f"before {parent_record.place[0]} of {parent}, its parent"
                yield Breach("out of order", child_record.t, f"{description} {parent_position}")


def check_repetitions(run: JudgedRun) -> Iterator[Breach]:
    """Check for forbidden repetitions (law 3), first within each tenure, and then from one tenure to the next."""
    # If handlers don't report when they finish, a record counts as finished when it is dispatched.
    are_finishes_reported = run.limits.acknowledged or any(event.event == "finished" for event in run.history.events)
    for tenure in run.tenure_history.tenures:
        first_records = {record.place: record for record in reversed(tenure.records)}
        repeated_records = (
            tenure.again
            if are_finishes_reported
            else [record for record in tenure.records if first_records[record.place] is not record]
        )
        if repeated_records:
            description = f"{tenure.process} dispatched {len(repeated_records)} records of {tenure.shard} twice"
            yield Breach("repeated", repeated_records[0].t, f"{description} without a change of owner")
    for change in run.reader_changes:
        if change.replayed or (change.duplicates and not run.limits.duplicates):
            repeated_count = change.replayed if run.limits.duplicates else change.duplicates
            circumstance = "that were checkpointed when it took it" if change.replayed else f"after {change.before}"
            description = f"{change.after} dispatched {repeated_count} records of {change.shard} again {circumstance}"
            yield Breach("dispatched again", change.t, description)


def check_one_process_per_token(run: JudgedRun) -> Iterator[Breach]:
    """Check that each token belongs to one process (law 4), separately for each row that the lease has had."""
    deletions = [(write.before.shard, write.t) for write in run.history.writes if write.before and write.after is None]
    deletions += [
        (answer.shard, answer.sent) for answer in run.history.answers if answer.verb == "delete" and answer.done
    ]
    applied_writes = [write for write in run.history.writes if write.done and write.after is not None]
    for shard, readers in run.tenures.items():
        deletion_times = sorted(deletion_time for deleted_shard, deletion_time in deletions if deleted_shard == shard)
        lease_writes = [write for write in applied_writes if write.key == shard] if deletion_times else []
        # A worker that remembers a deleted row recreates it with a higher counter, so its tokens continue.
        row_creation_times = sorted(
            write.t for write in lease_writes if write.verb == "create" and write.after and not write.after.epoch
        )
        takes = [write for write in lease_writes if write.verb in TAKING_VERBS]
        readers_by_token: dict[tuple[int, int, int], str] = {}
        # A reader gets its token when it starts, and keeps the token if it takes over a recreated row.
        for tenure in sorted(
            (tenure for tenure in readers if tenure.records), key=lambda read_tenure: read_tenure.records[0].t
        ):
            own_takes = (write.t for write in takes if write.process == tenure.process and write.t <= tenure.begin)
            row_number = bisect(row_creation_times, max(own_takes, default=0.0))
            for record in (record for record in tenure.records if record.token is not None):
                first_process = readers_by_token.setdefault(
                    (bisect(deletion_times, record.t), row_number, record.token or 0), record.process
                )
                if first_process != record.process:
                    description = f"{record.process} read {shard} under {record.token}, as {first_process} did"
                    yield Breach("token", record.t, description)
                    break
