"""Implements the project's own rule set (M1 to M15).

Every worker computes the same shares from the table, and makes only its own moves.

Shares (`shares.py`): if there are P leases and N workers, every worker gets P / N leases, rounded down. This number is
the *floor*. The remaining leases are the *extras*. They go to workers that already hold more than the floor, and then
to workers that are chosen by a digest of their ids. `shares.py` and `loads.py` describe how groups and loads change
this.

Moves: the free leases, followed by the surplus leases of workers above their share, form a line. Workers that lack
leases have positions along this line, in order of name. Each of them takes as many leases as it lacks, starting at its
position.

Order of decisions. A turn asks these questions, and the first one that yields actions ends the turn:
    M5, M12  Do I hold nothing?  Take one lease to become visible; a successor takes as many as the others hold.
    M6       Do I lack leases?  Take my part of the line: claim the free leases, request or steal the others.
    M15      Do workers that write no bulletin leave a lease free?  Divide such leases among our workers.
    M14      Does a worker of a KCL 3.x leader lack a lease of mine?  Release it, so that the leader can assign it.
    M13      Are the counts right, but not the loads?  Relieve the most loaded worker.
    M9, M11  Has something been left undone for too long?  Do it in place of the worker that should have.
While a newcomer waits for others to join, it takes no leases from living workers (C10). `plan` does not ask these
questions after a read of a few rows.

Why these are the fewest moves (S6). Once all workers are visible, a worker above its share only loses leases, and a
worker below its share only gains leases. Extras stay with workers that already hold more than the floor, so no other
even division needs fewer moves. A hand-off in progress counts as done (H1), so shares stay the same while moves are
carried out (S4). Therefore, a worker's plan remains valid when other workers have carried out their plans.

Why workers do not harm each other. Workers that read the same rows never choose the same lease. If they read different
rows, the store rejects all writes but one, because a claim is conditional on the version that was read, and a steal on
the owner that was read. A rejected write costs a turn, never a record. If an owner answers requests, the lease is
requested rather than stolen (H2), so that the owner finishes its batch and writes its checkpoint first. If a lease is
stolen, the records dispatched after its last checkpoint are delivered again.

Why the moves end. Each move of M6 brings two workers closer to their shares, and a worker that has its share requests
nothing (M3). A worker that should act may be stuck, or an expected worker may never have started. After `patience`
cycles without a change, any other worker acts in its place (M9). The acting worker takes one lease per turn, and only
from a worker that holds at least two leases more than it does, so no such move can undo another.

Example: a holds 6 leases, b holds 4, and c joins. The floor is 3, and the one extra goes to a, so the shares are 4, 3
and 3. The others cannot see c yet, so c takes one lease to become visible, in this case one of b's (M5). Now the counts
are 6, 3 and 1, c lacks two leases, and the line consists of a's surplus of two. c takes both leases (M6). Altogether,
there are three moves, as many as c lacked leases. If d joins as well and the counts are 5, 3, 1 and 1, the shares are
3, 3, 2 and 2. Again, the line consists of a's surplus of two. c takes the first of these leases, and d takes the
second.
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
from leasehold.balancer.chance import digest_under, draw_leases
from leasehold.balancer.handoff import counts_after_handoffs, pending_handoffs
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.rule_set import FleetSeconds, RuleSet, number_validator
from leasehold.balancer.rules.loads import count_tolerance, load_takers
from leasehold.balancer.rules.shares import Shares, awaits_joiners, donation_order

ALTERNATES_MAX = 3
"""How many other leases a newcomer may try to take if another worker takes the lease that it has chosen (M5)."""


def _check_groups(_rules: object, attribute: "Attribute[Any]", value: object) -> None:
    is_separators = isinstance(value, tuple) and all(isinstance(separator, str) and separator for separator in value)
    if not (value is None or value == "prefix" or is_separators):
        raise ValueError(f'{attribute.name}: {value!r} is neither none, "prefix" nor a list of separators')


def _check_expected_workers(rules: object, attribute: "Attribute[Any]", value: object) -> None:
    if not (isinstance(value, tuple) and all(isinstance(name, str) and name for name in value)):
        number_validator(1, whole_only=True, allow_none=True)(rules, attribute, value)


@frozen
class Minimal(RuleSet):
    """The project's own rules M1 to M15, which balance every group with the fewest moves.

    groups            how workers form groups: None; "prefix", the text before the last "-";
                      or separators, outermost first, for a tree
    expected_workers  the workers that are expected, or only their number; None: only those seen
    max_leases        the most leases that one worker may hold; None: no limit
    max_steals        the most leases taken from living workers in one turn; None: no limit
    patience          turns for which an unbalanced group may stay unchanged before any worker may act (M9)
    grace_seconds     how long a gracefully released lease is reserved for newcomers (M12); 0: off
    release           whether an overloaded worker gives up a lease for peers that never steal (M11)

    Examples:
        >>> from leasehold import Minimal
        >>> Minimal(groups="prefix", max_leases=50).name
        'minimal'
    """

    name = "minimal"
    renewal_rule = "C2"
    keeps_lookout = True
    children_later = True

    groups: Literal["prefix"] | tuple[str, ...] | None = field(default=None, validator=_check_groups)
    expected_workers: int | tuple[str, ...] | None = field(default=None, validator=_check_expected_workers)
    max_leases: int | None = field(default=None, validator=number_validator(1, whole_only=True, allow_none=True))
    max_steals: int | None = field(default=None, validator=number_validator(1, whole_only=True, allow_none=True))
    patience: int = field(default=3, validator=number_validator(1, whole_only=True))
    grace_seconds: float = field(default=0.0, validator=number_validator(0))
    release: bool = field(default=False, validator=instance_of(bool))

    @property
    def weighs_loads(self) -> bool:
        return True

    @property
    def frees_expired(self) -> bool:
        # If released leases are reserved for newcomers (M12), do not free expired leases. A freed lease would also be
        # reserved, but the lease of a dead worker should be claimed immediately.
        return not self.grace_seconds

    @property
    def most_leases(self) -> int | None:
        return self.max_leases

    def renew_seconds(self, lease_seconds: float) -> float:
        return 0.53 * lease_seconds  # C2: this leaves time for a second attempt to renew before the lease expires

    def expires_above(self, lease_seconds: float) -> float:
        return 1.05 * lease_seconds  # C2: slightly longer, because renewals start after 0.53 x `lease_seconds`

    def overdue_seconds(self, lease_seconds: float, cycle_seconds: float) -> float:
        return lease_seconds + self.grace_seconds + self.patience * cycle_seconds

    def take(self, census: Census, me: Me, config: FleetSeconds) -> tuple[Action, ...]:
        shares, free_leases, overdue_leases = self._compute_shares(census, me, config)
        counts = shares.counts
        patience_exceeded = me.history.owners_still > self.patience * config.cycle_seconds
        # M9: another worker may renew its leases but not plan. In this case, act even if this worker already has its
        #     share.
        may_take = patience_exceeded and max(counts.values()) >= counts[me.worker] + 2
        nothing_else_to_do = not (census.available or shares.tolerance or self.release or census.led or may_take)
        if counts[me.worker] > shares.floor and nothing_else_to_do:
            return ()  # M3: no share exceeds the floor + 1
        turn = _Turn(shares, me, self)
        return (
            (() if me.worker in (self._expected_workers()[0] if not overdue_leases else ()) else turn.join(free_leases))
            or turn.fill(free_leases)
            or turn.take_orphans(free_leases)
            or turn.yield_to_led(free_leases)
            or turn.rebalance_load()
            or (turn.act_for_missing_workers(overdue_leases) if overdue_leases or patience_exceeded else ())
        )

    def _compute_shares(
        self, census: Census, me: Me, config: FleetSeconds
    ) -> tuple[Shares, tuple[Lease, ...], tuple[Lease, ...]]:
        """Return the shares, the leases that may be claimed, and those of them that are overdue.

        A lease is overdue if another worker should have claimed it long ago.
        """
        counts = counts_after_handoffs(census, config)
        # M12: a lease that was released less than grace_seconds ago is reserved for a newcomer.
        free_leases = tuple(
            lease for lease in census.available if not (lease.owner is None and lease.idle < self.grace_seconds)
        )
        overdue_limit = self.overdue_seconds(config.lease_seconds, config.cycle_seconds)
        # M9: if a lease has been free for this long, the worker that should claim it must be missing. Leave out leases
        #     with an infinite idle time, because it is unknown how long they have been free.
        overdue_leases = tuple(lease for lease in free_leases if overdue_limit < lease.idle < math.inf)
        expected_names, expected_count = ((), 0) if overdue_leases else self._expected_workers()
        counts = {**dict.fromkeys(expected_names, 0), **counts} if expected_names else counts
        floor, extras = divmod(len(census.leases), max(len(counts), expected_count))
        tolerance = 0 if census.led else count_tolerance(census.leases, floor)  # M14: a KCL 3.x leader balances loads
        lease_limit = len(census.leases) if self.max_leases is None else self.max_leases
        # Workers that write no bulletin, such as KCL 2.x workers, come last in the line, unless M11 releases leases for
        # them.
        non_bulletin_last = me.history.hearing is not None and not self.release
        return (
            Shares(census, config, counts, floor, extras, self.groups, lease_limit, tolerance, non_bulletin_last),
            free_leases,
            overdue_leases,
        )

    def calls(self, census: Census, me: Me, config: FleetSeconds) -> Mapping[str, Sequence[str]]:
        """Map each other worker that must act under M6 to the keys of the leases that it should read (C6).

        A worker that will claim free leases should read these leases. An owner should read those of its leases that
        have been or will be requested.

        A worker that should take leases from others should read the whole table, so its sequence of keys is empty. This
        does not apply to newcomers, because they list the table anyway (C10).
        """
        shares, free_leases, _ = self._compute_shares(census, me, config)
        keys_by_worker: dict[str, list[str]] = {}
        non_bulletin, free_line = shares.non_bulletin_workers, deque(sorted(free_leases, key=donation_order))
        lacking_workers = sorted(
            (worker in non_bulletin, worker) for worker, lack in shares.lacking.items() if lack > 0
        )
        stealing_workers, needed_count = set[str](), 0
        for writes_no_bulletin, worker in lacking_workers:
            lack, keys = shares.lacking[worker], list[str]()
            while free_line and len(keys) < lack:
                keys.append(free_line.popleft().key)
            remaining_count = lack - len(keys)
            needed_count += remaining_count
            if not writes_no_bulletin and keys:
                keys_by_worker[worker] = keys
            if not writes_no_bulletin and remaining_count > shares.tolerance and not shares.loaded(worker):
                stealing_workers.add(worker)
        requested_leases = [
            *shares.surplus(0, needed_count),
            *(lease for lease in census.moving if lease.next_owner != lease.owner),
        ]
        for lease in requested_leases if stealing_workers or census.moving else ():
            if lease.owner is not None and lease.owner not in non_bulletin:
                keys_by_worker.setdefault(lease.owner, []).append(lease.key)
        for lease in census.leases if stealing_workers else ():
            if lease.owner in stealing_workers and lease.held >= config.cycle_seconds:
                keys_by_worker[lease.owner] = []
        keys_by_worker.pop(me.worker, None)
        return keys_by_worker

    def _expected_workers(self) -> tuple[tuple[str, ...], int]:
        """Return the names and the number of the expected workers (M1).

        If the option `expected_workers` contains only a number, there are no names.
        """
        expected = self.expected_workers
        return (expected, len(expected)) if isinstance(expected, tuple) else ((), expected or 0)


@frozen
class _Turn:
    """One worker's turn.

    Each public method answers one of the questions in the docstring of this module, and returns the resulting actions.
    """

    shares: Shares
    me: Me
    rules: Minimal

    @property
    def _own_count(self) -> int:
        return self.shares.counts[self.me.worker]

    def join(self, free_leases: tuple[Lease, ...]) -> tuple[Action, ...]:
        """Take one lease if this worker holds none (M5).

        The other workers see a newcomer only once it owns a lease. From then on, they include the newcomer when they
        compute shares.
        """
        if self._own_count:
            return ()
        if self.rules.grace_seconds:
            # M12: a newcomer may replace a worker that has just ended, so it takes as many leases as the median of the
            #      other workers holds.
            shares = self.shares
            other_counts = sorted(count for worker, count in shares.counts.items() if worker != self.me.worker)
            median_count = other_counts[(len(other_counts) - 1) // 2] if other_counts else 0
            if inherited_leases := draw_leases(
                shares.census.available, self.me, min(median_count, shares.floor, shares.limit)
            ):
                return tuple(Claim(lease, "M12") for lease in inherited_leases)
        if free_leases:
            return _with_alternates(
                [Claim(lease, "M5") for lease in draw_leases(free_leases, self.me, 1 + ALTERNATES_MAX)]
            )
        # Choose a few donors, and then a lease of any of them, so that workers that join at the same time rarely choose
        # the same lease. Leave at least one lease to each donor. Otherwise, the donor would have to take another lease
        # to become visible again, which would be one more move.
        digest, counts = digest_under(f"{self.me.worker}\0{self.me.turn}"), self.shares.counts
        donors = [worker for worker, count in counts.items() if count > max(self.shares.floor, 1)]
        chosen_donors = nsmallest(1 + ALTERNATES_MAX, donors, key=lambda donor: (digest(donor), donor))
        candidates = self.shares.donated({donor: slice(0, counts[donor] - 1) for donor in chosen_donors})
        return _with_alternates(
            [_request_or_steal(lease, "M5") for lease in draw_leases(candidates, self.me, 1 + ALTERNATES_MAX)]
        )

    def fill(self, free_leases: tuple[Lease, ...]) -> tuple[Action, ...]:
        """Take as many leases from the line as this worker lacks (M6).

        The line consists of the free leases, followed by the surplus leases of other workers. This worker takes leases
        starting at its own position.
        """
        shares, me = self.shares, self.me
        need = shares.share(me.worker) - self._own_count
        if need <= 0:
            return ()
        position = shares.line_position(me.worker)
        claimed_leases = nsmallest(position + need, free_leases, key=donation_order)[position:]
        may_steal = (
            need > shares.tolerance
            and not shares.loaded(me.worker)
            and not awaits_joiners(shares.census.mine, me, shares.config)
        )
        stolen_leases = (
            shares.surplus(position - len(free_leases), position + need - len(free_leases)) if may_steal else ()
        )
        # M7: `max_steals` limits only the leases that are taken from living workers, because a claim of a free lease
        #     interrupts no other worker.
        return tuple(Claim(lease, "M6") for lease in claimed_leases) + tuple(
            _request_or_steal(lease, "M6") for lease in stolen_leases[: self.rules.max_steals]
        )

    def take_orphans(self, free_leases: tuple[Lease, ...]) -> tuple[Action, ...]:
        """Claim free leases that have had an owner, if workers that write no bulletin should take them (M15).

        Workers that write no bulletin (KCL 2.x) may take a long time to claim a lease. A digest of the key decides
        which worker of this library claims the lease instead.
        """
        non_bulletin = self.shares.non_bulletin_workers
        if not non_bulletin:
            return ()
        own_workers = sorted(self.shares.census.counts.keys() - non_bulletin)
        unclaimed_leases = sorted(free_leases, key=donation_order)[self.shares.line_position(min(non_bulletin)) :]
        own_orphans = [
            lease
            for lease in unclaimed_leases
            if lease.epoch
            and own_workers[int.from_bytes(donation_order(lease)[0]) % len(own_workers)] == self.me.worker
        ]
        return tuple(Claim(lease, "M15") for lease in own_orphans[: max(0, self.shares.limit - self._own_count)])

    def yield_to_led(self, free_leases: tuple[Lease, ...]) -> tuple[Action, ...]:
        """Release leases so that a KCL 3.x leader can assign them to its workers (M14).

        If one of the leader's workers has too many leases, no lease is released, because the leader should first move
        those leases.
        """
        shares = self.shares
        if any(shares.lacking.get(worker, 0) < 0 for worker, _ in self.me.history.led):
            return ()
        releases: list[Release] = []
        for worker in shares.census.led:
            need, position = shares.lacking[worker], shares.line_position(worker) - len(free_leases)
            if need > shares.tolerance:
                releases += [Release(lease, "M14", worker) for lease in shares.surplus(position, position + need)]
        own_releases = [release for release in releases if release.lease.owner == self.me.worker]
        return tuple(own_releases[: self.rules.max_steals])

    def rebalance_load(self) -> tuple[Action, ...]:
        """Take leases from overloaded workers (M13).

        Loads are balanced only if the numbers of leases are already balanced. Otherwise, M6 and M13 might choose the
        same lease for different workers.
        """
        shares = self.shares
        some_lack_leases = shares.tolerance and max(shares.lacking.values()) > shares.tolerance
        if not shares.tolerance or (some_lack_leases and any(map(shares.lacks_too_many, shares.lacking))):
            return ()
        moves_in_progress = pending_handoffs(shares.census, shares.config)
        takings = load_takers(
            shares.census,
            shares.counts,
            shares.floor,
            moves_in_progress,
            self.rules.max_leases,
            settle_seconds=shares.config.cycle_seconds,
        )
        keys = {key for key, taker in takings.items() if taker == self.me.worker}
        leases_to_take = [lease for lease in shares.census.leases if lease.key in keys] if keys else []
        return tuple(
            _request_or_steal(lease, "M13")
            for lease in sorted(leases_to_take, key=donation_order)[: self.rules.max_steals]
        )

    def act_for_missing_workers(self, overdue_leases: tuple[Lease, ...]) -> tuple[Action, ...]:
        """Make a move that another worker should have made long ago (M9).

        A worker makes one such move per turn.
        """
        shares, is_full = self.shares, self._own_count >= self.shares.limit
        if overdue_leases:
            return () if is_full else tuple(Claim(lease, "M9") for lease in draw_leases(overdue_leases, self.me, 1))
        highest, fullest = max((count, worker) for worker, count in shares.counts.items())
        if not is_full and highest >= self._own_count + 2 + 2 * shares.tolerance and not shares.loaded(self.me.worker):
            return tuple(_request_or_steal(lease, "M9") for lease in shares.donated({fullest: slice(0, 1)}))
        # M11: the workers of some libraries never steal. After twice the wait of M9, an overloaded worker releases a
        #      lease for such workers.
        is_overloaded = self._own_count >= min(shares.counts.values()) + 2 + 2 * shares.tolerance
        waited_long_enough = self.me.history.owners_still > 2 * self.rules.patience * shares.config.cycle_seconds
        if not (self.rules.release and is_overloaded and waited_long_enough):
            return ()
        return tuple(Release(lease, "M11") for lease in shares.donated({self.me.worker: slice(0, 1)}))


def _request_or_steal(lease: Lease, rule: str) -> Steal | RequestHandoff:
    """Return a hand-off request for this lease, or a steal if its owner does not respond to requests (H2)."""
    from_owner = lease.owner or ""
    if lease.yields:
        return RequestHandoff(lease, from_owner, "H2", stale_next_owner=lease.next_owner)
    return Steal(lease, from_owner, rule)


def _with_alternates(actions: Sequence[Taking]) -> tuple[Action, ...]:
    """Return the first of these actions, with the others as its alternates.

    If the first action is a request, all alternates are requests. Otherwise, none of them is a request. The two kinds
    are not mixed, because only a request has to wait for the owner.
    """
    if not actions:
        return ()
    is_request = isinstance(actions[0], RequestHandoff)
    return (
        evolve(
            actions[0],
            alternates=tuple(action for action in actions[1:] if isinstance(action, RequestHandoff) == is_request),
        ),
    )
