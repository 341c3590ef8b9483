"""Who holds what this turn: counts, free, expired and mine, from one reading.

Rule 1: every rule set counts here and nowhere else, so that all agree on who is alive.
Rule 2: the passes run at C speed; most turns are balanced, and a balanced turn ends here.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import assert_never

from attrs import frozen

from balancer.config import Config, EventHubs, Kcl, KclRust, Minimal
from balancer.model import Lease, Me

OURS = "process"
"""Our attribute that says "process/worker"; void unless that worker is the owner, for Java's takings keep it."""


@frozen
class Census:
    """The leases in play, told apart by who holds them.

    Ended leases are not in play, except under `kcl`, which counts them as KCL 2.x does.
    Every tuple keeps the order of the reading: sort, or order by chance, before choosing.

    worker   who is asking
    leases   all in play: free, expired and held
    free     without an owner
    expired  owned, but its version stood still too long; my own among them
    mine     held by me and not expired
    moving   held or not, with an heir named (H1 to H4)
    counts   unexpired leases by owner. The asking worker is always there, perhaps with 0, and so are
             those that are led. Other workers without a lease cannot be seen, and a worker whose leases
             have all expired is not counted, or the target would be too low and its leases would wait.
    led      workers who may yet be given leases by their KCL 3.x leader, and take none themselves (M14)
    """

    worker: str
    leases: tuple[Lease, ...]
    free: tuple[Lease, ...]
    expired: tuple[Lease, ...]
    mine: tuple[Lease, ...]
    moving: tuple[Lease, ...]
    counts: Mapping[str, int]
    led: tuple[str, ...] = ()

    @property
    def available(self) -> tuple[Lease, ...]:
        """What may be claimed without robbing anybody."""
        return self.free + self.expired

    def held_by(self, owners: Collection[str]) -> tuple[Lease, ...]:
        """The unexpired leases of these owners."""
        held = list(self.each_held_by(owners))  # a tuple that grows costs three times as much as a list
        return tuple(held)

    def each_held_by(self, owners: Collection[str]) -> Iterator[Lease]:
        """The same, one after the other: where all owners are asked for, a copy would cost more than the counting."""
        dead = {lease.key for lease in self.expired}
        return (lease for lease in self.leases if lease.owner in owners and lease.key not in dead)


def take_census(leases: Iterable[Lease], me: Me, config: Config) -> Census:
    """Count one reading; `leases` have distinct keys."""
    reading = tuple(leases)
    limit = expires_above(config)
    # Few leases are anything but held and alive: this one pass finds them, the rest only looks at them.
    odd = [
        lease for lease in reading if lease.idle > limit or lease.owner is None or lease.ended or lease.heir is not None
    ]
    waiting = _waiting(reading, odd) if isinstance(config.rules, Minimal) else frozenset()
    if waiting:
        reading = tuple(lease for lease in reading if lease.key not in waiting)
        odd = [lease for lease in odd if lease.key not in waiting]
    if not isinstance(config.rules, Kcl) and any(lease.ended for lease in odd):
        reading = tuple(lease for lease in reading if not lease.ended)
        odd = [lease for lease in odd if not lease.ended]
    return _census(reading, odd, me, config)


def _waiting(reading: Collection[Lease], odd: Collection[Lease]) -> frozenset[str]:
    """M1: free leases that nobody may read yet (L12), for a parent is still being read.

    Claimed early they would count for a share, and when that parent ends the counts would be uneven.
    """
    young = [lease for lease in odd if lease.owner is None and lease.parents]
    names = {name for lease in young for name in lease.parents}
    unread = {lease.key for lease in reading if lease.key in names and not lease.ended} if names else set()
    return frozenset(lease.key for lease in young if not unread.isdisjoint(lease.parents))


def _census(reading: tuple[Lease, ...], odd: list[Lease], me: Me, config: Config) -> Census:
    limit, patience, led_by = expires_above(config), _patience(me, config), {worker for worker, _ in me.history.led}
    expired = [
        lease
        for lease in odd
        if lease.owner is not None
        and lease.idle > limit
        and lease.idle > patience.get(lease.owner, limit)
        and not (lease.owner in led_by and _just_given(lease, limit))
    ]
    counts = Counter(map(attrgetter("owner"), reading))
    counts.subtract(Counter(map(attrgetter("owner"), expired)))
    counts.pop(None, None)
    led = _led(expired, me, config)
    for worker in (me.worker, *led):
        counts[worker] += 0
    held = {owner: count for owner, count in counts.items() if count or owner == me.worker or owner in led}
    dead = {lease.key for lease in expired}
    return Census(
        worker=me.worker,
        leases=reading,
        free=tuple(lease for lease in odd if lease.owner is None),
        expired=tuple(expired),
        mine=tuple([lease for lease in reading if lease.owner == me.worker and lease.key not in dead]),
        moving=tuple(lease for lease in odd if lease.heir is not None),
        counts=held,
        led=led,
    )


def _just_given(lease: Lease, limit: float) -> bool:
    """M14: not renewed yet by its new owner, who finds it at its next poll: KCL's come every lease_seconds."""
    return lease.held <= lease.idle <= 2 * limit


def _led(expired: list[Lease], me: Me, config: Config) -> tuple[str, ...]:
    """M14: who reports and may still be given leases; not who lets one expire, nor who was given none for too long."""
    if not (me.history.led and isinstance(config.rules, Minimal)):
        return ()
    limit, dying = overdue_seconds(config, config.rules), {lease.owner for lease in expired}
    return tuple(worker for worker, waited in me.history.led if waited <= limit and worker not in dying)


def overdue_seconds(config: Config, rules: Minimal) -> float:
    """A lease free for longer is not taken by who should take it (M9)."""
    return config.lease_seconds + rules.grace_seconds + rules.patience * config.cycle_seconds


def signers(leases: Iterable[Lease]) -> frozenset[str]:
    """Whose leases say that one of ours holds them."""
    found: set[str] = set()
    for lease in leases:
        if lease.owner is not None and lease.owner not in found and signed(lease):
            found.add(lease.owner)
    return frozenset(found)


def signed(lease: Lease) -> bool:
    """Whether its owner is one of ours."""
    return (lease.note(OURS) or "").partition("/")[2] == lease.owner


def expires_above(config: Config) -> float:
    """A lease idle for more seconds than this has no living owner.

    Whether the limit itself is still alive follows the original of each rule set; "at the limit" is
    said as "above the next smaller number", so that one comparison serves all.
    """
    match config.rules:
        case Kcl() | KclRust():
            return config.lease_seconds
        case EventHubs(dialect="dotnet" | "java"):
            return math.nextafter(config.lease_seconds, 0.0)
        case EventHubs():
            return config.lease_seconds
        case Minimal():
            return 1.05 * config.lease_seconds  # C2: the half second that makes renewing at 0.53 safe
        case _:
            assert_never(config.rules)


def slow_owners(me: Me, config: Config) -> tuple[tuple[str, float], ...]:
    """Living owners that renew too slowly for our `lease_seconds`, with the longest gap measured.

    Their fleet is set to a longer `lease_seconds` (failoverTimeMillis, expiry) than ours. Too slow is
    slower than half of `lease_seconds`, and clearly slower than we renew ourselves.
    """
    return _slower(me.history.gaps, me, config)


def late_owners(me: Me, config: Config) -> frozenset[str]:
    """Who renewed too seldom between two readings, and is not known for it: perhaps it died meanwhile (C16)."""
    late, known = (dict(_slower(measured, me, config)) for measured in (me.history.paces, me.history.gaps))
    return frozenset(late) - frozenset(known)


def _slower(measured: tuple[tuple[str, float], ...], me: Me, config: Config) -> tuple[tuple[str, float], ...]:
    fair = max(config.lease_seconds / 2, 1.25 * config.renew_seconds)
    return tuple((owner, seconds) for owner, seconds in measured if seconds > fair and owner != me.worker)


def _patience(me: Me, config: Config) -> dict[str, float]:
    """Seconds before a slow owner counts as dead: three of its own gaps, not our lease_seconds."""
    return {owner: 3 * gap for owner, gap in slow_owners(me, config)}
