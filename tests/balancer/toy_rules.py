"""An example of a user's own rule set. It needs only this file and one line in the list of rule sets."""

from attrs import field, frozen

from leasehold.balancer.actions import Action, Claim, Steal
from leasehold.balancer.census import Census
from leasehold.balancer.chance import draw_leases
from leasehold.balancer.model import Me
from leasehold.balancer.rule_set import FleetSeconds, RuleSet, number_validator


@frozen
class Toy(RuleSet):
    """Claim a few free leases.

    If there are no free leases, steal one from the first worker that has at least two leases more than this one.

    Attributes:
        most: The number of free leases that a worker claims in a turn.
    """

    name = "toy"
    renewal_rule = "T0"

    most: int = field(default=2, validator=number_validator(1, whole_only=True))

    def take(self, census: Census, me: Me, _config: FleetSeconds) -> tuple[Action, ...]:
        """Return the claims and steals of this worker for one turn."""
        if census.available:
            return tuple(Claim(lease, "T1") for lease in draw_leases(census.available, me, self.most))
        fuller_workers = {owner for owner, count in census.counts.items() if count >= len(census.mine) + 2}
        return tuple(
            Steal(lease, min(fuller_workers), "T2")
            for lease in draw_leases(census.held_by({min(fuller_workers, default="")}), me, 1)
        )
