"""Our own rules M1 to M15: everybody computes the same shares from the listing, and takes its own part of the moves.

Rule 1: what two workers read alike they decide alike, so that their plans never meet; where they
read differently, both take from the same end of a donor's leases, and the store refuses one of them.
Rule 2: no share may depend on how far the moves have come (S4).
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from heapq import nsmallest

from attrs import evolve, frozen

from balancer.actions import Action, Claim, Release, RequestHandoff, Steal, Taking
from balancer.cadence import gathering
from balancer.census import Census, overdue_seconds, signers
from balancer.chance import digest_under, drawn, order_under
from balancer.config import Config, Minimal
from balancer.groups import favoured
from balancer.handoff import handed_counts, live_moves
from balancer.loads import BAND, average, slack, takers, weight_of
from balancer.model import Lease, Me

ALTERNATES = 3
"""Further leases an announcement tries when another worker was faster (M5)."""

_shed_order = order_under("minimal")


def take(census: Census, me: Me, config: Config, rules: Minimal) -> tuple[Action, ...]:
    """What this worker takes now; nothing once everybody has its share."""
    counts = handed_counts(census, config)
    free = tuple(lease for lease in census.available if not _graced(lease, rules))
    overdue = tuple(lease for lease in free if _overdue(lease, config, rules))
    names, size = ((), 0) if overdue else _expected(rules)  # M9: who was hinted at did not come
    counts = {**dict.fromkeys(names, 0), **counts} if names else counts
    floor, extras = divmod(len(census.leases), max(len(counts), size))
    tolerance = slack(census.leases, floor)
    above, stuck = counts[me.worker] > floor, me.history.owners_still > patience_seconds(config, rules)
    robs = stuck and max(counts.values()) >= counts[me.worker] + 2  # M9: beside a zombie's share, ours is too small
    if above and not (census.available or tolerance or rules.release or census.led or robs):
        return ()  # M3: no share is larger than the floor + 1
    fleet = _Fleet(census, me, config, rules, counts, floor, extras, tolerance)
    joined = () if me.worker in names else fleet.join(free)
    return (
        joined
        or fleet.fill(free)
        or fleet.rescue(free)
        or fleet.let_go(free)
        or fleet.relieve()
        or fleet.lose_patience(overdue)
    )


def _expected(rules: Minimal) -> tuple[tuple[str, ...], int]:
    """The hint of M1: who is coming, or only how many."""
    hint = rules.expected_workers
    return (hint, len(hint)) if isinstance(hint, tuple) else ((), hint or 0)


def _graced(lease: Lease, rules: Minimal) -> bool:
    """M12: lately given up in good order; its owner's successor is on the way."""
    return lease.owner is None and lease.idle < rules.grace_seconds


def _overdue(lease: Lease, config: Config, rules: Minimal) -> bool:
    """M9: free for so long that whoever should take it does not; unknown at first sight."""
    return overdue_seconds(config, rules) < lease.idle < math.inf


def patience_seconds(config: Config, rules: Minimal) -> float:
    """How long a worker waits for others to do their part (M9)."""
    return rules.patience * config.cycle_seconds


@frozen
class _Fleet:
    """One reading and everybody's share in it."""

    census: Census
    me: Me
    config: Config
    rules: Minimal
    counts: Mapping[str, int]
    floor: int
    extras: int
    tolerance: int

    def share(self, worker: str) -> int:
        """How many leases this worker should hold (M1, M2, M7)."""
        return min(self.floor + (worker in self._favoured), self._limit)

    @cached_property
    def _favoured(self) -> frozenset[str]:
        return favoured(self.counts, self.floor, self.extras, self.rules.groups)

    @property
    def _limit(self) -> int:
        return len(self.census.leases) if self.rules.max_leases is None else self.rules.max_leases

    def join(self, free: tuple[Lease, ...]) -> tuple[Action, ...]:
        """M5: who holds nothing takes one lease, and is seen, before it takes its share."""
        if self.counts[self.me.worker]:
            return ()
        if self.rules.grace_seconds and (inherited := self._inherit()):
            return inherited
        if free:
            return _one_of([Claim(lease, "M5") for lease in drawn(free, self.me, 1 + ALTERNATES)])
        return _one_of([_rob(lease, "M5") for lease in drawn(self._spare(), self.me, 1 + ALTERNATES)])

    def _inherit(self) -> tuple[Action, ...]:
        """M12: a successor takes at once what a worker here usually holds."""
        others = sorted(count for worker, count in self.counts.items() if worker != self.me.worker)
        usual = others[(len(others) - 1) // 2] if others else 0
        leases = drawn(self.census.available, self.me, min(usual, self.floor, self._limit))
        return tuple(Claim(lease, "M12") for lease in leases)

    def _spare(self) -> tuple[Lease, ...]:
        """Any lease of a few donors drawn by this worker, so that joiners seldom meet at one lease."""
        digest = digest_under(f"{self.me.worker}\0{self.me.turn}")
        keeps = max(self.floor, 1)
        donors = [worker for worker, count in self.counts.items() if count > keeps]
        few = nsmallest(1 + ALTERNATES, donors, key=lambda donor: (digest(donor), donor))
        return self._shed({donor: slice(0, self.counts[donor]) for donor in few})

    def fill(self, free: tuple[Lease, ...]) -> tuple[Action, ...]:
        """M6: free leases, then the donors' surplus, stand in one line; the takers, by id, take what they lack."""
        need = self.share(self.me.worker) - self.counts[self.me.worker]
        if need <= 0:
            return ()
        first = self._place(self.me.worker)
        claimed = nsmallest(first + need, free, key=_shed_order)[first:]
        robbing = need > self.tolerance and not self._loaded() and not gathering(self.census.mine, self.me, self.config)
        stolen = self._surplus(first - len(free), first + need - len(free)) if robbing else ()
        # M7: what is free hurts nobody; only what is taken from the living has a limit.
        return tuple(Claim(lease, "M6") for lease in claimed) + tuple(
            _rob(lease, "M6") for lease in stolen[: self.rules.max_steals]
        )

    @cached_property
    def _unknown(self) -> float:
        return average(self.census.leases)

    @cached_property
    def _lacking(self) -> dict[str, int]:
        most, base, lucky = self._limit, self.floor, self._favoured
        return {worker: min(base + (worker in lucky), most) - count for worker, count in self.counts.items()}

    def rescue(self, free: tuple[Lease, ...]) -> tuple[Action, ...]:
        """M15: what had an owner, and falls to strangers now, is taken by ours, each lease by whom its digest says."""
        if not self._strangers:
            return ()
        ours = sorted(self.census.counts.keys() - self._strangers)
        waiting = sorted(free, key=_shed_order)[self._place(min(self._strangers)) :]
        mine = [lease for lease in waiting if lease.epoch and ours[_part(lease, len(ours))] == self.me.worker]
        return tuple(Claim(lease, "M15") for lease in mine[: max(0, self._limit - self.counts[self.me.worker])])

    @cached_property
    def _strangers(self) -> frozenset[str]:
        """Who hears no bulletin and comes in its own time; nobody where leases are let go for such (M11, M14)."""
        if self.me.history.hearing is None or self.rules.release or self.me.history.led:
            return frozenset()
        return frozenset(self.census.counts) - signers(self.census.leases) - {self.me.worker}

    def _place(self, worker: str) -> int:
        """Where this worker begins to take from the line, in which strangers come last."""
        here = worker in self._strangers, worker
        return sum(
            lack for other, lack in self._lacking.items() if lack > 0 and (other in self._strangers, other) < here
        )

    def _surplus(self, start: int, stop: int) -> tuple[Lease, ...]:
        """What stands in these places of the line, the first donor's surplus at its head."""
        surplus = {worker: -lack for worker, lack in self._lacking.items() if lack < 0}
        return self._shed(_cut(surplus, max(start, 0), stop))

    def let_go(self, free: tuple[Lease, ...]) -> tuple[Action, ...]:
        """M14: workers that are given only what is free have a part of the line too; what is mine of it I let go.

        Nothing while one of them has more than its share: how they share is their leader's affair, not ours.
        """
        if any(self._lacking.get(worker, 0) < 0 for worker, _ in self.me.history.led):
            return ()
        going: list[Lease] = []
        for worker in self.census.led:
            need, first = self._lacking[worker], self._place(worker) - len(free)
            if need > self.tolerance:
                going += self._surplus(first, first + need)
        mine = [lease for lease in going if lease.owner == self.me.worker]
        return tuple(Release(lease, "M14") for lease in mine[: self.rules.max_steals])

    def _loaded(self) -> bool:
        """M13: whether this worker has its part of the load, in however few leases; no where loads are not known.

        Within the band: measurements wander, and what is taken on the strength of one would go back on the next.
        """
        if not self.tolerance:
            return False
        mine, everybodys = (
            sum(weight_of(lease, self._unknown) for lease in leases)
            for leases in (self.census.mine, self.census.leases)
        )
        return mine * len(self.counts) >= (1 - BAND) * everybodys

    def relieve(self) -> tuple[Action, ...]:
        """M13: take from the overloaded what falls to this worker, once the counts are in order."""
        moving = live_moves(self.census, self.config)
        takings = takers(self.census, self.counts, self.floor, moving, self.rules.max_leases)
        keys = {key for key, taker in takings.items() if taker == self.me.worker}
        mine = [lease for lease in self.census.leases if lease.key in keys] if keys else []
        return tuple(_rob(lease, "M13") for lease in sorted(mine, key=_shed_order)[: self.rules.max_steals])

    def lose_patience(self, overdue: tuple[Lease, ...]) -> tuple[Action, ...]:
        """M9: what others should have done long ago anybody does, one lease a turn."""
        held = self.counts[self.me.worker]
        full = held >= self._limit
        if overdue:
            return () if full else tuple(Claim(lease, "M9") for lease in drawn(overdue, self.me, 1))
        if self.me.history.owners_still <= patience_seconds(self.config, self.rules):
            return ()
        most, fullest = max((count, worker) for worker, count in self.counts.items())
        if not full and most >= held + 2 + 2 * self.tolerance and not self._loaded():
            return tuple(_rob(lease, "M9") for lease in self._shed({fullest: slice(0, 1)}))
        return self._release() if self.rules.release else ()

    def _release(self) -> tuple[Action, ...]:
        """M11: some peers take what is free and steal from nobody; for them the overloaded let go, later than M9."""
        patience = 2 * patience_seconds(self.config, self.rules)
        if (
            self.counts[self.me.worker] < min(self.counts.values()) + 2 + 2 * self.tolerance
            or self.me.history.owners_still <= patience
        ):
            return ()
        return tuple(Release(lease, "M11") for lease in self._shed({self.me.worker: slice(0, 1)}))

    def _shed(self, wanted: Mapping[str, slice]) -> tuple[Lease, ...]:
        """These parts of the donors' leases in shed order, donor by donor (M4); none that is on its way (H5)."""
        held: dict[str | None, list[Lease]] = {donor: [] for donor in sorted(wanted)}
        moving = live_moves(self.census, self.config)
        for lease in self.census.held_by(wanted):
            if lease.key not in moving:
                held[lease.owner].append(lease)
        return tuple(
            lease
            for donor, leases in held.items()
            for lease in nsmallest(wanted[donor or ""].stop, leases, key=_shed_order)[wanted[donor or ""]]
        )


def _part(lease: Lease, parts: int) -> int:
    return int.from_bytes(_shed_order(lease)[0]) % parts


def _cut(surplus: Mapping[str, int], start: int, stop: int) -> dict[str, slice]:
    """Which part of each donor's surplus falls between these places of the line."""
    parts = {}
    place = 0
    for donor in sorted(surplus):
        end = place + surplus[donor]
        if place < stop and end > start:
            parts[donor] = slice(max(start - place, 0), min(stop, end) - place)
        place = end
    return parts


def _rob(lease: Lease, rule: str) -> Steal | RequestHandoff:
    """Ask the living owner where it answers (H2), else steal."""
    victim = lease.owner or ""
    if lease.yields:
        return RequestHandoff(lease, victim, "H2", stale_heir=lease.heir)
    return Steal(lease, victim, rule)


def _one_of(ways: Sequence[Taking]) -> tuple[Action, ...]:
    """The first of these; the others stand by, requests beside requests, for only those are waited for."""
    if not ways:
        return ()
    asks = isinstance(ways[0], RequestHandoff)
    return (evolve(ways[0], alternates=tuple(way for way in ways[1:] if isinstance(way, RequestHandoff) == asks)),)
