"""KCL 2.x: the target, the very old first, then what is free, then one victim (rules K1 to K9).

Source: DynamoDBLeaseTaker of the Kinesis Client Library 2.7. It shuffles where this orders by
digest; everything else is the same, its stable disbalance included.

kcl-rust: what is free, greedily; else one lease from a worker with two more (rules R1 and R2).

Source: the README of kcl-rust, "Spawning". Which of the fullest it robs is not stated there; here it
is drawn by chance among those with the most leases.
"""

from attrs import field, frozen

from leasehold.balancer.actions import Action, Claim, Steal
from leasehold.balancer.census import Census
from leasehold.balancer.chance import digest_under, drawn
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.rule_set import FleetSeconds, RuleSet, number


@frozen
class Kcl(RuleSet):
    """The Kinesis Client Library 2.x (rules K1 to K10).

    max_leases           most leases one worker may hold; None: no limit
    max_steals           most leases stolen in one turn
    very_old_multiplier  leases idle for more lease_seconds than this are taken first; 0: off

    Examples:
        >>> from leasehold import Kcl
        >>> Kcl(max_leases=100).most_leases
        100
    """

    name = "kcl"
    renewal_rule = "K10"
    counts_ended = True

    max_leases: int | None = field(default=None, validator=number(1, whole=True, none=True))
    max_steals: int = field(default=1, validator=number(1, whole=True))
    very_old_multiplier: int = field(default=3, validator=number(0, whole=True))

    @property
    def most_leases(self) -> int | None:
        """The most that one worker may hold; None: no limit."""
        return self.max_leases

    def take(self, census: Census, me: Me, config: FleetSeconds) -> tuple[Action, ...]:
        """The answer is all that this worker takes in one turn."""
        if not census.leases:  # K3
            return ()
        oldest = self.very_old_multiplier * config.lease_seconds
        old = tuple(lease for lease in census.available if self.very_old_multiplier and lease.idle > oldest)
        if old:  # K5: whatever the target says, and nothing else in this turn, even where it may take none
            room = len(old) if self.max_leases is None else self.max_leases - len(census.mine)
            return _claims(drawn(old, me, room), "K5")
        needed = _target(census, self) - len(census.mine)
        if needed <= 0:  # K6
            return ()
        if census.free or census.expired:  # K7: nobody is robbed while anything is free
            return _claims(drawn(census.available, me, needed), "K7")
        return _steals(census, me, self, needed)


def _target(census: Census, rules: Kcl) -> int:
    """K4: how many leases each worker wants: an equal share rounded up and at least one, within `max_leases`."""
    share = max(1, -(-len(census.leases) // len(census.counts)))
    return share if rules.max_leases is None else min(share, rules.max_leases)


def _steals(census: Census, me: Me, rules: Kcl, needed: int) -> tuple[Steal, ...]:
    """K8: leases are stolen from one victim, the owner with the most.

    A worker that lacks two leases or more may take one from a victim that holds just the target; a worker that lacks
    one may not.
    This is the stable disbalance of KCL: five hundred leases stay 300 to 200 between two clusters of a hundred.
    """
    # Java meets equal counts in its hash map's order, which is the same in every JVM,
    # so that all thieves rob the same worker; here that order is the one of the names.
    from_owner, count = min(census.counts.items(), key=lambda entry: (-entry[1], entry[0]))
    over = count - _target(census, rules)
    if over < 0:
        return ()
    # With nothing above the target, one lease of a victim at the target, if more than one is lacking.
    most = min(needed, over) or (1 if needed > 1 else 0)
    taken = drawn(census.held_by({from_owner}), me, min(most, rules.max_steals))
    return tuple(Steal(lease, from_owner=from_owner, rule="K8") for lease in taken)


def _claims(leases: tuple[Lease, ...], rule: str) -> tuple[Claim, ...]:
    """Each of these leases is claimed under one rule."""
    return tuple(Claim(lease, rule=rule) for lease in leases)


@frozen
class KclRust(RuleSet):
    """kcl-rust (rules R1 to R3).

    leases_to_acquire  most free leases claimed in one turn
    max_leases         most leases one worker may hold; None: no limit

    Examples:
        >>> from leasehold import Config, KclRust
        >>> Config(rules=KclRust()).lease_seconds
        20.0
    """

    name = "kcl-rust"
    renewal_rule = "R3"
    starts_at_time = True

    leases_to_acquire: int = field(default=10, validator=number(1, whole=True))
    max_leases: int | None = field(default=None, validator=number(1, whole=True, none=True))

    @property
    def most_leases(self) -> int | None:
        """The most that one worker may hold; None: no limit."""
        return self.max_leases

    @property
    def lease_seconds(self) -> float:
        """The default of `Config.lease_seconds`."""
        return 20.0

    def cycle_seconds(self, lease_seconds: float) -> float:
        """The default of `Config.cycle_seconds`."""
        return lease_seconds

    def take(self, census: Census, me: Me, _config: FleetSeconds) -> tuple[Action, ...]:
        """The answer is all that this worker takes in one turn.

        There is no target (R1): the first worker may claim much more than its share, and the others take it back one
        lease a turn, until nobody has two more than another (R2).
        """
        mine = len(census.mine)
        room = len(census.leases) if self.max_leases is None else self.max_leases - mine
        if census.free or census.expired:  # R1
            taken = drawn(census.available, me, min(self.leases_to_acquire, room))
            return tuple(Claim(lease, rule="R1") for lease in taken)
        most = max(census.counts.values())
        if most < mine + 2 or room < 1:  # R2: two more, or the lease would only change places
            return ()
        digest = digest_under(f"{me.worker}\0{me.turn}")
        fullest = (owner for owner, count in census.counts.items() if count == most)
        from_owner = min(fullest, key=lambda owner: (digest(owner), owner))
        return tuple(
            Steal(lease, from_owner=from_owner, rule="R2") for lease in drawn(census.held_by({from_owner}), me, 1)
        )
