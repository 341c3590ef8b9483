"""Balances throughput by moving leases from the most loaded workers to the least loaded ones (M13).

A worker with an equal share of the leases may carry nearly three times the mean load. Therefore, if the throughput of
nearly all leases (their weight) is known, the numbers of leases may differ by half a share more than usual. Within this
range, leases are divided by load.

Workers that read the same rows compute the same series of moves, and each worker carries out only the moves to itself.
Each step moves one lease from the most loaded worker to the least loaded one. It chooses the lease whose move makes the
loads of these two workers most equal.

If the loads of the two workers are A and B, moving a weight w lowers the sum of the squared loads by 2 w (A - B - w).
Every step lowers this sum, so if the weights of the leases stay the same, the moves come to an end (S9).

Measured loads fluctuate, and leases must not move because of noise, so there are four limits. No lease moves unless a
worker is more than a tenth above the mean. A move leaves the taker more than a tenth of the mean below the load that
the giver had. A move gains at least (a tenth of the mean)² / 4, which is the most that a move can gain if the gap is a
tenth of the mean. A worker that gains a lease in a series gives none away in the same series, because other workers
could carry out the second step before the first.

A lease moves at most once per cycle. It does not move if its owner has changed within the last cycle, and a lease with
a hand-off in progress already counts for its next owner. If a worker plans from outdated rows, its write contains a
former owner, so the store rejects the write. A lease that was moved to make the counts even (M6) may move again to
balance loads, because M6 chooses leases without regard to load.

While there is little traffic, leases are divided only by count. The limit is an average load per lease of a hundredth
of a shard's capacity. If counts already differ because of loads, the limit is half as high. Otherwise, leases would
move back and forth if the traffic fluctuated around the limit.

The number of leases per worker is also limited. Let the floor be the mean number, rounded down, and let the tolerance
be half a share. No worker gets more than floor + 1 + tolerance leases, or more than `max_leases`. A worker with only
floor - tolerance leases gives away a lease only if its load stays above the mean.

Example: a has leases of 60, 30 and 10 kB/s, b has leases of 20, 10 and 10, and c has leases of 10, 10 and 20. The mean
load is 60, the band ends at 66, and the load of a is 100. The gap between a and b, whose load is 40, is 60, so a lease
that moves must weigh less than 54. The lease of 30 goes to b, because its move gains 30 x 30 = 900, and a move of the
lease of 10 would gain only 500. Now the load of a is 70, and c is the least loaded worker with 40. Of a's leases, only
the one of 10 is below 30 - 6, and it goes to c. The series ends with loads of 60, 70 and 50, because b has gained a
lease and gives none away. The next listing shows that b is above the band, and one of its leases of 10 goes to c. After
these three moves, all loads are 60.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from attrs import field, frozen

from leasehold.balancer.census import Census, KnownLeases, index_leases
from leasehold.balancer.model import Lease

LOAD_BAND = 0.1
"""How far above the mean a worker's load may be before leases move, as a fraction of the mean."""

QUIET_BYTES_PER_SECOND = 10_000
"""If the average load per lease is below this value, in bytes per second, leases are divided only by count.

The value is a hundredth of a shard's capacity.
"""

UNMEASURED_DIVISOR = 10
"""If more than one in this many leases is unmeasured, loads are not balanced.

A few unmeasured leases are allowed because every shard split creates some.
"""


def count_tolerance(leases: Sequence[Lease], floor: int) -> int:
    """Return by how many more leases than usual the workers may differ, so that loads can be balanced.

    The result is half a share if nearly all weights are known, and 0 otherwise.

    If there is hardly any traffic, the result is 0. If there are KCL 3.x workers, it is also 0, because their leader
    balances loads as well, and would move the same leases back.
    """
    limit = len(leases) // UNMEASURED_DIVISOR
    if not isinstance(leases, KnownLeases) and all(lease.weight is None for lease in leases[: limit + 1]):
        return 0  # no worker measures loads, so skip the remaining leases
    indexed_leases = index_leases(leases)
    measured, load = indexed_leases.weight_totals()
    if len(leases) - measured > limit or 2 * load < QUIET_BYTES_PER_SECOND * measured:
        return 0
    counts = {owner: count for owner, count in indexed_leases.counts().items() if owner is not None and count}
    # Between half of `QUIET_BYTES_PER_SECOND` and that value, balance loads only if balancing has already made the
    # counts differ by more than one.
    if load < QUIET_BYTES_PER_SECOND * measured and (not counts or max(counts.values()) - min(counts.values()) <= 1):
        return 0
    own_workers = indexed_leases.our_workers(math.inf)
    if own_workers and not own_workers >= counts.keys():
        return 0  # some owners are not workers of this library, perhaps KCL 3.x workers
    return (floor + 1) // 2


def mean_weight(leases: Sequence[Lease]) -> int:
    """Return the mean of the known weights, rounded down, or 0 if no weight is known.

    Leases that are not measured yet are assumed to have this weight.
    """
    measured, load = index_leases(leases).weight_totals()
    return load // max(measured, 1)


def weight_of(lease: Lease, default_weight: int) -> int:
    """Return the weight of a lease, or `default_weight` if it is not measured."""
    return default_weight if lease.weight is None else lease.weight


def loads_of(
    census: Census, workers: Iterable[str], moves_in_progress: Mapping[str, tuple[str, str]], default_weight: int
) -> dict[str, int]:
    """Return the load of each of these workers, with hand-offs in progress counted as done.

    If leases that are being handed off counted for their present owners, their next owners would be given too much
    load.
    """
    loads, expired_keys = dict.fromkeys(workers, 0), {lease.key for lease in census.expired}
    for lease in census.leases:
        owner = moves_in_progress[lease.key][1] if lease.key in moves_in_progress else lease.owner
        if owner in loads and lease.key not in expired_keys:
            loads[owner] += weight_of(lease, default_weight)
    return loads


def load_takers(
    census: Census,
    counts: Mapping[str, int],
    floor: int,
    moves_in_progress: Mapping[str, tuple[str, str]],
    most_leases: int | None,
    *,
    settle_seconds: float,
) -> dict[str, str]:
    """Map the key of each lease that should move to the worker that should take the lease.

    The numbers of leases must already be balanced. The result is empty if any lease is free or expired.

    Args:
        census: The leases that count, and their owners.
        counts: The number of leases of each worker, with hand-offs in progress counted as done.
        floor: The minimum number of leases that every worker should hold.
        moves_in_progress: The owner and next owner, by key, of the leases with a hand-off in progress.
        most_leases: The maximum number of leases that one worker may hold, or None for no limit.
        settle_seconds: The number of seconds for which a lease must have stayed with its owner before it may move.
    """
    indexed_leases = index_leases(census.leases)
    tolerance = count_tolerance(indexed_leases, floor)
    if not tolerance or census.available:
        return {}
    default_weight = mean_weight(indexed_leases)
    if not census.moving:
        # Return early if no worker is above the band, because this function runs in every turn.
        loads = indexed_leases.load_by_owner(default_weight)
        if max(loads.values()) * len(counts) <= (1 + LOAD_BAND) * sum(loads.values()):
            return {}
    movable_leases: dict[str, list[Lease]] = {worker: [] for worker in counts}
    for lease in census.leases:
        if lease.owner is not None and lease.key not in moves_in_progress and lease.held >= settle_seconds:
            movable_leases[lease.owner].append(lease)
    limit = min(floor + 1 + tolerance, len(census.leases) if most_leases is None else most_leases)
    room = {worker: limit - count for worker, count in counts.items()}
    spare = {worker: count - (floor - tolerance) for worker, count in counts.items()}
    return load_moves(
        movable_leases, room, spare, default_weight, loads_of(census, counts, moves_in_progress, default_weight)
    )


def load_moves(
    movable_leases: Mapping[str, Sequence[Lease]],
    gain_limits: Mapping[str, int],
    loss_limits: Mapping[str, int],
    default_weight: int = 0,
    loads: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """Map the key of each lease that should leave an overloaded worker to the worker that should take the lease.

    All workers that read the same rows compute the same result.

    Args:
        movable_leases: The leases of each worker that may move.
        gain_limits: The number of leases that each worker may gain.
        loss_limits: The number of leases that each worker may lose. A worker whose load stays above the mean may lose
            more.
        default_weight: The weight of a lease that is not measured yet.
        loads: The load of each worker, including leases that may not move. If None, the loads are computed from
            `movable_leases`.
    """
    if loads is None:
        loads = {
            worker: sum(weight_of(lease, default_weight) for lease in leases)
            for worker, leases in movable_leases.items()
        }
    balancer = _LoadBalancer(
        {worker: list(leases) for worker, leases in movable_leases.items()},
        dict(loads),
        dict(gain_limits),
        dict(loss_limits),
        default_weight,
    )
    while balancer.step():
        pass
    return balancer.taker_by_key


@frozen
class _LoadBalancer:
    """The loads of all workers while a series of moves is computed.

    Attributes:
        givable_leases: The leases that each worker may still give away.
        loads: The load of each worker in bytes per second.
        gains_left: The number of leases that each worker may still gain.
        losses_left: The number of leases that each worker may still lose.
        unknown: The weight of a lease that is not measured yet.
        taker_by_key: The takers of the leases that move, by key, as computed so far.
        mean: The mean load.
        donor_heap: A heap of the workers that may give leases, with the most loaded worker first.
        taker_heap: A heap of the workers that may take leases, with the least loaded worker first.
    """

    givable_leases: dict[str, list[Lease]]
    loads: dict[str, int]
    gains_left: dict[str, int]
    losses_left: dict[str, int]
    unknown: int
    taker_by_key: dict[str, str] = field(factory=dict, init=False)
    mean: float = field(init=False)
    donor_heap: list[tuple[int, str]] = field(init=False)
    taker_heap: list[tuple[int, str]] = field(init=False)

    @mean.default
    def _mean(self) -> float:
        return sum(self.loads.values()) / len(self.loads)

    @donor_heap.default
    def _full(self) -> list[tuple[int, str]]:
        donor_heap = [(-load, worker) for worker, load in self.loads.items()]
        heapify(donor_heap)
        return donor_heap

    @taker_heap.default
    def _empty(self) -> list[tuple[int, str]]:
        taker_heap = [(load, worker) for worker, load in self.loads.items() if self.gains_left[worker] > 0]
        heapify(taker_heap)
        return taker_heap

    def step(self) -> bool:
        """Make one move, or drop one overloaded worker that cannot give a lease.

        A heap entry is out of date if the load of its worker has changed since the entry was added. Such entries are
        skipped.

        Returns:
            False if the series is complete, because no worker that could give a lease has a load above the band.
        """
        while self.donor_heap and -self.donor_heap[0][0] != self.loads[self.donor_heap[0][1]]:
            heappop(self.donor_heap)
        while self.taker_heap and self.taker_heap[0][0] != self.loads[self.taker_heap[0][1]]:
            heappop(self.taker_heap)
        if not (self.donor_heap and self.taker_heap) or -self.donor_heap[0][0] <= (1 + LOAD_BAND) * self.mean:
            return False
        donor, taker = heappop(self.donor_heap)[1], self.taker_heap[0][1]
        lease = self._best_lease(donor, self.loads[donor] - self.loads[taker])
        if lease is None:
            return True
        self.givable_leases[donor].remove(lease)
        self.taker_by_key[lease.key] = taker
        for worker, sign in ((donor, -1), (taker, 1)):
            self.loads[worker] += sign * weight_of(lease, self.unknown)
            self.gains_left[worker] -= sign
            self.losses_left[worker] += sign
        # The taker is not added to `donor_heap` again, so it gives no lease in the same series. Different workers carry
        # out the two moves, so the second move could happen before the first.
        heappush(self.donor_heap, (-self.loads[donor], donor))
        for worker in (donor, taker):
            if self.gains_left[worker] > 0:
                heappush(self.taker_heap, (self.loads[worker], worker))
        return True

    def _best_lease(self, donor: str, gap: int) -> Lease | None:
        """Return the lease whose move makes the loads of two workers most equal, or None if no move gains enough.

        The gain is half of the decrease in the sum of squared loads.
        """
        best_gain = gap - LOAD_BAND * self.mean
        if self.losses_left[donor] <= 0:
            # The donor holds as few leases as it may, so it may give a lease only if its load stays above the mean.
            best_gain = min(best_gain, self.loads[donor] - self.mean)
        gains = [
            (weight * (gap - weight), lease.key, lease)
            for lease in self.givable_leases[donor]
            if 0 < (weight := weight_of(lease, self.unknown)) < best_gain
        ]
        gain, _, best_lease = max(gains, default=(0, "", None), key=lambda candidate: candidate[:2])
        return best_lease if gain >= (LOAD_BAND * self.mean) ** 2 / 4 else None
