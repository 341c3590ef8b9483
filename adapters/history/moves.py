"""How often a lease left a living worker, against the least that any balanced division would have needed.

A history is cut at each deed. What is held at the end of a part, and by whom at its start, says how few
moves would have done: leases that are new, or whose owner died, go where they are wanted for nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from adapters.history.tenures import Tenure
from adapters.history.told import Deed


def moves(tenures: Mapping[str, list[Tenure]], deeds: Sequence[Deed]) -> tuple[int, int]:
    """Moves made, and the least possible, up to the deed called end."""
    done = least = 0
    living: set[str] = set()
    for deed, following in pairwise(sorted(deeds, key=lambda deed: deed.t)):
        if deed.what == "end":
            break
        living = _after(deed, living)
        done += sum(_moved(readers, living, deed.t, following.t) for readers in tenures.values())
        least += _needed(tenures, living, deed.t, following.t)
    return done, least


def least_moves(held: Iterable[int], leases: int) -> int:
    """The fewest leases that must leave their owners until no two workers differ by more than one.

    `held` is what each worker has of `leases`; the rest is free for the taking.
    """
    counts = sorted(held, reverse=True)
    if not counts:
        return 0
    floor, extras = divmod(leases, len(counts))
    return sum(max(count - floor - (place < extras), 0) for place, count in enumerate(counts))


def _after(deed: Deed, living: set[str]) -> set[str]:
    match deed.what:
        case "join":
            return living | {deed.subject}
        case "kill" | "leave":
            return living - {deed.subject}
        case _:
            return living


def _moved(readers: list[Tenure], living: set[str], start: float, end: float) -> int:
    return sum(
        before.worker in living and before.worker != after.worker
        for before, after in pairwise(readers)
        if start <= after.begin < end
    )


def _needed(tenures: Mapping[str, list[Tenure]], living: set[str], start: float, end: float) -> int:
    counts = dict.fromkeys(living, 0)
    there = 0
    for readers in tenures.values():
        there += _reader_at(readers, end) is not None
        owner = _reader_at(readers, start)
        if owner in counts and _reader_at(readers, end) is not None:
            counts[owner] += 1
    return least_moves(counts.values(), there)


def _reader_at(readers: list[Tenure], t: float) -> str | None:
    return next((tenure.worker for tenure in reversed(readers) if tenure.begin < t <= tenure.end), None)
