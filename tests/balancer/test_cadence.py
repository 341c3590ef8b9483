"""Tests when the lookout, its stand-ins and the other workers read the table."""

import math
from typing import Any

import pytest
from attrs import evolve
from hypothesis import assume, given, settings
from hypothesis import strategies as st
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

from leasehold.balancer.actions import Claim, Look, Release, Renew, RequestHandoff, Steal
from leasehold.balancer.bulletin import BulletinTracker, bulletin_annotations, bulletin_of
from leasehold.balancer.chance import order_under
from leasehold.balancer.config import Config
from leasehold.balancer.lookout import (
    bulletin_row,
    bulletin_row_renewals,
    lookout_ranks,
    seconds_to_results,
    start_seconds,
)
from leasehold.balancer.model import SHARD_END, TRIM_HORIZON, Bulletin, BulletinState, History, Lease, Me
from leasehold.balancer.plan import HANDOFF_POLL_SECONDS, look_again, plan
from leasehold.balancer.rules.kcl import Kcl
from leasehold.balancer.rules.minimal import Minimal
from leasehold.balancer.rules.shares import seconds_until_joined
from leasehold.balancer.watch import Watch
from leasehold_lab.properties.strategies import WORKERS, bulletin_states, configs, rule_sets, workers


def test_ranks_contain_only_our_living_workers() -> None:
    """C3: Only living workers of ours are ranked. No dead worker or worker of another library becomes the lookout."""
    java_lease = Lease("j-1", owner="java", annotations=(("process", "p/w-9"),))
    expired_lease = row("d-1", "w-8", idle=11.0)
    assert lookout_ranks((*TABLE, java_lease, expired_lease), CONFIG).ranks == (LOOKOUT, NEXT, *THIRDS, READER, LAST)


def test_ranks_are_equal_in_all_versions() -> None:
    """C3: Workers of different versions agree on which worker is the lookout."""
    assert lookout_ranks([row(f"s-{index}", f"w-{index}") for index in range(6)], CONFIG).ranks == (
        "w-3",
        "w-4",
        "w-1",
        "w-5",
        "w-0",
        "w-2",
    )


def test_bulletin_row_is_not_the_first_that_newcomers_request() -> None:
    """C4: A join does not move the bulletin's row. Otherwise, every worker would have to list the table."""
    assert BOARD is not None
    joined_table = (*TABLE, *(row(f"t-{index}", f"w-{index % 6}") for index in range(40)), row("n-0", "new"))
    steals = [
        action for action in plan(joined_table, None, Me("new", history=FULL), CONFIG) if isinstance(action, Steal)
    ]
    bulletin_lease = bulletin_row(joined_table, LOOKOUT)
    assert bulletin_lease is not None
    assert LOOKOUT in {action.from_owner for action in steals}
    assert bulletin_lease.key not in {action.lease.key for action in steals}


def test_only_the_lookout_lists_the_table() -> None:
    """C4, C5, C7: in a fleet of six, one worker lists the table, and the others read one row."""
    assert BOARD is not None
    assert look(LOOKOUT, TABLE, FULL) == Look(3.0, annotations=told(8, 2, 1))
    assert [look(worker) for worker in (NEXT, READER, LAST)] == [Look(2.5, keys=(BOARD.key,), stale_ok=True)] * 3


def test_lookout_frees_leases_of_dead_workers() -> None:
    """C6: the lookout frees expired leases. Other workers could only claim them after another `lease_seconds`."""
    table = table_with_idle_owner(11.0, READER)
    dead_leases = [lease for lease in table if lease.owner == READER]
    releases = [
        action for action in plan(table, None, Me(LOOKOUT, history=FULL), CONFIG) if isinstance(action, Release)
    ]
    claimed_keys = {action.lease.key for action in plan(table, None, Me(LOOKOUT, history=FULL), CONFIG)} - {
        release.lease.key for release in releases
    }
    assert releases == [Release(lease, "C6") for lease in dead_leases if lease.key not in claimed_keys]
    plan_of_other = plan(table, None, Me(LAST, history=FULL), CONFIG)
    plan_without_bulletins = plan(table, None, Me(LOOKOUT), CONFIG)
    plan_with_grace = plan(table, None, Me(LOOKOUT, history=FULL), evolve(CONFIG, rules=Minimal(grace_seconds=30.0)))
    assert [
        action for action in (*plan_of_other, *plan_without_bulletins, *plan_with_grace) if isinstance(action, Release)
    ] == []
    claim = Claim(dead_leases[0], "M6")
    assert look(LOOKOUT, table, FULL, claim).annotations[:1] == bulletin_annotations(Bulletin(8, 3, 1))


def test_lookout_calls_workers_to_leases_that_become_readable() -> None:
    """C6, M1: A merge child gets a reader soon after its slower parent has ended, without a wait for the next cycle."""
    recent_history = evolve(FULL, hearing=evolve(HEARING, acts_still=1.0))
    child = evolve(row("s-x", None, idle=500.0), parents=("p-0", "p-1"))
    parents = (
        evolve(row("p-0", None, idle=400.0), checkpoint=SHARD_END),
        evolve(row("p-1", LAST), checkpoint=TRIM_HORIZON),
    )
    assert look(LOOKOUT, (*TABLE, *parents, child), recent_history).annotations[:1] == bulletin_annotations(
        Bulletin(8, 2, 1)
    )
    for idle, acts in ((1.0, 3), (31.0, 2)):
        ended_parents = (parents[0], evolve(parents[1], owner=None, checkpoint=SHARD_END, idle=idle))
        assert look(LOOKOUT, (*TABLE, *ended_parents, child), recent_history).annotations[:1] == bulletin_annotations(
            Bulletin(8, acts, 1)
        )


def test_readers_list_the_table_after_news() -> None:
    """C7: Every reader lists the table when the bulletin has news, and takes its part of the freed leases."""
    assert look(READER, TABLE, heard(latest=Bulletin(8, 3, 1))) == Look(0.0)
    assert look(READER, TABLE, heard(turned=True)) == Look(0.0)


def test_last_worker_lists_the_table_after_the_lookout_released_its_row() -> None:
    """C8, C13: the remaining worker notices the released leases immediately, instead of up to 20 s later."""
    free_lease, own_lease = row("s-0", None), row("s-1", READER)
    assert look(READER, (free_lease, own_lease), heard(turned=True)).seconds == 0.0
    assert look(READER, (free_lease, own_lease), heard()).seconds > 10.0
    assert look(READER, (free_lease, own_lease), FULL).seconds > 10.0


def test_workers_stand_in_by_rank() -> None:
    """C8: Workers stand in for the lookout one after another, so no single death stops the bulletin."""
    ranks = (NEXT, *THIRDS, READER)
    assert [on_duty(worker, table_with_idle_owner(2.6)) for worker in ranks] == [True, False, False, False]
    assert [on_duty(worker, table_with_idle_owner(4.6)) for worker in ranks] == [True, True, True, False]
    assert [on_duty(worker, TABLE, heard(looks_still=7.6)) for worker in ranks] == [True, False, False, False]
    assert [on_duty(worker, TABLE, heard(looks_still=8.6)) for worker in ranks] == [True, True, False, False]
    assert on_duty("new", table_with_idle_owner(7.6))
    assert not on_duty("new", table_with_idle_owner(7.4))
    assert look(NEXT, table_with_idle_owner(2.6)) == Look(0.0)
    assert look(NEXT, table_with_idle_owner(2.6), FULL).annotations[:1] == bulletin_annotations(Bulletin(8, 2, 1))
    assert look(READER, table_with_idle_owner(4.1), evolve(QUIET, full_still=30.0)) == Look(0.0)
    assert [look(READER, table_with_idle_owner(idle)).seconds for idle in (1.4, 1.6)] == [2.5, 0.5]
    assert look(READER, table_with_idle_owner(4.1), evolve(QUIET, full_still=1.0)).keys is not None
    assert look(READER, table_with_idle_owner(3.9), evolve(QUIET, full_still=30.0)).keys is not None


def test_stand_in_stays_on_duty_while_the_lookout_is_stuck() -> None:
    """C8: A stand-in stays on duty while the lookout renews its leases but does not read the table."""
    own_row = row("own", NEXT, bulletin="8 2 1")
    history = heard(latest=Bulletin(8, 2, 1), call="8 0 own")

    def stays_on_duty(worker: str, leases: tuple[Lease, ...]) -> bool:
        me = Me(worker, history=history)
        assert history.hearing is not None
        return lookout_ranks(leases, CONFIG, me).on_duty(me, history.hearing, CONFIG)

    stuck_table = (*TABLE, own_row)
    assert (stays_on_duty(NEXT, stuck_table), stays_on_duty(THIRDS[0], stuck_table)) == (True, False)
    for bulletin in ("9 2 1", "0 0 0"):  # the lookout reads again, or is new and has not read yet
        leases = tuple(
            row(lease.key, LOOKOUT, bulletin=bulletin) if lease.owner == LOOKOUT else lease for lease in stuck_table
        )
        assert not stays_on_duty(NEXT, leases)


def test_twelve_workers_list_the_table_early() -> None:
    """C8: When the bulletin's row is silent, only the twelve next in rank list the table early."""
    table = tuple(row(f"s-{index:03}", f"w-{index}", bulletin="7 2 1") for index in range(100))
    ranks = lookout_ranks(table, CONFIG).ranks
    silent_table = tuple(evolve(lease, idle=4.1) if lease.owner == ranks[0] else lease for lease in table)
    decisions = [look(worker, silent_table, evolve(QUIET, full_still=30.0)) for worker in ranks[3:]]
    assert [decision.keys is None for decision in decisions] == [True] * 10 + [False] * 87
    later_table = tuple(evolve(lease, idle=8.1) if lease.owner == ranks[0] else lease for lease in table)
    assert look(ranks[-1], later_table, evolve(QUIET, full_still=30.0)).keys is None  # several workers may be dead


def test_single_worker_lists_the_table_seldom() -> None:
    """C13: a worker without peers lists the table seldom. It notices new workers when they take a lease."""
    own_leases = tuple(row(f"s-{index}", "w-1") for index in range(3))
    assert look("w-1", own_leases, FULL).seconds == 20.0
    short_config = Config(rules=Minimal(), cycle_seconds=6.0)
    assert look_again((), own_leases, Me("w-1", history=FULL), short_config).seconds == 6.0


def test_worker_reads_the_table_soon_after_taking() -> None:
    """C10: A worker that has taken leases reads the table again soon, so a fleet starts quickly."""
    assert seconds_to_results((), CONFIG) is None
    assert seconds_to_results((Claim(TABLE[0], "M5"),), CONFIG) == 0.7
    assert seconds_to_results((Steal(TABLE[0], "w-0", "M5"),), CONFIG) == 5.0
    assert look(READER, TABLE, FULL, Claim(TABLE[1], "M5")) == Look(0.7)


def test_applied_claim_causes_no_listing() -> None:
    """C10: A worker whose claims were applied does not list the table, because it already knows the result."""
    claimed_table = (*TABLE[:-1], evolve(TABLE[-1], owner=READER, held=0.0))
    claim = Claim(evolve(TABLE[-1], owner=None), "M6")
    assert look(READER, TABLE, FULL, claim) == Look(0.7)  # the claim was rejected, or got no response
    assert look(READER, claimed_table, FULL, claim) == look(READER, claimed_table, FULL)
    assert look(READER, (*claimed_table, row("s-18", None)), FULL, claim) == look(
        READER, (*claimed_table, row("s-18", None)), FULL
    )
    assert look(LAST, (*claimed_table, row("s-18", None)), FULL, claim) == Look(0.7)
    assert look(READER, claimed_table, FULL, claim, Steal(TABLE[0], "w-0", "M6")) == Look(5.0)


@given(
    st.lists(st.tuples(st.sampled_from((None, None, *WORKERS)), st.sampled_from((3.0, 12.0, 90.0))), min_size=2),
    workers(),
    configs(rule_sets(Minimal)),
    bulletin_states(),
)
@settings(max_examples=300)
def test_worker_that_may_take_more_reads_the_table_soon(
    rows: list[tuple[str | None, float]], me: Me, config: Config, hearing: BulletinState
) -> None:
    """C10: A worker reads the table again soon if it may take more leases.

    M9 takes only one lease per turn. Once, two leases were without an owner for minutes because of this.

    A worker that would take more leases after the wait for joiners reads the table again soon: at the latest after the
    wait that follows a steal. Or it polls the leases that it has requested.
    """
    table = tuple(row(f"s-{index}", owner, idle) for index, (owner, idle) in enumerate(rows))
    history = evolve(me.history, full_still=0.0, hearing=hearing)
    actions = plan(table, None, evolve(me, history=history), config)
    claimed_keys = {action.lease.key for action in actions if isinstance(action, Claim)}
    table_after_claims = tuple(
        evolve(lease, owner=me.worker, idle=0.0, held=0.0, next_owner=None) if lease.key in claimed_keys else lease
        for lease in table
    )
    later_me = evolve(me, history=evolve(history, fleet_still=math.inf))
    further_actions = [
        action
        for action in plan(table_after_claims, None, later_me, config)
        if isinstance(action, Claim | Steal | RequestHandoff)
    ]
    assume(claimed_keys)
    decision = look_again(actions, table_after_claims, evolve(me, history=history), config)
    assert not further_actions or decision.seconds <= 5.0
    assert not further_actions or decision.keys is None or decision.seconds == HANDOFF_POLL_SECONDS


def test_worker_with_requests_lists_again_only_if_it_lacks_more() -> None:
    """C10: A newcomer that has requested its whole share does not list the table while it waits."""
    requested_leases = [evolve(lease, next_owner="new", next_owner_idle=2.0, yields=True) for lease in TABLE[:3]]
    joining_history = evolve(FULL, owners_still=2.0, fleet_still=2.0, full_still=3.0)
    keys = tuple(lease.key for lease in requested_leases)
    assert look("new", (*requested_leases, *TABLE[3:]), joining_history) == Look(0.125, keys=keys, stale_ok=True)
    assert look("new", (*requested_leases[:1], *TABLE[1:]), joining_history) == Look(0.125)  # it lacks two more leases
    assert look("new", (*requested_leases, *TABLE[3:]), evolve(joining_history, full_still=20.1)) == Look(0.125)


def test_newcomer_with_its_share_does_not_wait_for_joiners() -> None:
    """C10: A newcomer that has its share does not list the table after the wait.

    If it should take more leases, the lookout calls it.
    """
    joining_history = evolve(FULL, owners_still=2.0, fleet_still=2.0)
    assert BOARD is not None
    other_keys = [lease.key for lease in TABLE if lease.owner not in {READER, LOOKOUT}]
    joined_table = tuple(
        evolve(row_of_table, owner="new", held=2.0) if row_of_table.key in other_keys[:2] else row_of_table
        for row_of_table in TABLE
    )
    assert look("new", joined_table, joining_history) == Look(2.5, keys=(BOARD.key,), stale_ok=True)


def test_starts_are_spread_over_time() -> None:
    """C15: Workers that start at the same time read the table at different times, so their claims seldom collide."""
    waits = [start_seconds(f"w-{number}", CONFIG) for number in range(40)]
    assert 0.0 <= min(waits) < 0.05
    assert 0.45 < max(waits) < 0.5
    assert len(set(waits)) == len(waits)
    assert start_seconds("w-0", Config(Kcl())) == 0.0


def test_start_does_not_depend_on_lease_seconds() -> None:
    """C10, C15: With the long leases of an event hub, a worker starts as soon as with short leases."""
    hub_config, short_config = Config(lease_seconds=120.0), Config(lease_seconds=2.0)
    assert start_seconds("w-1", hub_config) == start_seconds("w-1", CONFIG) == 5 * start_seconds("w-1", short_config)
    claims = (Claim(TABLE[0], "M5"),)
    assert seconds_to_results(claims, hub_config) == 0.7
    assert seconds_to_results(claims, short_config) == pytest.approx(0.14)


def test_newcomers_wait_for_joiners_before_they_steal() -> None:
    """C10: Newcomers wait for other joiners before they steal leases. This saves a third of the moves."""
    joined_table = (evolve(TABLE[0], owner="new", held=2.0), *TABLE[1:])
    joining_history = evolve(FULL, owners_still=2.0, fleet_still=2.0)
    assert plan(joined_table, None, Me("new", history=joining_history), CONFIG) == ()
    assert look("new", joined_table, joining_history).seconds == 3.0
    assert [type(action) for action in plan(joined_table, None, Me("new", history=FULL), CONFIG)] == [Steal]
    seldom_history = evolve(joining_history, hearing=None, full_apart=20.0)
    assert (
        plan(joined_table, None, Me("new", history=seldom_history), CONFIG) != ()
    )  # a worker that reads the table once per cycle has already waited
    table_after_long = (evolve(joined_table[0], held=21.0), *TABLE[1:])
    assert plan(table_after_long, None, Me("new", history=joining_history), CONFIG) != ()


def test_newcomers_wait_for_joiners_without_bulletins() -> None:
    """C10, C14: Newcomers also wait for other joiners on blobs, where there are no bulletins."""
    joined_table = (evolve(TABLE[0], owner="new", held=2.0), *TABLE[1:])
    joining_history = evolve(FULL, hearing=None, owners_still=2.0, fleet_still=2.0, full_apart=1.0)
    assert plan(joined_table, None, Me("new", history=joining_history), CONFIG) == ()
    assert look("new", joined_table, joining_history).seconds == 3.0
    assert look("new", joined_table, evolve(joining_history, fleet_still=0.0)).seconds == 1.0
    assert look("new", joined_table, evolve(joining_history, fleet_still=9.0)).seconds == CONFIG.cycle_seconds
    assert (
        seconds_until_joined(joining_history, Config(lease_seconds=120.0)) == 3.0
    )  # leases of an event hub last two minutes
    first_read_history = evolve(joining_history, full_apart=History().full_apart)
    assert plan(joined_table, None, Me("new", history=first_read_history), CONFIG) != ()


def test_owners_watch_leases_that_newcomers_will_request() -> None:
    """C7: An owner reads the leases that a newcomer will request, and does not wait for its next renewal."""
    joined_table = (*TABLE, row("n-0", "new"))
    assert BOARD is not None
    recent_history = evolve(QUIET, fleet_still=14.0)
    first_lease = min((lease for lease in TABLE if lease.owner == READER), key=order_under("minimal"))
    assert look(READER, joined_table, recent_history) == Look(0.5, keys=(BOARD.key, first_lease.key), stale_ok=True)
    requested_table = tuple(evolve(lease, next_owner="new") if lease == first_lease else lease for lease in TABLE)
    assert look(READER, requested_table, recent_history).keys == (BOARD.key,)
    assert look(READER, joined_table, evolve(recent_history, fleet_still=16.0)) == Look(
        2.5, keys=(BOARD.key,), stale_ok=True
    )
    assert look(LOOKOUT, joined_table, evolve(recent_history, full_still=0.0)).seconds == 0.5
    larger_table = (*TABLE, row("s-18", READER), row("s-19", READER))
    assert look(READER, larger_table, recent_history) == Look(1.0)


def test_lookout_announces_newcomers() -> None:
    """C6: The lookout calls the owners of the leases that a newcomer will request."""
    recent_history = evolve(FULL, hearing=evolve(HEARING, acts_still=1.0), fleet_still=0.0)
    assert look(LOOKOUT, TABLE, recent_history).annotations[:1] == bulletin_annotations(Bulletin(8, 3, 1))
    assert look(LOOKOUT, TABLE, evolve(recent_history, fleet_still=0.1)).annotations[:1] == bulletin_annotations(
        Bulletin(8, 2, 1)
    )


def test_newcomers_that_start_together_wait_once() -> None:
    """C10: Newcomers that start together see each other before their wait ends, so they wait only once."""
    idle_times = ((0.0, 0.0), (1.0, 1.0), (2.0, 0.0), (3.0, 1.0), (9.0, 0.0))
    waits = [
        seconds_until_joined(History(fleet_still=fleet_still, full_still=full_still), CONFIG)
        for fleet_still, full_still in idle_times
    ]
    assert waits == [1.0, 1.0, 3.0, 3.0, 5.0]


def test_bulletin_row_is_renewed_at_each_heartbeat() -> None:
    """C4: The bulletin's row is renewed more often than other leases, as its readers expect."""
    lookout_leases = [evolve(lease, idle=1.5) for lease in TABLE if lease.owner == LOOKOUT]
    assert BOARD is not None
    assert bulletin_row_renewals(lookout_leases, Me(LOOKOUT), CONFIG) == (Renew(evolve(BOARD, idle=1.5), "C4"),)
    assert bulletin_row_renewals([evolve(lease, idle=1.4) for lease in lookout_leases], Me(LOOKOUT), CONFIG) == ()


def test_uneven_fleet_is_called_once_per_cycle() -> None:
    """M9: The lookout of an uneven fleet calls all workers to the table once per cycle."""
    uneven_table = tuple(evolve(lease, owner=LAST) if lease.owner == READER else lease for lease in TABLE)
    uneven_table = tuple(evolve(lease, annotations=row("", lease.owner).annotations) for lease in uneven_table)
    uneven_table += (row("s-x", READER),)
    calls = [
        look(LOOKOUT, uneven_table, evolve(FULL, hearing=evolve(HEARING, acts_still=seconds))).annotations
        for seconds in (19.0, 21.0)
    ]
    assert calls == [told(8, 2, 1), told(8, 3, 1, "*")]


def test_fleet_with_uneven_groups_is_called_once_per_cycle() -> None:
    """C6: A fleet whose groups are uneven is called to the table, even if lease counts differ by only one."""
    config = Config(rules=Minimal(groups="prefix"))
    owners = ("a-1", "a-1", "a-2", "a-2", "b-1", "b-2")
    table = tuple(row(f"s-{index}", owner) for index, owner in enumerate(owners))
    lookout = lookout_ranks(table, config).ranks[0]
    lacking_workers = [name for name in owners[4:] if plan(table, None, Me(name, history=FULL), config)]
    assert lacking_workers != []
    calls = [
        look_again(
            (), table, Me(lookout, history=evolve(FULL, hearing=evolve(HEARING, acts_still=seconds))), config
        ).annotations[1][1]
        for seconds in (19.0, 21.0)
    ]
    assert [text.endswith("*") for text in calls] == [False, True]


def test_fleet_with_uneven_loads_is_called_once_per_cycle() -> None:
    """M13: A worker that should take a lease from the fullest worker reads the table within a cycle.

    If the only uneven lease is too hot to move, no worker is called.
    """
    even_table = tuple(evolve(lease, weight=10_000) for lease in TABLE)
    hot_key = next(lease.key for lease in even_table if lease.owner == READER)
    uneven_table = tuple(evolve(lease, weight=60_000) if lease.owner == READER else lease for lease in even_table)
    hot_table = tuple(
        evolve(lease, weight=600_000 if lease.key == hot_key else 10_000)
        for lease in uneven_table
        if lease.owner != READER
    )
    hot_table += (evolve(row(hot_key, READER), weight=600_000),)
    late_history, early_history = (
        evolve(FULL, hearing=evolve(HEARING, acts_still=seconds)) for seconds in (21.0, 19.0)
    )
    assert [
        look(LOOKOUT, leases, history).annotations
        for leases, history in ((uneven_table, late_history), (uneven_table, early_history), (hot_table, late_history))
    ] == [told(8, 3, 1, "*"), told(8, 2, 1), told(8, 2, 1)]


def test_late_owner_is_checked_when_its_lease_may_have_expired() -> None:
    """C16: A worker that lists once per cycle lists again when the lease of a late owner may have expired."""

    def seconds_until_listing(*paces: tuple[str, float], **more_fields: Any) -> float:  # noqa: ANN401  any field of a History
        me = Me("w-1", history=History(paces=paces, **more_fields))
        return look_again((), TABLE, me, CONFIG).seconds

    assert seconds_until_listing() == seconds_until_listing(("w-2", 6.6)) == CONFIG.cycle_seconds
    assert seconds_until_listing(("w-2", 6.7)) == pytest.approx(10.5 - 1.0 + 0.2)
    assert seconds_until_listing(("w-1", 9.0)) == CONFIG.cycle_seconds
    assert seconds_until_listing(("w-2", 9.0), gaps=(("w-2", 7.0),)) == CONFIG.cycle_seconds
    me = Me("w-1", history=History(paces=(("w-2", 9.0),)))
    assert look_again((), table_with_idle_owner(10.6, "w-2"), me, CONFIG).seconds == CONFIG.cycle_seconds
    assert look_again((Claim(TABLE[0], "M6"),), TABLE, me, CONFIG).seconds == 0.7
    finished_leases = [evolve(lease, checkpoint=SHARD_END) if lease.owner == "w-2" else lease for lease in TABLE]
    assert look_again((), finished_leases, me, CONFIG).seconds == CONFIG.cycle_seconds
    assert look_again((), TABLE, me, Config(rules=Kcl())).seconds == Config(rules=Kcl()).cycle_seconds


def test_reads_are_timed_by_our_own_clock() -> None:
    """C1: A stall of the reader does not count as silence of the lookout."""
    watch, _ = Watch(bulletins=BulletinTracker()).look(TABLE, began=0.0, ended=1.0)
    assert watch.history.hearing == BulletinState(
        Bulletin(7, 2, 1), acts_read=2, acts_still=0.0, looks_still=0.0, warned=0.0
    )
    bulletin_lease = evolve(TABLE[0], annotations=row("", "w-0", bulletin="7 3 1").annotations)
    later_watch, _ = watch.look((bulletin_lease,), began=6.0, ended=9.0, requested_keys=("s-00",))
    assert later_watch.history.hearing == BulletinState(
        Bulletin(7, 3, 1), acts_read=2, acts_still=0.0, looks_still=5.0, warned=5.0
    )
    assert later_watch.history.full_still == 5.0
    watch_of_older_row, _ = later_watch.look(
        (evolve(bulletin_lease, annotations=TABLE[0].annotations),), began=9.0, ended=9.0, requested_keys=("s-00",)
    )
    assert watch_of_older_row.history.hearing is not None
    assert watch_of_older_row.history.hearing.latest == Bulletin(7, 3, 1)
    for rows in ((), (evolve(bulletin_lease, owner="w-9"),)):
        watch_of_turned_row, _ = later_watch.look(rows, began=10.0, ended=10.0, requested_keys=("s-00",))
        assert watch_of_turned_row.history.hearing is not None
        assert watch_of_turned_row.history.hearing.turned
    assert Watch().look(TABLE, began=0.0, ended=1.0)[0].history.hearing is None
    assert bulletin_of(evolve(TABLE[0], annotations=(("bulletin", "7 x 1"),))) == Bulletin()


def test_each_counter_is_timed_separately() -> None:
    """C1: For each counter in the bulletin, the time since its last change is measured separately."""
    watch, idle_times = Watch(bulletins=BulletinTracker()), []
    for began, bulletin in (
        (0.0, "0 0 0"),
        (10.0, "0 0 0"),
        (20.0, "1 0 0"),
        (30.0, "2 1 1"),
        (40.0, "3 1 1"),
        (50.0, "3 1 1"),
    ):
        watch, _ = watch.look((row("s-0", "a", bulletin=bulletin),), began, began + 1.0)
        hearing = watch.history.hearing
        assert hearing is not None
        idle_times.append((hearing.looks_still, hearing.acts_still, hearing.warned))
    never_changed = math.inf
    assert idle_times == [
        (0.0, never_changed, never_changed),
        (9.0, never_changed, never_changed),
        (0.0, never_changed, never_changed),
        (0.0, 0.0, 0.0),
        (0.0, 9.0, 9.0),
        (9.0, 19.0, 19.0),
    ]


def test_single_read_does_not_change_owners_seen_in_a_listing() -> None:
    """C7: If only a partial read shows a new owner, the reader does not list the whole table because of it."""
    watch, _ = Watch(bulletins=BulletinTracker()).look((row("s-0", "a"),), began=0.0, ended=1.0)
    watch, _ = watch.look((row("s-0", "b"),), began=10.0, ended=11.0)
    for owner, began, turned in (("b", 20.0, False), ("c", 30.0, True), ("c", 40.0, True)):
        watch, _ = watch.look((row("s-0", owner),), began, began + 1.0, requested_keys=("s-0",))
        assert watch.history.hearing is not None
        assert watch.history.hearing.turned == turned


@pytest.mark.parametrize(("looks", "heard_as"), [("9" * 18, 10**18 - 1), ("9" * 19, 0)])
def test_counter_has_at_most_eighteen_digits(looks: str, heard_as: int) -> None:
    """C1: A bulletin with a longer counter is ignored by all versions."""
    assert bulletin_of(row("s-0", "a", bulletin=f"{looks} 0 0")) == Bulletin(heard_as)


def test_worker_polls_all_candidates_of_its_request() -> None:
    """A worker polls both choices of its request, so it also notices when the second one is given to it."""
    first_request, second_request = (RequestHandoff(row(key, "w-0"), "w-0", "H2") for key in ("s-00", "s-01"))
    decision = look(READER, TABLE, FULL, evolve(first_request, alternates=(second_request,)))
    assert (decision.seconds, decision.keys) == (0.125, ("s-00", "s-01"))


@pytest.mark.parametrize(("idle", "listed"), [(8.0, False), (8.1, True)])
def test_slow_listing_of_the_lookout_causes_no_early_listings(idle: float, listed: bool) -> None:
    """C8: While a listing delays the bulletin's row, its readers wait for twice the time of the listing."""
    table = tuple(row(f"s-{index:03}", f"w-{index}", bulletin="7 2 1") for index in range(100))
    ranks = lookout_ranks(table, CONFIG).ranks
    silent_table = tuple(evolve(lease, idle=idle) if lease.owner == ranks[0] else lease for lease in table)
    history = evolve(heard(call=f"7 2 s-{ranks[0].partition('-')[2].zfill(3)}"), full_still=30.0)
    assert (look(ranks[11], silent_table, history).keys is None) is listed
