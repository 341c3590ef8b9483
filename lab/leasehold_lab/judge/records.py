"""Checks the laws of records: every record is dispatched, in order, by one process per token, and not needlessly again.

1. Every record that the stream acknowledged is dispatched, and nothing else.
2. Within a key, and from a parent to its child, no record is dispatched before every earlier one has been once.
3. Within one tenure a record is dispatched again only if no handler had finished with it. A later tenure starts after
   the checkpoint that it took the shard with.
4. For one shard, each token is given to one process only, so a handler that compares tokens sees one reader at a time.
   If the row of a finished lease was deleted, and a request that arrived late recreated it, tokens start over.
"""

from bisect import bisect
from collections.abc import Iterator

from leasehold_lab.judge.breach import Breach
from leasehold_lab.judge.events import ReadingEvent, RecordPlace
from leasehold_lab.judge.run import TAKES, JudgedRun


def everything_sent_was_dispatched(run: JudgedRun) -> Iterator[Breach]:
    """Check law 1, except for records that no worker could know of, and that processes dispatch only what they read."""
    # If no worker plans at the end, the last records may have had no reader.
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
    """Check law 2 for each key: within each tenure, then across all owners and shards."""
    for tenure in run.reading.tenures:
        reached: dict[str, int] = {}
        seen: set[RecordPlace] = set()
        for record in tenure.records:
            number = run.numbers.get((record.key, record.digest))
            if number is None or record.place in seen:
                continue  # a stranger or a repeated record, which other laws report
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
    """Check law 2 across a split or merge, without regard to keys. Ignore former streams, whose shard names recur.

    A process that joined after the parent's row was deleted takes the parent for finished, and cannot know better.
    """
    first: dict[str, ReadingEvent] = {}
    last_new: dict[str, ReadingEvent] = {}
    seen: set[tuple[str, RecordPlace]] = set()
    for record in run.records:
        if (record.key, record.digest) in run.former:
            continue
        first.setdefault(record.shard, record)
        # A parent's records may be repeated while its child is read, but none may come for the first time.
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
    """Check law 3: within a tenure, then from one tenure to the next."""
    # If handlers don't report when they have finished, they count as having finished at once.
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
    """Check law 4, separately for each row that the shard has had."""
    deleted = [(write.before.shard, write.t) for write in run.history.writes if write.before and write.after is None]
    deleted += [
        (answer.shard, answer.sent) for answer in run.history.answers if answer.verb == "delete" and answer.done
    ]
    done = [write for write in run.history.writes if write.done and write.after is not None]
    for shard, readers in run.tenures.items():
        ends = sorted(t for deleted_shard, t in deleted if deleted_shard == shard)
        written = [write for write in done if write.key == shard] if ends else []
        # A worker that remembers the row recreates it with a higher counter, and continues with the same tokens.
        unseen = sorted(
            write.t for write in written if write.verb == "create" and write.after and not write.after.epoch
        )
        takes = [write for write in written if write.verb in TAKES]
        readers_by_token: dict[tuple[int, int, int], str] = {}
        # A token is given when reading begins, and kept if its owner takes over a recreated row.
        for tenure in sorted((tenure for tenure in readers if tenure.records), key=lambda each: each.records[0].t):
            mine = (write.t for write in takes if write.process == tenure.process and write.t <= tenure.begin)
            row = bisect(unseen, max(mine, default=0.0))
            for record in (record for record in tenure.records if record.token is not None):
                other = readers_by_token.setdefault((bisect(ends, record.t), row, record.token or 0), record.process)
                if other != record.process:
                    why = f"{record.process} read {shard} under {record.token}, as {other} did"
                    yield Breach("token", record.t, why)
                    break
