"""Implements the rules of KCL 2.x (K1 to K10) and of kcl-rust (R1 to R3).

A KCL worker computes its target, which is an equal share of the leases. It takes leases that have been idle for a very
long time. If there are no such leases, it takes free leases, and if no lease is free, it steals leases from one worker.

Source: DynamoDBLeaseTaker of the Kinesis Client Library 2.7. The KCL shuffles leases, while this module sorts them by
digest. Everything else is the same, including the imbalance that can persist with the KCL (see `_steals`).

A kcl-rust worker claims as many free leases as it may. If none is free, it steals one lease from a worker that holds at
least two more than it does.

Source: the README of kcl-rust, "Spawning". If several workers hold the most leases, the README does not specify from
which of them to steal, so this module chooses one by digest.
"""

from attrs import field, frozen

from leasehold.balancer.actions import Action, Claim, Steal
from leasehold.balancer.census import Census
from leasehold.balancer.chance import digest_under, draw_leases
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.rule_set import FleetSeconds, RuleSet, number_validator


@frozen
class Kcl(RuleSet):
    """The rules of the Kinesis Client Library 2.x (K1 to K10).

    max_leases           the most leases that one worker may hold; None: no limit
    max_steals           the most leases stolen in one turn
    very_old_multiplier  leases idle for more than this many lease_seconds are taken first; 0: off

    Examples:
        >>> from leasehold import Kcl
        >>> Kcl(max_leases=100).most_leases
        100
    """

    name = "kcl"
    renewal_rule = "K10"
    counts_ended = True

    max_leases: int | None = field(default=None, validator=number_validator(1, whole_only=True, allow_none=True))
    max_steals: int = field(default=1, validator=number_validator(1, whole_only=True))
    very_old_multiplier: int = field(default=3, validator=number_validator(0, whole_only=True))

    @property
    def most_leases(self) -> int | None:
        return self.max_leases

    def take(self, census: Census, me: Me, config: FleetSeconds) -> tuple[Action, ...]:
        if not census.leases:  # K3
            return ()
        idle_limit = self.very_old_multiplier * config.lease_seconds
        very_old_leases = tuple(
            lease for lease in census.available if self.very_old_multiplier and lease.idle > idle_limit
        )
        if very_old_leases:  # K5: take these regardless of the target, and take no other lease in this turn
            room = len(very_old_leases) if self.max_leases is None else self.max_leases - len(census.mine)
            return _claims(draw_leases(very_old_leases, me, room), "K5")
        needed = _target(census, self) - len(census.mine)
        if needed <= 0:  # K6
            return ()
        if census.free or census.expired:  # K7: no lease is stolen while any is free
            return _claims(draw_leases(census.available, me, needed), "K7")
        return _steals(census, me, self, needed)


def _target(census: Census, rules: Kcl) -> int:
    """Return the number of leases that each worker wants, an equal share rounded up, from 1 to `max_leases` (K4)."""
    share = max(1, -(-len(census.leases) // len(census.counts)))
    return share if rules.max_leases is None else min(share, rules.max_leases)


def _steals(census: Census, me: Me, rules: Kcl, needed: int) -> tuple[Steal, ...]:
    """Return steals of leases from the worker that holds the most (K8).

    No worker steals from a worker that holds fewer leases than the target. From a worker that holds exactly the target,
    only a worker that lacks two or more leases steals. Therefore, an imbalance can persist with the KCL. For example,
    if two clusters of a hundred workers each share five hundred leases, 300 may stay with one cluster and 200 with the
    other.
    """
    # If several workers hold the most leases, the KCL chooses by the order of a Java hash map. This order is the same
    # in every JVM, so all workers steal from the same worker. Choose by name instead, which has the same effect.
    from_owner, count = min(census.counts.items(), key=lambda entry: (-entry[1], entry[0]))
    surplus = count - _target(census, rules)
    if surplus < 0:
        return ()
    # If the fullest worker holds exactly the target, steal one lease, but only if this worker lacks at least two.
    limit = min(needed, surplus) or (1 if needed > 1 else 0)
    leases = draw_leases(census.held_by({from_owner}), me, min(limit, rules.max_steals))
    return tuple(Steal(lease, from_owner=from_owner, rule="K8") for lease in leases)


def _claims(leases: tuple[Lease, ...], rule: str) -> tuple[Claim, ...]:
    return tuple(Claim(lease, rule=rule) for lease in leases)


@frozen
class KclRust(RuleSet):
    """The rules of kcl-rust (R1 to R3).

    leases_to_acquire  the most free leases claimed in one turn
    max_leases         the most leases that one worker may hold; None: no limit

    Examples:
        >>> from leasehold import Config, KclRust
        >>> Config(rules=KclRust()).lease_seconds
        20.0
    """

    name = "kcl-rust"
    renewal_rule = "R3"
    starts_at_time = True

    leases_to_acquire: int = field(default=10, validator=number_validator(1, whole_only=True))
    max_leases: int | None = field(default=None, validator=number_validator(1, whole_only=True, allow_none=True))

    @property
    def most_leases(self) -> int | None:
        return self.max_leases

    @property
    def lease_seconds(self) -> float:
        return 20.0

    def cycle_seconds(self, lease_seconds: float) -> float:
        return lease_seconds

    def take(self, census: Census, me: Me, _config: FleetSeconds) -> tuple[Action, ...]:
        """Return the actions by which this worker takes leases in one turn.

        kcl-rust computes no shares, so the first worker may claim most of the leases (R1). The other workers then steal
        one lease per turn from the fullest worker, until no worker holds two more leases than another (R2).
        """
        own_count = len(census.mine)
        room = len(census.leases) if self.max_leases is None else self.max_leases - own_count
        if census.free or census.expired:  # R1
            leases = draw_leases(census.available, me, min(self.leases_to_acquire, room))
            return tuple(Claim(lease, rule="R1") for lease in leases)
        highest = max(census.counts.values())
        if highest < own_count + 2 or room < 1:  # R2: if counts differ by one, a steal would only swap them
            return ()
        digest = digest_under(f"{me.worker}\0{me.turn}")
        fullest = (owner for owner, count in census.counts.items() if count == highest)
        from_owner = min(fullest, key=lambda owner: (digest(owner), owner))
        return tuple(
            Steal(lease, from_owner=from_owner, rule="R2") for lease in draw_leases(census.held_by({from_owner}), me, 1)
        )
