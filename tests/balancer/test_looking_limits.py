"""Tests what a worker does exactly at the limits that determine when it reads the table.

If workers of different versions or languages treated a limit differently, they would read the table at different times.
"""

import pytest
from attrs import evolve
from looking_fleet import (
    BOARD,
    CONFIG,
    FULL,
    HEARING,
    LAST,
    LOOKOUT,
    NEXT,
    QUIET,
    READER,
    TABLE,
    THIRDS,
    heard,
    look,
    on_duty,
    row,
    table_with_idle_owner,
    told,
)

from leasehold.balancer.actions import Claim, Create, Look, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.bulletin import bulletin_annotations, worker_digits
from leasehold.balancer.config import Config
from leasehold.balancer.lookout import (
    AFTER_CLAIM_SECONDS,
    bulletin_row_renewals,
    lookout_ranks,
    seconds_to_results,
)
from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, Bulletin, History, Lease, Me
from leasehold.balancer.plan import look_again
from leasehold.balancer.rules.minimal import Minimal

assert BOARD is not None
KEYS = (BOARD.key,)
LOUD, SILENT = bulletin_annotations(Bulletin(8, 3, 1)), bulletin_annotations(Bulletin(8, 2, 1))
LATELY = evolve(FULL, hearing=evolve(HEARING, acts_still=1.0))
"""A history in which the last call was a second ago."""

NOT_CALLED_FOR_A_CYCLE = evolve(FULL, hearing=evolve(HEARING, acts_still=CONFIG.cycle_seconds))
"""A history in which the last call was a cycle ago."""


def leases_of_former_lookout(acts_read: int) -> tuple[tuple[Lease, ...], History]:
    """Return the table and the history of READER, which was the lookout until now and has read this value of `acts`."""
    former_table = tuple(
        evolve(lease, annotations=row("", READER, bulletin="9 2 1").annotations) if lease.owner == READER else lease
        for lease in TABLE
    )
    return former_table, heard(latest=Bulletin(9, 2, 1), acts_read=acts_read)


def test_abdicating_lookout_writes_a_last_bulletin() -> None:
    """C3: A replaced lookout writes a last bulletin immediately, so its readers need not wait until it looks silent."""
    annotations = told(10, 3, 1)
    former_table, history = leases_of_former_lookout(acts_read=2)
    assert look(READER, former_table, history) == Look(2.5, keys=KEYS, annotations=annotations, stale_ok=True)
    assert look(READER, *leases_of_former_lookout(acts_read=1)) == Look(0.0, annotations=annotations)
    larger_table = (*former_table, row("s-18", READER), row("s-19", READER))
    assert look(READER, larger_table, evolve(history, fleet_still=14.0)) == Look(1.0, annotations=annotations)
    assert look(READER, former_table, heard(latest=Bulletin(11, 3, 1), acts_read=3)).annotations == (), "once"


def test_read_after_a_listing_is_partial() -> None:
    """C7: A change half a second after a listing is noticed at the next listing."""
    turned_history = heard(turned=True)
    assert look(READER, TABLE, evolve(turned_history, full_still=0.5)) == Look(0.0)
    assert look(READER, TABLE, evolve(turned_history, full_still=0.0)).keys == KEYS


@pytest.mark.parametrize(("idle", "seconds"), [(1.5, 2.5), (1.75, 0.5)])
def test_bulletin_row_is_late_after_its_heartbeat_was_due(idle: float, seconds: float) -> None:
    """C8: readers hurry only if a heartbeat is late, and not before every heartbeat."""
    assert look(READER, table_with_idle_owner(idle)) == Look(seconds, keys=KEYS, stale_ok=True)


@pytest.mark.parametrize(("warned", "seconds"), [(9.75, 0.5), (10.0, 2.5)])
def test_warning_lasts_ten_seconds(warned: float, seconds: float) -> None:
    """C5: A warning lasts until the suspect has renewed its leases, or they were freed."""
    assert look(READER, TABLE, heard(warned=warned)).seconds == seconds


def test_single_row_is_read_by_key_in_a_table_of_twelve() -> None:
    """C7: A table of eleven rows is listed, because a listing of twelve rows costs as much as a read by key."""
    recent_history = evolve(QUIET, fleet_still=14.0)
    rows = [row(f"s-{index}", f"w-{index % 6}") for index in range(10)]
    eleven_rows = (*(lease for lease in rows if lease.owner != READER), *(row(f"t-{n}", READER) for n in range(3)))
    twelve_rows = (*eleven_rows, row("u-0", LAST))
    decision = look(READER, (*twelve_rows, row("u-1", LAST)), recent_history)
    assert (len(eleven_rows), len(twelve_rows)) == (11, 12)
    assert decision.keys is not None
    assert [look(READER, leases, recent_history).keys is None for leases in (eleven_rows, twelve_rows)] == [True, False]


@pytest.mark.parametrize(("fleet_still", "keys"), [(15.0, 2), (15.25, 1)])
def test_owner_watches_for_requests_for_fifteen_seconds(fleet_still: float, keys: int) -> None:
    """C7: An owner reads its own rows as long as a newcomer may request leases."""
    polled_keys = look(READER, (*TABLE, row("n-0", "new")), evolve(QUIET, fleet_still=fleet_still)).keys
    assert polled_keys is not None
    assert len(polled_keys) == keys


def test_worker_with_its_share_does_not_watch_for_requests() -> None:
    """C7: A worker that has no more than its share does not watch for requests, because there will be none."""
    assert look(READER, TABLE, evolve(QUIET, fleet_still=14.0)) == Look(2.5, keys=KEYS, stale_ok=True)


def test_worker_with_only_a_request_counts_for_shares() -> None:
    """C6: A newcomer that has only requested leases counts as a worker, so owners watch for its next requests."""
    requested_table = tuple(evolve(lease, next_owner="new") if lease.key == KEYS[0] else lease for lease in TABLE)
    decision = look(READER, requested_table, evolve(QUIET, fleet_still=14.0))
    assert decision.seconds == 0.5
    assert len(decision.keys or ()) == 2


def test_silence_since_the_last_listing_causes_no_listing() -> None:
    """C8: The silence of the bulletin's row counts only from the reader's last listing on."""
    idle_table = table_with_idle_owner(5.0)
    assert [look(READER, idle_table, evolve(QUIET, full_still=seconds)).keys is None for seconds in (5.0, 5.25)] == [
        False,
        True,
    ]
    late_history = evolve(QUIET, full_still=30.0)
    assert [look(READER, table_with_idle_owner(idle), late_history).keys is None for idle in (4.0, 4.25)] == [
        False,
        True,
    ]


def test_every_worker_lists_as_a_last_resort() -> None:
    """C11: In a fleet of six, each worker lists the table at least every 120 seconds."""
    assert [look(READER, TABLE, evolve(QUIET, full_still=seconds)).keys for seconds in (120.0, 120.25)] == [KEYS, None]


def test_owner_at_its_limit_is_read_again() -> None:
    """C5, C16: A lease that is idle for exactly the limit is read again. Just above the limit it may be freed."""
    for idle, seconds in ((10.0, 0.5), (10.25, 0.25), (10.5, 0.05), (10.75, 3.0)):
        assert look(LOOKOUT, table_with_idle_owner(idle, READER), FULL).seconds == seconds
    me = Me("w-1", history=History(paces=(("w-2", 9.0),)))
    for idle, seconds in ((10.0, 0.7), (10.5, 0.2), (10.75, CONFIG.cycle_seconds)):
        assert look_again((), table_with_idle_owner(idle, "w-2"), me, CONFIG).seconds == pytest.approx(seconds)


def test_owner_that_is_just_due_is_not_suspected() -> None:
    """C3, C5: An owner whose renewal has just become due causes no warning, and keeps its rank."""
    config = Config(rules=Minimal(), renew_seconds=5.0)
    annotations = [
        look_again((), table_with_idle_owner(idle, READER), Me(LOOKOUT, history=FULL), config).annotations
        for idle in (6.5, 6.75)
    ]
    assert annotations == [told(8, 2, 1), told(8, 2, 2)]
    assert [lookout_ranks(table_with_idle_owner(idle), CONFIG).ranks[0] for idle in (10.5, 10.75)] == [LOOKOUT, NEXT]


def test_each_rank_stands_in_at_its_own_time() -> None:
    """C8: Stand-ins start one after another, so that only one of them lists the table."""
    assert not on_duty(NEXT, table_with_idle_owner(2.5))
    longer_config = evolve(CONFIG, lease_seconds=20.0)
    ranks = lookout_ranks(table_with_idle_owner(8.0), longer_config)
    hearing = HEARING
    assert [ranks.on_duty(Me(worker), hearing, longer_config) for worker in (NEXT, *THIRDS)] == [True, True, False]


def test_worker_without_leases_renews_no_bulletin_row() -> None:
    """C4: A worker that has just lost its last lease continues to read the bulletin."""
    assert bulletin_row_renewals((), Me(LOOKOUT), CONFIG) == ()
    assert bulletin_row_renewals((evolve(TABLE[0], checkpoint=SHARD_END),), Me(str(TABLE[0].owner)), CONFIG) == ()


def test_lease_taken_in_the_same_turn_is_not_announced() -> None:
    """C6: The lookout does not call other workers to a lease that it takes itself."""
    free_lease = row("s-x", None)
    assert look(LOOKOUT, (*TABLE, free_lease), LATELY).annotations[:1] == LOUD
    assert look(LOOKOUT, (*TABLE, free_lease), LATELY, Claim(free_lease, "M5")).annotations[:1] == SILENT
    table_with_own_lease = (*TABLE, row("s-x", LOOKOUT, idle=11.0))
    assert look(LOOKOUT, table_with_own_lease, LATELY).annotations[:1] == SILENT


@pytest.mark.parametrize(("idle", "notes"), [(29.75, LOUD), (30.0, SILENT)])
def test_released_lease_is_announced_for_half_a_minute(idle: float, notes: object) -> None:
    """C6: A lease is announced until 30 s after its release, or after the end of its shard's parent."""
    assert look(LOOKOUT, (*TABLE, row("s-x", None, idle=idle)), LATELY).annotations[:1] == notes
    parent = evolve(row("p-0", None, idle=idle), checkpoint=SHARD_END)
    child = evolve(row("s-x", None, idle=500.0), parents=("p-0",), checkpoint=TRIM_HORIZON)
    assert look(LOOKOUT, (*TABLE, parent, child), LATELY).annotations[:1] == notes


def test_lasting_state_is_announced_once_per_cycle() -> None:
    """C6: A lasting state is announced once per cycle, because each call costs every worker a listing."""
    table_with_free_lease = (*TABLE, row("s-x", None, idle=31.0))
    assert look(LOOKOUT, table_with_free_lease, NOT_CALLED_FOR_A_CYCLE).annotations[:1] == LOUD


@pytest.mark.parametrize(("leases", "acts"), [(1, 0), (2, 1), (3, 1)])
def test_newcomer_without_a_share_causes_no_call(leases: int, acts: int) -> None:
    """C6: Owners with one lease each are not called for a newcomer, because it will request nothing."""
    rows = (evolve(row("s-0", "a"), next_owner="new"), *(row(f"s-{index}", "a") for index in range(1, leases)))
    history = evolve(LATELY, fleet_still=0.0, hearing=evolve(HEARING, latest=Bulletin(), acts_still=1.0))
    assert look("a", rows, history).annotations[:1] == bulletin_annotations(Bulletin(1, acts, 0))


def uneven(*others: Lease) -> tuple[Lease, ...]:
    """Return the leases of all workers except LAST, and these additional leases."""
    return (*(lease for lease in TABLE if lease.owner != LAST), *others)


def test_counts_that_differ_by_two_call_the_fleet() -> None:
    """M9: A fleet is called if counts differ by two for more than a cycle. A difference of one is normal."""
    differing_by_two = (*TABLE, row("s-x", READER), row("s-y", READER))
    differing_by_one = (*TABLE, row("s-x", READER))
    assert [
        look(LOOKOUT, leases, NOT_CALLED_FOR_A_CYCLE).annotations[:1] for leases in (differing_by_two, differing_by_one)
    ] == [LOUD, SILENT]
    for owners_still, expected_annotations in ((CONFIG.cycle_seconds, SILENT), (CONFIG.cycle_seconds + 0.25, LOUD)):
        assert (
            look(LOOKOUT, differing_by_two, evolve(NOT_CALLED_FOR_A_CYCLE, owners_still=owners_still)).annotations[:1]
            == expected_annotations
        )


def leases_with_weights(**weights: tuple[int, ...]) -> tuple[Lease, ...]:
    """Return the leases of these workers with these weights, in units of 10 kB/s."""
    return tuple(
        evolve(row(f"{worker}-{index}", worker), weight=10_000 * weight)
        for worker, worker_weights in weights.items()
        for index, weight in enumerate(worker_weights)
    )


def is_fleet_called(leases: tuple[Lease, ...], config: Config = CONFIG) -> bool:
    """Return whether the lookout calls all workers of a quiet fleet because of these leases."""
    history = evolve(
        NOT_CALLED_FOR_A_CYCLE, hearing=evolve(HEARING, latest=Bulletin(), acts_still=CONFIG.cycle_seconds)
    )
    me = Me(lookout_ranks(leases, config).ranks[0], history=history)
    return look_again((), leases, me, config).annotations[:1] == bulletin_annotations(Bulletin(1, 1, 0))


def test_counts_may_differ_by_half_a_share_for_loads() -> None:
    """M13: Two workers with even loads share eight leases. Counts of 7 and 1 cause a call, and 6 and 2 do not."""
    assert is_fleet_called(leases_with_weights(a=(1,) * 7, b=(7,)))
    assert not is_fleet_called(leases_with_weights(a=(1,) * 6, b=(3, 3)))


def test_uneven_loads_without_room_cause_no_call() -> None:
    """M13: The fleet is not called if no worker has room for the lease that would even out the loads."""
    full_table = leases_with_weights(a=(1,) * 6, b=(50, 50), c=(30, 30))
    assert not is_fleet_called(full_table)
    assert is_fleet_called(full_table[1:])
    uneven_table = leases_with_weights(a=(6, 6, 6), b=(1, 1, 1), c=(1, 1, 1))
    assert is_fleet_called(uneven_table)
    assert not is_fleet_called(uneven_table, Config(rules=Minimal(max_leases=3)))


def test_workers_of_other_libraries_count_for_the_last_resort() -> None:
    """C11: The more owners there are, the less often each worker lists the table, whatever their libraries are."""
    table = (*TABLE, *(Lease(f"j-{index}", owner=f"java-{index}", idle=1.0) for index in range(6)))
    assert [look(READER, table, evolve(QUIET, full_still=seconds)).keys for seconds in (240.0, 240.25)] == [KEYS, None]


def test_owner_of_a_requested_lease_is_watched() -> None:
    """C10: If the owner of a requested lease is late, a newcomer lists the table, and measures all of its leases."""
    history = evolve(FULL, owners_still=2.0, fleet_still=2.0, full_still=3.0)
    for idle, is_listed in ((6.8, False), (6.9, True)):
        requested_leases = [evolve(lease, next_owner="new", yields=True, idle=idle) for lease in TABLE[:3]]
        assert (look("new", (*requested_leases, *TABLE[3:]), history).keys is None) is is_listed


def test_newcomer_without_bulletins_lists_once_per_cycle() -> None:
    """C14: Without bulletins, a worker that waits for a hand-off does not list the table at each poll."""
    table = (evolve(TABLE[0], next_owner="new", yields=True), *TABLE[1:])
    history = History(owners_still=9.0, fleet_still=9.0, full_still=9.0, full_apart=1.0)
    assert look("new", table, history).keys == (TABLE[0].key,)
    assert look("new", table, evolve(history, full_still=20.05)).keys is None


def test_results_are_read_sooner_after_claims_than_after_steals() -> None:
    """C10: A worker that waits for other workers to join or to release reads the table later."""
    lease = Lease("s-0", owner="b")
    for action in (Steal(lease, "b", "M6"), RequestHandoff(lease, "b", "H2")):
        assert seconds_to_results([action, Claim(lease, "M6")], CONFIG) == 0.5 * CONFIG.lease_seconds
    for claim_or_create in (Claim(lease, "M6"), Create(lease, "L3")):
        assert seconds_to_results([claim_or_create], CONFIG) == AFTER_CLAIM_SECONDS
    assert seconds_to_results([Renew(lease, "M8")], CONFIG) is None


def test_suspect_delays_no_listing() -> None:
    """C5: If a suspected owner expires only after the usual interval, the lookout lists the table at this interval."""
    assert look(LOOKOUT, table_with_idle_owner(7.0, NEXT), FULL).seconds == 3.0


def test_bulletin_is_renewed_with_its_call() -> None:
    """C6: Between two listings, a lookout that writes its bulletin again also writes the call again."""
    call_text = f"7 0 {KEYS[0]} {READER}"
    bulletin = bulletin_annotations(Bulletin(7, 2, 1), (("call", call_text),))
    assert look(LOOKOUT, TABLE, heard(call=call_text)).annotations == bulletin
    assert look(LOOKOUT, TABLE, QUIET).annotations == bulletin_annotations(Bulletin(7, 2, 1))


def test_released_leases_are_open_to_others() -> None:
    """C6: A lookout that frees expired leases calls other workers to them, and only leaves out leases it claims."""
    expired_table = table_with_idle_owner(11.0, NEXT)
    expired_leases = [lease for lease in expired_table if lease.owner == NEXT]
    releases = [Release(lease, "C6") for lease in expired_leases]
    claims = [Claim(lease, "M6") for lease in expired_leases]
    called = look(LOOKOUT, expired_table, FULL).annotations
    assert look(LOOKOUT, expired_table, FULL, *releases).annotations == called
    assert look(LOOKOUT, expired_table, FULL, *claims).annotations != called


def test_owners_are_called_while_requests_are_expected() -> None:
    """C6: A lookout calls the owner of a requested lease at any time, and the owners of surplus leases after a join."""
    last_key = next(lease.key for lease in TABLE if lease.owner == LAST)
    requested_table = tuple(evolve(lease, next_owner=READER) if lease.key == last_key else lease for lease in TABLE)
    assert worker_digits(LAST) in str(look(LOOKOUT, requested_table, evolve(FULL, owners_still=1.0)).annotations)
    joined_table = (*TABLE, row("n-0", "new"), *(row(f"n-{index}", LAST) for index in range(1, 4)))
    for fleet_still, is_called in ((15.0, True), (15.25, False)):
        annotations = look(LOOKOUT, joined_table, evolve(FULL, fleet_still=fleet_still, owners_still=1.0)).annotations
        assert (worker_digits(LAST) in str(annotations)) is is_called


def test_worker_that_has_read_no_bulletin_writes_no_last_one() -> None:
    """C3: Only a worker that was the lookout writes a last bulletin, and a row without a bulletin is not one."""
    assert look(READER, TABLE, heard(latest=Bulletin(), acts_read=0)).annotations == ()
