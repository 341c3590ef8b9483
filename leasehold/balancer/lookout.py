"""The cadence says who looks at the table when: one lookout reads it, and the others read its bulletin (C3 to C18).

If every worker listed the table, reading would cost workers x leases. Here each worker ranks the workers of its own
last listing by a digest of their ids. All that read alike rank alike, so the first in rank, the lookout, needs no
election and no lock, and there is nothing to wait for when it dies.

The lookout lists the table every 3 s, or sooner when an owner that is late reaches its limit (C5). It frees the leases
of the dead, so that workers that never watched them may claim them (C6), and writes a bulletin on its own rows (C4):
    looks   grows with each look, and proves that the lookout still lists the table
    acts    grows when there is something for others to do, and sends every reader to the whole table
    warns   grows when an owner may be dead, and makes readers read the bulletin every 0.5 s
One of these rows is renewed every 1.5 s, and the others read only that row, every 2.5 s (C7). A joiner, a lease just
freed, and a fleet that stays uneven for a cycle raise *acts*.

When the lookout dies, its row stands still. Its readers read it every 0.5 s then. Once it stood still for 2.5 s the
second in rank is on duty, the third a second later, and so on along the ranks, until the row moves or is another's.
After 4 s the next twelve list the table once, so that their clocks for all leases start early, and the others after
8 s (C8). Where only *looks* stands still, renewals go on and planning does not: then the second in rank is on duty
after 7.5 s.

A wrong belief costs readings or delay, never ownership, for every write carries a condition that the store checks:
    two lookouts            both list the table and both try to free a lease; the store refuses one of them
    no lookout              readers notice the silence (C8), and list the table every 20 s x workers in any case (C11)
    an old lookout          raises *acts* when it finds itself replaced (C3), so that its readers list the table
    a bulletin unread       the counts only grow, so the next one says the same again
    a row given away        its readers see another owner, and list the table (C7)

Example: one of twenty workers dies just after it renewed its leases. After 6.8 s the lookout suspects it (a renewal was
due after 5.3 s), and warns at its next look. After 10.5 s the leases have expired: the lookout looks just then, frees
them and raises *acts*. The row carries this at once, readers see it within 0.5 s, and claim.
specs/cadence.md says what each rule is for, and what each of them earns (`python benchmarks/cadence_ablation.py`).

Rule 1: nothing here decides who owns a lease.
Rule 2: seconds are those of `lease_seconds` 10, and scale with it; those that wait for requests, only downwards.

Nobody is elected. Workers that list differently for a moment may take two of them for the lookout, or none. Of the
workers a, b and c let the ranks be c, a, b, and c dies. Its row moved last at 0 s. Once a has seen the row unmoved for
2.5 s, it lists the table from then on; b does so a second later. After 10.5 s a frees c's leases, that row among them.
Both see that the row has another owner, list the table once more, and rank a first.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from heapq import nsmallest

from attrs import evolve, frozen

from leasehold.balancer.actions import Action, Claim, Create, Look, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.bulletin import CALL, Summons, bulletin_of, call_of, note_of, note_of_call, rank_digest
from leasehold.balancer.census import Census, Known, signed, signers
from leasehold.balancer.config import Config
from leasehold.balancer.counting import expires_above, late_owners, take_census
from leasehold.balancer.handoff import live_moves
from leasehold.balancer.model import Bulletin, BulletinState, Lease, Me, Notes
from leasehold.balancer.rules.loads import slack, takers
from leasehold.balancer.rules.shares import awaits_joiners, donation_order, until_gathered

HEARTBEAT_SECONDS = 1.5
"""The bulletin's row is renewed so often, so that its silence is noticed within seconds (C4)."""

SILENT_SECONDS, LOOKS_SILENT_SECONDS = 2.5, 7.5
"""The lookout has stopped if its row stood still for so long, a heartbeat being a second late; or *looks*, of which
two are missing then (C8)."""

STAND_IN_SECONDS = 1.0
"""Each rank stands in so much later than the one before it: one is enough while it lives (C8)."""

LOOK_SECONDS, ALONE_SECONDS = 3.0, 20.0
"""The lookout lists the table so often (C5); a worker that sees nobody else's lease, so seldom (C13)."""

LATE_SECONDS = 1.5
"""An owner is suspected so long after a renewal was due: a request may stall, or a process pause (C5)."""

READ_SECONDS, HURRIED_SECONDS = 2.5, 0.5
"""Readers read the bulletin so often: at rest, and while requests, a death or a late heartbeat are awaited (C7)."""

WARNED_SECONDS = 10.0
"""A warning makes readers hurry for so long: until then the suspect has renewed, or is dead and freed (C5)."""

REQUESTS_SECONDS = 15.0
"""Requests may come for so long after the last worker came or went (C7)."""

EARLY_SECONDS, EARLY_PLACES = 4.0, 12
"""If the row stands still for so long, so many next in rank list the table once, the others after twice that (C8).

The second in rank reads the row as seldom as others, and may hear of the silence later than some of them. Those would
list the table in vain, and the more of them the larger the fleet.
"""

LAST_RESORT_SECONDS = 20.0
"""Each worker lists the table after so many seconds for each worker, whatever it heard (C11)."""

FREE_SECONDS = 30.0
"""The lookout calls at each look for a lease that was let go within so many seconds, later once a cycle (C6)."""

START_SECONDS, CLAIMED_SECONDS = 0.5, 0.7
"""Workers that start together look first within half a second (C15); after claims the next look is 0.7 s away (C10)."""

OUTAGE_SECONDS = 2.0
"""A store that answers no reading for longer has an outage: the owners could not renew either (C17)."""

AT_ONCE_SECONDS = 0.05
"""A worker that finds itself called reads the rows so soon (C7)."""

LISTING_MOST = 60.0
"""A lookout that has listed for longer may hang: others stand in after twice this, and two missing looks (C8)."""

STAND_INS = 4
"""The first in rank, whose rows are read where the bulletin's row falls silent (C8)."""

LISTED = 12
"""A listing reads so many rows for the price of one row asked for by its key."""


@frozen
class LookoutRanks:
    """The living workers of ours by rank, with the row that carries the bulletin, if any does (C3, C4).

    left   whether its owner has let that row go: nobody keeps the lookout, and the next in rank need not wait
    place  after how many others this worker stands in, as the latest call says; None where none was heard
    """

    ranks: tuple[str, ...]
    row: Lease | None
    left: bool = False
    place: int | None = None

    @property
    def silent(self) -> float:
        """For how many seconds nothing was heard from that row."""
        if self.row is None:
            return math.inf
        return self.row.held if self.left else self.row.idle

    def on_duty(self, me: Me, hearing: BulletinState, config: Config) -> bool:
        """Whether this worker keeps the lookout: by rank, or because the bulletin of the lookout has stopped (C8)."""
        if self.row is None or self.ranks[0] == me.worker:
            return True
        silent = max(
            self.silent - (0.0 if self.left else _row_silent(me, hearing, config)),
            hearing.looks_still - _looks_silent(me, hearing, config),
        )
        if silent <= 0:
            return False
        return silent > self.behind(me) * scaled(STAND_IN_SECONDS, config)

    def behind(self, me: Me) -> int:
        """After how many others this worker stands in."""
        rank = self.ranks.index(me.worker) if me.worker in self.ranks else len(self.ranks)
        return rank - 1 if self.place is None else self.place


def _listing(me: Me, hearing: BulletinState, config: Config) -> float:
    """C8: for how many seconds this table is listed, or is being listed, as far as its lookout and this worker know."""
    call = call_of(hearing.call)
    return max(me.history.full_took, 0.0 if call is None else min(call.seconds, scaled(LISTING_MOST, config)))


def _looks_silent(me: Me, hearing: BulletinState, config: Config) -> float:
    """C8: *looks* may stand still for so long: two are missing then, each as long as the listings of this table take.

    While a listing goes on, its lookout says for how long (`going_on`), and nobody stands in for it.
    """
    return scaled(LOOKS_SILENT_SECONDS, config) + 2 * _listing(me, hearing, config)


def _row_silent(me: Me, hearing: BulletinState, config: Config) -> float:
    """C8: its row may stand still for so long. Where a listing is dear, a heartbeat that stalls may come later, too."""
    return scaled(SILENT_SECONDS, config) + math.floor(_listing(me, hearing, config)) / 2


def lookout_ranks(leases: Sequence[Lease], config: Config, me: Me | None = None) -> LookoutRanks:
    """The first in rank is the lookout; the others stand in for it in this order (C3, C8).

    me  who asks: the row is the one that the latest call names, where one was heard. The call knows better than a
        listing of long ago who keeps the lookout, and on which of its rows.
    """
    limit = expires_above(config)
    ranks = _ranked(leases.signers(limit) if isinstance(leases, Known) else signers(leases, limit))
    hearing = None if me is None else me.history.hearing
    call = None if hearing is None else call_of(hearing.call)
    if me is not None and hearing is not None and call is not None and ranks and ranks[0] != me.worker:
        named_keys = (call.row, *call.next)
        known = leases if isinstance(leases, Known) else {each.key: each for each in leases if each.key in named_keys}
        rows = {key: known.get(key) for key in named_keys}
        owners = [None if (lease := rows[key]) is None else lease.owner for key in call.next]
        rank = ranks.index(me.worker) if me.worker in ranks else len(ranks)
        place = owners.index(me.worker) if me.worker in owners else max(len(owners), rank - 1)
        # Its own row tells a worker nothing of who keeps the lookout: it stood in, and goes by the ranks; but it stays
        # for as long as the first in rank renews and does not look.
        named = rows[call.row]
        if named is not None and named.owner != me.worker and not named.ended:
            return LookoutRanks(ranks, named, left=not signed(named), place=place)
        if named is not None and named.owner == me.worker:
            row = bulletin_row(leases, ranks[0])
            renews = row is not None and row.idle <= _row_silent(me, hearing, config)
            # It has not looked since somebody else wrote the bulletin.
            if row is not None and renews and 0 < bulletin_of(row).looks < hearing.latest.looks:
                return LookoutRanks((me.worker, *(each for each in ranks if each != me.worker)), named)
    return LookoutRanks(ranks, bulletin_row(leases, ranks[0]) if ranks else None)


@lru_cache(maxsize=100)  # most looks find the workers that the look before found
def _ranked(ours: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(ours, key=lambda worker: (rank_digest(worker), worker)))


def bulletin_row(leases: Iterable[Lease], lookout: str) -> Lease | None:
    """The lookout's last row in shed order carries the bulletin, for every newcomer takes from the first (C4)."""
    if isinstance(leases, Known):
        return leases.last_of(lookout, donation_order)
    held = [lease for lease in leases if lease.owner == lookout and not lease.ended]
    return max(held, key=donation_order, default=None)


def heartbeat(mine: Iterable[Lease], me: Me, config: Config) -> tuple[Renew, ...]:
    """C4: the worker that keeps the lookout renews the bulletin's row more often than any other."""
    row = bulletin_row(mine, me.worker)
    return (Renew(row, "C4"),) if row is not None and row.idle >= heartbeat_seconds(config) else ()


def heartbeat_seconds(config: Config) -> float:
    """The bulletin's row is renewed this often."""
    return scaled(HEARTBEAT_SECONDS, config)


def scaled(seconds: float, config: Config) -> float:
    """Seconds that are given for a `lease_seconds` of 10, as they are for this one."""
    return seconds * config.lease_seconds / 10


def called_for(census: Census, me: Me, config: Config) -> tuple[Claim, ...]:
    """C6: what the latest call names for this worker, as far as it is free in this reading."""
    hearing = me.history.hearing
    call = None if hearing is None else call_of(hearing.call)
    keys = set(call.keys(me.worker)) if call is not None and config.rules.keeps_lookout else set()
    if not keys:
        return ()
    most = config.rules.most_leases
    free = sorted((lease for lease in census.free if lease.key in keys), key=donation_order)
    return tuple(Claim(lease, "C6") for lease in free[: None if most is None else max(0, most - len(census.mine))])


def free_expired(census: Census, leases: Sequence[Lease], me: Me, config: Config) -> tuple[Release, ...]:
    """C6: the worker on duty frees the expired leases, so that others may take them without having watched them.

    Under M12 nothing is freed: a released lease waits for its owner's successor, and the dead have none.
    """
    hearing = me.history.hearing
    others = (lease for lease in census.expired if lease.owner != me.worker)
    expired = tuple(sorted(others, key=lambda lease: lease.key))
    if (
        hearing is None
        or not expired
        or not config.rules.frees_expired
        or not lookout_ranks(leases, config, me).on_duty(me, hearing, config)
    ):
        return ()
    return tuple(Release(lease, "C6") for lease in expired)


def start_seconds(worker: str, config: Config) -> float:
    """C15: a worker waits for up to half a second before its first look, by the digest of its id.

    A worker that holds nothing cannot be seen: of those that look at one moment, many choose the same first lease.
    """
    part = int.from_bytes(rank_digest(worker)) / 2**64
    return part * _of_requests(START_SECONDS, config) if config.rules.keeps_lookout else 0.0


def _of_requests(seconds: float, config: Config) -> float:
    """Requests need no more time where leases are longer than 10 s; where leases are shorter, less must do."""
    return seconds * min(1.0, config.lease_seconds / 10)


def next_look(
    actions: Sequence[Action], leases: Sequence[Lease], me: Me, config: Config, hearing: BulletinState
) -> Look:
    """The answer says when to look next, at which rows, and what to write on this worker's own."""
    ours, partial = lookout_ranks(leases, config, me), me.history.full_still > 0
    duty = ours.on_duty(me, hearing, config)
    census = take_census(leases, me, config)
    mine = tuple(leases.owned_by(me.worker)) if isinstance(leases, Known) else leases
    notes = _notes(actions, leases, census, me, config) if duty else _abdication(mine, leases, me, hearing, ours)
    settle = _settle(actions, census, me, config) if not partial or ours.row is None else None
    if settle is None and awaits_joiners(census.mine, me, config) and takes_more(census, me, config):
        settle = until_gathered(me.history, config)
    if settle is not None:
        return Look(settle, notes=notes)
    wanted = _wanted(census, me, config)
    if duty or ours.row is None:
        # The rows that others will ask for are read alone between two listings (C7).
        rest = max(0.0, _until_judged(census, me, config) - me.history.full_still)
        own = bulletin_row(mine, me.worker) if wanted else None
        soon = scaled(HURRIED_SECONDS, config)
        if own is None or rest <= soon or LISTED * len(wanted) > len(leases):
            return Look(min(rest, 2 * soon) if wanted else rest, notes=notes)
        return Look(soon, keys=tuple(dict.fromkeys((own.key, *wanted))), notes=notes, stale_ok=True)
    if partial and _news(leases, me, config, ours, census):
        return Look(0.0, notes=notes)
    call = call_of(hearing.call)
    called = _called(leases, me, call)
    # C8: is it the row that stands still, or one heartbeat late?
    silent = ours.left or ours.silent > heartbeat_seconds(config)
    hurried = wanted or called or silent or hearing.warned < scaled(WARNED_SECONDS, config)
    pause = scaled(HURRIED_SECONDS if hurried else READ_SECONDS, config)
    if called and not hearing.looks_still:
        pause = scaled(AT_ONCE_SECONDS, config)
    keys = (ours.row.key, *(() if call is None else (call.row,)), *called, *wanted)
    stopped = hearing.looks_still > _looks_silent(me, hearing, config)
    stopped |= ours.left or ours.silent > _row_silent(me, hearing, config)
    if stopped and len(leases) >= LISTED * STAND_INS:
        # C8: who stands in says so on its rows, and need not be looked for in the whole table.
        keys += _next_rows(leases, ours.ranks[:STAND_INS]) if call is None else call.next
    if LISTED * len(wanted) > len(leases):
        return Look(2 * pause, notes=notes)
    return Look(pause, keys=tuple(dict.fromkeys(keys)), notes=notes, stale_ok=True)


def _next_rows(leases: Sequence[Lease], workers: Iterable[str]) -> tuple[str, ...]:
    """The rows on which the bulletin stands where these keep the lookout."""
    rows = (bulletin_row(leases, each) for each in workers)
    return tuple(each.key for each in rows if each is not None)


def _called(leases: Sequence[Lease], me: Me, call: Summons | None) -> tuple[str, ...]:
    """The rows that this worker is called to, unless a listing of all costs less."""
    keys = () if call is None else call.keys(me.worker)
    return keys if LISTED * len(keys) <= len(leases) else ()


def _news(leases: Sequence[Lease], me: Me, config: Config, ours: LookoutRanks, census: Census) -> bool:
    """C7, C8, C11: whether this reader should list the whole table now."""
    hearing, full_still = me.history.hearing or BulletinState(), me.history.full_still
    call = call_of(hearing.call)
    # C8: one listing starts this worker's clocks, or a second lease_seconds would be lost.
    early = scaled(EARLY_SECONDS, config) * (1 if ours.behind(me) < EARLY_PLACES else 2)
    unheard = full_still > ours.silent > early + (0.0 if call is None else 2 * call.seconds)
    # A worker that is not called reads nothing. A worker without a lease cannot be seen, and so not be called.
    cheaper = call is not None and len(call.keys(me.worker)) > len(_called(leases, me, call))
    concerns = call is None or call.lists(me.worker) or cheaper or not census.mine
    acts = hearing.latest.acts != hearing.acts_read and concerns
    turned = hearing.turned and (call is None or (ours.left and len(leases) < LISTED * STAND_INS))
    # Of a worker that was never seen to sign a row the ranks know nothing; its leases are known.
    last_resort = full_still > scaled(LAST_RESORT_SECONDS, config) * max(len(ours.ranks), len(census.counts))
    return acts or turned or unheard or last_resort


def _wanted(census: Census, me: Me, config: Config) -> tuple[str, ...]:
    """C7: while the fleet changes, others ask for what this worker holds beyond a share, in this order.

    This worker reads these rows, for it would otherwise see a request only when it renews the lease.
    """
    if me.history.fleet_still > scaled(REQUESTS_SECONDS, config):
        return ()
    spare = max(0, len(census.mine) - len(census.leases) // len(_present(census)))
    return tuple(lease.key for lease in nsmallest(spare, census.mine, key=donation_order) if lease.next_owner is None)


def _present(census: Census) -> frozenset[str]:
    """A worker is present if it holds a lease, or has asked for its first."""
    return frozenset(census.counts) | {lease.next_owner for lease in census.moving if lease.next_owner is not None}


def _settle(actions: Sequence[Action], census: Census, me: Me, config: Config) -> float | None:
    """C10: as `settle_seconds`, but what became of a claim that was answered these leases show already.

    Of such claims another look tells nothing, unless there is more to take: M5 takes one lease at first, M9 one a turn.
    """
    mine = {lease.key for lease in census.mine}
    answered = {action for action in actions if isinstance(action, Claim) and action.lease.key in mine}
    more = bool(answered) and takes_more(census, me, config)
    return settle_seconds([action for action in actions if action not in answered or more], config)


def takes_more(census: Census, me: Me, config: Config) -> bool:
    """C10: whether this worker would take something, were its wait for joiners over; if not, a listing helps nobody."""
    return bool(config.rules.take(census, evolve(me, history=evolve(me.history, fleet_still=math.inf)), config))


def settle_seconds(actions: Iterable[Action], config: Config) -> float | None:
    """C10: a worker looks this soon after these actions; None if others need see none of them first.

    Free leases are claimed fast, once all that started together have chosen (C15). After taking from the living, a
    worker waits for others that join now: shares computed without them would be taken, and taken away again.
    """
    kinds = {type(action) for action in actions}
    if kinds & {Steal, RequestHandoff}:
        return 0.5 * config.lease_seconds
    return _of_requests(CLAIMED_SECONDS, config) if kinds & {Claim, Create} else None


def until_late_judged(leases: Iterable[Lease], me: Me, config: Config) -> float:
    """C16: the time until a second reading shows whether a late owner has died; infinite where none is late."""
    late = late_owners(me, config) if config.rules.keeps_lookout else frozenset()
    left = [expires_above(config) - lease.idle for lease in leases if lease.owner in late and not lease.ended]
    # 0.02: 0.2 s for the reading itself, since a lease stands still from the end of the reading that showed it.
    return min([each + 0.02 * config.lease_seconds for each in left if each >= 0], default=math.inf)


def _until_judged(census: Census, me: Me, config: Config) -> float:
    """C5: three seconds, or just when the first suspect reaches its limit; C13: rarely with nobody to watch."""
    limit = expires_above(config)
    others = [lease.idle for lease in census.leases if lease.owner not in {None, me.worker}]
    if not others:
        # Where the lookout has just let its row go, nobody else is seen only because no other row was read.
        turned = (me.history.hearing or BulletinState()).turned
        return 0.0 if turned else min(scaled(ALONE_SECONDS, config), config.cycle_seconds)
    # Seconds count from the start of the reading, as `idle` does. Where listings take long, everybody renews from one
    # to the next, and what did not move at all is suspected, too.
    took = me.history.full_took
    left = [
        limit - idle
        for idle in others
        if (overdue(idle, config) or (idle > 0 and overdue(idle + took, config))) and idle <= limit
    ]
    rest = scaled(LOOK_SECONDS, config)
    # A look that takes long and begins a moment too early judges nobody, and the next one ends a whole listing later.
    soonest = min(left) if left and took >= rest else min([rest, *left])
    # 0.05: however close the limit is, 50 ms pass before the next look.
    return max(scaled(0.05, config), soonest)


def overdue(idle: float, config: Config) -> bool:
    """C5: whether the owner of a lease that stood still for so long is suspected."""
    return idle > config.renew_seconds + scaled(LATE_SECONDS, config)


def _notes(actions: Iterable[Action], leases: Sequence[Lease], census: Census, me: Me, config: Config) -> Notes:
    """The bulletin after one more look, and whom it calls.

    *acts* grows if others have something to do, *warns* if one may be dead.
    """
    taken = {action.lease.key for action in actions if isinstance(action, Claim)}
    open_now = [lease for lease in census.available if lease.key not in taken and lease.owner != me.worker]
    dead = {lease.key for lease in census.expired}
    warned = any(
        lease.owner not in {None, me.worker} and overdue(lease.idle, config) and lease.key not in dead
        for lease in census.leases
    )
    hearing = me.history.hearing or BulletinState()
    mine = [lease for lease in leases if lease.owner == me.worker]
    if me.history.full_still > 0:  # between two listings nothing new is known
        again = any(bulletin_of(lease) == hearing.latest for lease in mine)
        return note_of(hearing.latest, ((CALL, hearing.call),) if hearing.call else ()) if again else ()
    joined = not me.history.fleet_still and len(census.leases) // len(_present(census)) > 0
    # Others had no time yet to take what was let go lately, or what only became theirs as its parents ended (M1).
    lately = scaled(FREE_SECONDS, config)
    fresh = any(lease.idle < lately for lease in open_now)
    if open_now and not fresh:
        ended = {lease.key for lease in leases if lease.ended and lease.idle < lately}
        fresh = any(not ended.isdisjoint(lease.parents) for lease in open_now)
    # Leases that nobody wants, and moves that nobody makes, raise acts once a cycle: each costs everybody a listing.
    # While a dead worker's leases expire one after another, its count is low for no reason that anybody could mend.
    stands = not fresh if open_now else _uneven(census, me, config)
    lasting = hearing.acts_still >= config.cycle_seconds and stands
    latest, row = hearing.latest, bulletin_row(mine, me.worker)
    if row is None:
        return note_of(Bulletin(latest.looks + 1, latest.acts + (lasting or joined or fresh), latest.warns + warned))
    # A call without effect becomes one to all, once a cycle.
    moves = fresh or census.moving or me.history.fleet_still <= scaled(REQUESTS_SECONDS, config)
    names = config.rules.calls(census, me, config) if moves and not lasting else {}
    rows = (row.key, *_next_rows(leases, lookout_ranks(leases, config).ranks[1:STAND_INS]))
    call = note_of_call(latest.looks + 1, me.history.full_took, rows, names, to_all=lasting)
    return note_of(Bulletin(latest.looks + 1, latest.acts + (lasting or joined or fresh), latest.warns + warned), call)


def _uneven(census: Census, me: Me, config: Config) -> bool:
    """Whether counts (M9), groups (M6) or loads (M13) stood uneven for a cycle, so that who should act has to look."""
    if me.history.owners_still <= config.cycle_seconds:
        return False
    counts = census.counts
    floor = len(census.leases) // len(counts)
    if max(counts.values()) - min(counts.values()) >= 2 + 2 * slack(census.leases, floor):
        return True
    # Groups may be uneven where counts differ by one. A worker that should take from the living is called to the whole
    # table.
    if not all(config.rules.calls(census, me, config).values()):
        return True
    moving = live_moves(census, config)
    return bool(takers(census, counts, floor, moving, config.rules.most_leases, settling=config.cycle_seconds))


def _abdication(
    mine: Sequence[Lease], leases: Sequence[Lease], me: Me, hearing: BulletinState, ours: LookoutRanks
) -> Notes:
    """C3: a worker that was the lookout and no longer is says so once, and which row carries the bulletin now.

    It raises *acts*, so that readers of earlier versions list the table.
    """
    latest = hearing.latest
    if not latest.looks or all(bulletin_of(lease) != latest for lease in mine if lease.owner == me.worker):
        return ()
    row = bulletin_row(leases, ours.ranks[0]) if ours.ranks else None
    others = ours.ranks[1:STAND_INS]
    call = () if row is None else note_of_call(latest.looks + 1, 0.0, (row.key, *_next_rows(leases, others)), {})
    return note_of(evolve(latest, looks=latest.looks + 1, acts=latest.acts + 1), call)
