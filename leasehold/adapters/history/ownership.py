"""The owners of each lease over time, by its writes or by its readers."""

import math
from collections.abc import Iterable, Iterator, Mapping

from attrs import frozen

from leasehold.adapters.history.events import REFUSABLE, RunHistory, WriteEvent
from leasehold.adapters.history.lives import Life, lives
from leasehold.adapters.history.tenures import Tenure

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
