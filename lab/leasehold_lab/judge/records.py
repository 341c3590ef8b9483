"""Checks the laws about records and their dispatch.

1. Every record that the stream acknowledged is dispatched, and no other records are.
2. A record is dispatched for the first time only after all earlier records of its key. The records of a child shard are
   dispatched only after those of its parents.
3. While one process reads a shard, a record is dispatched again only if no handler had finished with it. The next
   reader starts after the checkpoint that it received when it took the lease.
4. Each token (fencing number) of a shard belongs to one process, so a handler that compares tokens sees one reader at a
   time. Tokens start over if the row of a finished lease was deleted and a late request created it again.
"""

from bisect import bisect
from collections.abc import Iterator

from leasehold_lab.judge.breach import Breach
from leasehold_lab.judge.events import ReadingEvent, RecordPlace
from leasehold_lab.judge.run import TAKES, JudgedRun


def everything_sent_was_dispatched(run: JudgedRun) -> Iterator[Breach]:
    """Check law 1, except for records that no worker could know of.

    Also check that each process dispatches only records of shards that it is reading.
    """
    # If no worker plans at the end, the last records may have no reader.
    due = run.limits.settled is None or run.planners
    lost = [record for record in run.lost if record.key not in run.forgotten]
    if due and lost:
        first = f"the first is number {lost[0].number} of {lost[0].key}"
        yield Breach("lost", run.history.end, f"{len(lost)} records were never handed over, {first}")
    if run.strangers:
        why = f"{len(run.strangers)} records were handed over and never sent, one of them of {run.strangers[0][0]}"
        yield Breach("stranger", run.history.end, why)
    if outside := run.reading.outside:
        why = f"{outside[0].process} handed over {len(outside)} records while not reading, as of {outside[0].shard}"
        yield Breach("handed over unheld", outside[0].t, why)


def in_order_within_a_key(run: JudgedRun) -> Iterator[Breach]:
    """Check law 2 for each key, first for each reader of a shard, and then for all readers and shards together."""
    for tenure in run.reading.tenures:
        reached: dict[str, int] = {}
        seen: set[RecordPlace] = set()
        for record in tenure.records:
            number = run.numbers.get((record.key, record.digest))
            if number is None or record.place in seen:
                continue  # the record was never sent, or is repeated, which other laws report
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
        if number is not None and (record.key, record.digest) not in run.former:
            first.setdefault((record.key, number), record.t)
    latest: dict[str, tuple[float, int]] = {}
    for (key, number), t in sorted(first.items()):
        before, other = latest.get(key, (t, number))
        if t < before:
            yield Breach("out of order", t, f"number {number} of {key} was handed over before number {other}")
            return
        latest[key] = (t, number)


def parents_before_children(run: JudgedRun) -> Iterator[Breach]:
    """Check law 2 for parents and children, regardless of keys.

    Records of former streams are ignored, because their shards may have the same names. If an operator deleted a
    parent's row, a process that joins afterwards cannot know that the parent is unfinished, and breaks no law.
    """
    first: dict[str, ReadingEvent] = {}
    last_new: dict[str, ReadingEvent] = {}
    seen: set[tuple[str, RecordPlace]] = set()
    for record in run.records:
        if (record.key, record.digest) in run.former:
            continue
        first.setdefault(record.shard, record)
        # While a child is read, records of its parent may be repeated, but none may be dispatched for the first time.
        if (record.shard, record.place) not in seen:
            seen.add((record.shard, record.place))
            last_new[record.shard] = record
    for shard in run.tenures:
        for parent in run.history.parents.get(shard, ()):
            if shard in first and parent in last_new and last_new[parent].t > first[shard].t:
                early, late = first[shard], last_new[parent]
                if run.unaware(early.process, parent, early.t):
                    continue
                why = f"{early.process} handed over {early.place[0]} of {shard} before {late.place[0]} of {parent}"
                yield Breach("out of order", early.t, f"{why}, its parent")


def again_only_where_due(run: JudgedRun) -> Iterator[Breach]:
    """Check law 3, first within each tenure, and then from one tenure to the next."""
    # If handlers don't report that they have finished, they count as finished at the dispatch.
    finish_reported = run.limits.acknowledged or any(event.event == "finished" for event in run.history.events)
    for tenure in run.reading.tenures:
        first = {record.place: record for record in reversed(tenure.records)}
        again = (
            tenure.again
            if finish_reported
            else [record for record in tenure.records if first[record.place] is not record]
        )
        if again:
            why = f"{tenure.process} handed over {len(again)} records of {tenure.shard} twice without a change of owner"
            yield Breach("repeated", again[0].t, why)
    for change in run.reader_changes:
        if change.replayed or (change.duplicates and not run.limits.duplicates):
            count = change.replayed if run.limits.duplicates else change.duplicates
            which = "that were checkpointed when it took it" if change.replayed else f"after {change.before}"
            why = f"{change.after} handed over {count} records of {change.shard} again {which}"
            yield Breach("handed over again", change.t, why)


def one_process_for_each_token(run: JudgedRun) -> Iterator[Breach]:
    """Check law 4, separately for each row that the shard's lease has had."""
    deleted = [(write.before.shard, write.t) for write in run.history.writes if write.before and write.after is None]
    deleted += [
        (answer.shard, answer.sent) for answer in run.history.answers if answer.verb == "delete" and answer.done
    ]
    done = [write for write in run.history.writes if write.done and write.after is not None]
    for shard, readers in run.tenures.items():
        ends = sorted(t for deleted_shard, t in deleted if deleted_shard == shard)
        written = [write for write in done if write.key == shard] if ends else []
        # A worker that remembers a deleted row recreates it with a higher counter, so its tokens continue.
        unseen = sorted(
            write.t for write in written if write.verb == "create" and write.after and not write.after.epoch
        )
        takes = [write for write in written if write.verb in TAKES]
        readers_by_token: dict[tuple[int, int, int], str] = {}
        # A reader gets its token when it starts, and keeps the token if it takes over a recreated row.
        for tenure in sorted((tenure for tenure in readers if tenure.records), key=lambda each: each.records[0].t):
            mine = (write.t for write in takes if write.process == tenure.process and write.t <= tenure.begin)
            row = bisect(unseen, max(mine, default=0.0))
            for record in (record for record in tenure.records if record.token is not None):
                other = readers_by_token.setdefault((bisect(ends, record.t), row, record.token or 0), record.process)
                if other != record.process:
                    why = f"{record.process} read {shard} under {record.token}, as {other} did"
                    yield Breach("token", record.t, why)
                    break
