"""Tests how the idle times of leases are computed from successive reads of the table."""

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from attrs import evolve, fields
from hypothesis import given
from hypothesis import strategies as st

from leasehold.balancer.bulletin import BulletinTracker
from leasehold.balancer.census import Census, index_leases
from leasehold.balancer.config import Config
from leasehold.balancer.counting import take_census
from leasehold.balancer.family import update_holes
from leasehold.balancer.lookout import bulletin_row, lookout_ranks
from leasehold.balancer.model import (
    HASH_KEYS,
    SHARD_END,
    TRIM_HORIZON,
    History,
    Hole,
    Lease,
    Me,
    Position,
    Shard,
    Version,
)
from leasehold.balancer.plan import look_again, plan
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules.kcl import Kcl
from leasehold.balancer.rules.minimal import Minimal
from leasehold.balancer.watch import Reports, Watch

ROW = Lease("s-1", owner="a", version=Version("1"))


def test_watched_row_keeps_all_fields() -> None:
    """The copy of a row keeps every field that the store has sent."""
    row = Lease(
        "s-1",
        stream="orders",
        shard="1",
        parents=("s-0",),
        owner="a",
        version=Version("1"),
        idle=1.0,
        checkpoint=SHARD_END,
        hash_range=HASH_KEYS,
        weight=2,
        held=3.0,
        next_owner="b",
        next_owner_idle=4.0,
        yields=True,
        leaving=True,
        epoch=5,
        annotations=(("process", "a/1"),),
    )
    assert all(getattr(row, field.name) != getattr(Lease(""), field.name) for field in fields(Lease))
    assert row.watched(6.0, 7.0, 8.0) == evolve(row, idle=6.0, held=7.0, next_owner_idle=8.0)
    written_row = row.written(9, (("process", "b/1"),))
    assert written_row == evolve(row, epoch=9, version=Version("9"), annotations=(("process", "b/1"),))
    assert row.epoch == 5, "a copy that shares its fields would change the row of an earlier reading"


def test_our_own_stall_makes_nobody_look_dead() -> None:
    """A listing that takes 30 s does not make every lease look expired."""
    watch, _ = Watch().look([ROW], began=0, ended=30)
    _, (lease,) = watch.look([ROW], began=31, ended=90)
    assert lease.idle == 1


def test_idle_time_ends_at_the_start_of_the_last_read() -> None:
    """The idle time is the time that was observed: from the end of the first listing to the start of the last one."""
    watch, _ = Watch().look([ROW], began=0, ended=1)
    watch, _ = watch.look([ROW], began=5, ended=6)
    _, (lease,) = watch.look([ROW], began=9, ended=12)
    assert lease.idle == 8


def test_lease_first_seen_without_owner_is_idle_forever() -> None:
    """A lease without an owner in the first listing has an infinite idle time. KCL takes such leases first."""
    free_lease = evolve(ROW, owner=None)
    watch, (lease,) = Watch().look([free_lease], began=0, ended=1)
    assert (lease.idle, lease.held) == (math.inf, math.inf)
    _, (lease,) = watch.look([free_lease], began=4, ended=5)
    assert lease.idle == 3


def test_larger_of_row_age_and_watched_time_counts() -> None:
    """The idle time is the larger of the row's age and the time that we have watched it."""
    watch, (lease,) = Watch().look([evolve(ROW, idle=70.0)], began=0, ended=1)
    assert lease.idle == 70
    watch, (lease,) = watch.look([evolve(ROW, idle=75.0)], began=4, ended=5)
    assert lease.idle == 75
    _, (lease,) = watch.look([evolve(ROW, idle=20.0)], began=51, ended=52)
    assert lease.idle == 50


def test_new_version_restarts_idle_time() -> None:
    """A renewed lease stays with its owner, because its idle time starts again."""
    watch, _ = Watch().look([ROW], began=0, ended=1)
    watch, (lease,) = watch.look([evolve(ROW, version=Version("2"))], began=9, ended=10)
    assert lease.idle == 0
    _, (lease,) = watch.look([evolve(ROW, version=Version("2"))], began=12, ended=13)
    assert lease.idle == 2


def test_same_version_of_another_owner_restarts_idle_time() -> None:
    """A recreated row with the same version but another owner counts as renewed."""
    first_watch, _ = Watch().look([Lease("0", owner="a", version=Version("3"))], 0.0, 0.0)
    _, (lease,) = first_watch.look([Lease("0", owner="b", version=Version("3"))], 60.0, 60.0)
    assert (lease.owner, lease.idle) == ("b", 0.0)


def test_partial_read_keeps_other_leases_and_drops_missing_ones() -> None:
    """A read of a few rows keeps the other leases, and removes the requested ones that were deleted."""
    rows = [evolve(ROW, key=key) for key in ("s-1", "s-2", "s-3")]
    watch, _ = Watch().look(rows, began=0, ended=1)
    watch, _ = watch.look(rows, began=6, ended=7)
    watch, leases = watch.look([rows[0]], began=11, ended=12, requested_keys=["s-1", "s-2"])
    assert leases == tuple(leases)
    assert tuple(leases) == leases
    assert [(lease.key, lease.idle) for lease in leases] == [("s-1", 10), ("s-3", 5)]
    _, leases = watch.look([rows[2]], began=13, ended=14)
    assert [(lease.key, lease.idle) for lease in leases] == [("s-3", 12)]


def test_clock_stepping_back_gives_no_negative_times() -> None:
    """If the clock steps back, idle times do not become negative, which would postpone the expiry of leases."""
    watch, _ = Watch().look([ROW], began=100, ended=101)
    _, (lease,) = watch.look([ROW], began=50, ended=51)
    assert (lease.idle, lease.held) == (0, math.inf)


def test_held_time_is_unknown_for_the_first_owner() -> None:
    """A steal spares an owner that took the lease recently. The first owner that we see may have taken it long ago."""
    watch, (lease,) = Watch().look([ROW], began=0, ended=1)
    assert lease.held == math.inf
    taken_row = evolve(ROW, owner="b", version=Version("2"))
    watch, (lease,) = watch.look([taken_row], began=4, ended=5)
    assert lease.held == 0
    new_row = evolve(ROW, key="s-2", owner="c")
    _, leases = watch.look([evolve(taken_row, version=Version("3")), new_row], began=9, ended=10)
    assert [lease.held for lease in leases] == [4, 0]


def test_next_owner_idle_counts_from_its_request() -> None:
    """If the next owner changes, the time after which a stuck owner loses its lease starts again (H4)."""
    watch, _ = Watch().look([ROW], began=0, ended=1)
    requested_lease = evolve(ROW, next_owner="b")
    watch, (lease,) = watch.look([requested_lease], began=4, ended=5)
    assert lease.next_owner_idle == 0
    watch, (lease,) = watch.look([evolve(requested_lease, version=Version("2"))], began=9, ended=10)
    assert lease.next_owner_idle == 4
    _, (lease,) = watch.look([evolve(requested_lease, next_owner="c")], began=20, ended=21)
    assert lease.next_owner_idle == 0


def test_history_contains_idle_times_of_owners_and_fleet() -> None:
    """The history contains the times for which rules wait."""
    two_rows = [ROW, evolve(ROW, key="s-2", owner="b")]
    watch, _ = Watch().look(two_rows, began=0, ended=1)
    watch, _ = watch.look(two_rows, began=10, ended=11)
    assert watch.history == History(owners_still=9, fleet_still=9, full_apart=9, full_took=1)
    swapped_rows = [evolve(two_rows[0], owner="b"), evolve(two_rows[1], owner="a")]
    watch, _ = watch.look(swapped_rows, began=20, ended=21)
    assert watch.history == History(owners_still=0, fleet_still=19, full_apart=9, full_took=1)
    watch, _ = watch.look([evolve(lease, owner="c") for lease in swapped_rows], began=30, ended=31)
    assert watch.history == History(owners_still=0, fleet_still=0, full_apart=9, full_took=1)


def test_gaps_are_measured_only_for_the_same_owner() -> None:
    """A change of owner does not count as a renewal interval of the new owner."""
    watch, _ = Watch().look([ROW], began=0, ended=1)
    watch, _ = watch.look([ROW], began=9, ended=9)
    watch, _ = watch.look([evolve(ROW, version=Version("2"))], began=10, ended=10)
    assert dict(watch.history.gaps) == {}
    watch, _ = watch.look([evolve(ROW, version=Version("2"))], began=17, ended=17)
    watch, _ = watch.look([evolve(ROW, version=Version("2b"))], began=18, ended=18)
    assert dict(watch.history.gaps) == {"a": 7}
    watch, _ = watch.look([evolve(ROW, version=Version("3"))], began=19, ended=19)
    assert dict(watch.history.gaps) == {}
    watch, _ = watch.look([evolve(ROW, version=Version("3"))], began=30, ended=30)
    watch, _ = watch.look([evolve(ROW, owner="b", version=Version("4"))], began=31, ended=31)
    assert dict(watch.history.gaps) == {}


def test_intervals_are_computed_from_renewal_counters() -> None:
    """C16: The renewal interval of an owner is computed from its counter, which shows how many renewals we missed."""

    def row_with_counter(epoch: int, **more_fields: Any) -> Lease:  # noqa: ANN401  any field of a Lease
        return evolve(ROW, epoch=epoch, version=Version(str(epoch)), **more_fields)

    watch, _ = Watch().look([row_with_counter(1)], began=0, ended=1)
    watch, _ = watch.look([row_with_counter(3)], began=19, ended=20)
    assert watch.history.paces == (("a", 6.0),)
    unchanged_watch, _ = watch.look([row_with_counter(3)], began=25, ended=26)
    assert unchanged_watch.history.paces == (("a", 6.0),)
    renewed_watch, _ = watch.look([row_with_counter(7)], began=30, ended=31)
    assert renewed_watch.history.paces == (("a", 2.0),)
    for changed_row in (
        row_with_counter(5, owner="b"),
        row_with_counter(5, checkpoint=SHARD_END),
        evolve(ROW, epoch=3, version=Version("x")),
    ):
        changed_watch, _ = watch.look([changed_row], began=40, ended=41)
        assert changed_watch.history.paces == ()


def test_intervals_below_a_second_are_measured() -> None:
    """C16: One renewal is enough to measure an interval, which may be shorter than a second."""
    watch, _ = Watch().look([evolve(ROW, epoch=1)], began=0, ended=1)
    watch, _ = watch.look([evolve(ROW, epoch=2, version=Version("2"))], began=1.5, ended=2)
    assert watch.history.paces == (("a", 0.25),)


def test_longest_interval_of_an_owner_counts() -> None:
    """C16: An owner's interval is that of the lease that it renews least often."""
    rows = [evolve(ROW, key=key, epoch=1) for key in ("s-1", "s-2", "s-3")]
    watch, _ = Watch().look(rows, began=0, ended=1)
    renewed_rows = [evolve(row, epoch=epoch, version=Version("2")) for row, epoch in zip(rows, (3, 2, 5), strict=True)]
    watch, _ = watch.look(renewed_rows, began=7, ended=8)
    assert watch.history.paces == (("a", 3.0),)


def test_holes_are_counted_only_in_full_reads() -> None:
    """Only a read of the whole table counts as a sighting of a hole (L7)."""
    row = evolve(ROW, hash_range=(0, 9))
    watch, _ = Watch().look([row], began=0, ended=1)
    watch, _ = watch.look([row], began=2, ended=3, requested_keys=["s-1"])
    assert watch.history.holes == (Hole("", 10, HASH_KEYS[1], times=1),)
    watch, _ = watch.look([row], began=4, ended=5)
    assert watch.history.holes == (Hole("", 10, HASH_KEYS[1], times=2),)
    watch, _ = watch.look([evolve(row, hash_range=None)], began=6, ended=7)
    assert watch.history.holes == ()


def steps(*versions: str, owner: str = "a") -> list[Lease]:
    """Return the row of this owner in successive listings."""
    return [evolve(ROW, owner=owner, version=Version(version)) for version in versions]


def test_gaps_of_former_owner_do_not_count_for_the_next() -> None:
    """A worker that takes a lease from a slow worker does not inherit the longer limit."""
    watch, gaps = Watch(), []
    rows_of_slow_owner = steps("1", "1", "2", "2", "3", "3", "3")
    for began, row in enumerate(rows_of_slow_owner + steps("4", "4", "5", "5", "6", "6", "7", owner="b")):
        watch, _ = watch.look([row], began, began)
        gaps.append(dict(watch.history.gaps))
    assert gaps == [{}] * 4 + [{"a": 1}] * 3 + [{}] * 6 + [{"b": 1}]


def test_next_owner_idle_is_zero_without_a_next_owner() -> None:
    """The time starts when the next owner is named in the row (H4).

    If our first read already shows a next owner, the time starts with that read.
    """
    watch, _ = Watch().look([ROW], began=0, ended=1)
    assert watch.look([ROW], began=9, ended=10)[1][0].next_owner_idle == 0
    requested_lease = evolve(ROW, next_owner="b")
    watch, (lease,) = Watch().look([requested_lease], began=0, ended=1)
    assert lease.next_owner_idle == 0
    assert watch.look([requested_lease], began=9, ended=10)[1][0].next_owner_idle == 8


def test_later_lease_is_held_since_its_creation() -> None:
    """The owner of a lease that was created later is not treated as if it had always held the lease."""
    watch, _ = Watch().look([ROW], began=0, ended=1)
    watch, _ = watch.look([ROW, evolve(ROW, key="s-2")], began=9, ended=10)
    _, leases = watch.look([ROW, evolve(ROW, key="s-2")], began=19, ended=20)
    assert [lease.held for lease in leases] == [math.inf, 9]


def idle_after_second_listing(rows: list[Lease], later_rows: list[Lease]) -> tuple[float, float]:
    """Return the idle times of owners and fleet at a second listing, ten seconds after the first one."""
    watch, _ = Watch().look(rows, began=0, ended=0)
    watch, _ = watch.look(later_rows, began=10, ended=10)
    return watch.history.owners_still, watch.history.fleet_still


def test_owners_change_only_with_new_owners_or_leases() -> None:
    """`owners_still` and `fleet_still` start again when owners or leases change, but not after a request."""
    two_rows = [ROW, evolve(ROW, key="s-2")]
    assert idle_after_second_listing(two_rows, two_rows) == (10, 10)
    assert idle_after_second_listing(two_rows, [ROW]) == idle_after_second_listing([ROW], two_rows) == (0, 10)
    assert (
        idle_after_second_listing(two_rows, [evolve(ROW, key="s-0"), ROW])
        == idle_after_second_listing(two_rows, [ROW, evolve(ROW, key="s-3")])
        == (0, 10)
    )
    assert idle_after_second_listing(two_rows, [evolve(ROW, next_owner="b"), two_rows[1]]) == (10, 0)


def test_partial_reads_do_not_count_as_listings() -> None:
    """The interval between listings is measured only from reads of the whole table (C10)."""
    watch, _ = Watch().look([ROW], began=0, ended=1)
    watch, _ = watch.look([ROW], began=1.5, ended=2)
    assert watch.history.full_apart == 0.5
    watch, _ = watch.look([ROW], began=9, ended=10, requested_keys=["s-1"])
    assert (watch.history.full_apart, watch.history.full_still) == (0.5, 7)


def test_led_workers_are_those_of_the_last_full_read() -> None:
    """M14: A read of a few rows does not change the reports of led workers."""
    free_lease, given_row = evolve(ROW, owner=None), evolve(ROW, owner="j", version=Version("2"))
    watch, led_workers = Watch(), []
    for began, row, stamp in ((0, free_lease, "1"), (10, free_lease, "2"), (20, given_row, "2"), (30, given_row, "3")):
        watch, _ = watch.look([row], began, began + 1, reports=Reports("j", (("j", stamp),)))
        partial_watch, _ = watch.look([], began + 5, began + 6, requested_keys=["s-2"])
        led_workers.append((watch.history.led, partial_watch.history.led))
    watch_without_reports, _ = watch.look([given_row], 40, 41)
    assert led_workers == [
        ((), ()),
        ((("j", 0),), (("j", 4),)),
        ((("j", 0),), (("j", 4),)),
        ((("j", 9),), (("j", 14),)),
    ]
    assert watch_without_reports.history.led == ()


def test_lease_without_a_row_is_remembered() -> None:
    """The position of a deleted row is remembered until the row exists again or the shard is gone."""
    first_lease, second_lease = Lease("0", epoch=3), Lease("1", epoch=3)
    watch, _ = Watch().look([first_lease, second_lease], 0.0, 1.0)
    watch, _ = watch.look([], 2.0, 3.0)
    assert [lease.key for lease in watch.history.gone] == ["0", "1"]
    watch, _ = watch.look([second_lease], 4.0, 5.0)
    assert [lease.key for lease in watch.history.gone] == ["0"]
    watch, _ = watch.look([], 6.0, 7.0, requested_keys=["1"])
    assert [lease.key for lease in watch.history.gone] == ["0", "1"]
    watch = watch.recalling({"0": evolve(first_lease, epoch=9), "1": evolve(second_lease, epoch=2)}, None)
    assert [(lease.key, lease.epoch) for lease in watch.history.gone] == [("0", 9), ("1", 3)]
    watch = watch.recalling({}, [Shard("1")])
    assert [lease.key for lease in watch.history.gone] == ["1"]


NAMES = st.sampled_from(["a", "b", "c"])


@st.composite
def rows(draw: st.DrawFn, key: str) -> Lease | None:
    """Draw a row with this key, or None, which means that the row does not exist."""
    owner = draw(st.none() | NAMES)
    has_annotations = owner is not None and draw(st.booleans())
    bulletin = f"{draw(st.integers(0, 3))} {draw(st.integers(0, 2))} 0"
    row = Lease(
        key,
        parents=draw(st.sampled_from([(), ("s-0",), ("s-1", "s-2")])),
        owner=owner,
        version=Version(str(draw(st.integers(1, 3)))),
        checkpoint=draw(st.sampled_from([TRIM_HORIZON, Position("7"), SHARD_END])),
        weight=draw(st.sampled_from([None, None, 50_000])),
        stream=draw(st.sampled_from(["", "", "orders"])),
        hash_range=draw(st.sampled_from([(0, 9), (0, 9), (20, HASH_KEYS[1]), None])),
        next_owner=draw(st.sampled_from([None, None, "a", "b"])),
        yields=draw(st.booleans()),
        epoch=draw(st.integers(0, 3)),
        annotations=(("bulletin", bulletin), ("process", f"p/{owner}")) if has_annotations else (),
    )
    return draw(st.sampled_from([row, row, row, None]))


KEYS = [f"s-{index}" for index in range(6)]


@st.composite
def draw_reads(draw: st.DrawFn) -> list[tuple[list[str] | None, list[Lease], float, float]]:
    """Draw reads of the whole table and of a few rows, in any order.

    Each has the requested keys, the rows, its start and its end.
    """
    reads, now = [], 0.0
    for _ in range(draw(st.integers(2, 7))):
        requested_keys = draw(st.none() | st.lists(st.sampled_from(KEYS), max_size=3, unique=True))
        drawn_rows = [draw(rows(key)) for key in (KEYS if requested_keys is None else requested_keys)]
        began = now + draw(st.sampled_from([0.5, 3.0, 12.0, 30.0]))
        now = began + draw(st.sampled_from([0.1, 2.0]))
        reads.append((requested_keys, [row for row in drawn_rows if row is not None], began, now))
    return reads


def recompute_history(watch_before: Watch, watch_after: Watch, read_end: float, *, is_full_read: bool) -> History:
    """Compute the history after a listing from all leases before and after it, without incremental updates."""

    def leases_of(watch: Watch) -> dict[str, Lease]:
        return {key: watch.sightings[key].lease for key in watch.sightings}

    leases_before, leases_after = leases_of(watch_before), leases_of(watch_after)
    deleted_leases = {lease.key: lease for lease in watch_before.history.gone} | leases_before
    named_workers = [
        {name for lease in leases.values() for name in (lease.owner, lease.next_owner)} - {None}
        for leases in (leases_before, leases_after)
    ]
    owners = [{key: lease.owner for key, lease in leases.items()} for leases in (leases_before, leases_after)]
    owners_at = watch_before.owners_at if owners[0] == owners[1] and watch_before.owners_at is not None else read_end
    fleet_at = (
        watch_before.fleet_at
        if named_workers[0] == named_workers[1] and watch_before.fleet_at is not None
        else read_end
    )
    assert (watch_after.owners_at, watch_after.fleet_at) == (owners_at, fleet_at)
    holes = (
        update_holes(leases_after.values(), watch_before.history.holes) if is_full_read else watch_before.history.holes
    )
    return evolve(
        watch_after.history,
        holes=holes,
        gone=tuple(deleted_leases[key] for key in sorted(deleted_leases.keys() - leases_after.keys())),
    )


def ordered_census(leases: Sequence[Lease], me: Me, config: Config) -> Census:
    """Return a census with its leases sorted by key instead of in listing order."""
    census = take_census(leases, me, config)

    def sort_by_key(unsorted_leases: Sequence[Lease]) -> tuple[Lease, ...]:
        return tuple(sorted(unsorted_leases, key=attrgetter("key")))

    return evolve(
        census,
        leases=sort_by_key(census.leases),
        free=sort_by_key(census.free),
        expired=sort_by_key(census.expired),
        mine=sort_by_key(census.mine),
        moving=sort_by_key(census.moving),
    )


@given(draw_reads(), st.booleans(), st.sampled_from([Minimal(), Minimal(grace_seconds=5.0), Kcl()]))
def test_counts_after_partial_reads_equal_a_full_count(
    told: list[tuple[list[str] | None, list[Lease], float, float]], hears: bool, rules: RuleSet
) -> None:
    """The counts that are updated after partial reads equal those computed from all leases."""
    watch, config = Watch(bulletins=BulletinTracker() if hears else None), Config(rules=rules)
    for turn, (requested_keys, listing, began, ended) in enumerate(told):
        watch_before = watch
        watch, leases = watch.look(listing, began, ended, requested_keys)
        assert watch.history == recompute_history(watch_before, watch, ended, is_full_read=requested_keys is None)
        all_leases = tuple(leases)
        assert len(leases) == len(all_leases) == len(watch.sightings)
        assert {lease.key: lease for lease in all_leases} == {
            key: watch.sightings[key].lease for key in watch.sightings
        }
        weights = [(lease.owner, lease.weight) for lease in all_leases]
        measured_weights = [weight for _, weight in weights if weight is not None]
        weight_by_owner = {owner: sum(weight or 0 for name, weight in weights if name == owner) for owner, _ in weights}
        unmeasured_counts = {owner: weights.count((owner, None)) for owner in weight_by_owner}
        table_index = index_leases(leases)
        assert table_index.weight_totals() == (len(measured_weights), sum(measured_weights))
        # After the last lease of an owner is gone, the owner has no entry.
        load_by_owner = {owner: load for owner, load in table_index.load_by_owner(7).items() if load}
        assert load_by_owner == {
            owner: total
            for owner in weight_by_owner
            if (total := weight_by_owner[owner] + 7 * unmeasured_counts[owner])
        }
        for worker in ("a", "b", "d"):
            me = Me(worker, turn, watch.history)
            assert ordered_census(leases, me, config) == ordered_census(all_leases, me, config)
            assert bulletin_row(leases, worker) == bulletin_row(all_leases, worker)
            assert lookout_ranks(leases, config) == lookout_ranks(all_leases, config)
            actions = plan(leases, None, me, config)
            assert actions == plan(all_leases, None, me, config)
            assert look_again(actions, leases, me, config) == look_again(actions, all_leases, me, config)


def test_lease_that_ends_leaves_a_hole() -> None:
    """A hash range is a hole from the first full read in which its lease has ended and no child has a lease."""
    low, high = HASH_KEYS
    rows = [evolve(ROW, hash_range=(low, high // 2)), Lease("s-2", owner="b", hash_range=(high // 2 + 1, high))]
    watch, _ = Watch().look(rows, began=0, ended=1)
    assert watch.history.holes == ()
    watch, _ = watch.look([evolve(rows[0], checkpoint=SHARD_END), rows[1]], began=2, ended=3)
    assert len(watch.history.holes) == 1


def test_outage_of_the_store_expires_no_lease() -> None:
    """C17: The time of an outage does not count as idle time of any lease."""
    aged_row = evolve(ROW, idle=70.0)  # the row's age in the store includes the outage
    watch, _ = Watch(silence_seconds=2.0).look([ROW], began=0, ended=1)
    watch, (lease,) = watch.unanswered(4).unanswered(30).look([aged_row], began=61, ended=62)
    assert lease.idle == 0
    watch, (lease,) = watch.look([aged_row], began=70, ended=71)
    assert lease.idle == 8
    watch, (lease,) = watch.unanswered(73).look([aged_row], began=75, ended=76)
    assert lease.idle == 13, "a single late answer is no outage"
    assert watch.silent_at is None


def test_outage_of_the_store_makes_no_request_look_ignored() -> None:
    """C17, H4: An owner cannot release a lease during an outage, so the next owner steals it only later."""
    requested_row = evolve(ROW, next_owner="b", yields=True)
    watch, _ = Watch(silence_seconds=2.0).look([requested_row], began=0, ended=1)
    watch, (lease,) = watch.unanswered(4).unanswered(100).look([requested_row], began=101, ended=102)
    assert lease.next_owner_idle == 0
    assert not plan([lease], None, Me("b", history=watch.history), Config())
    _, (lease,) = watch.look([requested_row], began=110, ended=111)
    assert lease.next_owner_idle == 8


def test_outage_lasts_from_its_first_failed_read() -> None:
    """C17: Reads that fail one after another form a single outage, however short the time between them is."""
    watch, _ = Watch(silence_seconds=2.0).look([ROW], began=0, ended=1)
    _, (lease,) = watch.unanswered(4).unanswered(5).unanswered(6).look([ROW], began=7, ended=8)
    assert lease.idle == 0


def test_outage_is_remembered_until_the_leases_are_read() -> None:
    """C17: A read of one row after an outage, and later failed reads, do not count the outage against other leases."""
    other_row = evolve(ROW, key="s-2")
    watch, _ = Watch(silence_seconds=2.0).look([ROW, other_row], began=0, ended=1)
    watch, _ = watch.unanswered(4).look([ROW], began=61, ended=62, requested_keys=["s-1"])
    watch, leases = watch.unanswered(63).look([ROW, other_row], began=64, ended=65)
    assert [lease.idle for lease in leases] == [2, 2]
    _, leases = watch.unanswered(66).look([ROW, other_row], began=99, ended=100)
    assert [lease.idle for lease in leases] == [0, 0], "a second outage"


def test_slow_read_is_no_outage() -> None:
    """C17: An outage ends when the read that succeeds begins, so a slow read keeps no dead owner alive."""
    watch, _ = Watch(silence_seconds=2.0).look([ROW], began=0, ended=1)
    for began, idle in ((6, 5), (6.5, 0)):
        _, (lease,) = watch.unanswered(4).look([ROW], began=began, ended=20)
        assert lease.idle == idle


def test_duration_of_the_first_read_after_an_outage_does_not_count() -> None:
    """C17: The idle times start again at the end of the read."""
    watch, _ = Watch(silence_seconds=2.0).look([ROW], began=0, ended=1)
    watch, _ = watch.unanswered(4).look([ROW], began=60, ended=68)
    _, (lease,) = watch.look([ROW], began=70, ended=71)
    assert lease.idle == 2


def test_read_after_a_failed_one_keeps_its_arguments() -> None:
    """M14: A read that succeeds after a failed one is like any other read."""
    reports = [Reports("j", (("j", stamp),)) for stamp in "12"]
    watch, _ = Watch().look([ROW, evolve(ROW, key="s-2")], 0, 1, reports=reports[0])
    listed_watch, _ = watch.unanswered(2).look([ROW, evolve(ROW, key="s-2")], 3, 4, reports=reports[1])
    assert listed_watch.history.led == (("j", 0.0),)
    _, leases = watch.unanswered(2).look([ROW], 3, 4, requested_keys=["s-1"])
    assert [lease.key for lease in leases] == ["s-1", "s-2"]


def test_last_known_state_of_a_deleted_lease_is_found() -> None:
    """L13: A child is not read before its parent only because the parent's row was deleted."""
    watch, _ = Watch().look([ROW], 0, 1)
    watch, _ = watch.look([], 2, 3)
    lease = watch.last_seen("s-1")
    assert lease is not None
    assert lease.key == "s-1"
    assert watch.last_seen("s-2") is None


def test_time_of_a_listing_is_kept_by_partial_reads() -> None:
    """C8: The read of one row does not show how long a listing takes."""
    watch, _ = Watch().look([ROW], 0, 8)
    watch, _ = watch.look([ROW], 9, 9.5, requested_keys=["s-1"])
    assert watch.history.full_took == 8
    watch, _ = watch.look([ROW], 10, 14)
    assert watch.history.full_took == 4
