"""Who looks at the table when: one lookout, computed and not elected, and the others read its bulletin (C3 to C13).

Rule 1: nothing here decides who owns a lease; a wrong belief costs readings or delay, never ownership.
Rule 2: seconds are those of `lease_seconds` 10, and scale with it.
"""

import math
from collections.abc import Collection, Iterable, Sequence

from attrs import frozen

from balancer.actions import Action, Claim, Create, Look, Release, RequestHandoff, Steal
from balancer.census import expires_above
from balancer.chance import digest_under, order_under
from balancer.config import Config
from balancer.model import Lease, Me, Notes

NOTE = "bulletin"
"""Our attribute with the counts; the lookout writes it with each of its renewals (C4)."""

OURS = "process"
"""Our attribute that says "process/worker"; void unless that worker is the owner, for Java's takings keep it."""

DEPUTIES = 3

_digest = digest_under("lookout")
_shed_order = order_under("minimal")


@frozen(order=True)
class Bulletin:
    """How often lookouts looked, saw work for others, or had to warn; each goes on where the last one stopped."""

    looks: int = 0
    acts: int = 0
    warns: int = 0

    @property
    def note(self) -> Notes:
        """As it is written on a row."""
        return ((NOTE, f"{self.looks} {self.acts} {self.warns}"),)


def bulletin_of(lease: Lease) -> Bulletin:
    """What its row says; nothing where it says nothing, or nothing that can be read."""
    words = (lease.note(NOTE) or "").split()
    if len(words) != len(Bulletin.__attrs_attrs__) or not all(word.isascii() and word.isdigit() for word in words):
        return Bulletin()
    return Bulletin(*map(int, words))


@frozen
class Hearing:
    """What the readings taught about bulletins; folded like `Watch`, beside it.

    latest       the furthest of all bulletins ever read
    acts_read    its acts at the last full reading
    looks_still  seconds that the looks stood still, warned how long ago the warns last grew,
    full_still   how long ago the last full reading was; all by our own watching
    turned       whether a row read alone is gone, or has another owner than at the last full reading
    """

    latest: Bulletin = Bulletin()
    acts_read: int = 0
    looks_still: float = 0.0
    warned: float = math.inf
    full_still: float = math.inf
    turned: bool = False
    looks_at: float = -math.inf
    warns_at: float = -math.inf
    full_at: float = -math.inf

    def after(self, leases: Iterable[Lease], began: float, ended: float, asked: Collection[str] | None) -> "Hearing":
        """Fold in one reading; parameters as those of `Watch.look`, `leases` being its answer."""
        rows = tuple(leases)
        latest = max([self.latest, *map(bulletin_of, rows)])
        looks_at = self.looks_at if latest.looks == self.latest.looks and self.looks_at > -math.inf else ended
        warns_at = self.warns_at if latest.warns == self.latest.warns else ended
        full_at = self.full_at if asked is not None else ended
        kept = {lease.key for lease in rows if lease.held >= began - full_at}
        return Hearing(
            turned=asked is not None and not kept.issuperset(asked),
            latest=latest,
            acts_read=self.acts_read if asked is not None else latest.acts,
            looks_still=max(0.0, began - looks_at),
            warned=max(0.0, began - warns_at),
            full_still=max(0.0, began - full_at),
            looks_at=looks_at,
            warns_at=warns_at,
            full_at=full_at,
        )


def crew(leases: Iterable[Lease], config: Config) -> tuple[str, ...]:
    """Our living workers by rank: the first is the lookout, the next three are its deputies (C3)."""
    limit = expires_above(config)
    ours = {
        lease.owner
        for lease in leases
        if lease.owner is not None and lease.idle <= limit and (lease.note(OURS) or "").partition("/")[2] == lease.owner
    }
    return tuple(sorted(ours, key=lambda worker: (_digest(worker), worker)))


def bulletin_row(leases: Iterable[Lease], lookout: str) -> Lease | None:
    """The row to read: the lookout's last in shed order, for its first is what every newcomer takes (C4)."""
    held = [lease for lease in leases if lease.owner == lookout and not lease.ended]
    return max(held, key=_shed_order, default=None)


def on_duty(leases: Sequence[Lease], me: Me, config: Config, hearing: Hearing) -> bool:
    """Whether this worker keeps the lookout: by rank, or because nothing is heard of the one that should (C8)."""
    ranks = crew(leases, config)
    if ranks[:1] == (me.worker,):
        return True
    row = bulletin_row(leases, ranks[0]) if ranks else None
    scale = config.lease_seconds / 10
    if row is None:
        return True
    still = max(row.idle - 2.5 * scale, hearing.looks_still - 7.5 * scale)
    deputy = me.worker in ranks[: 1 + DEPUTIES]
    return still > (0.0 if deputy else config.lease_seconds + 3.5 * scale)


def reaps(
    actions: Iterable[Action], leases: Sequence[Lease], me: Me, config: Config, hearing: Hearing
) -> tuple[Release, ...]:
    """C6: who is on duty frees the expired that it does not take itself: others need not have watched them."""
    if not on_duty(leases, me, config, hearing):
        return ()
    limit, taken = expires_above(config), {action.lease.key for action in actions}
    expired = (lease for lease in leases if lease.owner is not None and lease.idle > limit and not lease.ended)
    return tuple(Release(lease, "C6") for lease in expired if lease.owner != me.worker and lease.key not in taken)


def appointment(actions: Sequence[Action], leases: Sequence[Lease], me: Me, config: Config, hearing: Hearing) -> Look:
    """When to look next, at which rows, and what to write on this worker's own."""
    duty = on_duty(leases, me, config, hearing)
    notes = _watch_kept(actions, leases, me, config, hearing).note if duty else _abdication(leases, me, hearing)
    settle = settle_seconds(actions, config)
    if settle is not None:
        return Look(settle, notes=notes)
    if duty:
        return Look(_until_judged(leases, me, config), notes=notes)
    ranks = crew(leases, config)
    row = bulletin_row(leases, ranks[0])
    safety = 2 * config.lease_seconds * len(ranks)  # C11
    # C8: the clocks of all must run before all stand in, or a second lease_seconds would be lost.
    unheard = row is not None and hearing.full_still > row.idle > 0.6 * config.lease_seconds
    news = hearing.turned or hearing.latest.acts != hearing.acts_read
    if row is None or news or unheard or hearing.full_still > safety:
        return Look(0.0, notes=notes)  # C7
    pause = 1.0 if me.worker in ranks[: 1 + DEPUTIES] else 2.5
    alarmed = hearing.warned < config.lease_seconds
    return Look((0.5 if alarmed else pause) * config.lease_seconds / 10, keys=(row.key,), notes=notes)


def settle_seconds(actions: Iterable[Action], config: Config) -> float | None:
    """C10: how soon to look after these; None if nothing was done that others must see first.

    What was free is claimed fast. After taking from the living, others who joined at the same time are
    waited for: shares computed without them would be taken, and taken away again.
    """
    scale = config.lease_seconds / 10
    kinds = {type(action) for action in actions}
    if kinds & {Steal, RequestHandoff}:
        return 5.0 * scale
    return 1.0 * scale if kinds & {Claim, Create} else None


def _until_judged(leases: Iterable[Lease], me: Me, config: Config) -> float:
    """C5: three seconds, or just when the first suspect would be past its limit; C13: rarely with none to watch."""
    limit, scale = expires_above(config), config.lease_seconds / 10
    others = [lease.idle for lease in leases if lease.owner not in {None, me.worker} and not lease.ended]
    if not others:
        return min(20.0 * scale, config.cycle_seconds)
    left = [limit - idle for idle in others if _suspect(idle, config) and idle <= limit]
    return max(0.05 * scale, min([3.0 * scale, *left]))


def _suspect(idle: float, config: Config) -> bool:
    return idle > config.renew_seconds + 0.15 * config.lease_seconds


def _watch_kept(
    actions: Iterable[Action], leases: Iterable[Lease], me: Me, config: Config, hearing: Hearing
) -> Bulletin:
    """The bulletin after one more look: act where something is there for others, warn where somebody may be dead."""
    taken = {action.lease.key for action in actions if isinstance(action, Claim)}
    limit, latest = expires_above(config), hearing.latest
    open_to_others = warned = False
    for lease in leases:
        if lease.ended or lease.owner == me.worker or lease.key in taken:
            continue
        gone = lease.owner is None or lease.idle > limit
        open_to_others |= gone
        warned |= not gone and _suspect(lease.idle, config)
    return Bulletin(latest.looks + 1, latest.acts + open_to_others, latest.warns + warned)


def _abdication(leases: Iterable[Lease], me: Me, hearing: Hearing) -> Notes:
    """C3: whose own rows carry the latest bulletin was the lookout, and sends its readers to the table once."""
    mine = [bulletin_of(lease) for lease in leases if lease.owner == me.worker]
    latest = hearing.latest
    if not latest.looks or latest not in mine:
        return ()
    return Bulletin(latest.looks + 1, latest.acts + 1, latest.warns).note
