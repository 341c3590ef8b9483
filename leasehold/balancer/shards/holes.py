"""Hash ranges of a stream that nothing covers."""

from collections.abc import Iterable

from leasehold.balancer.model import HASH_KEYS, HashRange, Hole, Lease


def first_hole(ranges: Iterable[HashRange]) -> HashRange | None:
    """The first stretch of hash keys that none of these ranges covers, or None; overlaps are fine.

    Source: KCL's PeriodicShardSyncManager. It also sees a hole where a wide range comes before a
    narrow one that does not reach the last key; that is no hole, and is not reported here.
    """
    reach = HASH_KEYS[0] - 1
    for first, last in sorted(ranges):
        if first > reach + 1:
            return (reach + 1, first - 1)
        reach = max(reach, last)
    return None if reach >= HASH_KEYS[1] else (reach + 1, HASH_KEYS[1])


def holes_after(leases: Iterable[Lease], earlier: tuple[Hole, ...]) -> tuple[Hole, ...]:
    """The first hole of each stream in a full reading, with how many readings in a row showed it (L7).

    A different hole counts from 1 again. A stream with an unended lease of unknown range says nothing.
    """
    times = {(hole.stream, hole.first, hole.last): hole.times for hole in earlier}
    found = []
    for stream, ranges in sorted(_ranges(leases).items()):
        known = [each for each in ranges if each is not None]
        hole = first_hole(known) if len(known) == len(ranges) else None
        if hole is not None:
            found.append(Hole(stream, *hole, times=times.get((stream, *hole), 0) + 1))
    return tuple(found)


def _ranges(leases: Iterable[Lease]) -> dict[str, list[HashRange | None]]:
    """The hash ranges of each stream's unended leases; a stream whose leases have all ended has none."""
    streams: dict[str, list[HashRange | None]] = {}
    for lease in leases:
        ranges = streams.setdefault(lease.stream, [])
        if not lease.ended:
            ranges.append(lease.hash_range)
    return streams
