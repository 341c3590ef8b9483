"""The laws of records: every one is handed over, in order, to one reader by token, and again only where that is due.

Law 1: what the stream took is handed over, and nothing else. Law 2: within a key, and from a parent to its child, no
record is handed over before an earlier one has been once. Law 3: within one tenure a record comes again only if no
handler had finished with it; a later tenure begins behind the checkpoint that it took the shard with. Law 4: of one
shard, a token is given to one process alone, so that whoever compares tokens hears one reader at a time. A finished
lease whose row was deleted, and made anew by a request that arrived late, begins at its first token again.
"""

from bisect import bisect
from collections.abc import Iterator

from leasehold_lab.judge.breach import Breach
from leasehold_lab.judge.events import ReadingEvent, RecordPlace
from leasehold_lab.judge.run import TAKES, JudgedRun


def all_that_was_sent(run: JudgedRun) -> Iterator[Breach]:
    """Law 1, but for what nobody could remember; and a process hands over only shards that it has begun to read."""
    # Where nobody plans at the end, the last records may have had nobody to read them.
    due = run.limits.settled is None or run.planners
    lost = [each for each in run.lost if each.key not in run.forgotten]
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
    """Law 2 of one key: within each tenure, then across all owners and shards."""
    for tenure in run.reading.tenures:
        reached: dict[str, int] = {}
        seen: set[RecordPlace] = set()
        for record in tenure.records:
            number = run.numbers.get((record.key, record.digest))
            if number is None or record.place in seen:
                continue  # a stranger, or repeated: named by another law
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
    """Law 2 across a split or merge, where keys need not be known; shards of a former stream have the same names.

    A process that joined after the parent's row was deleted takes it for finished, and cannot know better.
    """
    first: dict[str, ReadingEvent] = {}
    last_new: dict[str, ReadingEvent] = {}
    seen: set[tuple[str, RecordPlace]] = set()
    for record in run.records:
        if (record.key, record.digest) in run.former:
            continue
        first.setdefault(record.shard, record)
        # A parent's records may come again while its child is read; what comes for the first time may not.
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
    """Law 3: within a tenure, then from one tenure to the next."""
    # Where handlers do not say when they have finished, they count as having finished at once.
    told = run.limits.acknowledged or any(event.event == "finished" for event in run.history.events)
    for tenure in run.reading.tenures:
        first = {record.place: record for record in reversed(tenure.records)}
        again = tenure.again if told else [each for each in tenure.records if first[each.place] is not each]
        if again:
            why = f"{tenure.process} handed over {len(again)} records of {tenure.shard} twice without a change of owner"
            yield Breach("repeated", again[0].t, why)
    for change in run.reader_changes:
        if change.replayed or (change.duplicates and not run.limits.duplicates):
            count = change.replayed if run.limits.duplicates else change.duplicates
            behind = "that were checkpointed when it took it" if change.replayed else f"after {change.before}"
            why = f"{change.after} handed over {count} records of {change.shard} again {behind}"
            yield Breach("handed over again", change.t, why)


def one_process_for_each_token(run: JudgedRun) -> Iterator[Breach]:
    """Law 4, apart for each row that the shard has had."""
    deleted = [(write.before.shard, write.t) for write in run.history.writes if write.before and write.after is None]
    deleted += [(each.shard, each.sent) for each in run.history.answers if each.verb == "delete" and each.done]
    done = [each for each in run.history.writes if each.done and each.after is not None]
    for shard, readers in run.tenures.items():
        ends = sorted(t for of, t in deleted if of == shard)
        written = [each for each in done if each.key == shard] if ends else []
        # By one that remembers the row it is made with a higher counter, and goes on with the same tokens.
        unseen = sorted(each.t for each in written if each.verb == "create" and each.after and not each.after.epoch)
        takes = [each for each in written if each.verb in TAKES]
        given: dict[tuple[int, int, int], str] = {}
        # A token is given when a reading begins, and kept where its owner takes a row that was made anew over.
        for tenure in sorted((each for each in readers if each.records), key=lambda each: each.records[0].t):
            mine = (each.t for each in takes if each.process == tenure.process and each.t <= tenure.begin)
            row = bisect(unseen, max(mine, default=0.0))
            for record in (each for each in tenure.records if each.token is not None):
                other = given.setdefault((bisect(ends, record.t), row, record.token or 0), record.process)
                if other != record.process:
                    why = f"{record.process} read {shard} under {record.token}, as {other} did"
                    yield Breach("token", record.t, why)
                    break
