"""KCL 2.x: the target, the very old first, then what is free, then one victim (rules K1 to K9).

Source: DynamoDBLeaseTaker of the Kinesis Client Library 2.7. It shuffles where this orders by
digest; everything else is the same, its stable disbalance included.
"""

from balancer.actions import Action, Claim, Steal
from balancer.census import Census
from balancer.chance import drawn
from balancer.config import Config, Kcl
from balancer.model import Lease, Me


def take(census: Census, me: Me, config: Config, rules: Kcl) -> tuple[Action, ...]:
    """What this worker takes in one turn."""
    if not census.leases:  # K3
        return ()
    old = _very_old(census, config, rules)
    if old:  # K5: whatever the target says, and nothing else in this turn, even where it may take none
        return _claims(drawn(old, me, _room(census, rules)), "K5")
    needed = target(census, rules) - len(census.mine)
    if needed <= 0:  # K6
        return ()
    if census.free or census.expired:  # K7: nobody is robbed while anything is free
        return _claims(drawn(census.available, me, needed), "K7")
    return _steals(census, me, rules, needed)


def target(census: Census, rules: Kcl) -> int:
    """K4: how many leases each worker wants: an equal share rounded up, within `max_leases`."""
    share = fair_share(census)
    return share if rules.max_leases is None else min(share, rules.max_leases)


def fair_share(census: Census) -> int:
    """An equal share rounded up; at least one, also with fewer leases than workers."""
    return max(1, -(-len(census.leases) // len(census.counts)))


def spillover(census: Census, rules: Kcl) -> int:
    """K9: how far the fair share is beyond `max_leases`; above 0, leases stay without an owner."""
    return max(0, fair_share(census) - target(census, rules))


def _very_old(census: Census, config: Config, rules: Kcl) -> tuple[Lease, ...]:
    oldest = rules.very_old_multiplier * config.lease_seconds
    return tuple(lease for lease in census.available if rules.very_old_multiplier and lease.idle > oldest)


def _room(census: Census, rules: Kcl) -> int:
    return len(census.leases) if rules.max_leases is None else rules.max_leases - len(census.mine)


def _steals(census: Census, me: Me, rules: Kcl, needed: int) -> tuple[Steal, ...]:
    # K8: one victim. Java meets equal counts in its hash map's order, which is the same in every JVM,
    # so that all thieves rob the same worker; here that order is the one of the names.
    victim, count = min(census.counts.items(), key=lambda entry: (-entry[1], entry[0]))
    over = count - target(census, rules)
    if over < 0:
        return ()
    # K8: short by more than one may rob a worker that is just at the target; short by one may not,
    # and that is the stable disbalance.
    most = min(needed, over) or (1 if needed > 1 else 0)
    loot = drawn(census.held_by({victim}), me, min(most, rules.max_steals))
    return tuple(Steal(lease, victim=victim, rule="K8") for lease in loot)


def _claims(leases: tuple[Lease, ...], rule: str) -> tuple[Claim, ...]:
    return tuple(Claim(lease, rule=rule) for lease in leases)
