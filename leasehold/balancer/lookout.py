"""Decides when each worker reads the lease table, and which rows it reads (C3 to C18).

If every worker listed the table, the cost of reading would be proportional to the number of workers times the number of
leases. Therefore, only one worker, the lookout, lists the table regularly. Each worker sorts the workers in its last
listing by a digest of their ids, and the first in this order is the lookout. Workers that read the same rows compute
the same order, so no election or lock is needed, either at the start or when the lookout dies.

The lookout lists the table every 3 s, or sooner if the leases of a late owner reach their limit (C5). It frees the
leases of dead workers, because any worker may claim a lease without an owner, even if it has not watched the lease
expire (C6). Each time that it renews one of its rows, it writes the bulletin on the row, which contains three counts
(C4):
    looks   grows with each look and proves that the lookout still lists the table
    acts    grows when there is work for others and makes every reader read the whole table
    warns   grows when an owner may be dead and makes readers read the bulletin every 0.5 s
The lookout renews one of its rows, the bulletin's row, every 1.5 s. The other workers read only that row, every 2.5 s
(C7). *acts* grows when a worker joins, when a lease was just freed, and when leases stay uneven for a cycle.

When the lookout dies, its row stops changing, and the other workers read this row every 0.5 s. Once the row has not
changed for 2.5 s, the second in rank stands in for the lookout. A second later, the third in rank does, and so on,
until the row changes or has another owner. After 4 s, the first twelve of the other workers list the table once, so
that they start early to measure how long each lease stays unchanged. The rest list it after 8 s (C8). If only *looks*
stops growing, the lookout still renews its leases but no longer plans. In this case, the second in rank stands in after
7.5 s.

A mistake about the lookout costs reads or time, but no lease ever gets two owners, because the store checks a condition
of every write:
    two lookouts            both list the table and both try to free a lease; the store rejects one of the writes
    no lookout              readers notice the silence (C8); in any case, they list the table every 20 s x workers (C11)
    a replaced lookout      raises *acts* when it notices that it was replaced (C3), so that its readers list the table
    a missed bulletin       the counts only grow, so the next bulletin has the same effect
    a row with a new owner  its readers see another owner, and list the table (C7)

Example: one of twenty workers dies just after it has renewed its leases. The next renewal would be due after 5.3 s
(`renew_seconds`). After 6.8 s, it is 1.5 s overdue, so the lookout suspects that the worker is dead, and the next
bulletin contains a warning. After 10.5 s (`expires_above`), the leases have expired. The lookout lists the table at
this moment, frees the leases and raises *acts*. It immediately writes the new count to its row. The other workers read
the count within 0.5 s and claim the leases.

specs/cadence.md explains the purpose of each rule whose name begins with C, and `python benchmarks/cadence_ablation.py`
measures its benefit. specs/minimal.md explains the rules whose names begin with M.

Rule 1: this module does not decide which worker owns a lease.
Rule 2: all times in this module are given for `lease_seconds` of 10. They are multiplied by the configured
`lease_seconds` / 10, except that waits for the store's response are never lengthened.

Workers that list the table at different moments may briefly disagree about the order, so two of them may act as the
lookout, or none. For example, let the workers a, b and c rank in the order c, a, b, and let c die just after its row
changed at 0 s. Once the row has been unchanged for 2.5 s, a starts to list the table, and a second later, b does, too.
After 10.5 s, a frees c's leases, including the lease of this row. Both a and b notice that c no longer owns the row,
list the table once more, and rank a first.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from heapq import nsmallest

from attrs import evolve, frozen

from leasehold.balancer.actions import Action, Claim, Create, Look, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.bulletin import (
    CALL,
    LookoutCall,
    bulletin_annotations,
    bulletin_of,
    call_annotation,
    call_of,
    rank_digest,
)
from leasehold.balancer.census import Census, KnownLeases, our_workers, owner_is_ours
from leasehold.balancer.config import Config
from leasehold.balancer.counting import expires_above, late_owners, take_census
from leasehold.balancer.handoff import pending_handoffs
from leasehold.balancer.model import Annotations, Bulletin, BulletinState, Lease, Me
from leasehold.balancer.rules.loads import count_tolerance, load_takers
from leasehold.balancer.rules.shares import awaits_joiners, donation_order, seconds_until_joined

HEARTBEAT_SECONDS = 1.5
"""How often the lookout renews the row with the bulletin, in seconds. Others notice within seconds if it stops (C4)."""

ROW_SILENCE_SECONDS, LOOKS_SILENCE_SECONDS = 2.5, 7.5
"""How long the bulletin's row, or its count of looks, may stay unchanged before the lookout counts as stopped (C8).

After the first of these times, the renewal of the row is one second overdue. After the second, the lookout has missed
two listings of the table.
"""

STAND_IN_SECONDS = 1.0
"""The extra time that each worker waits for those before it in rank (C8).

If the lookout stops, the second in rank stands in for it. If that worker does not stand in, the third in rank does so
this much later, and so on.
"""

LOOKOUT_LISTING_SECONDS, LONE_LISTING_SECONDS = 3.0, 20.0
"""The time between two listings by the lookout (C5), and by a worker that sees no leases of other workers (C13)."""

OVERDUE_SECONDS = 1.5
"""How long a renewal may be overdue before the lookout suspects that the owner is dead (C5).

If a renewal is overdue for a shorter time, the reason may only be a slow request or a short pause of the process.
"""

BULLETIN_READ_SECONDS, HURRIED_READ_SECONDS = 2.5, 0.5
"""The time between two reads of the bulletin (C7).

A worker uses the shorter time while it expects hand-off requests, or suspects that another worker is dead.
"""

WARNED_SECONDS = 10.0
"""After a warning, workers read the bulletin more often for this long (C5).

By the end of this time, either the suspected owner has renewed its leases, or the leases have expired and the lookout
has freed them.
"""

REQUESTS_EXPECTED_SECONDS = 15.0
"""How long a worker expects hand-off requests for its own leases after any worker has joined or left (C7)."""

EARLY_SECONDS, EARLY_LISTERS = 4.0, 12
"""How long the bulletin's row may stay unchanged before workers list the table, and how many list it first (C8).

The first `EARLY_LISTERS` workers list the table after `EARLY_SECONDS`, and the other workers only after twice this
time. All workers read the bulletin's row equally often, so many of them may notice before the second in rank that the
row no longer changes. If all of these workers listed the table, nearly all of their reads would be wasted.
"""

LAST_RESORT_SECONDS = 20.0
"""The maximum time between two listings by the same worker, in seconds per worker of the group (C11)."""

FREE_CALL_SECONDS = 30.0
"""After a lease has become free, the lookout tells workers to claim it at every look for this long (C6).

After this time, the lookout tells workers to claim the lease only once per cycle.
"""

START_WAIT_SECONDS, AFTER_CLAIM_SECONDS = 0.5, 0.7
"""The maximum wait before a worker's first read of the table (C15), and the wait for a read after claims (C10).
"""

OUTAGE_SECONDS = 2.0
"""If all reads fail for longer than this, the store has an outage (C17).

Owners cannot renew their leases during an outage, so the duration of an outage must not count against them.
"""

CALLED_READ_SECONDS = 0.05
"""How soon a worker reads the rows that a call of the lookout names (C7)."""

LISTING_SECONDS_MAX = 60.0
"""How long a listing of the table may take before the lookout is assumed to hang (C8).

If the lookout reports a longer time, this time is used instead. Before the second in rank stands in, twice the time of
a listing passes in addition to `LOOKS_SILENCE_SECONDS`. The sum is at most 127.5 s, unless the last listing of that
worker itself took longer than a minute.
"""

LOOKOUT_CANDIDATES_MAX = 4
"""The number of workers whose rows are read if the lookout stops: itself and the three that stand in first (C8)."""

ROWS_PER_LISTING_COST = 12
"""Listing this many rows costs as much as reading a single row by its key."""


@frozen
class LookoutRanks:
    """The living workers of this library by rank, and the row that carries the bulletin, if there is one (C3, C4).

    Attributes:
        ranks: The workers, the lookout first.
        row: The row that carries the bulletin.
        row_released: Whether the lookout has released the row. If so, the next worker in rank stands in without a wait.
        place: The number of other workers that stand in for the lookout before this one, according to the latest call;
            None if no call has been read.
    """

    ranks: tuple[str, ...]
    row: Lease | None
    row_released: bool = False
    place: int | None = None

    @property
    def silent_seconds(self) -> float:
        """The number of seconds since the row last changed, or infinity if there is no row.

        If the owner has released the row, it is the number of seconds since the release.
        """
        if self.row is None:
            return math.inf
        return self.row.held if self.row_released else self.row.idle

    def on_duty(self, me: Me, bulletin_state: BulletinState, config: Config) -> bool:
        """Return whether this worker acts as the lookout.

        The first worker in rank is the lookout. If the lookout's bulletin has stopped changing, the other workers stand
        in for it one after another (C8).
        """
        if self.row is None or self.ranks[0] == me.worker:
            return True
        seconds_overdue = max(
            self.silent_seconds - (0.0 if self.row_released else _row_silence_limit(me, bulletin_state, config)),
            bulletin_state.looks_still - _looks_silence_limit(me, bulletin_state, config),
        )
        if seconds_overdue <= 0:
            return False
        return seconds_overdue > self.stand_ins_before(me) * scale_to_lease_seconds(STAND_IN_SECONDS, config)

    def stand_ins_before(self, me: Me) -> int:
        """Return how many other workers stand in for the lookout before this one."""
        rank = self.ranks.index(me.worker) if me.worker in self.ranks else len(self.ranks)
        return rank - 1 if self.place is None else self.place


def _listing_seconds(me: Me, bulletin_state: BulletinState, config: Config) -> float:
    """Return how many seconds a listing of the table takes (C8).

    The result is the larger one of the times that the lookout and this worker have measured.
    """
    call = call_of(bulletin_state.call)
    return max(
        me.history.full_took,
        0.0 if call is None else min(call.seconds, scale_to_lease_seconds(LISTING_SECONDS_MAX, config)),
    )


def _looks_silence_limit(me: Me, bulletin_state: BulletinState, config: Config) -> float:
    """Return how long the count *looks* may stay unchanged, in seconds (C8).

    The limit grows with the time that a listing of the table takes, so that a slow listing is not mistaken for a dead
    lookout. During a listing, the lookout writes how long the listing has taken so far (`prolonged_annotations`).
    """
    return scale_to_lease_seconds(LOOKS_SILENCE_SECONDS, config) + 2 * _listing_seconds(me, bulletin_state, config)


def _row_silence_limit(me: Me, bulletin_state: BulletinState, config: Config) -> float:
    """Return how long the bulletin's row may stay unchanged, in seconds (C8).

    A long listing may also delay the renewals of the row.
    """
    return (
        scale_to_lease_seconds(ROW_SILENCE_SECONDS, config)
        + math.floor(_listing_seconds(me, bulletin_state, config)) / 2
    )


def lookout_ranks(leases: Sequence[Lease], config: Config, me: Me | None = None) -> LookoutRanks:
    """Return the workers by rank. The first is the lookout, and the others stand in for it in this order (C3, C8).

    Args:
        leases: The known leases.
        config: The settings of the group of workers.
        me: The worker that calls this function, or None. If this worker has read a call from the lookout, the result
            contains the row that the latest call names, because the call may be more recent than the last listing.
    """
    limit = expires_above(config)
    ranks = _rank_workers(leases.our_workers(limit) if isinstance(leases, KnownLeases) else our_workers(leases, limit))
    bulletin_state = None if me is None else me.history.hearing
    call = None if bulletin_state is None else call_of(bulletin_state.call)
    if me is not None and bulletin_state is not None and call is not None and ranks and ranks[0] != me.worker:
        named_keys = (call.row, *call.stand_in_rows)
        by_key = (
            leases
            if isinstance(leases, KnownLeases)
            else {first_row.key: first_row for first_row in leases if first_row.key in named_keys}
        )
        rows = {key: by_key.get(key) for key in named_keys}
        owners = [None if (lease := rows[key]) is None else lease.owner for key in call.stand_in_rows]
        rank = ranks.index(me.worker) if me.worker in ranks else len(ranks)
        # A worker that the call does not name stands in after all workers that it names.
        stand_in_place = owners.index(me.worker) if me.worker in owners else max(len(owners), rank - 1)
        # If the latest call names a row of this worker, this worker has stood in for the lookout. In this case, the
        # call does not show which worker is the lookout now, so use the ranks. However, if the first in rank renews its
        # row without listing the table, continue to stand in.
        named_row = rows[call.row]
        if named_row is not None and named_row.owner != me.worker and not named_row.ended:
            return LookoutRanks(ranks, named_row, row_released=not owner_is_ours(named_row), place=stand_in_place)
        if named_row is not None and named_row.owner == me.worker:
            first_row = bulletin_row(leases, ranks[0])
            first_is_alive = first_row is not None and first_row.idle <= _row_silence_limit(me, bulletin_state, config)
            # The first in rank lives, but its *looks* are below the latest ones, so it has not listed the table since
            # another worker wrote the latest bulletin.
            if (
                first_row is not None
                and first_is_alive
                and 0 < bulletin_of(first_row).looks < bulletin_state.latest.looks
            ):
                return LookoutRanks((me.worker, *(worker for worker in ranks if worker != me.worker)), named_row)
    return LookoutRanks(ranks, bulletin_row(leases, ranks[0]) if ranks else None)


@lru_cache(maxsize=100)  # cached, because the workers are usually the same as at the previous look
def _rank_workers(our_workers: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(our_workers, key=lambda worker: (rank_digest(worker), worker)))


def bulletin_row(leases: Iterable[Lease], lookout: str) -> Lease | None:
    """Return the row on which this lookout writes its bulletin: the last of its rows in donation order (C4).

    Workers that join take leases from the beginning of the donation order. Therefore, the last lease in this order
    changes its owner least often.
    """
    if isinstance(leases, KnownLeases):
        return leases.last_unfinished(lookout, donation_order)
    held_leases = [lease for lease in leases if lease.owner == lookout and not lease.ended]
    return max(held_leases, key=donation_order, default=None)


def bulletin_row_renewals(own_leases: Iterable[Lease], me: Me, config: Config) -> tuple[Renew, ...]:
    """Return the renewal of the bulletin's row, if one is due (C4). This row is renewed more often than the others."""
    row = bulletin_row(own_leases, me.worker)
    return (Renew(row, "C4"),) if row is not None and row.idle >= heartbeat_seconds(config) else ()


def heartbeat_seconds(config: Config) -> float:
    """Return the interval at which the bulletin's row is renewed, in seconds."""
    return scale_to_lease_seconds(HEARTBEAT_SECONDS, config)


def scale_to_lease_seconds(seconds: float, config: Config) -> float:
    """Convert a time that is given for `lease_seconds` of 10 to the `lease_seconds` of this configuration."""
    return seconds * config.lease_seconds / 10


def called_claims(census: Census, me: Me, config: Config) -> tuple[Claim, ...]:
    """Return claims of the free leases that the latest call names for this worker (C6)."""
    bulletin_state = me.history.hearing
    call = None if bulletin_state is None else call_of(bulletin_state.call)
    keys = set(call.keys(me.worker)) if call is not None and config.rules.keeps_lookout else set()
    if not keys:
        return ()
    lease_limit = config.rules.most_leases
    called_leases = sorted((lease for lease in census.free if lease.key in keys), key=donation_order)
    return tuple(
        Claim(lease, "C6")
        for lease in called_leases[: None if lease_limit is None else max(0, lease_limit - len(census.mine))]
    )


def free_expired(census: Census, leases: Sequence[Lease], me: Me, config: Config) -> tuple[Release, ...]:
    """Return a `Release` for each expired lease if this worker is the lookout (C6).

    The lookout frees expired leases because any worker may claim a lease that has no owner, even if it has not watched
    the lease expire. If released leases are reserved for newcomers (M12), `frees_expired` is false and no lease is
    freed, because a freed lease would be reserved, too, and would be claimed later.
    """
    bulletin_state = me.history.hearing
    others_expired = (lease for lease in census.expired if lease.owner != me.worker)
    sorted_leases = tuple(sorted(others_expired, key=lambda lease: lease.key))
    if (
        bulletin_state is None
        or not sorted_leases
        or not config.rules.frees_expired
        or not lookout_ranks(leases, config, me).on_duty(me, bulletin_state, config)
    ):
        return ()
    return tuple(Release(lease, "C6") for lease in sorted_leases)


def start_seconds(worker: str, config: Config) -> float:
    """Return how long a worker waits before it reads the table for the first time, up to half a second (C15).

    The wait depends on a digest of the worker's id, so that workers wait for different times. Workers that hold no
    leases cannot see each other, so if many of them read the table at the same moment, they would choose the same first
    lease.
    """
    fraction = int.from_bytes(rank_digest(worker)) / 2**64
    return fraction * _scale_request_wait(START_WAIT_SECONDS, config) if config.rules.keeps_lookout else 0.0


def _scale_request_wait(seconds: float, config: Config) -> float:
    """Convert a wait for the store's response, which is given for `lease_seconds` of 10, to this configuration.

    The wait is shortened if `lease_seconds` is less than 10. It is never lengthened, because longer leases don't make
    the store slower.
    """
    return seconds * min(1.0, config.lease_seconds / 10)


def next_look(
    actions: Sequence[Action], leases: Sequence[Lease], me: Me, config: Config, bulletin_state: BulletinState
) -> Look:
    """Return when to read the table next, which rows to read, and what to write on this worker's own rows."""
    ranks, is_partial_read = lookout_ranks(leases, config, me), me.history.full_still > 0
    on_duty = ranks.on_duty(me, bulletin_state, config)
    census = take_census(leases, me, config)
    own_leases = tuple(leases.owned_by(me.worker)) if isinstance(leases, KnownLeases) else leases
    annotations = (
        _next_bulletin(actions, leases, census, me, config)
        if on_duty
        else _last_bulletin(own_leases, leases, me, bulletin_state, ranks)
    )
    settle_wait = _settle_wait(actions, census, me, config) if not is_partial_read or ranks.row is None else None
    if settle_wait is None and awaits_joiners(census.mine, me, config) and wants_more_leases(census, me, config):
        settle_wait = seconds_until_joined(me.history, config)
    if settle_wait is not None:
        return Look(settle_wait, annotations=annotations)
    likely_requested_keys = _likely_requested_keys(census, me, config)
    if on_duty or ranks.row is None:
        # Between two listings, the lookout reads only those of its rows whose leases other workers will probably
        # request (C7).
        seconds_to_listing = max(0.0, _seconds_to_next_listing(census, me, config) - me.history.full_still)
        own_bulletin_row = bulletin_row(own_leases, me.worker) if likely_requested_keys else None
        hurried_seconds = scale_to_lease_seconds(HURRIED_READ_SECONDS, config)
        if (
            own_bulletin_row is None
            or seconds_to_listing <= hurried_seconds
            or ROWS_PER_LISTING_COST * len(likely_requested_keys) > len(leases)
        ):
            return Look(
                min(seconds_to_listing, 2 * hurried_seconds) if likely_requested_keys else seconds_to_listing,
                annotations=annotations,
            )
        return Look(
            hurried_seconds,
            keys=tuple(dict.fromkeys((own_bulletin_row.key, *likely_requested_keys))),
            annotations=annotations,
            stale_ok=True,
        )
    if is_partial_read and _should_list(leases, me, config, ranks, census):
        return Look(0.0, annotations=annotations)
    call = call_of(bulletin_state.call)
    called_keys = _called_keys(leases, me, call)
    # C8: read the row more often if it has not changed for a while, because the lookout may have stopped.
    row_silent = ranks.row_released or ranks.silent_seconds > heartbeat_seconds(config)
    must_hurry = (
        likely_requested_keys
        or called_keys
        or row_silent
        or bulletin_state.warned < scale_to_lease_seconds(WARNED_SECONDS, config)
    )
    seconds = scale_to_lease_seconds(HURRIED_READ_SECONDS if must_hurry else BULLETIN_READ_SECONDS, config)
    if called_keys and not bulletin_state.looks_still:
        seconds = scale_to_lease_seconds(CALLED_READ_SECONDS, config)
    keys = (ranks.row.key, *(() if call is None else (call.row,)), *called_keys, *likely_requested_keys)
    lookout_stopped = bulletin_state.looks_still > _looks_silence_limit(me, bulletin_state, config)
    lookout_stopped |= ranks.row_released or ranks.silent_seconds > _row_silence_limit(me, bulletin_state, config)
    if lookout_stopped and len(leases) >= ROWS_PER_LISTING_COST * LOOKOUT_CANDIDATES_MAX:
        # C8: if another worker stands in for the lookout, it writes its bulletin on one of these rows. Reading them is
        # cheaper than listing the table.
        keys += _bulletin_row_keys(leases, ranks.ranks[:LOOKOUT_CANDIDATES_MAX]) if call is None else call.stand_in_rows
    if ROWS_PER_LISTING_COST * len(likely_requested_keys) > len(leases):
        return Look(2 * seconds, annotations=annotations)
    return Look(seconds, keys=tuple(dict.fromkeys(keys)), annotations=annotations, stale_ok=True)


def _bulletin_row_keys(leases: Sequence[Lease], workers: Iterable[str]) -> tuple[str, ...]:
    """Return, for each of these workers, the key of the row on which it would write a bulletin."""
    rows = (bulletin_row(leases, worker) for worker in workers)
    return tuple(row.key for row in rows if row is not None)


def _called_keys(leases: Sequence[Lease], me: Me, call: LookoutCall | None) -> tuple[str, ...]:
    """Return the keys that this worker is called to read, or no keys if listing the whole table costs less."""
    keys = () if call is None else call.keys(me.worker)
    return keys if ROWS_PER_LISTING_COST * len(keys) <= len(leases) else ()


def _should_list(leases: Sequence[Lease], me: Me, config: Config, ranks: LookoutRanks, census: Census) -> bool:
    """Return whether this reader should list the whole table now (C7, C8, C11)."""
    bulletin_state, full_still = me.history.hearing or BulletinState(), me.history.full_still
    call = call_of(bulletin_state.call)
    # C8: list the table once, to start measuring how long each lease stays unchanged. The first comparison is false if
    #     the table was listed after the row last changed. If a worker started to measure only when it became the
    #     lookout, it would find expired leases `lease_seconds` later.
    early_seconds = scale_to_lease_seconds(EARLY_SECONDS, config) * (
        1 if ranks.stand_ins_before(me) < EARLY_LISTERS else 2
    )
    bulletin_stopped = full_still > ranks.silent_seconds > early_seconds + (0.0 if call is None else 2 * call.seconds)
    # A worker ignores new work unless the lookout calls the worker. A worker without a lease must list the table in any
    # case, because the lookout doesn't see it and cannot call it.
    listing_is_cheaper = call is not None and len(call.keys(me.worker)) > len(_called_keys(leases, me, call))
    may_act = call is None or call.reads_whole_table(me.worker) or listing_is_cheaper or not census.mine
    work_for_us = bulletin_state.latest.acts != bulletin_state.acts_read and may_act
    must_list_for_new_owner = bulletin_state.turned and (
        call is None or (ranks.row_released and len(leases) < ROWS_PER_LISTING_COST * LOOKOUT_CANDIDATES_MAX)
    )
    # Use the larger number, because the ranks contain only workers of this library, while the counts contain all
    # owners.
    is_last_resort = full_still > scale_to_lease_seconds(LAST_RESORT_SECONDS, config) * max(
        len(ranks.ranks), len(census.counts)
    )
    return work_for_us or must_list_for_new_owner or bulletin_stopped or is_last_resort


def _likely_requested_keys(census: Census, me: Me, config: Config) -> tuple[str, ...]:
    """Return the leases that others will request from this worker while workers join and leave (C7).

    The result contains the leases beyond this worker's share, in donation order. The worker polls the rows of these
    leases, because otherwise it would notice a request only when it next renews the lease.
    """
    if me.history.fleet_still > scale_to_lease_seconds(REQUESTS_EXPECTED_SECONDS, config):
        return ()
    surplus_count = max(0, len(census.mine) - len(census.leases) // len(_present_workers(census)))
    return tuple(
        lease.key for lease in nsmallest(surplus_count, census.mine, key=donation_order) if lease.next_owner is None
    )


def _present_workers(census: Census) -> frozenset[str]:
    """Return the workers that own a lease or have requested one."""
    return frozenset(census.counts) | {lease.next_owner for lease in census.moving if lease.next_owner is not None}


def _settle_wait(actions: Sequence[Action], census: Census, me: Me, config: Config) -> float | None:
    """Return `seconds_to_results` for these actions (C10).

    Claims that have already succeeded count only if the worker still lacks leases. Otherwise, it need not read the
    table again because of them. It may still lack some, because M5 takes only one lease at first, and M9 takes only one
    lease per turn.
    """
    own_keys = {lease.key for lease in census.mine}
    succeeded_claims = {action for action in actions if isinstance(action, Claim) and action.lease.key in own_keys}
    needs_results = bool(succeeded_claims) and wants_more_leases(census, me, config)
    return seconds_to_results([action for action in actions if action not in succeeded_claims or needs_results], config)


def wants_more_leases(census: Census, me: Me, config: Config) -> bool:
    """Return whether this worker would take a lease if it did not have to wait for workers that are joining (C10).

    A worker that would take no lease need not read the table when the wait is over.
    """
    return bool(config.rules.take(census, evolve(me, history=evolve(me.history, fleet_still=math.inf)), config))


def seconds_to_results(actions: Iterable[Action], config: Config) -> float | None:
    """Return the seconds until a worker reads the results of these actions (C10), or None if it need not read them.

    After claims, the wait is short. At its end, even workers that started together have chosen their leases (C15).

    After leases are taken from living workers, the wait is longer, because other workers may be joining. A share that
    is computed before those workers are visible is too large, and they would take the surplus leases away again.
    """
    action_types = {type(action) for action in actions}
    if action_types & {Steal, RequestHandoff}:
        return 0.5 * config.lease_seconds
    return _scale_request_wait(AFTER_CLAIM_SECONDS, config) if action_types & {Claim, Create} else None


def seconds_until_late_owners_expire(leases: Iterable[Lease], me: Me, config: Config) -> float:
    """Return the seconds until another read of the table can show whether a late owner has died (C16).

    The result is infinite if no owner is late.
    """
    late_workers = late_owners(me, config) if config.rules.keeps_lookout else frozenset()
    seconds_left = [
        expires_above(config) - lease.idle for lease in leases if lease.owner in late_workers and not lease.ended
    ]
    # The factor 0.02 adds 0.2 s if `lease_seconds` is 10. The time is needed because `idle` does not include the
    # durations of the first and the latest read.
    return min([seconds + 0.02 * config.lease_seconds for seconds in seconds_left if seconds >= 0], default=math.inf)


def _seconds_to_next_listing(census: Census, me: Me, config: Config) -> float:
    """Return the seconds from one listing of the lookout to the next.

    The result is usually `LOOKOUT_LISTING_SECONDS`. It is smaller if the lease of a suspected owner expires earlier
    (C5), and larger if no other worker holds a lease (C13).
    """
    limit = expires_above(config)
    other_idle_times = [lease.idle for lease in census.leases if lease.owner not in {None, me.worker}]
    if not other_idle_times:
        # If this worker has read only a few rows, and the lookout has just released one of them, there may be other
        # workers although none is visible. In this case, list the table now.
        row_released = (me.history.hearing or BulletinState()).turned
        return 0.0 if row_released else min(scale_to_lease_seconds(LONE_LISTING_SECONDS, config), config.cycle_seconds)
    # `idle` ends at the start of the latest read, so add the time that a listing takes. If listings take long, a living
    # owner renews between two of them, so a lease that has not changed is suspicious.
    listing_seconds = me.history.full_took
    seconds_left = [
        limit - idle
        for idle in other_idle_times
        if (is_renewal_overdue(idle, config) or (idle > 0 and is_renewal_overdue(idle + listing_seconds, config)))
        and idle <= limit
    ]
    usual_pause = scale_to_lease_seconds(LOOKOUT_LISTING_SECONDS, config)
    # If listings are slow, don't start one before the first lease expires. Such a listing would not show that an owner
    # is dead, and the next result would come only a whole listing later.
    next_seconds = (
        min(seconds_left) if seconds_left and listing_seconds >= usual_pause else min([usual_pause, *seconds_left])
    )
    # Let at least 50 ms pass (if `lease_seconds` is 10) before the next listing, even if a lease expires sooner.
    return max(scale_to_lease_seconds(0.05, config), next_seconds)


def is_renewal_overdue(idle: float, config: Config) -> bool:
    """Return whether an owner is suspected to be dead if it has not renewed a lease for `idle` seconds (C5)."""
    return idle > config.renew_seconds + scale_to_lease_seconds(OVERDUE_SECONDS, config)


def _next_bulletin(
    actions: Iterable[Action], leases: Sequence[Lease], census: Census, me: Me, config: Config
) -> Annotations:
    """Return the annotations with the next bulletin and its call.

    *looks* grows by one. *acts* grows if other workers must act, and *warns* grows if an owner may be dead.
    """
    taken_keys = {action.lease.key for action in actions if isinstance(action, Claim)}
    open_leases = [lease for lease in census.available if lease.key not in taken_keys and lease.owner != me.worker]
    expired_keys = {lease.key for lease in census.expired}
    owner_may_be_dead = any(
        lease.owner not in {None, me.worker}
        and is_renewal_overdue(lease.idle, config)
        and lease.key not in expired_keys
        for lease in census.leases
    )
    bulletin_state = me.history.hearing or BulletinState()
    own_leases = [lease for lease in leases if lease.owner == me.worker]
    if me.history.full_still > 0:  # no new bulletin, because a bulletin changes only after a listing
        carries_bulletin = any(bulletin_of(lease) == bulletin_state.latest for lease in own_leases)
        return (
            bulletin_annotations(bulletin_state.latest, ((CALL, bulletin_state.call),) if bulletin_state.call else ())
            if carries_bulletin
            else ()
        )
    worker_joined = not me.history.fleet_still and len(census.leases) // len(_present_workers(census)) > 0
    # If a lease was just released, or has become available because its parents ended (M1), other workers have not had
    # time to claim it yet.
    max_idle = scale_to_lease_seconds(FREE_CALL_SECONDS, config)
    lease_newly_free = any(lease.idle < max_idle for lease in open_leases)
    if open_leases and not lease_newly_free:
        recently_ended_keys = {lease.key for lease in leases if lease.ended and lease.idle < max_idle}
        lease_newly_free = any(not recently_ended_keys.isdisjoint(lease.parents) for lease in open_leases)
    # If an imbalance persists although workers were called, for example because open leases were not claimed, raise
    # *acts* only once per cycle, because every worker then lists the table. While a dead worker's leases expire one
    # after another, the counts are uneven, but no worker can change that yet.
    imbalance_persists = not lease_newly_free if open_leases else _uneven_for_a_cycle(census, me, config)
    moves_overdue = bulletin_state.acts_still >= config.cycle_seconds and imbalance_persists
    latest_bulletin, row = bulletin_state.latest, bulletin_row(own_leases, me.worker)
    if row is None:
        return bulletin_annotations(
            Bulletin(
                latest_bulletin.looks + 1,
                latest_bulletin.acts + (moves_overdue or worker_joined or lease_newly_free),
                latest_bulletin.warns + owner_may_be_dead,
            )
        )
    # If calls to single workers have no effect, call all workers once per cycle.
    moves_expected = (
        lease_newly_free
        or census.moving
        or me.history.fleet_still <= scale_to_lease_seconds(REQUESTS_EXPECTED_SECONDS, config)
    )
    keys_by_worker = config.rules.calls(census, me, config) if moves_expected and not moves_overdue else {}
    rows = (row.key, *_bulletin_row_keys(leases, lookout_ranks(leases, config).ranks[1:LOOKOUT_CANDIDATES_MAX]))
    call = call_annotation(latest_bulletin.looks + 1, me.history.full_took, rows, keys_by_worker, to_all=moves_overdue)
    return bulletin_annotations(
        Bulletin(
            latest_bulletin.looks + 1,
            latest_bulletin.acts + (moves_overdue or worker_joined or lease_newly_free),
            latest_bulletin.warns + owner_may_be_dead,
        ),
        call,
    )


def _uneven_for_a_cycle(census: Census, me: Me, config: Config) -> bool:
    """Return whether the division of leases is uneven although no lease has moved for a cycle.

    The division is uneven if the numbers of leases (M9), the shares of the groups (M6) or the loads (M13) are uneven.
    In this case, the lookout makes the workers that should act read the table.
    """
    if me.history.owners_still <= config.cycle_seconds:
        return False
    counts = census.counts
    base_share = len(census.leases) // len(counts)
    if max(counts.values()) - min(counts.values()) >= 2 + 2 * count_tolerance(census.leases, base_share):
        return True
    # Even if no two workers' counts differ by more than one, the groups of workers may hold unequal shares. In this
    # case, `calls` maps a worker that should take leases from living workers to an empty list of keys, because it must
    # read the whole table.
    if not all(config.rules.calls(census, me, config).values()):
        return True
    moves_in_progress = pending_handoffs(census, config)
    return bool(
        load_takers(
            census, counts, base_share, moves_in_progress, config.rules.most_leases, settle_seconds=config.cycle_seconds
        )
    )


def _last_bulletin(
    own_leases: Sequence[Lease], leases: Sequence[Lease], me: Me, bulletin_state: BulletinState, ranks: LookoutRanks
) -> Annotations:
    """Return the last bulletin that a worker writes when it is no longer the lookout, and its call (C3).

    The call points readers to the row of the new lookout. If the key of this row cannot be part of a call, readers list
    the table instead, because *acts* has grown.
    """
    latest_bulletin = bulletin_state.latest
    if not latest_bulletin.looks or all(
        bulletin_of(lease) != latest_bulletin for lease in own_leases if lease.owner == me.worker
    ):
        return ()
    row = bulletin_row(leases, ranks.ranks[0]) if ranks.ranks else None
    stand_ins = ranks.ranks[1:LOOKOUT_CANDIDATES_MAX]
    call = (
        ()
        if row is None
        else call_annotation(latest_bulletin.looks + 1, 0.0, (row.key, *_bulletin_row_keys(leases, stand_ins)), {})
    )
    return bulletin_annotations(
        evolve(latest_bulletin, looks=latest_bulletin.looks + 1, acts=latest_bulletin.acts + 1), call
    )
