"""The story of each lease and each worker, folded from a history: who owned what from when to when, who was alive."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from attrs import frozen

from adapters.simulator.told import REFUSABLE, Deed, History, Wrote
from balancer.groups import Groups, path_of


@frozen
class Life:
    """A process of a worker, from its start to its end; `leaves` is when it was told to go."""

    worker: str
    process: str
    start: float
    leaves: float = math.inf
    end: float = math.inf


@frozen
class Change:
    """A lease passed from one owner (None: nobody) to another."""

    t: float
    key: str
    before: str | None
    after: str | None
    verb: str


def lives(deeds: Iterable[Deed]) -> tuple[Life, ...]:
    """Every process, in order of start."""
    found: dict[str, Life] = {}
    for deed in deeds:
        match deed.what:
            case "start":
                found[deed.subject] = Life(deed.subject.rpartition("#")[0], deed.subject, deed.t)
            case "leave":
                life = found[deed.subject]
                found[deed.subject] = Life(life.worker, life.process, life.start, deed.t)
            case "crash" | "gone":
                life = found[deed.subject]
                found[deed.subject] = Life(life.worker, life.process, life.start, min(life.leaves, deed.t), deed.t)
            case _:
                pass
    return tuple(found.values())


def alive_at(all_lives: Iterable[Life], t: float) -> frozenset[str]:
    """The workers that run then and have not been told to go."""
    return frozenset(life.worker for life in all_lives if life.start <= t < life.leaves)


def changes(writes: Iterable[Wrote]) -> Iterator[Change]:
    """Every change of owner, in order of time; the end or removal of a lease is none."""
    for write in writes:
        before = write.before.owner if write.before else None
        after = write.after.owner if write.after and write.verb != "delete" else None
        ended = write.after is not None and write.after.ended
        if write.done and before != after and not ended and write.verb != "delete":
            yield Change(write.t, write.key, before, after, write.verb)


def settled(passed: Iterable[Change]) -> tuple[Change, ...]:
    """Without the gifts that were taken back: nobody but the giver ever read the lease (H3)."""
    kept: dict[str, list[Change]] = {}
    for change in passed:
        of_one = kept.setdefault(change.key, [])
        if change.verb == "take-back" and of_one and of_one[-1].verb == "give":
            of_one.pop()
        else:
            of_one.append(change)
    return tuple(sorted((change for of_one in kept.values() for change in of_one), key=lambda change: change.t))


def owners_at(history: History, t: float) -> dict[str, str | None]:
    """Who owns each unended lease then."""
    owners = {row.key: row.owner for row in history.first}
    for write in history.writes:
        if write.t > t:
            break
        _apply(owners, write)
    return owners


def unowned(history: History, end: float, since: float = 0.0) -> dict[str, float]:
    """By lease: the longest time in seconds, between these moments, in which it had no living owner."""
    by_worker: dict[str, list[Life]] = {}
    for life in lives(history.deeds):
        by_worker.setdefault(life.worker, []).append(life)
    spans: dict[str, list[tuple[float, str | None]]] = {row.key: [(0.0, row.owner)] for row in history.first}
    for write in history.writes:
        if write.done and write.t <= end:
            _span(spans.setdefault(write.key, []), write)
    return {key: _longest(owned, by_worker, since, end) for key, owned in spans.items() if owned}


OVER = "nobody is needed"


def _span(owned: list[tuple[float, str | None]], write: Wrote) -> None:
    over = write.verb == "delete" or write.after is None or write.after.ended
    owner = OVER if over or write.after is None else write.after.owner
    if not owned or owned[-1][1] != owner:
        owned.append((write.t, owner))


def _longest(
    owned: list[tuple[float, str | None]], by_worker: Mapping[str, list[Life]], begin: float, end: float
) -> float:
    stops = [t for t, _ in owned[1:]] + [end]
    spans = zip(owned, stops, strict=True)
    marks = [mark for (t, owner), stop in spans for mark in _marks(owner, t, stop, by_worker)]
    longest, since = 0.0, None
    for t, held in marks:
        if not held and since is None:
            since = t
        elif held and since is not None:
            longest, since = max(longest, t - max(since, begin)), None
    return max(longest, end - max(since, begin)) if since is not None else longest


def _marks(
    owner: str | None, start: float, stop: float, by_worker: Mapping[str, list[Life]]
) -> Iterator[tuple[float, bool]]:
    """As of when, while this owner is named, somebody living has it, or nobody."""
    if owner == OVER:
        yield start, True
        return
    t = start
    for life in by_worker.get(owner or "", ()):
        if life.start < stop and life.end > t:
            if life.start > t:
                yield t, False
            yield max(life.start, t), True
            t = life.end
    if t < stop:
        yield t, False


def least_moves(owners: Mapping[str, str | None], workers: Iterable[str], groups: Groups = None) -> int:
    """The fewest leases that must leave living workers until all is even, groups of one level included.

    `owners` by lease; whatever belongs to none of the workers is free for the taking (L1).
    """
    held = Counter(owner for owner in owners.values() if owner is not None)
    counts = {worker: held[worker] for worker in workers}
    if not counts:
        return 0
    floor, extras = divmod(len(owners), len(counts))
    surplus = sum(max(count - floor, 0) for count in counts.values())
    members = Counter(path_of(worker, groups) for worker in counts)
    above = Counter(path_of(worker, groups) for worker, count in counts.items() if count > floor)
    kept = wanting = spare = 0
    for group, size in members.items():
        least, fraction = divmod(extras * size, len(counts))
        kept += min(least, above[group])
        spare += least
        wanting += fraction > 0 and above[group] > least
    return surplus - kept - min(extras - spare, wanting)


def refused(writes: Iterable[Wrote]) -> int:
    """Writes for which somebody else was faster; not those that one's own unanswered write had done already."""
    return sum(
        not write.done and write.verb in REFUSABLE and (write.before is None or write.before.owner != write.worker)
        for write in writes
    )


def _apply(owners: dict[str, str | None], write: Wrote) -> None:
    if not write.done:
        return
    if write.verb == "delete" or (write.after is not None and write.after.ended):
        owners.pop(write.key, None)
    elif write.after is not None:
        owners[write.key] = write.after.owner
