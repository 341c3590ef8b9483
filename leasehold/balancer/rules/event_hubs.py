"""Implements the P/N rules of the Azure SDKs (E1 to E7), with one function per dialect.

Each dialect computes the share, claims free partitions, and otherwise steals from one worker. Sources: the
load-balancing note of the Event Processor (gist), and PartitionLoadBalancer (.NET), PartitionBasedLoadBalancer (Java)
and OwnershipManager (Python) of the SDKs. They choose at random, and we choose by digest.

The census implements E1, which determines the active workers. `_share` implements E2, the share of each worker.
`renewals` implements E7, by which an owner rewrites all its partitions.
"""

import math
from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Literal, assert_never

from attrs import field, frozen
from attrs.validators import in_

from leasehold.balancer.actions import Action, Claim, Steal
from leasehold.balancer.census import Census
from leasehold.balancer.chance import draw, draw_owner
from leasehold.balancer.model import Me
from leasehold.balancer.rule_set import FleetSeconds, RuleSet

Dialect = Literal["gist", "dotnet", "java", "python"]
DIALECTS: tuple[Dialect, ...] = ("gist", "dotnet", "java", "python")


@frozen
class EventHubs(RuleSet):
    """The P/N rules of the Azure SDKs (E1 to E7), in one of their dialects.

    Examples:
        >>> from leasehold import EventHubs
        >>> EventHubs("java").mode
        'balanced'
    """

    name = "event-hubs"
    renewal_rule = "E7"

    dialect: Dialect = field(default="dotnet", validator=in_(DIALECTS))
    mode: Literal["balanced", "greedy"] = field(default="balanced", validator=in_(("balanced", "greedy")))

    @classmethod
    def variants(cls) -> Mapping[str, RuleSet]:
        """Return each dialect by name, and again with the suffix "-greedy" if it has a greedy mode."""
        balanced = {dialect: cls(dialect) for dialect in DIALECTS}
        greedy = {f"{dialect}-greedy": cls(dialect, "greedy") for dialect in DIALECTS if dialect != "gist"}
        return {cls.name: cls(), **balanced, **greedy}

    @property
    def evens_out(self) -> bool:
        return self.dialect != "python"  # E3: counts of 4, 2 and 2 never change

    @property
    def again_at_once(self) -> bool:
        # E4, E5: the greedy mode applies the same rule again as long as a partition was taken.
        return self.mode == "greedy" and self.dialect in {"dotnet", "java"}

    @property
    def lease_seconds(self) -> float:
        return 180.0 if self.dialect == "python" else 120.0

    def cycle_seconds(self, _lease_seconds: float) -> float:
        return 30.0

    def renew_seconds(self, lease_seconds: float) -> float:
        return min(20.0, lease_seconds / 3)  # the leases of peers may expire after 60 s

    def expires_above(self, lease_seconds: float) -> float:
        return math.nextafter(lease_seconds, 0.0) if self.dialect in {"dotnet", "java"} else lease_seconds

    def take(self, census: Census, me: Me, _config: FleetSeconds) -> tuple[Action, ...]:
        """Return the takings of this worker in one turn, at most one except in Python's greedy mode.

        The greedy mode of .NET and Java applies the same rule again at once as long as a partition was taken (see
        `look_again`). The gist has no modes.
        """
        match self.dialect:
            case "gist":
                return _gist(census, me)
            case "dotnet":
                return _dotnet(census, me)
            case "java":
                return _java(census, me)
            case "python":
                return _python(census, me, greedy=self.mode == "greedy")
            case _:
                assert_never(self.dialect)


def _share(census: Census) -> tuple[int, int]:
    """Return the number of partitions per owner, rounded down, and how many owners may hold one more (E2)."""
    return divmod(len(census.leases), len(census.counts))


def _python(census: Census, me: Me, *, greedy: bool) -> tuple[Action, ...]:
    """Apply the rules of the Python SDK (E3).

    A worker that holds fewer partitions than the share rounded up claims a free one. If none is free, a worker that
    holds fewer than the share rounded down steals one. A worker that holds exactly the share rounded down never steals,
    so counts of 4, 2 and 2 never change.
    """
    floor, extras = _share(census)
    ceiling, mine = floor + (extras > 0), len(census.mine)
    if mine >= ceiling:  # E3
        return ()
    free = draw(census.available, me, ceiling - mine if greedy else 1)
    if free:
        return tuple(Claim(lease, rule="E3") for lease in free)
    if mine >= floor:
        return ()
    # Steal from the owner with the most partitions. If several have the most, choose the one whose partition is first
    # in key order.
    highest = max(census.counts.values())
    fullest = {owner for owner, count in census.counts.items() if count == highest}
    first = min(census.each_held_by(fullest), key=attrgetter("key"))
    return _steal_one(census, me, {first.owner or census.worker}, "E3")


def _dotnet(census: Census, me: Me) -> tuple[Action, ...]:
    """Apply the rules of the .NET SDK (E4).

    A worker takes a partition if it holds fewer than the share rounded down, or if it holds exactly that share and no
    worker holds fewer.

    Free partitions come first, then those of owners that hold at least two more than the share. Only a worker below the
    share also takes from owners that hold one more than the share. Otherwise the counts could stay uneven forever.
    """
    floor, _ = _share(census)
    mine, least = len(census.mine), min(census.counts.values())
    if mine > floor or (mine == floor and least < floor):  # E4: workers below the share go first
        return ()
    if census.free or census.expired:
        return _claim_one(census, me, "E4")
    from_owners = _holding(census, above=floor + 1)
    if not from_owners and mine < floor:
        from_owners = _holding(census, above=floor)
    return _steal_one(census, me, from_owners, "E4")


def _java(census: Census, me: Me) -> tuple[Action, ...]:
    """Apply the rules of the Java SDK (E5).

    A worker takes a partition if it holds fewer than the share, or if no other worker holds fewer. If the counts are
    already even, no worker takes a partition.
    """
    floor, extras = _share(census)
    mine, counts = len(census.mine), census.counts.values()
    owners_with_extra = sum(count == floor + 1 for count in counts)
    is_even = min(counts) >= floor and max(counts) <= floor + 1 and owners_with_extra == extras
    if is_even or (mine >= floor and mine > min(counts)):  # E5
        return ()
    if census.free or census.expired:
        return _claim_one(census, me, "E5")
    # If several owners have the most, choose the first by name. Java uses the order of its hash map.
    fullest = min(census.counts, key=lambda owner: (-census.counts[owner], owner))
    return _steal_one(census, me, {fullest}, "E5")


def _gist(census: Census, me: Me) -> tuple[Action, ...]:
    """Apply the rules of the gist (E6).

    A worker takes a partition unless it holds more than the share. Free partitions come first, then those of owners
    that hold at least two more than the share.
    """
    floor, _ = _share(census)
    mine = len(census.mine)
    if mine > floor:  # E6
        return ()
    if census.free or census.expired:
        return _claim_one(census, me, "E6")
    from_owners = _holding(census, above=floor + 1)
    if not from_owners and mine < floor:
        # E6: the note steals only from owners above the share + 1. In the example that the note gives, with 18
        # partitions and a fourth owner, the counts would stay at 5, 5, 5 and 3.
        from_owners = _holding(census, above=floor)
    return _steal_one(census, me, from_owners, "E6")


def _holding(census: Census, *, above: int) -> set[str]:
    """Return the other owners with more than `above` partitions."""
    return {owner for owner, count in census.counts.items() if count > above and owner != census.worker}


def _claim_one(census: Census, me: Me, rule: str) -> tuple[Action, ...]:
    """Claim one available partition, drawn by worker and turn."""
    return tuple(Claim(lease, rule=rule) for lease in draw(census.available, me, 1))


def _steal_one(census: Census, me: Me, from_owners: Collection[str], rule: str) -> tuple[Action, ...]:
    """Steal one partition, as if drawn from all that the owners in `from_owners` hold."""
    if not from_owners:
        return ()
    from_owner = draw_owner({owner: census.counts[owner] for owner in from_owners}, me)
    return tuple(Steal(lease, from_owner=from_owner, rule=rule) for lease in draw(census.held_by({from_owner}), me, 1))
