"""kcl-rust: what is free, greedily; else one lease from a worker with two more (rules R1 and R2).

Source: the README of kcl-rust, "Spawning". Which of the fullest it robs is not stated there; here it
is drawn by chance among those with the most leases.
"""

from attrs import field, frozen

from leasehold.balancer.actions import Action, Claim, Steal
from leasehold.balancer.census import Census
from leasehold.balancer.chance import digest_under, drawn
from leasehold.balancer.model import Me
from leasehold.balancer.rule_set import FleetSeconds, RuleSet, number


@frozen
class KclRust(RuleSet):
    """kcl-rust (rules R1 to R3).

    leases_to_acquire  most free leases claimed in one turn
    max_leases         most leases one worker may hold; None: no limit
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
        victim = min(fullest, key=lambda owner: (digest(owner), owner))
        return tuple(Steal(lease, victim=victim, rule="R2") for lease in drawn(census.held_by({victim}), me, 1))
