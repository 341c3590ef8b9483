"""Computes how many leases each worker should hold (its share), and which leases it takes (M1, M2, M4, M6, M7).

The share of a worker is the mean number of leases, rounded down (the floor). For the workers that `workers_with_extra`
returns, the share is one more. It is never more than `max_leases`. Hand-offs in progress count as done (H1), so shares
stay the same while moves are carried out.

In the line, the free leases come first, ordered by digest. They are followed by the surplus leases of the donors,
ordered by donor name and, for each donor, by digest (M4). The workers that lack leases have places along the line in
order of name, and each of them takes as many leases as it lacks. Workers that read the same rows see the same line and
the same places, so no two of them choose the same lease. Workers that write no bulletin, such as KCL 2.x workers, have
the last places, so that no other worker has to wait until they act (M15).

Example: a holds s-1 to s-5, b holds s-6 to s-8, c and d hold one lease each, and s-11 is free. With eleven leases and
four workers, the floor is 2 and there are three extras. Two of them go to a and b, which already hold more than the
floor, and the third goes to c or d by digest. If c gets the third extra, the shares are 3, 3, 3 and 2. The line
consists of s-11, followed by a's surplus of two leases, say s-2 and s-4. c lacks two leases and takes s-11 and s-2, and
d lacks one lease and takes s-4.

A division of the leases is even if workers, and groups of workers, differ as little as possible (M2). In an even
division, every worker holds the mean number of leases, rounded down or up. Likewise, every group holds its proportional
number of leases, rounded down or up, at every level of the tree of groups (S8). Among all even divisions, this module
chooses one that needs the fewest moves. The choice does not change while the moves are in progress (S4).

Without groups, the only question is which workers get an extra. Workers that already hold more than the floor come
first, because they keep a lease without a move. The other workers are chosen by a digest of their ids, which every
worker computes in the same way.

Moves do not change the choice. A worker above the floor that gets an extra stays above the floor. A worker that is
chosen by digest rises to floor + 1 when it takes its extra, and from then on it is among the workers that come first.

With groups, the extras are passed down the tree. If a group has n of all N workers, it is entitled to n / N of all
extras. It always gets the whole part of this number, its *least*. The remaining fractions add up to whole extras, which
the parent group hands out one by one, at most one to each of its parts, and none to a part without a fraction. Parts in
which one more extra saves a move come first. The other parts follow by decreasing fraction, and parts with equal
fractions by name.

Example, with prefixes as groups: x-1, x-2 and x-3 hold 3, 3 and 2 leases, and y-1 and y-2 hold 2 each. With twelve
leases and five workers, the floor is 2 and there are two extras. Group x is entitled to 2 x 3 / 5 extras, which is 1
and a fraction of 1/5. Group y is entitled to 2 x 2 / 5 extras, which is 0 and a fraction of 4/5. Group x gets one extra
in any case, and one extra is left. By fractions alone, it would go to y, and a lease would move from x to y. However, x
has two workers above the floor, which is more than its least of one, so a second extra saves this move. Therefore, x
gets the extra, and no lease moves. Both divisions are even: 8 leases for x and 4 for y are 7.2 rounded up and 4.8
rounded down, and 7 and 5 would be 7.2 rounded down and 4.8 rounded up.

If groups are nested, the parent must know whether one more extra for a group would save a move. The answer depends on
the part of the group that would get the extra. To find this part, distribute the group's least among its parts in the
order above. The first part that gets no additional extra would get the next one. Parts in which an extra saves a move
come first, so if an extra saves no move in this part, it saves none in any later part.

Before a newcomer takes leases from living workers, it waits for other workers that are joining (C10).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from heapq import nsmallest
from itertools import groupby
from typing import Any, Literal

from attrs import frozen

from leasehold.balancer.census import Census, our_workers
from leasehold.balancer.chance import digest_under, order_under
from leasehold.balancer.handoff import pending_handoffs
from leasehold.balancer.model import History, Lease, Me
from leasehold.balancer.rule_set import FleetSeconds
from leasehold.balancer.rules.loads import LOAD_BAND, loads_of, mean_weight, weight_of

Groups = Literal["prefix"] | tuple[str, ...] | None

_digest = digest_under("minimal")


def path_of(worker: str, groups: Groups) -> tuple[str, ...]:
    """Return the groups to which a worker belongs according to its id, outermost first.

    If `groups` is "prefix", there is one level of groups, named by the part of the id before the last "-". Otherwise,
    `groups` contains a separator for each level, and the name of the group is the part of the id before this separator.
    If the separator does not occur, the name is empty, so all workers without the separator form one group.
    """
    if groups is None:
        return ()
    if groups == "prefix":
        return (worker.rpartition("-")[0],)
    path = []
    for separator in groups:
        name, match, remainder = worker.partition(separator)
        path.append(name if match else "")
        worker = remainder if match else worker
    return tuple(path)


def workers_with_extra(counts: Mapping[str, int], base_share: int, extra_count: int, groups: Groups) -> frozenset[str]:
    """Return the workers whose share is one more than `base_share` (M2).

    The result contains `extra_count` workers, or all workers if there are fewer.
    """
    if not extra_count:
        return frozenset()
    if groups is None:
        return frozenset(_members_with_extra(counts, counts, base_share, extra_count))
    members = sorted((path_of(worker, groups), worker) for worker in counts)
    tree = _Tree(counts, base_share, extra_count, len(counts), len(groups) if isinstance(groups, tuple) else 1)
    return frozenset(tree.favoured(tree.group(members, 0), extra_count))


def _members_with_extra(
    workers: Iterable[str], counts: Mapping[str, int], base_share: int, extra_count: int
) -> list[str]:
    """Return the workers of one group that get its extras.

    Workers above the floor come first, because they keep their extra lease. The others are chosen by digest.
    """
    workers_above = [worker for worker in workers if counts[worker] > base_share]
    chosen_workers = _first_by_digest(workers_above, extra_count)
    workers_below = (
        [] if len(workers_above) >= extra_count else [worker for worker in workers if counts[worker] <= base_share]
    )
    return chosen_workers + _first_by_digest(workers_below, extra_count - len(chosen_workers))


def _first_by_digest(workers: list[str], count: int) -> list[str]:
    """Return the first `count` workers in order of digest, or all workers if there are fewer."""
    if len(workers) <= count:
        return workers
    return nsmallest(count, workers, key=lambda worker: (_digest(worker), worker)) if count > 0 else []


@frozen
class _Group:
    """A node in the tree of groups.

    Attributes:
        least: The number of extras that the group gets in any case: its proportional part of all extras, rounded down.
        fraction: The remainder of this division, in units of one extra divided by the number of all workers. If it is
            0, the group gets no further extra.
        would_save_move: Whether a move would be saved if the group got one extra more than `least`.
        parts: The subgroups, in the order in which they get further extras.
    """

    name: str
    workers: tuple[str, ...]
    least: int
    fraction: int
    would_save_move: bool
    parts: tuple["_Group", ...] = ()


@frozen
class _Tree:
    """Computes the groups, and the workers that get an extra.

    Attributes:
        counts: The number of leases of each worker.
        floor: The share of a worker without an extra.
        extras: The number of leases that remain after every worker got the floor.
        size: The number of workers.
        depth: The number of group levels.
    """

    counts: Mapping[str, int]
    floor: int
    extras: int
    size: int
    depth: int

    def group(self, members: Sequence[tuple[tuple[str, ...], str]], level: int, name: str = "") -> _Group:
        """Return the group of these workers, with its subgroups.

        `members` are sorted (path, worker) pairs whose paths are equal in the levels before `level`.
        """
        workers = tuple(worker for _, worker in members)
        base_count, remainder = divmod(self.extras * len(workers), self.size)
        if level == self.depth:
            above_count = sum(self.counts[worker] > self.floor for worker in workers)
            return _Group(name, workers, base_count, remainder, above_count > base_count)
        members_by_part = groupby(members, key=lambda member: member[0][level])
        parts = [self.group(tuple(group_members), level + 1, part) for part, group_members in members_by_part]
        parts.sort(key=lambda part: (not part.fraction, not part.would_save_move, -part.fraction, part.name))
        # The parts before this index get one extra more than their `base_count`. The part at this index would get the
        # next extra.
        next_part = base_count - sum(part.least for part in parts)
        return _Group(
            name, workers, base_count, remainder, remainder > 0 and parts[next_part].would_save_move, tuple(parts)
        )

    def favoured(self, group: _Group, extras: int) -> list[str]:
        """Return the workers of this group that get its extras.

        Each part of the group gets its `least`, and the first parts get one more each until no extra is left.
        """
        if not group.parts:
            return _members_with_extra(group.workers, self.counts, self.floor, extras)
        parts_with_extra = extras - sum(part.least for part in group.parts)
        return [
            worker
            for index, part in enumerate(group.parts)
            for worker in self.favoured(part, part.least + (index < parts_with_extra))
        ]


def least_moves(owners: Mapping[Any, str | None], workers: Iterable[str], groups: Groups = None) -> int:
    """Return the minimum number of leases that living workers must give up so that the division becomes even.

    Groups may have at most one level.

    `owners` maps leases to their owners. If an owner is not in `workers`, its leases count as free (L1).
    """
    lease_counts = Counter(owner for owner in owners.values() if owner is not None)
    counts = {worker: lease_counts[worker] for worker in workers}
    if not counts:
        return 0
    base_share, extra_count = divmod(len(owners), len(counts))
    surplus_count = sum(max(count - base_share, 0) for count in counts.values())
    size_by_group = Counter(path_of(worker, groups) for worker in counts)
    above_by_group = Counter(path_of(worker, groups) for worker, count in counts.items() if count > base_share)
    kept_extras = wanting_groups = least_total = 0
    for group, size in size_by_group.items():
        base_count, remainder = divmod(extra_count * size, len(counts))
        kept_extras += min(base_count, above_by_group[group])
        least_total += base_count
        wanting_groups += remainder > 0 and above_by_group[group] > base_count
    return surplus_count - kept_extras - min(extra_count - least_total, wanting_groups)


def describe_imbalance(
    counts: Mapping[str, int], takers: Iterable[str], lease_count: int, groups: Groups = None
) -> str:
    """Return a sentence about why a division is not even (S8), or "" if it is.

    No rule uses this function.

    Args:
        counts: The number of leases of each worker.
        takers: The workers that could take one more lease. If there are no such workers, the division counts as even.
        lease_count: The number of all leases, including those without an owner.
        groups: How workers form groups.
    """
    emptiest_worker = min(takers, key=lambda worker: (counts[worker], worker), default=None)
    if emptiest_worker is None:
        return ""
    fullest_worker = max(counts, key=lambda worker: (counts[worker], worker))
    if counts[fullest_worker] - counts[emptiest_worker] > 1:
        return (
            f"{fullest_worker} holds {counts[fullest_worker]} leases, and {emptiest_worker} {counts[emptiest_worker]}"
        )
    # Count the leases of each worker in its group at every level.
    counts_by_group: dict[tuple[str, ...], list[int]] = {}
    for worker, count in counts.items():
        path = path_of(worker, groups)
        for depth in range(1, len(path) + 1):
            counts_by_group.setdefault(path[:depth], []).append(count)
    for group, group_counts in counts_by_group.items():
        if abs(sum(group_counts) - lease_count * len(group_counts) / len(counts)) >= 1:
            description = (
                f"{sum(group_counts)} of {lease_count} leases, with {len(group_counts)} of {len(counts)} workers"
            )
            return f"group {'/'.join(group)} holds {description}"
    return ""


donation_order = order_under("minimal")
"""The donation order of leases, in which owners give up leases and workers claim free ones (M4)."""


@frozen
class Shares:
    """The share of each worker, computed from one read of the table.

    Attributes:
        census: The leases that count, and their owners.
        config: The times that the rules need.
        counts: The number of leases of each worker, with hand-offs in progress counted as done (H1).
        floor: The minimum number of leases that every worker should hold.
        extras: The number of leases that remain after every worker got the floor.
        groups: How workers form groups.
        limit: The maximum number of leases that one worker may hold (M7).
        tolerance: The number of leases by which counts may additionally differ in order to balance loads (M13).
        non_bulletin_last: Whether workers that write no bulletin come last in the line (M15).
    """

    census: Census
    config: FleetSeconds
    counts: Mapping[str, int]
    floor: int
    extras: int
    groups: Groups
    limit: int
    tolerance: int
    non_bulletin_last: bool

    @cached_property
    def lacking(self) -> dict[str, int]:
        """The number of leases that each worker lacks to reach its share. A negative number is a surplus."""
        normal_share, larger_share, favored_workers = (
            min(self.floor, self.limit),
            min(self.floor + 1, self.limit),
            self._workers_with_extra,
        )
        return {
            worker: (larger_share if worker in favored_workers else normal_share) - count
            for worker, count in self.counts.items()
        }

    def share(self, worker: str) -> int:
        """Return the number of leases that this worker should hold (M1, M2, M7)."""
        return min(self.floor + (worker in self._workers_with_extra), self.limit)

    @cached_property
    def _workers_with_extra(self) -> frozenset[str]:
        return workers_with_extra(self.counts, self.floor, self.extras, self.groups)

    @cached_property
    def non_bulletin_workers(self) -> frozenset[str]:
        """The workers that write no bulletin, such as KCL 2.x workers.

        The set is empty if `non_bulletin_last` is false.
        """
        other_workers = frozenset(self.census.counts) - {self.census.worker} if self.non_bulletin_last else frozenset()
        return other_workers - our_workers(self.census.leases) if other_workers else other_workers

    def line_position(self, worker: str) -> int:
        """Return a worker's position in the line, which is the number of leases that the workers before it lack.

        Workers that write no bulletin come last.
        """
        non_bulletin = self.non_bulletin_workers
        own_rank = worker in non_bulletin, worker
        return sum(
            lack
            for other_worker, lack in self.lacking.items()
            if lack > 0 and (other_worker in non_bulletin, other_worker) < own_rank
        )

    def surplus(self, start: int, stop: int) -> tuple[Lease, ...]:
        """Return the surplus leases at the positions from `start` to `stop` (exclusive) in the line.

        The surplus leases are sorted by the names of their owners. The free leases are not counted in the positions.
        """
        surplus = {worker: -lack for worker, lack in self.lacking.items() if lack < 0}
        start, offset = max(start, 0), 0
        slices = {}
        for donor in sorted(surplus):
            end = offset + surplus[donor]
            if offset < stop and end > start:
                slices[donor] = slice(max(start - offset, 0), min(stop, end) - offset)
            offset = end
        return self.donated(slices)

    def donated(self, slices: Mapping[str, slice]) -> tuple[Lease, ...]:
        """Return a slice of the leases of each donor.

        `slices` refers to the donor's leases in donation order (M4).

        Leases with a hand-off in progress are left out (H5).
        """
        leases_by_donor: dict[str | None, list[Lease]] = {donor: [] for donor in sorted(slices)}
        moves_in_progress = pending_handoffs(self.census, self.config)
        for lease in self.census.held_by(slices):
            if lease.key not in moves_in_progress:
                leases_by_donor[lease.owner].append(lease)
        return tuple(
            lease
            for donor, leases in leases_by_donor.items()
            for lease in nsmallest(slices[donor or ""].stop, leases, key=donation_order)[slices[donor or ""]]
        )

    @cached_property
    def _assumed_weight(self) -> int:
        return mean_weight(self.census.leases)

    @cached_property
    def _loads(self) -> dict[str, int]:
        return loads_of(self.census, self.counts, pending_handoffs(self.census, self.config), self._assumed_weight)

    @cached_property
    def _total_load(self) -> int:
        return sum(weight_of(lease, self._assumed_weight) for lease in self.census.leases)

    def loaded(self, worker: str) -> bool:
        """Return whether a worker has about the mean load or more (M13).

        A load of nine tenths of the mean is enough, because measurements fluctuate.

        If loads are unknown, the result is False.
        """
        if not self.tolerance:
            return False
        return self._loads[worker] * len(self.counts) >= (1 - LOAD_BAND) * self._total_load

    def lacks_too_many(self, worker: str) -> bool:
        """Return whether this worker lacks so many leases that it should take some from living workers (M6, M14)."""
        takes_part = self.census.counts.get(worker, 0) > 0 or worker in self.census.led
        return takes_part and self.lacking[worker] > self.tolerance and not self.loaded(worker)


JOIN_WAIT = 0.5
"""How long a newcomer waits after each change in the group of workers, as a fraction of `lease_seconds` (C10)."""
LEASE_SECONDS_MAX = 10.0
"""If workers write no bulletins, a newcomer's wait is computed with at most this many `lease_seconds`.

Longer leases are usually configured to save renewals, which is no reason for a newcomer to wait longer.
"""


def awaits_joiners(leases: Iterable[Lease], me: Me, config: FleetSeconds) -> bool:
    """Return whether this worker is a newcomer that must not take leases from living workers yet (C10).

    A newcomer first waits for other workers that are also joining.

    If a newcomer took its share before other new workers are visible, it would take too many leases and lose some of
    them again. The wait ends at the latest one cycle after the newcomer got its first lease.
    """
    history = me.history
    # With the first factor of 0.8, a worker that reads the table about once per cycle need not wait, because a cycle
    # passes before its next read.
    reads_rarely = history.hearing is None and history.full_apart >= 0.8 * config.cycle_seconds
    # With the second factor of 0.8, four of the five seconds are enough, because the measured time is always a little
    # less than the actual time.
    if reads_rarely or history.fleet_still >= 0.8 * JOIN_WAIT * _wait_lease_seconds(history, config):
        return False
    longest_held = max((lease.held for lease in leases if lease.owner == me.worker), default=0.0)
    return longest_held < config.cycle_seconds


def seconds_until_joined(history: History, config: FleetSeconds) -> float:
    """Return the seconds until a newcomer lists the table again (C10).

    If the last listing showed that a worker has joined or left, the next listing follows soon. Otherwise, it follows at
    the end of the wait. Without the early listing, workers that start together would first see each other at the end of
    the wait, and would have to wait again.
    """
    scaled_lease_seconds = _wait_lease_seconds(history, config)
    wait_seconds, waited_seconds = JOIN_WAIT * scaled_lease_seconds, history.fleet_still - history.full_still
    if waited_seconds <= 0:
        # The factor is 0.1 because other workers that are starting now become visible within a second, when they take
        # their first lease.
        return 0.1 * scaled_lease_seconds
    return wait_seconds - waited_seconds if waited_seconds < wait_seconds else wait_seconds


def _wait_lease_seconds(history: History, config: FleetSeconds) -> float:
    return config.lease_seconds if history.hearing is not None else min(config.lease_seconds, LEASE_SECONDS_MAX)
