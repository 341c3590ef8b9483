"""Our own rules M1 to M15: everybody computes the same shares from the listing, and takes its own part of the moves.

Shares (`shares.py`): with P leases and N workers everybody gets P / N rounded down, the floor. The remainder, the
extras, go first to workers that hold more than the floor already, then by digest; `favoured` and `loads.py` tell how
groups and loads change it. Moves: free leases, and behind them what the donors have too much of, stand in one line.
The workers that lack something stand along it by name, each before as many leases as it lacks, and each takes its own.

What happens in which order. A turn asks these questions, and the first that has an answer ends it:
    M5, M12  do I hold nothing?          take one lease, to be seen; as a successor, as many as the others have
    M6       do I lack something?        take my part of the line: claim what is free, ask or rob the living
    M15      do workers that write no bulletin leave something free?    ours share it out among themselves
    M14      does a worker of a KCL 3.x leader lack something of mine?  let it go, for that leader to give
    M13      are the counts in order, but not the loads?                relieve the fullest
    M9, M11  is something undone for too long?                          do it for whoever should have
Nothing is taken from the living while a newcomer waits for others to join (C10), and nothing is chosen from a reading
of few rows: `plan` does not ask then.

Why these are the fewest moves (S6). Once all are visible, a worker above its share loses the difference, one below it
gains the difference, and nobody does both. The extras stay where a lease too many is held already, so the sum of the
differences is the least among all even divisions. A move under way counts as made (H1), and no share depends on how
far the moves have come (S4): when a part of one plan has been written, the other plans still hold.

Why nobody harms anybody. Workers that read alike never choose one lease, and of those that read differently the store
refuses all but one: a claim is written under the version as seen, a theft under the owner as seen. A refused write
costs a turn, never a record. An owner that answers requests is asked in place of robbed (H2), so that it finishes its
batch and writes its checkpoint first; whatever was handed over after the last checkpoint of a robbed one comes again.

Why it ends. Each move of M6 brings two workers nearer to their shares and none away from it; a fleet at rest asks for
nothing (M3). What others should do and do not, because they are stuck or expected in vain, is done by anybody after
`patience` cycles without a change (M9), one lease a turn, and only between workers two or more leases apart: such a
move cannot be undone by its like.

Example: a holds 6 leases, b holds 4, and c joins. The floor is 3, the one extra goes to a, the shares are 4, 3, 3.
Nobody sees c yet: it takes one lease to be seen, here one of b's (M5). With 6, 3, 1 it lacks two, the line is a's
surplus of two, and c takes both (M6): three moves, as many as c lacked. If d joins as well, and counts are 5, 3, 1, 1,
the shares are 3, 3, 2, 2, and the line is a's surplus of two again: c takes the first of it and d the second.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from heapq import nsmallest
from typing import Any, Literal

from attrs import Attribute, evolve, field, frozen
from attrs.validators import instance_of

from leasehold.balancer.actions import Action, Claim, Release, RequestHandoff, Steal, Taking
from leasehold.balancer.census import Census
from leasehold.balancer.chance import digest_under, drawn
from leasehold.balancer.handoff import handed_counts, live_moves
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.rule_set import FleetSeconds, RuleSet, number
from leasehold.balancer.rules.loads import slack, takers
from leasehold.balancer.rules.shares import Shares, awaits_joiners, donation_order

ALTERNATES = 3
"""An announcement names so many further leases to try when another worker was faster (M5)."""


def _groups(_rules: object, attribute: "Attribute[Any]", value: object) -> None:
    separators = isinstance(value, tuple) and all(isinstance(part, str) and part for part in value)
    if not (value is None or value == "prefix" or separators):
        raise ValueError(f'{attribute.name}: {value!r} is neither none, "prefix" nor a list of separators')


def _workers(rules: object, attribute: "Attribute[Any]", value: object) -> None:
    if not (isinstance(value, tuple) and all(isinstance(name, str) and name for name in value)):
        number(1, whole=True, none=True)(rules, attribute, value)


@frozen
class Minimal(RuleSet):
    """The project's own rules: the least moves, every group balanced (rules M1 to M15).

    groups            how workers form groups: None; "prefix", the text before the last "-";
                      or separators, outermost first, for a tree
    expected_workers  which workers are known to be coming, or only how many; None: only those seen
    max_leases        most leases one worker may hold; None: no limit
    max_steals        most leases taken from the living in one turn; None: no limit
    patience          turns an unbalanced group may stand still before slots are ignored (M9)
    grace_seconds     how long gracefully released leases wait for a joiner (M12); 0: off
    release           whether an overloaded worker gives a lease up for peers that never steal (M11)

    Examples:
        >>> from leasehold import Minimal
        >>> Minimal(groups="prefix", max_leases=50).name
        'minimal'
    """

    name = "minimal"
    renewal_rule = "C2"
    keeps_lookout = True
    children_later = True

    groups: Literal["prefix"] | tuple[str, ...] | None = field(default=None, validator=_groups)
    expected_workers: int | tuple[str, ...] | None = field(default=None, validator=_workers)
    max_leases: int | None = field(default=None, validator=number(1, whole=True, none=True))
    max_steals: int | None = field(default=None, validator=number(1, whole=True, none=True))
    patience: int = field(default=3, validator=number(1, whole=True))
    grace_seconds: float = field(default=0.0, validator=number(0))
    release: bool = field(default=False, validator=instance_of(bool))

    @property
    def weighs_loads(self) -> bool:
        """Whether counts may differ for the sake of bytes a second (M13)."""
        return True

    @property
    def frees_expired(self) -> bool:
        """Whether the lookout frees what has expired, for all (C6)."""
        # A released lease would wait for its owner's successor (M12): the dead have none.
        return not self.grace_seconds

    @property
    def most_leases(self) -> int | None:
        """The most that one worker may hold; None: no limit."""
        return self.max_leases

    def renew_seconds(self, lease_seconds: float) -> float:
        """The default of `Config.renew_seconds`."""
        return 0.53 * lease_seconds  # C2: two chances before any judge's expiry

    def expires_above(self, lease_seconds: float) -> float:
        """A lease idle for more seconds than this has no living owner."""
        return 1.05 * lease_seconds  # C2: the half second that makes renewing at 0.53 safe

    def overdue_seconds(self, lease_seconds: float, cycle_seconds: float) -> float:
        """A lease free for longer is not taken by who should take it (M9, M14)."""
        return lease_seconds + self.grace_seconds + self.patience * cycle_seconds

    def take(self, census: Census, me: Me, config: FleetSeconds) -> tuple[Action, ...]:
        """The answer is everything this worker takes now; it is empty once everybody has its share."""
        shares, free, overdue = self._shared(census, me, config)
        counts = shares.counts
        impatient = me.history.owners_still > self.patience * config.cycle_seconds
        # M9: beside a zombie's share, ours is too small.
        robs = impatient and max(counts.values()) >= counts[me.worker] + 2
        spares = not (census.available or shares.tolerance or self.release or census.led or robs)
        if counts[me.worker] > shares.floor and spares:
            return ()  # M3: no share is larger than the floor + 1
        turn = _Turn(shares, me, self)
        return (
            (() if me.worker in (self._expected()[0] if not overdue else ()) else turn.join(free))
            or turn.fill(free)
            or turn.take_orphans(free)
            or turn.yield_to_led(free)
            or turn.rebalance_load()
            or (turn.lose_patience(overdue) if overdue or impatient else ())
        )

    def _shared(
        self, census: Census, me: Me, config: FleetSeconds
    ) -> tuple[Shares, tuple[Lease, ...], tuple[Lease, ...]]:
        """The share of everybody, what may be claimed, and what of that nobody claimed in time."""
        counts = handed_counts(census, config)
        # M12: a lease that was lately given up in good order waits: its owner's successor is on the way.
        free = tuple(
            lease for lease in census.available if not (lease.owner is None and lease.idle < self.grace_seconds)
        )
        limit = self.overdue_seconds(config.lease_seconds, config.cycle_seconds)
        # M9: the taker of what has been free for so long must be missing. The age of a lease at first sight is unknown.
        overdue = tuple(lease for lease in free if limit < lease.idle < math.inf)
        names, size = ((), 0) if overdue else self._expected()  # M9: the expected workers did not come
        counts = {**dict.fromkeys(names, 0), **counts} if names else counts
        floor, extras = divmod(len(census.leases), max(len(counts), size))
        tolerance = 0 if census.led else slack(census.leases, floor)  # M14: beside strangers only counts are even
        most = len(census.leases) if self.max_leases is None else self.max_leases
        # Where M11 lets leases go for workers without a bulletin, nobody goes before them.
        apart = me.history.hearing is not None and not self.release
        return Shares(census, config, counts, floor, extras, self.groups, most, tolerance, apart), free, overdue

    def calls(self, census: Census, me: Me, config: FleetSeconds) -> Mapping[str, Sequence[str]]:
        """C6: whom the line of M6 asks to act, at which keys; of the workers that can be seen, but for the asking one.

        Who claims what is free reads it. Whose leases will be asked for, or are, reads those. Who should rob reads the
        whole table, unless it is new here: a newcomer looks by itself (C10).
        """
        shares, free, _ = self._shared(census, me, config)
        called: dict[str, list[str]] = {}
        strangers, waiting = shares.non_bulletin_workers, deque(sorted(free, key=donation_order))
        lacking = sorted((worker in strangers, worker) for worker, lack in shares.lacking.items() if lack > 0)
        robs, needed = set[str](), 0
        for foreign, worker in lacking:
            lack, keys = shares.lacking[worker], list[str]()
            while waiting and len(keys) < lack:
                keys.append(waiting.popleft().key)
            left = lack - len(keys)
            needed += left
            if not foreign and keys:
                called[worker] = keys
            if not foreign and left > shares.tolerance and not shares.loaded(worker):
                robs.add(worker)
        asked = [*shares.surplus(0, needed), *(lease for lease in census.moving if lease.next_owner != lease.owner)]
        for lease in asked if robs or census.moving else ():
            if lease.owner is not None and lease.owner not in strangers:
                called.setdefault(lease.owner, []).append(lease.key)
        for lease in census.leases if robs else ():
            if lease.owner in robs and lease.held >= config.cycle_seconds:
                called[lease.owner] = []
        called.pop(me.worker, None)
        return called

    def _expected(self) -> tuple[tuple[str, ...], int]:
        """The hint of M1 gives the names of the workers that are coming, or only their number."""
        hint = self.expected_workers
        return (hint, len(hint)) if isinstance(hint, tuple) else ((), hint or 0)


@frozen
class _Turn:
    """A turn of one worker: each method answers one question of the six."""

    shares: Shares
    me: Me
    rules: Minimal

    @property
    def _held(self) -> int:
        return self.shares.counts[self.me.worker]

    def join(self, free: tuple[Lease, ...]) -> tuple[Action, ...]:
        """M5: a worker that holds nothing takes one lease, and is seen, before it takes its share."""
        if self._held:
            return ()
        if self.rules.grace_seconds:
            # M12: a successor takes at once as many leases as the median of the others holds.
            shares = self.shares
            others = sorted(count for worker, count in shares.counts.items() if worker != self.me.worker)
            usual = others[(len(others) - 1) // 2] if others else 0
            if inherited := drawn(shares.census.available, self.me, min(usual, shares.floor, shares.limit)):
                return tuple(Claim(lease, "M12") for lease in inherited)
        if free:
            return _one_of([Claim(lease, "M5") for lease in drawn(free, self.me, 1 + ALTERNATES)])
        # A joiner draws a few donors and any of their leases but the last. So joiners seldom meet at one lease, and no
        # donor is left with nothing: it would announce itself, a move more.
        digest, counts = digest_under(f"{self.me.worker}\0{self.me.turn}"), self.shares.counts
        donors = [worker for worker, count in counts.items() if count > max(self.shares.floor, 1)]
        few = nsmallest(1 + ALTERNATES, donors, key=lambda donor: (digest(donor), donor))
        spare = self.shares.donated({donor: slice(0, counts[donor] - 1) for donor in few})
        return _one_of([_steal(lease, "M5") for lease in drawn(spare, self.me, 1 + ALTERNATES)])

    def fill(self, free: tuple[Lease, ...]) -> tuple[Action, ...]:
        """M6: a worker takes as many leases of the line as it lacks, from its own place in the line on."""
        shares, me = self.shares, self.me
        need = shares.share(me.worker) - self._held
        if need <= 0:
            return ()
        first = shares.place(me.worker)
        claimed = nsmallest(first + need, free, key=donation_order)[first:]
        robbing = (
            need > shares.tolerance
            and not shares.loaded(me.worker)
            and not awaits_joiners(shares.census.mine, me, shares.config)
        )
        stolen = shares.surplus(first - len(free), first + need - len(free)) if robbing else ()
        # M7: taking what is free hurts nobody; only what is taken from the living has a limit.
        return tuple(Claim(lease, "M6") for lease in claimed) + tuple(
            _steal(lease, "M6") for lease in stolen[: self.rules.max_steals]
        )

    def take_orphans(self, free: tuple[Lease, ...]) -> tuple[Action, ...]:
        """M15: leases that had an owner and fall to strangers are claimed by ours; a digest names the worker."""
        strangers = self.shares.non_bulletin_workers
        if not strangers:
            return ()
        ours = sorted(self.shares.census.counts.keys() - strangers)
        waiting = sorted(free, key=donation_order)[self.shares.place(min(strangers)) :]
        mine = [
            lease
            for lease in waiting
            if lease.epoch and ours[int.from_bytes(donation_order(lease)[0]) % len(ours)] == self.me.worker
        ]
        return tuple(Claim(lease, "M15") for lease in mine[: max(0, self.shares.limit - self._held)])

    def yield_to_led(self, free: tuple[Lease, ...]) -> tuple[Action, ...]:
        """M14: an owner gives a led worker what falls to it; while one of those has too many, their leader must act."""
        shares = self.shares
        if any(shares.lacking.get(worker, 0) < 0 for worker, _ in self.me.history.led):
            return ()
        going: list[Release] = []
        for worker in shares.census.led:
            need, first = shares.lacking[worker], shares.place(worker) - len(free)
            if need > shares.tolerance:
                going += [Release(lease, "M14", worker) for lease in shares.surplus(first, first + need)]
        mine = [release for release in going if release.lease.owner == self.me.worker]
        return tuple(mine[: self.rules.max_steals])

    def rebalance_load(self) -> tuple[Action, ...]:
        """M13: with counts in order, the overloaded are relieved; before, this and M6 would go for one lease."""
        shares = self.shares
        lacks = shares.tolerance and max(shares.lacking.values()) > shares.tolerance
        if not shares.tolerance or (lacks and any(map(shares.short, shares.lacking))):
            return ()
        moving = live_moves(shares.census, shares.config)
        takings = takers(
            shares.census,
            shares.counts,
            shares.floor,
            moving,
            self.rules.max_leases,
            settling=shares.config.cycle_seconds,
        )
        keys = {key for key, taker in takings.items() if taker == self.me.worker}
        mine = [lease for lease in shares.census.leases if lease.key in keys] if keys else []
        return tuple(_steal(lease, "M13") for lease in sorted(mine, key=donation_order)[: self.rules.max_steals])

    def lose_patience(self, overdue: tuple[Lease, ...]) -> tuple[Action, ...]:
        """M9: anybody does what others should have done long ago, one lease a turn."""
        shares, full = self.shares, self._held >= self.shares.limit
        if overdue:
            return () if full else tuple(Claim(lease, "M9") for lease in drawn(overdue, self.me, 1))
        most, fullest = max((count, worker) for worker, count in shares.counts.items())
        if not full and most >= self._held + 2 + 2 * shares.tolerance and not shares.loaded(self.me.worker):
            return tuple(_steal(lease, "M9") for lease in shares.donated({fullest: slice(0, 1)}))
        # M11: some peers never steal; for them the overloaded let a lease go, after twice the time of M9.
        overloaded = self._held >= min(shares.counts.values()) + 2 + 2 * shares.tolerance
        waited = self.me.history.owners_still > 2 * self.rules.patience * shares.config.cycle_seconds
        if not (self.rules.release and overloaded and waited):
            return ()
        return tuple(Release(lease, "M11") for lease in shares.donated({self.me.worker: slice(0, 1)}))


def _steal(lease: Lease, rule: str) -> Steal | RequestHandoff:
    """An owner that answers requests is asked (H2); from any other the lease is stolen."""
    from_owner = lease.owner or ""
    if lease.yields:
        return RequestHandoff(lease, from_owner, "H2", stale_next_owner=lease.next_owner)
    return Steal(lease, from_owner, rule)


def _one_of(ways: Sequence[Taking]) -> tuple[Action, ...]:
    """The first way is taken; others of its kind stand by, for only requests are waited for."""
    if not ways:
        return ()
    asks = isinstance(ways[0], RequestHandoff)
    return (evolve(ways[0], alternates=tuple(way for way in ways[1:] if isinstance(way, RequestHandoff) == asks)),)
