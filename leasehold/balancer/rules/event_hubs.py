"""Implements the load-balancing rules of the Azure Event Hubs SDKs (E1 to E7), with one function per dialect.

In each dialect, a worker computes its share, and then claims free partitions. If no partition is free, it steals one
from another worker.

Sources: the load-balancing note of the Event Processor (gist), and PartitionLoadBalancer (.NET),
PartitionBasedLoadBalancer (Java) and OwnershipManager (Python) of the SDKs. The SDKs choose partitions at random, while
this module chooses them by digest.

Three rules are not in these functions. The census determines the active workers (E1), `_share` computes the share of
each worker (E2), and `renewals` makes each owner renew all its partitions (E7).
"""

import math
from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Literal, assert_never

from attrs import field, frozen
from attrs.validators import in_

from leasehold.balancer.actions import Action, Claim, Steal
from leasehold.balancer.census import Census
from leasehold.balancer.chance import draw_leases, draw_owner
from leasehold.balancer.model import Me
from leasehold.balancer.rule_set import FleetSeconds, RuleSet

Dialect = Literal["gist", "dotnet", "java", "python"]
DIALECTS: tuple[Dialect, ...] = ("gist", "dotnet", "java", "python")


@frozen
class EventHubs(RuleSet):
    """The load-balancing rules of the Azure Event Hubs SDKs (E1 to E7), in one of their dialects.

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
        """Map the name of each dialect to its rule set.

        For a dialect with a greedy mode, the result also contains the greedy rule set, under the name with the suffix
        "-greedy".
        """
        balanced_sets = {dialect: cls(dialect) for dialect in DIALECTS}
        greedy_sets = {f"{dialect}-greedy": cls(dialect, "greedy") for dialect in DIALECTS if dialect != "gist"}
        return {cls.name: cls(), **balanced_sets, **greedy_sets}

    @property
    def evens_out(self) -> bool:
        return self.dialect != "python"  # E3: with counts of 4, 2 and 2, no lease moves

    @property
    def again_at_once(self) -> bool:
        # E4, E5: in greedy mode, a worker that has taken a partition immediately tries to take another one.
        return self.mode == "greedy" and self.dialect in {"dotnet", "java"}

    @property
    def lease_seconds(self) -> float:
        return 180.0 if self.dialect == "python" else 120.0

    def cycle_seconds(self, _lease_seconds: float) -> float:
        return 30.0

    def renew_seconds(self, lease_seconds: float) -> float:
        return min(20.0, lease_seconds / 3)  # the leases of other workers may expire after 60 s

    def expires_above(self, lease_seconds: float) -> float:
        return math.nextafter(lease_seconds, 0.0) if self.dialect in {"dotnet", "java"} else lease_seconds

    def take(self, census: Census, me: Me, _config: FleetSeconds) -> tuple[Action, ...]:
        """Return the claims or steals of this worker in one turn.

        A worker takes at most one partition per turn, except in the greedy mode of the Python SDK.

        In the greedy mode of .NET and Java, each turn is immediately followed by the next one until no partition is
        taken (see `look_again`). The gist has no modes.
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
    """Return the number of partitions per owner, rounded down, and the number of owners that may hold one more (E2)."""
    return divmod(len(census.leases), len(census.counts))


def _python(census: Census, me: Me, *, greedy: bool) -> tuple[Action, ...]:
    """Apply the rules of the Python SDK (E3).

    A worker claims a free partition if it holds fewer than the share rounded up. If no partition is free, the worker
    steals one, but only if it holds fewer than the share rounded down. Therefore, counts of 4, 2 and 2 never change,
    although 3, 3 and 2 would be even.
    """
    floor, extras = _share(census)
    ceiling, own_count = floor + (extras > 0), len(census.mine)
    if own_count >= ceiling:  # E3
        return ()
    free_partitions = draw_leases(census.available, me, ceiling - own_count if greedy else 1)
    if free_partitions:
        return tuple(Claim(lease, rule="E3") for lease in free_partitions)
    if own_count >= floor:
        return ()
    # Steal from the owner with the most partitions. If several owners have the most, choose the owner of the partition
    # with the smallest key.
    highest = max(census.counts.values())
    fullest = {owner for owner, count in census.counts.items() if count == highest}
    first_partition = min(census.each_held_by(fullest), key=attrgetter("key"))
    return _steal_one(census, me, {first_partition.owner or census.worker}, "E3")


def _dotnet(census: Census, me: Me) -> tuple[Action, ...]:
    """Apply the rules of the .NET SDK (E4).

    The share is rounded down. A worker takes a partition if it holds fewer than the share. It also takes a partition if
    it holds exactly the share and no worker holds fewer.

    A worker claims a free partition if there is one. Otherwise, it steals a partition from an owner that holds at least
    two more than the share. If there is no such owner, a worker below the share steals from an owner that holds one
    more than the share. Without this last case, the counts could stay uneven forever.
    """
    floor, _ = _share(census)
    own_count, lowest_count = len(census.mine), min(census.counts.values())
    if own_count > floor or (own_count == floor and lowest_count < floor):  # E4: workers below the share go first
        return ()
    if census.free or census.expired:
        return _claim_one(census, me, "E4")
    from_owners = _other_owners(census, above=floor + 1)
    if not from_owners and own_count < floor:
        from_owners = _other_owners(census, above=floor)
    return _steal_one(census, me, from_owners, "E4")


def _java(census: Census, me: Me) -> tuple[Action, ...]:
    """Apply the rules of the Java SDK (E5).

    If the counts are already even, no worker takes a partition. Otherwise, a worker takes a partition if it holds fewer
    than the share, or if no other worker holds fewer than it does.
    """
    floor, extras = _share(census)
    own_count, counts = len(census.mine), census.counts.values()
    owners_with_extra = sum(count == floor + 1 for count in counts)
    is_even = min(counts) >= floor and max(counts) <= floor + 1 and owners_with_extra == extras
    if is_even or (own_count >= floor and own_count > min(counts)):  # E5
        return ()
    if census.free or census.expired:
        return _claim_one(census, me, "E5")
    # If several owners have the most partitions, choose the first by name. The Java SDK chooses by the order of its
    # hash map.
    fullest = min(census.counts, key=lambda owner: (-census.counts[owner], owner))
    return _steal_one(census, me, {fullest}, "E5")


def _gist(census: Census, me: Me) -> tuple[Action, ...]:
    """Apply the rules of the gist (E6).

    A worker takes a partition unless it holds more than the share rounded down. It claims a free partition if there is
    one. Otherwise, it steals a partition from an owner that holds at least two more than the share.
    """
    floor, _ = _share(census)
    own_count = len(census.mine)
    if own_count > floor:  # E6
        return ()
    if census.free or census.expired:
        return _claim_one(census, me, "E6")
    from_owners = _other_owners(census, above=floor + 1)
    if not from_owners and own_count < floor:
        # E6: according to the text of the note, a worker steals only from owners that hold at least two more than the
        #     share. With this rule alone, the example in the note would fail: with 18 partitions and a fourth owner,
        #     the counts would stay at 5, 5, 5 and 3.
        from_owners = _other_owners(census, above=floor)
    return _steal_one(census, me, from_owners, "E6")


def _other_owners(census: Census, *, above: int) -> set[str]:
    """Return the other owners with more than `above` partitions."""
    return {owner for owner, count in census.counts.items() if count > above and owner != census.worker}


def _claim_one(census: Census, me: Me, rule: str) -> tuple[Action, ...]:
    """Claim one available partition, which is drawn by worker and turn."""
    return tuple(Claim(lease, rule=rule) for lease in draw_leases(census.available, me, 1))


def _steal_one(census: Census, me: Me, from_owners: Collection[str], rule: str) -> tuple[Action, ...]:
    """Steal one partition from the owners in `from_owners`. Each of their partitions has the same probability."""
    if not from_owners:
        return ()
    from_owner = draw_owner({owner: census.counts[owner] for owner in from_owners}, me)
    return tuple(
        Steal(lease, from_owner=from_owner, rule=rule) for lease in draw_leases(census.held_by({from_owner}), me, 1)
    )
