"""Balance by throughput, where every lease's is known: the fewest moves that bring the fullest into a band (M13).

Counts say nothing of loads: a worker with an even share of leases may carry nearly three times the mean load. Where
weights are known, counts may therefore differ by half a share more than usual, and loads decide within that freedom.

Every worker computes the same series of moves from the same listing and takes its own part. Each step looks at the
fullest and the emptiest worker, and moves the lease that evens the two out best. With loads A and B, a weight w lowers
the sum of squared loads by 2 w (A - B - w). That sum falls with every step, so that fixed loads come to rest (S9).

Measures wander, and a fleet must not follow their noise. Hence four limits:
    nothing moves while nobody is more than a tenth above the mean;
    a move leaves the taker more than a tenth of the mean below the load that the giver had;
    it gains at least (a tenth of the mean)² / 4, the most that a lease gains where the gap is a tenth of the mean;
    a worker that gains in a series gives nothing in it: others would carry the second step out before the first.

A lease moves once in a settling: one that changed hands within the last cycle stays, and the weight of one that is on
its way counts for its heir already. Somebody who plans from an older reading names an owner that no longer has it, and
is refused. What M6 moved for the counts' sake may go once more for the loads': no order of M4 knows both.

Little traffic is no reason to move anything: below a hundredth of what a shard takes, for each lease, counts alone
decide. Uneven counts go on to half of that, so that traffic about the limit does not move leases to and fro.

Counts stay within limits too. Nobody is filled above the floor, one and the tolerance, nor above `max_leases`; a worker
that is down to the floor less the tolerance gives only what leaves it above the mean.

Example: a has leases of 60, 30 and 10 kB/s, b of 20, 10 and 10, c of 10, 10 and 20. The mean is 60, the band ends at
66, and a is at 100. Between a and b (40) the gap is 60, so that a lease must weigh less than 54: the 30 gains
30 x 30 = 900, the 10 only 500, and the 30 goes to b. Now a is at 70 and c, at 40, is the emptiest; of a's leases only
the 10 is below 30 - 6, and goes to c. The series ends with 60, 70, 50, for b has gained and gives nothing. The next
listing shows b above the band, and one of its tens goes to c: 60, 60, 60. That makes three moves.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from attrs import field, frozen

from leasehold.balancer.census import Census, Known, indexed
from leasehold.balancer.model import Lease

BAND = 0.1
"""A worker's load may be so far above the mean before anything moves."""

QUIET = 10_000
"""Bytes a second for each lease, a hundredth of what a shard of Kinesis takes: below it counts alone decide."""

UNKNOWN = 10
"""One in so many leases may be unmeasured: a shard that was just split must not end the balance of loads."""


def slack(leases: Sequence[Lease], floor: int) -> int:
    """Counts may differ so far for the sake of loads: half a share where nearly every weight is known, else 0.

    With hardly any traffic, leases are balanced by count alone. Beside a KCL 3.x worker, which measures too, counts
    are all that both go by: a lease that one moved for its load the other would take back.
    """
    most = len(leases) // UNKNOWN
    if not isinstance(leases, Known) and all(lease.weight is None for lease in leases[: most + 1]):
        return 0  # where nobody measures, without a look at the rest
    known = indexed(leases)
    measured, load = known.measured()
    if len(leases) - measured > most or 2 * load < QUIET * measured:
        return 0
    counts = {owner: count for owner, count in known.counts().items() if owner is not None and count}
    # Too little traffic to move anything for; half as much is enough where counts already differ for it.
    if load < QUIET * measured and (not counts or max(counts.values()) - min(counts.values()) <= 1):
        return 0
    ours = known.signers(math.inf)
    if ours and not ours >= counts.keys():
        return 0  # some sign their leases, and others do not
    return (floor + 1) // 2


def average(leases: Sequence[Lease]) -> int:
    """The weight that a lease is given until it is measured, whole like all weights; 0 if none was measured."""
    measured, load = indexed(leases).measured()
    return load // max(measured, 1)


def weight_of(lease: Lease, unknown: int) -> int:
    """The weight of a lease that was measured, or else that of the average lease."""
    return unknown if lease.weight is None else lease.weight


def loads_of(
    census: Census, workers: Iterable[str], moving: Mapping[str, tuple[str, str]], unknown: int
) -> dict[str, int]:
    """The load of each of these workers, with the moves under way made: counted nowhere, an heir would get more."""
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
    """The taker of each lease (by key) that should move, once the counts are in order; none while a lease is free.

    counts       leases by worker, with the moves under way made
    floor        the least that anybody should hold
    moving       owner and heir, by key, of the leases that are on their way
    most_leases  of one worker; None: no limit
    settling     what changed hands less than so many seconds ago stays
    """
    known = indexed(census.leases)
    tolerance = slack(known, floor)
    if not tolerance or census.available:
        return {}
    unknown = average(known)
    if not census.moving:
        # Whether anybody is above the band is asked every turn, before it is worked out what to do about it.
        loads = known.load_of_each(unknown)
        if max(loads.values()) * len(counts) <= (1 + BAND) * sum(loads.values()):
            return {}
    held: dict[str, list[Lease]] = {worker: [] for worker in counts}
    for lease in census.leases:
        if lease.owner is not None and lease.key not in moving and lease.held >= settling:
            held[lease.owner].append(lease)
    most = min(floor + 1 + tolerance, len(census.leases) if most_leases is None else most_leases)
    room = {worker: most - count for worker, count in counts.items()}
    spare = {worker: count - (floor - tolerance) for worker, count in counts.items()}
    return relief(held, room, spare, unknown, loads_of(census, counts, moving, unknown))


def relief(
    held: Mapping[str, Sequence[Lease]],
    room: Mapping[str, int],
    spare: Mapping[str, int],
    unknown: int = 0,
    loads: Mapping[str, int] | None = None,
) -> dict[str, str]:
    """The taker of each lease (by key) that leaves an overloaded worker; the same for all that read alike.

    held     the leases of each worker, those that may move
    room     how many leases each worker may gain
    spare    how many each may lose; a worker that stays above the mean may lose more
    unknown  the weight of a lease that was not measured yet
    loads    of each worker, with what may not move; None: the leases in `held` are all there are
    """
    if loads is None:
        loads = {worker: sum(weight_of(lease, unknown) for lease in leases) for worker, leases in held.items()}
    scale = _LoadBalancer(
        {worker: list(leases) for worker, leases in held.items()}, dict(loads), dict(room), dict(spare), unknown
    )
    while scale.step():
        pass
    return scale.taken


@frozen
class _LoadBalancer:
    """The scale holds everybody's load while the moves are tried out.

    held   the leases that each worker may still give
    loads  the bytes per second of each worker
    room   how many leases each worker may still gain
    spare  how many each may still lose
    taken  the answer so far: the taker of each lease, by key
    full   heap of the workers that may give, the fullest first
    empty  heap of the workers that may take, the emptiest first
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
        """A step is one move, or one donor found beyond help; False when all who can be helped are within the band.

        An entry of a heap is stale, and is dropped, once its worker's load has changed.
        """
        while self.full and -self.full[0][0] != self.loads[self.full[0][1]]:
            heappop(self.full)
        while self.empty and self.empty[0][0] != self.loads[self.empty[0][1]]:
            heappop(self.empty)
        if not (self.full and self.empty) or -self.full[0][0] <= (1 + BAND) * self.mean:
            return False
        donor, taker = heappop(self.full)[1], self.empty[0][1]
        lease = self._best(donor, self.loads[donor] - self.loads[taker])
        if lease is None:
            return True
        self.held[donor].remove(lease)
        self.taken[lease.key] = taker
        for worker, sign in ((donor, -1), (taker, 1)):
            self.loads[worker] += sign * weight_of(lease, self.unknown)
            self.room[worker] -= sign
            self.spare[worker] += sign
        # A gainer gives nothing in the same plan: others would carry that out before the gain is there.
        heappush(self.full, (-self.loads[donor], donor))
        for worker in (donor, taker):
            if self.room[worker] > 0:
                heappush(self.empty, (self.loads[worker], worker))
        return True

    def _best(self, donor: str, gap: int) -> Lease | None:
        """The lease whose move evens the two out best, unless that is too little to be worth it.

        The gain is half of what the move takes from the sum of squared loads.
        """
        most = gap - BAND * self.mean
        if self.spare[donor] <= 0:
            # Its count is as low as it may be: it gives only what leaves it above the mean.
            most = min(most, self.loads[donor] - self.mean)
        gains = [
            (weight * (gap - weight), lease.key, lease)
            for lease in self.held[donor]
            if 0 < (weight := weight_of(lease, self.unknown)) < most
        ]
        gain, _, best = max(gains, default=(0, "", None), key=lambda one: one[:2])
        return best if gain >= (BAND * self.mean) ** 2 / 4 else None
