"""Tests single turns of the rule set `minimal` at its limits: which workers take, keep or lose leases, and when."""

import math

import pytest
from attrs import evolve

from leasehold.balancer.actions import Action, Claim, Release, RequestHandoff, Steal
from leasehold.balancer.chance import digest_under
from leasehold.balancer.config import Config
from leasehold.balancer.counting import take_census
from leasehold.balancer.model import BulletinState, History, Lease, Me
from leasehold.balancer.plan import plan
from leasehold.balancer.rules.loads import loads_of
from leasehold.balancer.rules.minimal import Minimal
from leasehold.balancer.rules.shares import donation_order

STILL = History(owners_still=90.0, fleet_still=90.0)
"""A history without changes for more than three cycles of twenty seconds, after which workers act for others."""

LATELY = History(owners_still=30.0, fleet_still=30.0)


def config(**rules: object) -> Config:
    return Config(rules=Minimal(**rules), lease_seconds=10.0, cycle_seconds=20.0)  # type: ignore[arg-type]


def leases_with_weights(owner: str, *weights: int | None) -> list[Lease]:
    """Return leases with these weights in units of 10 kB/s. With less traffic, leases would be balanced by count."""
    weights_in_bytes = (None if weight is None else 10_000 * weight for weight in weights)
    return [Lease(f"{owner}-{index}", owner=owner, weight=size) for index, size in enumerate(weights_in_bytes)]


def unmeasured_leases(owner: str, number: int) -> list[Lease]:
    """Return this many leases without a measured weight."""
    return leases_with_weights(owner, *[None] * number)


def free_leases(number: int, idle: float) -> list[Lease]:
    return [Lease(f"f-{index}", idle=idle) for index in range(number)]


def plan_turn(
    leases: list[Lease], history: History = LATELY, worker: str = "b", **rules: object
) -> list[tuple[str, str]]:
    """Return the planned actions of this worker, each as its rule and the lease's owner."""
    actions = plan(leases, None, Me(worker, history=history), config(**rules))
    return [(action.rule, action.lease.owner or "") for action in actions]


def first_move(actions: tuple[Action, ...]) -> Steal | RequestHandoff:
    (action,) = actions
    assert isinstance(action, Steal | RequestHandoff)
    return action


# The first lease (M5, M12)


def test_newcomer_counts_immediately_with_few_leases() -> None:
    """With three leases, the newcomer gets one before the wait for other joiners is over."""
    assert plan_turn([*unmeasured_leases("a", 2), *unmeasured_leases("b", 1)], History(), "c") == [("M5", "a")]


def test_worker_with_its_share_gives_no_lease_to_a_newcomer() -> None:
    """A worker that holds its share keeps it, because it would take the lease back."""
    table = [*unmeasured_leases("a", 2), *unmeasured_leases("b", 5)]
    for number in range(30):
        (action,) = plan(table, None, Me(f"c-{number}"), config())
        assert isinstance(action, Steal)
        assert {candidate.lease.owner for candidate in (action, *action.alternates)} == {"b"}


def test_newcomer_requests_from_four_donors() -> None:
    """Newcomers request from different owners, so that fifty newcomers do not compete for the leases of four owners."""
    donors = [f"d-{number}" for number in range(12)]
    table = [lease for donor in donors for lease in unmeasured_leases(donor, 9)]
    requested_donors = set()
    for number in range(50):
        name = f"c-{number}"
        digest = digest_under(f"{name}\0{0}")
        action = first_move(plan(table, None, Me(name), config()))
        donors_of_newcomer = {candidate.lease.owner for candidate in (action, *action.alternates)}
        assert donors_of_newcomer <= set(sorted(donors, key=digest)[:4])
        requested_donors |= donors_of_newcomer
    assert requested_donors == set(donors)


@pytest.mark.parametrize(
    ("others", "waiting", "most", "taken"),
    [((3,), 3, None, 3), ((1, 9, 9), 8, None, 6), ((2, 4), 9, None, 2), ((3,), 3, 2, 2), ((), 3, None, 0)],
)
def test_successor_takes_the_median_of_the_other_counts(
    others: tuple[int, ...], waiting: int, most: int | None, taken: int
) -> None:
    """M12: A successor takes as many leases as the median of the others, and at most its limit."""
    table = [lease for index, number in enumerate(others) for lease in unmeasured_leases(f"o-{index}", number)]
    taken_rules = plan_turn([*table, *free_leases(waiting, idle=1.0)], LATELY, "c", grace_seconds=5.0, max_leases=most)
    assert taken_rules == ([("M12", "")] * taken if taken else [])


@pytest.mark.parametrize(("idle", "rules"), [(4.9, []), (5.0, ["M6", "M6"])])
def test_released_lease_waits_for_the_successor(idle: float, rules: list[str]) -> None:
    """M12: a released lease waits for its owner's successor during the grace period, so it moves only once."""
    actions = plan_turn(
        [*unmeasured_leases("a", 3), *unmeasured_leases("b", 1), *free_leases(2, idle)], grace_seconds=5.0
    )
    assert [rule for rule, _ in actions] == rules


def test_leases_of_a_dead_worker_do_not_wait_for_a_successor() -> None:
    """M12: only a lease that its owner released is reserved."""
    dead_leases = [evolve(lease, idle=20.0) for lease in unmeasured_leases("dead", 2)]
    actions = plan_turn([*unmeasured_leases("a", 3), *unmeasured_leases("b", 1), *dead_leases], grace_seconds=30.0)
    assert actions == [("M6", "dead"), ("M6", "dead")]


# The share (M1, M6)


def test_worker_takes_free_leases_and_the_rest_from_living_workers() -> None:
    """A worker takes its whole share in one turn, first from the free leases, and then from living workers."""
    assert plan_turn([*unmeasured_leases("a", 6), *unmeasured_leases("b", 1), *free_leases(1, 1.0)]) == [
        ("M6", ""),
        ("M6", "a"),
        ("M6", "a"),
    ]


def test_leases_of_missing_expected_workers_are_taken() -> None:
    """M9: The leases of expected workers that do not join are taken after a while, so all shards are read."""
    table = [*unmeasured_leases("a", 2), *unmeasured_leases("b", 2)]
    assert plan_turn([*table, *free_leases(4, 30.0)], expected_workers=4) == []
    assert plan_turn([*table, *free_leases(4, 71.0)], expected_workers=4) == [("M6", ""), ("M6", "")]
    assert plan_turn([*table, *free_leases(4, 71.0)], expected_workers=("a", "b", "c", "d")) == [("M6", ""), ("M6", "")]


def test_request_names_the_next_owner_that_it_replaces() -> None:
    """A request names the next owner that it replaces, because the store rejects it if another one is stored."""
    table = [evolve(lease, yields=True, next_owner="gone", next_owner_idle=90.0) for lease in unmeasured_leases("a", 2)]
    request = first_move(plan(table, None, Me("b", history=LATELY), config()))
    assert isinstance(request, RequestHandoff)
    assert (request.from_owner, request.stale_next_owner) == ("a", "gone")


# Patience, by M9 and M11


@pytest.mark.parametrize(("idle", "rules"), [(70.0, []), (70.1, ["M9"]), (math.inf, [])])
def test_lease_that_stays_free_is_taken_after_patience(idle: float, rules: list[str]) -> None:
    """A lease in another worker's share is taken only after that worker's time is over, and only one per turn."""
    table = [*unmeasured_leases("a", 3), *unmeasured_leases("b", 3), *unmeasured_leases("c", 1), *free_leases(2, idle)]
    assert [rule for rule, _ in plan_turn(table, worker="b")] == rules


def test_grace_is_part_of_patience() -> None:
    table = [*unmeasured_leases("a", 3), *unmeasured_leases("b", 3), *unmeasured_leases("c", 1), *free_leases(2, 74.9)]
    assert plan_turn(table, worker="b", grace_seconds=5.0) == []
    assert plan_turn([*table[:-2], *free_leases(2, 75.1)], worker="b", grace_seconds=5.0) == [("M9", "")]


def test_full_worker_never_takes_a_lease() -> None:
    """A worker with `max_leases` leases takes no more, however long a lease stays free."""
    table = [*unmeasured_leases("a", 2), *unmeasured_leases("b", 2), *free_leases(2, 200.0)]
    assert plan_turn(table, STILL, max_leases=2) == []
    assert plan_turn(table, STILL, max_leases=3) == [("M6", "")]


@pytest.mark.parametrize(
    ("most", "still", "stolen"), [(6, 90.0, True), (6, 60.0, False), (5, 90.0, False)], ids=["apart", "early", "near"]
)
def test_fullest_worker_is_relieved_beside_a_zombie(most: int, still: float, stolen: bool) -> None:
    """Three workers hold 6, 4 and 1 leases, and the third one is a zombie. The second one takes one from the first."""
    table = [*unmeasured_leases("a", most), *unmeasured_leases("b", 4), *unmeasured_leases("z", 1)]
    actions = plan_turn(table, History(owners_still=still, fleet_still=90.0))
    assert actions == ([("M9", "a")] if stolen else [])


@pytest.mark.parametrize(
    ("release", "still", "goes"), [(True, 121.0, True), (True, 120.0, False), (False, 900.0, False)]
)
def test_overloaded_worker_releases_only_if_configured(release: bool, still: float, goes: bool) -> None:
    """M11: An overloaded worker releases a lease only if the option `release` is set."""
    table = [
        *unmeasured_leases("a", 4),
        *unmeasured_leases("b", 3),
        *unmeasured_leases("c", 4),
        *unmeasured_leases("z", 1),
    ]
    history = History(owners_still=still, fleet_still=still)
    assert plan_turn(table, history, release=release) == ([("M11", "b")] if goes else [])


# Loads (M13): there are 24 leases on three workers, so counts may differ by four


def spread_evenly(total: int, number: int) -> list[int]:
    """Return this many nearly even weights that add up to this sum."""
    return [total // number + (index < total % number) for index in range(number)]


def leases_with_loads(**shares: tuple[int, int]) -> list[Lease]:
    """Return the leases of each owner, given its count and load."""
    return [
        lease
        for owner, (number, load) in shares.items()
        for lease in leases_with_weights(owner, *spread_evenly(load, number))
    ]


@pytest.mark.parametrize(
    ("fullest", "rest", "load", "stolen"),
    [(14, 6, 850, True), (13, 7, 850, False), (14, 6, 1000, False)],
    ids=["too many", "not too many", "it has its load"],
)
def test_fullest_worker_is_relieved_for_its_count_if_far_off(fullest: int, rest: int, load: int, stolen: bool) -> None:
    """If loads are known, a lease moves for its count only if the counts differ by more than loads allow."""
    table = leases_with_loads(a=(fullest, 1070), b=(4, load), z=(rest, 3000 - 1070 - load))
    assert plan_turn(table, STILL) == ([("M9", "a")] if stolen else [])


@pytest.mark.parametrize(("fullest", "rest", "goes"), [(14, 6, True), (13, 7, False)])
def test_release_for_count_requires_counts_far_off(fullest: int, rest: int, goes: bool) -> None:
    """M11: If loads are known, a lease is released for its count only if the counts differ by more than loads allow."""
    table = leases_with_loads(a=(fullest, 1000), b=(4, 1000), z=(rest, 1000))
    history = History(owners_still=900.0, fleet_still=900.0)
    assert plan_turn(table, history, "a", release=True) == ([("M11", "a")] if goes else [])


def test_reader_of_a_hot_shard_takes_no_lease_for_its_count() -> None:
    """A worker whose single lease brings its full share of the load takes no others for its count."""
    assert plan_turn([*leases_with_weights("a", *[10] * 7), *leases_with_weights("b", 100)]) == []


def test_count_within_the_tolerance_causes_no_take() -> None:
    """A worker takes no lease for its count if the count is within the tolerance that loads allow."""
    assert (
        plan_turn([*leases_with_weights("a", *[100] * 6), *leases_with_weights("b", *[50] * 2)]) == [("M13", "a")] * 2
    )


def test_loads_are_balanced_after_counts() -> None:
    """Two workers never want the same lease, one for its count and the other for its load."""
    table = leases_with_loads(a=(12, 2000), b=(10, 100), c=(2, 300))
    assert plan_turn(table) == []


def test_loads_respect_max_leases() -> None:
    """A worker with `max_leases` leases takes no more, whatever the loads are."""
    table = [*leases_with_weights("a", 50, 50), *leases_with_weights("b", 1, 1)]
    assert plan_turn(table, max_leases=2) == []
    assert plan_turn(table, max_leases=3) == [("M13", "a")]


# Workers of a KCL 3.x leader (M14)


def test_leases_for_led_workers_are_released_in_order() -> None:
    """Free leases count for the workers that come first in the order.

    Otherwise, an owner would release one lease too many or too few.
    """
    history = evolve(LATELY, led=(("j", 0.0),))
    table = [*unmeasured_leases("a", 5), *unmeasured_leases("b", 4), *free_leases(1, 1.0)]
    planned_releases = [*plan_turn(table, history, "a"), *plan_turn(table, history, "b")]
    assert planned_releases == [("M14", "a"), ("M14", "b")]


def test_led_workers_leases_are_not_evened_out() -> None:
    """No lease is released to even out led workers among themselves, because their leader does that."""
    history = evolve(LATELY, led=(("j", 0.0), ("k", 0.0)))
    assert (
        plan_turn([*unmeasured_leases("a", 4), *unmeasured_leases("k", 4), *unmeasured_leases("j", 1)], history, "a")
        == []
    )
    (release,) = plan(
        [*unmeasured_leases("a", 4), *unmeasured_leases("k", 3), *unmeasured_leases("j", 2)],
        None,
        Me("a", history=history),
        config(),
    )
    assert isinstance(release, Release)
    assert (release.rule, release.next_owner) == ("M14", "j")


@pytest.mark.parametrize("limit", [1, 2])
def test_max_steals_limits_every_move_between_living_workers(limit: int) -> None:
    """M7: The option limits requests for counts and for loads, and releases for the workers of a leader."""
    history = evolve(LATELY, led=(("j", 0.0),))
    uneven_loads = [*leases_with_weights("a", *[100] * 6), *leases_with_weights("b", *[50] * 2)]
    uneven_counts = [*unmeasured_leases("a", 9), *unmeasured_leases("b", 1)]
    assert plan_turn(uneven_counts, max_steals=limit) == [("M6", "a")] * limit
    assert plan_turn(uneven_loads, max_steals=limit) == [("M13", "a")] * limit
    assert plan_turn(unmeasured_leases("a", 8), history, "a", max_steals=limit) == [("M14", "a")] * limit


def test_worker_above_the_floor_still_acts() -> None:
    """M9, M11, M13: A worker with more leases than the floor claims an overdue lease, releases one, or takes load."""
    long_still = History(owners_still=500.0, fleet_still=500.0)
    three_and_one = [*unmeasured_leases("a", 3), *unmeasured_leases("b", 1)]
    assert plan_turn([*three_and_one, *free_leases(1, 900.0)], worker="a") == [("M9", "")]
    assert plan_turn(three_and_one, long_still, "a", release=True) == [("M11", "a")]
    loaded_leases = [*leases_with_weights("a", 10, 10, 10), *leases_with_weights("b", 100, 40)]
    assert plan_turn(loaded_leases, worker="a") == [("M13", "b")]


def test_expected_worker_joins_if_leases_are_overdue() -> None:
    """M1, M5: If a lease has been free for too long, an expected worker takes its first lease as others do."""
    table = [*unmeasured_leases("a", 3), *free_leases(4, 900.0)]
    assert plan_turn(table, expected_workers=("a", "b")) == [("M5", "")]


@pytest.mark.parametrize("free_count", [5, 15])
def test_limited_workers_claim_the_first_leases_of_the_line(free_count: int) -> None:
    """M7: A worker lacks no more leases than it may hold, so the positions of later workers leave no gap."""
    leases = [*free_leases(free_count, 1.0), *(lease for name in "abc" for lease in unmeasured_leases(name, 1))]
    claimed_keys = [
        action.lease.key
        for worker in "abc"
        for action in plan(leases, None, Me(worker, history=LATELY), config(max_leases=2))
        if isinstance(action, Claim)
    ]
    assert claimed_keys == [lease.key for lease in sorted(leases[:free_count], key=donation_order)[:3]]


def test_requested_leases_are_requested_by_no_other_worker() -> None:
    """H5: A worker requests only leases without a hand-off in progress."""
    leases = [evolve(lease, yields=True) for lease in unmeasured_leases("b", 7)]
    first_leases = sorted(leases, key=donation_order)[:2]
    table = [evolve(lease, next_owner="c") if lease in first_leases else lease for lease in leases]
    actions = plan([*table, *unmeasured_leases("a", 1)], None, Me("a", history=LATELY), config())
    assert {type(action) for action in actions} == {RequestHandoff}
    assert {action.lease.next_owner for action in actions} == {None}


@pytest.mark.parametrize(
    ("next_owner", "worker", "called"), [("c", "a", {"b": ["b-0"]}), ("b", "a", {}), ("c", "b", {})]
)
def test_only_the_other_owner_of_a_requested_lease_is_called(
    next_owner: str, worker: str, called: dict[str, list[str]]
) -> None:
    """C6: A lookout calls the owner that must release a lease, but neither a new owner nor itself."""
    leases = [*unmeasured_leases("a", 1), *unmeasured_leases("b", 2), *unmeasured_leases("c", 1)]
    leases[1] = evolve(leases[1], next_owner=next_owner, yields=True)
    me = Me(worker, history=LATELY)
    assert Minimal().calls(take_census(leases, me, config()), me, config()) == called


def test_expired_leases_load_no_worker() -> None:
    """M13: The load of a lease that has expired is not counted for its former owner."""
    leases = leases_with_weights("b", 5, 7)
    leases[0] = evolve(leases[0], idle=99.0)
    census = take_census(leases, Me("a"), config())
    assert loads_of(census, ("a", "b"), {}, 0) == {"a": 0, "b": 70_000}


def test_workers_that_write_no_bulletin_are_not_called() -> None:
    """C6, M15: A worker of another library reads no calls, so a call names no such worker."""
    me = Me("a", history=evolve(LATELY, hearing=BulletinState()))
    uneven_table = [*unmeasured_leases("a", 3), *unmeasured_leases("b", 1), *free_leases(3, 1.0)]
    requested_lease = evolve(unmeasured_leases("b", 1)[0], next_owner="c")
    moving_table = [requested_lease, *unmeasured_leases("a", 1), *unmeasured_leases("c", 1)]
    for table in (uneven_table, moving_table):
        assert Minimal().calls(take_census(table, me, config()), me, config()) == {}


def test_newcomer_with_its_first_lease_waits_for_other_joiners() -> None:
    """C10: A newcomer claims free leases at once, but takes no others while workers may still be joining."""
    joining_history = History(fleet_still=0.0, full_apart=1.0)
    first_lease = evolve(unmeasured_leases("b", 1)[0], held=0.0)
    table = [*unmeasured_leases("a", 7), first_lease]
    assert plan_turn(table, joining_history) == []
    assert plan_turn([*table, *free_leases(1, 1.0)], joining_history) == [("M6", "")]
    assert plan_turn(table, evolve(joining_history, fleet_still=5.0)) == [("M6", "a")] * 3


@pytest.mark.parametrize("turn", range(10))
def test_alternates_are_of_the_same_kind(turn: int) -> None:
    """H2, M5: Only a request has to wait for the owner, so no steal is an alternate of a request, or the reverse."""
    table = [*(evolve(lease, yields=True) for lease in unmeasured_leases("a", 4)), *unmeasured_leases("b", 4)]
    move = first_move(plan(table, None, Me("c", turn, LATELY), config()))
    assert {type(alternate) for alternate in move.alternates} <= {type(move)}


def test_full_worker_releases_nothing_while_leases_are_overdue() -> None:
    """M9, M11: Leases are overdue because workers are missing, so a full worker releases none to them."""
    table = [*unmeasured_leases("a", 3), *unmeasured_leases("b", 1), *free_leases(1, 900.0)]
    long_still = History(owners_still=500.0, fleet_still=500.0)
    assert plan_turn(table, long_still, "a", release=True, max_leases=3) == []


def test_expired_leases_are_held_by_no_worker() -> None:
    """C1: A lease that has expired is claimed, so it is not among the leases that its former owner holds."""
    leases = unmeasured_leases("b", 2)
    census = take_census([evolve(leases[0], idle=99.0), leases[1]], Me("a"), config())
    assert [lease.key for lease in census.held_by({"b"})] == ["b-1"]
