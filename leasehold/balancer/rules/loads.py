"""Balances throughput, if it is known, with the fewest moves that bring the most loaded worker close to the mean (M13).

Even counts do not make even loads. A worker with an even share of leases may carry nearly three times the mean load. If
weights are known, counts may differ by half a share more than usual, and within that range leases are divided by load.

Every worker computes the same series of moves from the same rows and carries out its own part. Each step takes the most
and the least loaded worker and moves the lease that evens the two out best. With loads A and B, moving a weight w
lowers the sum of squared loads by 2 w (A - B - w). Each step lowers this sum, so the moves end while loads stay the
same (S9).

Measurements fluctuate, and leases must not move because of noise. So there are four limits:
    No lease moves while no worker is more than a tenth above the mean.
    A move leaves the taker more than a tenth of the mean below the load that the giver had.
    It gains at least (a tenth of the mean)² / 4, which is the most a lease can gain if the gap is a tenth of the mean.
    A worker that gains in a series gives nothing in it, because others could carry out the second step before the
    first.

A lease moves at most once per cycle, because a lease that changed hands within the last cycle stays, and a lease with a
hand-off in progress already counts for its next owner. If a worker plans from outdated rows, its write names a former
owner, and the store rejects it. A lease that M6 moved because of counts may move once more because of loads, since no
order in M4 suits both.

No leases move because of loads while there is little traffic. Below an average of a hundredth of a shard's capacity per
lease, counts alone decide. If counts already differ because of loads, they may stay so down to half of that, so that
leases do not move back and forth when traffic is near the limit.

Counts have limits, too. No worker gets more than the floor + 1 + the tolerance, nor more than `max_leases`. A worker
that is down to the floor less the tolerance gives only leases that leave it above the mean.

Example: a has leases of 60, 30 and 10 kB/s, b of 20, 10 and 10, c of 10, 10 and 20. The mean is 60, the band ends at
66, and a is at 100. The gap between a and b (40) is 60, so a lease that moves must weigh less than 54. The 30 goes to
b, because it gains 30 x 30 = 900 and the 10 would gain only 500. Now a is at 70, and c is the least loaded at 40. Of
a's leases only the 10 is below 30 - 6, and it goes to c. The series ends with 60, 70 and 50, because b has gained and
gives nothing. The next listing shows b above the band, and one of its tens goes to c: 60, 60, 60. That makes three
moves.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from attrs import field, frozen

from leasehold.balancer.census import Census, KnownLeases, indexed
from leasehold.balancer.model import Lease

BAND = 0.1
"""How far above the mean a worker's load may be before leases move, as a fraction of the mean."""

QUIET = 10_000
"""If a lease has fewer bytes per second on average, counts alone decide. It is a hundredth of a shard's capacity."""

UNKNOWN = 10
"""At most one in this many leases may be unmeasured, so that a shard split does not stop the balancing of loads."""


def slack(leases: Sequence[Lease], floor: int) -> int:
    """Return how far counts may differ to balance loads, which is half a share if nearly all weights are known, else 0.

    The result is 0 if there is hardly any traffic. It is also 0 if there are workers of KCL 3.x, which balance loads,
    too. If each side moved leases because of loads, the other would take them back.
    """
    limit = len(leases) // UNKNOWN
    if not isinstance(leases, KnownLeases) and all(lease.weight is None for lease in leases[: limit + 1]):
        return 0  # no worker measures loads, so skip the remaining leases
    indexed_leases = indexed(leases)
    measured, load = indexed_leases.measured()
    if len(leases) - measured > limit or 2 * load < QUIET * measured:
        return 0
    counts = {owner: count for owner, count in indexed_leases.counts().items() if owner is not None and count}
    # There is too little traffic to start moving leases. Half as much is enough if counts already differ because of
    # loads.
    if load < QUIET * measured and (not counts or max(counts.values()) - min(counts.values()) <= 1):
        return 0
    own_workers = indexed_leases.our_workers(math.inf)
    if own_workers and not own_workers >= counts.keys():
        return 0  # some workers sign their leases and others do not
    return (floor + 1) // 2


def average(leases: Sequence[Lease]) -> int:
    """Return the integer mean of the known weights, or 0. It is assumed for leases that are not measured yet."""
    measured, load = indexed(leases).measured()
    return load // max(measured, 1)


def weight_of(lease: Lease, unknown: int) -> int:
    """Return the weight of a lease, or `unknown` if it is not measured."""
    return unknown if lease.weight is None else lease.weight


def loads_of(
    census: Census, workers: Iterable[str], moving: Mapping[str, tuple[str, str]], unknown: int
) -> dict[str, int]:
    """Return the load of each of these workers, with hand-offs in progress counted as done.

    Otherwise their next owners would be given even more.
    """
    loads, dead = dict.fromkeys(workers, 0), {lease.key for lease in census.expired}
    for lease in census.leases:
        owner = moving[lease.key][1] if lease.key in moving else lease.owner
        if owner in loads and lease.key not in dead:
            loads[owner] += weight_of(lease, unknown)
    return loads


def takers(
    census: Census,
    counts: Mapping[str, int],
    floor: int,
    moving: Mapping[str, tuple[str, str]],
    most_leases: int | None,
    *,
    settling: float,
) -> dict[str, str]:
    """Map the key of each lease that should move to the worker that should take the lease.

    The counts must already be in order. No lease moves while any lease is free.

    Args:
        census: The leases in play.
        counts: The number of leases of each worker, with hand-offs in progress counted as done.
        floor: The number of leases that every worker should hold at least.
        moving: The owner and next owner, by key, of the leases with a hand-off in progress.
        most_leases: The most leases that one worker may hold, or None for no limit.
        settling: How many seconds a lease must have stayed with its owner before it may move.
    """
    indexed_leases = indexed(census.leases)
    tolerance = slack(indexed_leases, floor)
    if not tolerance or census.available:
        return {}
    unknown = average(indexed_leases)
    if not census.moving:
        # First find out cheaply whether any worker is above the band, because this runs in every turn.
        loads = indexed_leases.load_of_each(unknown)
        if max(loads.values()) * len(counts) <= (1 + BAND) * sum(loads.values()):
            return {}
    movable_leases: dict[str, list[Lease]] = {worker: [] for worker in counts}
    for lease in census.leases:
        if lease.owner is not None and lease.key not in moving and lease.held >= settling:
            movable_leases[lease.owner].append(lease)
    limit = min(floor + 1 + tolerance, len(census.leases) if most_leases is None else most_leases)
    room = {worker: limit - count for worker, count in counts.items()}
    spare = {worker: count - (floor - tolerance) for worker, count in counts.items()}
    return relief(movable_leases, room, spare, unknown, loads_of(census, counts, moving, unknown))


def relief(
    movable: Mapping[str, Sequence[Lease]],
    room: Mapping[str, int],
    spare: Mapping[str, int],
    unknown: int = 0,
    loads: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """Map the key of each lease that should leave an overloaded worker to the worker that should take the lease.

    The result is the same for all workers that read the same rows.

    Args:
        movable: The leases of each worker that may move.
        room: How many leases each worker may gain.
        spare: How many leases each worker may lose. A worker that stays above the mean may lose more.
        unknown: The weight of a lease that is not measured yet.
        loads: The load of each worker, including leases that may not move. If None, `movable` contains all leases.
    """
    if loads is None:
        loads = {worker: sum(weight_of(lease, unknown) for lease in leases) for worker, leases in movable.items()}
    balancer = _LoadBalancer(
        {worker: list(leases) for worker, leases in movable.items()}, dict(loads), dict(room), dict(spare), unknown
    )
    while balancer.step():
        pass
    return balancer.taken


@frozen
class _LoadBalancer:
    """The loads of all workers while a series of moves is computed.

    Attributes:
        held: The leases that each worker may still give.
        loads: The load of each worker in bytes per second.
        room: How many leases each worker may still gain.
        spare: How many leases each worker may still lose.
        unknown: The weight of a lease that is not measured yet.
        taken: The taker of each lease that moves, by key, as computed so far.
        mean: The mean load.
        full: A heap of the workers that may give, the most loaded first.
        empty: A heap of the workers that may take, the least loaded first.
    """

    held: dict[str, list[Lease]]
    loads: dict[str, int]
    room: dict[str, int]
    spare: dict[str, int]
    unknown: int
    taken: dict[str, str] = field(factory=dict, init=False)
    mean: float = field(init=False)
    full: list[tuple[int, str]] = field(init=False)
    empty: list[tuple[int, str]] = field(init=False)

    @mean.default
    def _mean(self) -> float:
        return sum(self.loads.values()) / len(self.loads)

    @full.default
    def _full(self) -> list[tuple[int, str]]:
        full = [(-load, worker) for worker, load in self.loads.items()]
        heapify(full)
        return full

    @empty.default
    def _empty(self) -> list[tuple[int, str]]:
        empty = [(load, worker) for worker, load in self.loads.items() if self.room[worker] > 0]
        heapify(empty)
        return empty

    def step(self) -> bool:
        """Make one move, or drop one worker that cannot be relieved.

        A heap entry is out of date if its worker's load has changed since. Such entries are dropped.

        Returns:
            False if no worker that could be relieved is above the band.
        """
        while self.full and -self.full[0][0] != self.loads[self.full[0][1]]:
            heappop(self.full)
        while self.empty and self.empty[0][0] != self.loads[self.empty[0][1]]:
            heappop(self.empty)
        if not (self.full and self.empty) or -self.full[0][0] <= (1 + BAND) * self.mean:
            return False
        donor, taker = heappop(self.full)[1], self.empty[0][1]
        lease = self._best_lease(donor, self.loads[donor] - self.loads[taker])
        if lease is None:
            return True
        self.held[donor].remove(lease)
        self.taken[lease.key] = taker
        for worker, sign in ((donor, -1), (taker, 1)):
            self.loads[worker] += sign * weight_of(lease, self.unknown)
            self.room[worker] -= sign
            self.spare[worker] += sign
        # A worker that gains a lease gives none in the same plan, because another worker could carry out the second
        # move before the first.
        heappush(self.full, (-self.loads[donor], donor))
        for worker in (donor, taker):
            if self.room[worker] > 0:
                heappush(self.empty, (self.loads[worker], worker))
        return True

    def _best_lease(self, donor: str, gap: int) -> Lease | None:
        """Return the lease whose move evens out two workers best, or None if that gains too little.

        The gain is half of the decrease in the sum of squared loads.
        """
        best_gain = gap - BAND * self.mean
        if self.spare[donor] <= 0:
            # The donor's count is as low as it may be, so the donor gives only leases that leave it above the mean.
            best_gain = min(best_gain, self.loads[donor] - self.mean)
        gains = [
            (weight * (gap - weight), lease.key, lease)
            for lease in self.held[donor]
            if 0 < (weight := weight_of(lease, self.unknown)) < best_gain
        ]
        gain, _, best = max(gains, default=(0, "", None), key=lambda candidate: candidate[:2])
        return best if gain >= (BAND * self.mean) ** 2 / 4 else None
