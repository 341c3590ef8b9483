"""Everybody's share of one reading, and the line in which leases wait for those that lack some (M1, M2, M4, M6, M7).

A share is the floor of the mean, or one more for the workers that `groups.py` favours, within `max_leases`. What a
worker holds is counted with the moves under way made (H1), so that no share changes while the fleet carries moves out.

The line: free leases stand in front, in an order that a digest gives them; behind them stands the surplus of each
donor, donors by name, and each donor's own leases again by digest (M4). The workers that lack something stand along
the line by name, each before as many leases as it lacks. All that read alike see the same line and the same places, so
that no two of them choose one lease. Workers that write no bulletin, KCL 2.x among them, have the last places, for they
come in their own time: nobody should wait behind them (M15).

Example: a holds s-1 to s-5, b holds s-6 to s-8, c and d hold one each, and s-11 is free. Eleven leases on four workers
make a floor of 2 and three extras. They go to a and b, which hold more than the floor already, and to c or d by digest,
say to c: the shares are 3, 3, 3 and 2. The line is s-11, then a's surplus of two, say s-2 and s-4. c lacks two and
takes s-11 and s-2; d lacks one and takes s-4.
"""

from collections.abc import Mapping
from functools import cached_property
from heapq import nsmallest

from attrs import frozen

from leasehold.balancer.census import Census, signers
from leasehold.balancer.chance import order_under
from leasehold.balancer.handoff import live_moves
from leasehold.balancer.model import Lease
from leasehold.balancer.rule_set import FleetSeconds
from leasehold.balancer.rules.groups import Groups, favoured
from leasehold.balancer.rules.loads import BAND, average, loads_of, weight_of

donation_order = order_under("minimal")
"""M4: the order in which leases are given up, and free ones are claimed."""


@frozen
class Shares:
    """A reading of the table, with the share of each worker.

    census     who holds what
    counts     leases by worker, with the moves under way made (H1)
    floor      what everybody should hold at least
    extras     how many leases the floor leaves over
    limit      most leases of one worker (M7)
    tolerance  how far counts may differ for the sake of loads (M13)
    apart      whether workers that write no bulletin come last (M15)
    """

    census: Census
    config: FleetSeconds
    counts: Mapping[str, int]
    floor: int
    extras: int
    groups: Groups
    limit: int
    tolerance: int
    apart: bool

    @cached_property
    def lacking(self) -> dict[str, int]:
        """How many leases each worker lacks; below zero is its surplus."""
        most, base, chosen = self.limit, self.floor, self._favoured
        return {worker: min(base + (worker in chosen), most) - count for worker, count in self.counts.items()}

    def share(self, worker: str) -> int:
        """The number of leases that this worker should hold (M1, M2, M7)."""
        return min(self.floor + (worker in self._favoured), self.limit)

    @cached_property
    def _favoured(self) -> frozenset[str]:
        return favoured(self.counts, self.floor, self.extras, self.groups)

    @cached_property
    def non_bulletin_workers(self) -> frozenset[str]:
        """Workers that write no bulletin (KCL 2.x), where that matters."""
        others = frozenset(self.census.counts) - {self.census.worker} if self.apart else frozenset()
        return others - signers(self.census.leases) if others else others

    def place(self, worker: str) -> int:
        """How many leases those before this worker still lack; workers that write no bulletin come last."""
        strangers = self.non_bulletin_workers
        here = worker in strangers, worker
        return sum(lack for other, lack in self.lacking.items() if lack > 0 and (other in strangers, other) < here)

    def surplus(self, start: int, stop: int) -> tuple[Lease, ...]:
        """The surpluses of the donors, by name, fill the line; these places of it are wanted."""
        surplus = {worker: -lack for worker, lack in self.lacking.items() if lack < 0}
        return self.donated(_cut(surplus, max(start, 0), stop))

    def donated(self, wanted: Mapping[str, slice]) -> tuple[Lease, ...]:
        """Each donor gives this part of its leases, in the order of M4; none that is on its way (H5)."""
        held: dict[str | None, list[Lease]] = {donor: [] for donor in sorted(wanted)}
        moving = live_moves(self.census, self.config)
        for lease in self.census.held_by(wanted):
            if lease.key not in moving:
                held[lease.owner].append(lease)
        return tuple(
            lease
            for donor, leases in held.items()
            for lease in nsmallest(wanted[donor or ""].stop, leases, key=donation_order)[wanted[donor or ""]]
        )

    @cached_property
    def _unknown(self) -> int:
        return average(self.census.leases)

    @cached_property
    def _loads(self) -> dict[str, int]:
        return loads_of(self.census, self.counts, live_moves(self.census, self.config), self._unknown)

    @cached_property
    def _everybodys(self) -> int:
        return sum(weight_of(lease, self._unknown) for lease in self.census.leases)

    def loaded(self, worker: str) -> bool:
        """M13: whether a worker has its load, or a tenth less, for measures wander; no where loads are unknown."""
        if not self.tolerance:
            return False
        return self._loads[worker] * len(self.counts) >= (1 - BAND) * self._everybodys

    def short(self, worker: str) -> bool:
        """Whether this worker, seen or led, takes from the living for its count's sake (M6, M14)."""
        here = self.census.counts.get(worker, 0) > 0 or worker in self.census.led
        return here and self.lacking[worker] > self.tolerance and not self.loaded(worker)


def _cut(surplus: Mapping[str, int], start: int, stop: int) -> dict[str, slice]:
    """Each donor's surplus is cut to the part that lies between these places of the line."""
    parts = {}
    place = 0
    for donor in sorted(surplus):
        end = place + surplus[donor]
        if place < stop and end > start:
            parts[donor] = slice(max(start - place, 0), min(stop, end) - place)
        place = end
    return parts
