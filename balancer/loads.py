"""Balance by throughput, where every lease's is known: the fewest moves that bring the fullest into a band (M13)."""

from collections.abc import Container, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from attrs import field, frozen

from balancer.census import Census, signers
from balancer.model import Lease

BAND = 0.1
"""How far above the mean a worker's load may be before anything moves."""

UNKNOWN = 10
"""One in so many leases may be unmeasured: a shard that was just split must not end the balance of loads."""


def slack(leases: Sequence[Lease], floor: int) -> int:
    """How far counts may differ for the sake of loads: half a share where nearly every weight is known, else 0.

    Where nothing flows, loads have nothing to say: only counts can be brought in order. Beside a KCL 3.x worker,
    which measures too, counts are all that both go by; what one evened out by load the other would take back.
    """
    most = len(leases) // UNKNOWN
    if all(lease.weight is None for lease in leases[: most + 1]):
        return 0  # where nobody measures, without a look at the rest
    weights = [lease.weight for lease in leases]
    if weights.count(None) > most or not any(weights) or _mixed(leases):
        return 0
    return (floor + 1) // 2


def _mixed(leases: Sequence[Lease]) -> bool:
    """Whether some workers sign their leases, and others do not."""
    ours = signers(leases)
    return bool(ours) and not ours >= {lease.owner for lease in leases if lease.owner is not None}


def average(leases: Iterable[Lease]) -> float:
    """What a lease that was not measured yet is taken for; 0 if none was."""
    known = [lease.weight for lease in leases if lease.weight is not None]
    return sum(known) / max(len(known), 1)


def weight_of(lease: Lease, unknown: float) -> float:
    """Its weight, or that of the average lease."""
    return unknown if lease.weight is None else lease.weight


def takers(
    census: Census, counts: Mapping[str, int], floor: int, moving: Container[str], most_leases: int | None
) -> dict[str, str]:
    """Who should take which lease (by key), once the counts are in order; nothing while anything is free.

    counts       leases by worker, with the moves under way made
    floor        the least that anybody should hold
    moving       the keys of the leases that are on their way
    most_leases  of one worker; None: no limit
    """
    tolerance = slack(census.leases, floor)
    if not tolerance or census.available:
        return {}
    unknown = average(census.leases)
    if not (census.moving or _overloaded(census.leases, len(counts), unknown)):
        return {}
    held: dict[str, list[Lease]] = {worker: [] for worker in counts}
    for lease in census.leases:
        if lease.owner is not None and lease.key not in moving:
            held[lease.owner].append(lease)
    most = min(floor + 1 + tolerance, len(census.leases) if most_leases is None else most_leases)
    room = {worker: most - count for worker, count in counts.items()}
    spare = {worker: count - (floor - tolerance) for worker, count in counts.items()}
    return relief(held, room, spare, unknown)


def relief(
    held: Mapping[str, Sequence[Lease]], room: Mapping[str, int], spare: Mapping[str, int], unknown: float = 0.0
) -> dict[str, str]:
    """Who should take which lease (by key) from the overloaded; the same for all who read alike.

    held     the leases of each worker, those that may move
    room     how many leases each worker may gain
    spare    how many each may lose; whoever stays above the mean may lose more
    unknown  the weight of a lease that was not measured yet
    Each move is from the fullest to the emptiest, so that the sum of squared loads falls with every
    one (S9), and none happens for a gain that noise could undo.
    """
    loads = {worker: sum(weight_of(lease, unknown) for lease in leases) for worker, leases in held.items()}
    scale = _Scale({worker: list(leases) for worker, leases in held.items()}, loads, dict(room), dict(spare), unknown)
    while scale.step():
        pass
    return scale.taken


def _overloaded(leases: Iterable[Lease], workers: int, unknown: float) -> bool:
    """Whether anybody is above the band: asked every turn, before it is worked out what to do about it."""
    loads: dict[str | None, float] = {}
    for lease in leases:
        weight = lease.weight  # spelled out: a call for each of perhaps ten thousand leases would cost more
        loads[lease.owner] = loads.get(lease.owner, 0.0) + (unknown if weight is None else weight)
    return max(loads.values(), default=0.0) * workers > (1 + BAND) * sum(loads.values())


@frozen
class _Scale:
    """Everybody's load while the moves are tried out."""

    held: dict[str, list[Lease]]
    loads: dict[str, float]
    room: dict[str, int]
    spare: dict[str, int]
    unknown: float
    taken: dict[str, str] = field(factory=dict, init=False)
    mean: float = field(init=False)
    full: list[tuple[float, str]] = field(init=False)
    empty: list[tuple[float, str]] = field(init=False)

    @mean.default
    def _mean(self) -> float:
        return sum(self.loads.values()) / len(self.loads)

    @full.default
    def _full(self) -> list[tuple[float, str]]:
        full = [(-load, worker) for worker, load in self.loads.items()]
        heapify(full)
        return full

    @empty.default
    def _empty(self) -> list[tuple[float, str]]:
        empty = [(load, worker) for worker, load in self.loads.items() if self.room[worker] > 0]
        heapify(empty)
        return empty

    def step(self) -> bool:
        """One move, or one donor found beyond help; False when all who can be helped are within the band."""
        while self.full and -self.full[0][0] != self.loads[self.full[0][1]]:
            heappop(self.full)
        while self.empty and self.empty[0][0] != self.loads[self.empty[0][1]]:
            heappop(self.empty)
        if not (self.full and self.empty) or -self.full[0][0] <= (1 + BAND) * self.mean:
            return False
        donor, taker = heappop(self.full)[1], self.empty[0][1]
        lease = self._best(donor, self.loads[donor] - self.loads[taker])
        if lease is not None:
            self._move(lease, donor, taker)
        return True

    def _best(self, donor: str, gap: float) -> Lease | None:
        """The lease whose move evens the two out best, unless that is too little to be worth it."""
        most = gap - BAND * self.mean
        if self.spare[donor] <= 0:
            most = min(most, self.loads[donor] - self.mean)
        gains = [
            (weight * (gap - weight), lease.key, lease)
            for lease in self.held[donor]
            if 0 < (weight := weight_of(lease, self.unknown)) < most
        ]
        gain, _, best = max(gains, default=(0.0, "", None), key=lambda one: one[:2])
        return best if gain >= (BAND * self.mean) ** 2 / 4 else None

    def _move(self, lease: Lease, donor: str, taker: str) -> None:
        self.held[donor].remove(lease)
        self.taken[lease.key] = taker
        for worker, sign in ((donor, -1), (taker, 1)):
            self.loads[worker] += sign * weight_of(lease, self.unknown)
            self.room[worker] -= sign
            self.spare[worker] += sign
        # Who gains gives nothing in the same plan: others would carry that out before the gain is there.
        heappush(self.full, (-self.loads[donor], donor))
        for worker in (donor, taker):
            if self.room[worker] > 0:
                heappush(self.empty, (self.loads[worker], worker))
