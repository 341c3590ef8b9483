"""The Azure SDKs' P/N rules, one dialect a function: share, then what is free, then one victim (E1 to E7).

Sources: the load-balancing note of the Event Processor (gist), and PartitionLoadBalancer (.NET),
PartitionBasedLoadBalancer (Java) and OwnershipManager (Python) of the SDKs. They draw at random where
this orders by digest. E1, who is active, is the census; E2, the share, is `_share`; E7, that an
owner writes all its partitions again, is `renewals`.
"""

from collections.abc import Collection
from operator import attrgetter
from typing import assert_never

from balancer.actions import Action, Claim, Steal
from balancer.census import Census
from balancer.chance import drawn, drawn_owner
from balancer.config import Config, EventHubs
from balancer.model import Me


def take(census: Census, me: Me, _config: Config, rules: EventHubs) -> tuple[Action, ...]:
    """What this worker takes in one turn: at most one partition, but for Python's greedy mode.

    The greedy mode of .NET and Java is the same rule again at once, as long as something was taken:
    see `look_again`. The note knows no modes.
    """
    match rules.dialect:
        case "gist":
            return _gist(census, me)
        case "dotnet":
            return _dotnet(census, me)
        case "java":
            return _java(census, me)
        case "python":
            return _python(census, me, greedy=rules.mode == "greedy")
        case _:
            assert_never(rules.dialect)


def _share(census: Census) -> tuple[int, int]:
    """E2: whole partitions per owner, and how many owners may hold one more."""
    return divmod(len(census.leases), len(census.counts))


def _python(census: Census, me: Me, *, greedy: bool) -> tuple[Action, ...]:
    low, more = _share(census)
    high, mine = low + (more > 0), len(census.mine)
    if mine >= high:  # E3
        return ()
    free = drawn(census.available, me, high - mine if greedy else 1)
    if free:
        return tuple(Claim(lease, rule="E3") for lease in free)
    # E3: robs only while below the whole share, so that 4, 2 and 2 of 8 never changes.
    return _steal_one(census, me, {_first_fullest(census)}, "E3") if mine < low else ()


def _dotnet(census: Census, me: Me) -> tuple[Action, ...]:
    low, _ = _share(census)
    mine, least = len(census.mine), min(census.counts.values())
    if mine > low or (mine == low and least < low):  # E4: at the share, those below it go first
        return ()
    if census.free or census.expired:
        return _claim_one(census, me, "E4")
    victims = _holding(census, above=low + 1)
    if not victims and mine < low:
        victims = _holding(census, above=low)
    return _steal_one(census, me, victims, "E4")


def _java(census: Census, me: Me) -> tuple[Action, ...]:
    low, more = _share(census)
    mine, counts = len(census.mine), census.counts.values()
    if len(census.leases) == len(census.free) + len(census.expired):  # E5: with nobody active, counts do not matter
        return _claim_one(census, me, "E5")
    at_more = sum(count == low + 1 for count in counts)
    even = min(counts) >= low and max(counts) <= low + 1 and at_more == more
    if even or (mine >= low and mine > min(counts)):  # E5
        return ()
    if census.free or census.expired:
        return _claim_one(census, me, "E5")
    return _steal_one(census, me, {_fullest(census)}, "E5")


def _gist(census: Census, me: Me) -> tuple[Action, ...]:
    low, _ = _share(census)
    mine = len(census.mine)
    if mine > low:  # E6
        return ()
    if census.free or census.expired:
        return _claim_one(census, me, "E6")
    victims = _holding(census, above=low + 1)
    if not victims and mine < low:
        # E6: the note robs only above one more than the share, and its own example, 18 partitions
        # and a fourth owner, would stick at 5, 5, 5 and 3.
        victims = _holding(census, above=low)
    return _steal_one(census, me, victims, "E6")


def _holding(census: Census, *, above: int) -> set[str]:
    return {owner for owner, count in census.counts.items() if count > above and owner != census.worker}


def _fullest(census: Census) -> str:
    return min(census.counts, key=lambda owner: (-census.counts[owner], owner))


def _first_fullest(census: Census) -> str:
    """Of the owners with most partitions, the one that a listing in order of keys shows first."""
    most = max(census.counts.values())
    fullest = {owner for owner, count in census.counts.items() if count == most}
    first = min(census.each_held_by(fullest), key=attrgetter("key"))
    return first.owner or census.worker


def _claim_one(census: Census, me: Me, rule: str) -> tuple[Action, ...]:
    return tuple(Claim(lease, rule=rule) for lease in drawn(census.available, me, 1))


def _steal_one(census: Census, me: Me, victims: Collection[str], rule: str) -> tuple[Action, ...]:
    if not victims:
        return ()
    victim = drawn_owner({owner: census.counts[owner] for owner in victims}, me)
    return tuple(Steal(lease, victim=victim, rule=rule) for lease in drawn(census.held_by({victim}), me, 1))
