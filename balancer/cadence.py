"""Who looks at the table when: one lookout, computed and not elected, and the others read its bulletin (C3 to C16).

Rule 1: nothing here decides who owns a lease; a wrong belief costs readings or delay, never ownership.
Rule 2: seconds are those of `lease_seconds` 10, and scale with it; those that wait for requests, only downwards.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from heapq import nsmallest

from attrs import evolve, frozen

from balancer.actions import Action, Claim, Create, Look, Release, Renew, RequestHandoff, Steal
from balancer.bulletins import bulletin_of, note_of
from balancer.census import Census, expires_above, late_owners, signers, take_census
from balancer.chance import digest_under, order_under
from balancer.config import Config, Minimal
from balancer.loads import slack, takers
from balancer.model import Bulletin, Hearing, History, Lease, Me, Notes

DEPUTIES = 3

GATHER = 0.5
"""Of `lease_seconds`: how long after each change of the fleet a newcomer waits for the next one (C10)."""

START_SECONDS, CLAIMED_SECONDS = 0.5, 0.7
"""Within how long those that start together look for the first time (C15); how soon one looks again after claims."""

LISTED = 12
"""Rows that a listing reads for the price of one row asked for by its key."""

_digest = lru_cache(maxsize=10_000)(digest_under("lookout"))  # each look ranks everybody
_shed_order = order_under("minimal")


@frozen
class Crew:
    """Our living workers by rank, and the row that carries the bulletin, if any does (C3, C4)."""

    ranks: tuple[str, ...]
    row: Lease | None

    def on_duty(self, me: Me, hearing: Hearing, config: Config) -> bool:
        """Whether this worker keeps the lookout: by rank, or because nothing is heard of the one that should (C8)."""
        if self.row is None or self.ranks[0] == me.worker:
            return True
        scale = config.lease_seconds / 10
        still = max(self.row.idle - 2.5 * scale, hearing.looks_still - 7.5 * scale)
        return still > (0.0 if self.deputy(me) else config.lease_seconds + 3.5 * scale)

    def deputy(self, me: Me) -> bool:
        """Whether this worker is one of those that stand in first."""
        return me.worker in self.ranks[: 1 + DEPUTIES]


def crew(leases: Sequence[Lease], config: Config) -> Crew:
    """Who is there: the first is the lookout, the next three are its deputies (C3)."""
    limit = expires_above(config)
    ours = signers(lease for lease in leases if lease.idle <= limit)
    ranks = tuple(sorted(ours, key=lambda worker: (_digest(worker), worker)))
    return Crew(ranks, bulletin_row(leases, ranks[0]) if ranks else None)


def bulletin_row(leases: Iterable[Lease], lookout: str) -> Lease | None:
    """The row to read: the lookout's last in shed order, for its first is what every newcomer takes (C4)."""
    held = [lease for lease in leases if lease.owner == lookout and not lease.ended]
    return max(held, key=_shed_order, default=None)


def beat(mine: Iterable[Lease], me: Me, config: Config) -> tuple[Renew, ...]:
    """C4: the renewal of the bulletin's row, more often than any other; for whoever keeps the lookout."""
    row = bulletin_row(mine, me.worker)
    return (Renew(row, "C4"),) if row is not None and row.idle >= beat_seconds(config) else ()


def beat_seconds(config: Config) -> float:
    """Between two renewals of the bulletin's row."""
    return 0.15 * config.lease_seconds


def reaps(census: Census, leases: Sequence[Lease], me: Me, config: Config, rules: Minimal) -> tuple[Release, ...]:
    """C6: who is on duty frees the expired, so that others may take them who have not watched them.

    Not where what is released waits for its owner's successor (M12): the dead have none.
    """
    hearing = me.history.hearing
    expired = tuple(lease for lease in census.expired if lease.owner != me.worker)
    if hearing is None or not expired or rules.grace_seconds or not crew(leases, config).on_duty(me, hearing, config):
        return ()
    return tuple(Release(lease, "C6") for lease in expired)


def start_seconds(worker: str, config: Config) -> float:
    """C15: how long a worker waits before its first look, by the digest of its id, up to half a second.

    Nobody can see who holds nothing yet: of those that look at one moment, many choose the same first lease.
    """
    part = int.from_bytes(_digest(worker)) / 2**64
    return part * _of_requests(START_SECONDS, config) if isinstance(config.rules, Minimal) else 0.0


def _of_requests(seconds: float, config: Config) -> float:
    """What is long enough for requests: no more where leases are longer than 10 s, less where they are shorter."""
    return seconds * min(1.0, config.lease_seconds / 10)


def gathering(leases: Iterable[Lease], me: Me, config: Config) -> bool:
    """C10: whether this worker, new here, waits for others who join now before it takes from the living.

    Shares computed without them would be taken, and taken away again. No longer than a cycle.
    """
    if me.history.hearing is None or me.history.fleet_still >= 0.8 * GATHER * config.lease_seconds:
        return False
    here = max((lease.held for lease in leases if lease.owner == me.worker), default=0.0)
    return here < config.cycle_seconds


def until_gathered(history: History, config: Config) -> float:
    """C10: how long after a listing a newcomer lists again: soon if that showed a change, else when all are there.

    Those who start together would otherwise see each other only when the waiting should be over, and wait once more.
    """
    wait, stood = GATHER * config.lease_seconds, history.fleet_still - history.full_still
    if stood <= 0:
        return 0.1 * config.lease_seconds
    return wait - stood if stood < wait else wait


def appointment(actions: Sequence[Action], leases: Sequence[Lease], me: Me, config: Config, hearing: Hearing) -> Look:
    """When to look next, at which rows, and what to write on this worker's own."""
    ours, partial = crew(leases, config), me.history.full_still > 0
    duty = ours.on_duty(me, hearing, config)
    scale = config.lease_seconds / 10
    census = take_census(leases, me, config)
    notes = note_of(_kept(actions, leases, census, me, config)) if duty else _abdication(leases, me, hearing)
    settle = settle_seconds(actions, config)
    if settle is None and gathering(census.mine, me, config):
        settle = until_gathered(me.history, config)
    if settle is not None:
        return Look(settle, notes=notes)
    wanted = _wanted(census, me, config)
    if duty or ours.row is None:
        pause = _until_judged(census, me, config)
        return Look(0.0 if partial else min(pause, 1.0 * scale) if wanted else pause, notes=notes)
    if partial and _called(ours, me, config, hearing):
        return Look(0.0, notes=notes)
    pause = 0.5 if wanted or hearing.warned < config.lease_seconds else 1.0 if ours.deputy(me) else 2.5
    if LISTED * len(wanted) > len(leases):
        return Look(2 * pause * scale, notes=notes)
    return Look(pause * scale, keys=(ours.row.key, *wanted), notes=notes, stale_ok=True)


def _wanted(census: Census, me: Me, config: Config) -> tuple[str, ...]:
    """C7: while the fleet changes, what this worker holds beyond a share, in the order in which others ask for it.

    Otherwise it would see that it was asked only when it renews the lease.
    """
    if me.history.fleet_still > 1.5 * config.lease_seconds:
        return ()
    spare = max(0, len(census.mine) - len(census.leases) // len(_present(census)))
    return tuple(lease.key for lease in nsmallest(spare, census.mine, key=_shed_order) if lease.heir is None)


def _present(census: Census) -> frozenset[str]:
    """Who holds a lease, or asked for its first."""
    return frozenset(census.counts) | {lease.heir for lease in census.moving if lease.heir is not None}


def _called(ours: Crew, me: Me, config: Config, hearing: Hearing) -> bool:
    """Whether what was heard, or not heard, sends a reader of the bulletin to the whole table."""
    full_still, idle = me.history.full_still, ours.row.idle if ours.row else 0.0
    # C8: the clocks of all must run before all stand in, or a second lease_seconds would be lost.
    unheard = full_still > idle > 0.4 * config.lease_seconds
    news = hearing.turned or hearing.latest.acts != hearing.acts_read  # C7
    return news or unheard or full_still > 2 * config.lease_seconds * len(ours.ranks)  # C11


def settle_seconds(actions: Iterable[Action], config: Config) -> float | None:
    """C10: how soon to look after these; None if nothing was done that others must see first.

    What was free is claimed fast, once all that started together have chosen (C15). After taking from the living,
    others who joined at the same time are waited for: shares computed without them would be taken, and taken away
    again.
    """
    kinds = {type(action) for action in actions}
    if kinds & {Steal, RequestHandoff}:
        return 0.5 * config.lease_seconds
    return _of_requests(CLAIMED_SECONDS, config) if kinds & {Claim, Create} else None


def until_late_judged(leases: Iterable[Lease], me: Me, config: Config) -> float:
    """C16: how long until a second reading tells whether who renewed too seldom has died; infinite where nobody did."""
    late = late_owners(me, config) if isinstance(config.rules, Minimal) else frozenset()
    left = [expires_above(config) - lease.idle for lease in leases if lease.owner in late and not lease.ended]
    # A lease stands still from the end of the reading that showed it.
    return min([each + 0.02 * config.lease_seconds for each in left if each >= 0], default=math.inf)


def _until_judged(census: Census, me: Me, config: Config) -> float:
    """C5: three seconds, or just when the first suspect would be past its limit; C13: rarely with none to watch."""
    limit, scale = expires_above(config), config.lease_seconds / 10
    others = [lease.idle for lease in census.leases if lease.owner not in {None, me.worker}]
    if not others:
        return min(20.0 * scale, config.cycle_seconds)
    left = [limit - idle for idle in others if _suspect(idle, config) and idle <= limit]
    return max(0.05 * scale, min([3.0 * scale, *left]))


def _suspect(idle: float, config: Config) -> bool:
    return idle > config.renew_seconds + 0.15 * config.lease_seconds


def still(leases: Iterable[Lease], me: Me, config: Config) -> tuple[str, ...]:
    """C9: the keys of my own leases that stand still in my own reading; whoever judges all others judges itself."""
    return tuple(
        lease.key for lease in leases if lease.owner == me.worker and not lease.ended and _suspect(lease.idle, config)
    )


def _kept(actions: Iterable[Action], leases: Iterable[Lease], census: Census, me: Me, config: Config) -> Bulletin:
    """The bulletin after one more look: act where something is there for others, warn where somebody may be dead."""
    taken = {action.lease.key for action in actions if isinstance(action, Claim)}
    open_now = [lease for lease in census.available if lease.key not in taken and lease.owner != me.worker]
    dead = {lease.key for lease in census.expired}
    warned = any(
        lease.owner not in {None, me.worker} and _suspect(lease.idle, config) and lease.key not in dead
        for lease in census.leases
    )
    hearing = me.history.hearing or Hearing()
    # What nobody wants, or nobody gets done, is called out once a cycle and no more often.
    lasting = hearing.acts_still >= config.cycle_seconds and (bool(open_now) or _uneven(census, me, config))
    joined = not me.history.fleet_still and len(census.leases) // len(_present(census)) > 0
    act = lasting or joined or _lately_open(open_now, leases, config)
    latest = hearing.latest
    return Bulletin(latest.looks + 1, latest.acts + act, latest.warns + warned)


def _lately_open(open_now: Collection[Lease], leases: Iterable[Lease], config: Config) -> bool:
    """Whether others have not had their time to take something: it was let go, or may be read only now (M1)."""
    lately = 3 * config.lease_seconds
    if not open_now or any(lease.idle < lately for lease in open_now):
        return bool(open_now)
    ended = {lease.key for lease in leases if lease.ended and lease.idle < lately}
    return any(not ended.isdisjoint(lease.parents) for lease in open_now)


def _uneven(census: Census, me: Me, config: Config) -> bool:
    """Whether counts (M9) or loads (M13) have stood uneven for a cycle: whoever should do something has to look."""
    if me.history.owners_still <= config.cycle_seconds:
        return False
    counts = census.counts
    floor = len(census.leases) // max(len(counts), 1)
    if max(counts.values()) - min(counts.values()) >= 2 + 2 * slack(census.leases, floor):
        return True
    moving = {lease.key for lease in census.moving}
    most_leases = config.rules.max_leases if isinstance(config.rules, Minimal) else None
    return bool(takers(census, counts, floor, moving, most_leases))


def _abdication(leases: Iterable[Lease], me: Me, hearing: Hearing) -> Notes:
    """C3: whose own rows carry the latest bulletin was the lookout, and sends its readers to the table once."""
    latest = hearing.latest
    if not latest.looks or all(bulletin_of(lease) != latest for lease in leases if lease.owner == me.worker):
        return ()
    return note_of(evolve(latest, looks=latest.looks + 1, acts=latest.acts + 1))
