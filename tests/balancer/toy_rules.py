"""An example of a rule set that a user adds: it needs this file and one line in the list of rule sets."""

from attrs import field, frozen

from leasehold.balancer.actions import Action, Claim, Steal
from leasehold.balancer.census import Census
from leasehold.balancer.chance import draw_leases
from leasehold.balancer.model import Me
from leasehold.balancer.rule_set import FleetSeconds, RuleSet, number_validator


@frozen
class Toy(RuleSet):
    """Claim a few free leases.

    If there are none, steal one lease of the first worker that has at least two more than this one.

    Attributes:
        most: How many free leases one worker claims in a turn.
    """

    name = "toy"
    renewal_rule = "T0"

    most: int = field(default=2, validator=number_validator(1, whole_only=True))

    def take(self, census: Census, me: Me, _config: FleetSeconds) -> tuple[Action, ...]:
        """Return the leases that this worker takes in one turn."""
        if census.available:
            return tuple(Claim(lease, "T1") for lease in draw_leases(census.available, me, self.most))
        fuller_workers = {owner for owner, count in census.counts.items() if count >= len(census.mine) + 2}
        return tuple(
            Steal(lease, min(fuller_workers), "T2")
            for lease in draw_leases(census.held_by({min(fuller_workers, default="")}), me, 1)
        )
