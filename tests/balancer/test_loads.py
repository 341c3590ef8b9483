"""Tests balancing by throughput: A fleet reaches the band with few moves, and then no more leases move (M13)."""

from collections import Counter
from random import Random

import pytest
from attrs import evolve

from leasehold.balancer.actions import Action, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.counting import take_census
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.plan import plan
from leasehold.balancer.rules.loads import LOAD_BAND, count_tolerance, load_moves
from leasehold.balancer.rules.minimal import Minimal
from leasehold.balancer.rules.shares import Shares

WORKERS = tuple(f"w-{number:02d}" for number in range(15))
CONFIG = Config(rules=Minimal())


def make_leases(seed: int) -> dict[str, Lease]:
    """Return three hundred leases with log-normal throughputs, twenty for each worker."""
    random = Random(seed)  # noqa: S311  a seed, not a secret
    keys = [f"s-{number:03d}" for number in range(300)]
    return {
        key: Lease(key, owner=WORKERS[index % 15], weight=round(65_536 * random.lognormvariate(0, 1)))
        for index, key in enumerate(keys)
    }


def count_loads(leases: dict[str, Lease]) -> dict[str, int]:
    return {worker: sum(lease.weight or 0 for lease in leases.values() if lease.owner == worker) for worker in WORKERS}


def list_planned_actions(leases: dict[str, Lease], turn: int) -> list[tuple[str, Action]]:
    """Return the workers' planned actions for one listing."""
    return [(worker, action) for worker in WORKERS for action in plan(leases.values(), None, Me(worker, turn), CONFIG)]


@pytest.mark.parametrize("seed", range(5))
def test_loads_reach_the_band_and_stay(seed: int) -> None:
    """S9: Loads reach the band with few moves, unless a single lease is too heavy. After that, no lease moves."""
    leases = make_leases(seed)
    move_count = 0
    for turn in range(20):
        squares_before = sum(load**2 for load in count_loads(leases).values())
        actions = list_planned_actions(leases, turn)
        if not actions:
            break
        assert {action.rule for _, action in actions} == {"M13"}
        keys = [action.lease.key for _, action in actions]
        assert len(set(keys)) == len(keys)
        for worker, action in actions:
            leases[action.lease.key] = evolve(action.lease, owner=worker)
        move_count += len(actions)
        assert sum(load**2 for load in count_loads(leases).values()) < squares_before
    assert list_planned_actions(leases, 20) == []
    mean = sum(count_loads(leases).values()) / len(WORKERS)
    largest_weight = max(lease.weight or 0 for lease in leases.values())
    assert max(count_loads(leases).values()) <= max((1 + LOAD_BAND) * mean, largest_weight + LOAD_BAND * mean)
    assert 0 < move_count <= 0.08 * len(leases)


def unmeasured_leases(leases: list[Lease], first: int, last: int) -> list[Lease]:
    return [evolve(lease, weight=None) if first <= index < last else lease for index, lease in enumerate(leases)]


def test_counts_decide_if_many_weights_are_unknown() -> None:
    """If many leases belong to workers that do not measure throughput, leases are balanced by count."""
    leases = [*make_leases(1).values()]
    assert count_tolerance(leases, 20) == count_tolerance(unmeasured_leases(leases, 0, 30), 20) == 10
    assert (
        count_tolerance(unmeasured_leases(leases, 0, 31), 20)
        == count_tolerance(unmeasured_leases(leases, 200, 231), 20)
        == 0
    )
    assert count_tolerance([], 0) == 0


def test_split_in_a_balanced_fleet_moves_no_leases() -> None:
    """The unmeasured children of a split do not switch a balanced fleet from loads to counts."""
    leases = make_leases(1)
    for turn in range(20):
        for worker, action in list_planned_actions(leases, turn):
            leases[action.lease.key] = evolve(action.lease, owner=worker)
    counts = Counter(lease.owner for lease in leases.values())
    assert max(counts.values()) > min(counts.values()) + 1
    median_lease = min(leases.values(), key=lambda lease: abs((lease.weight or 0) - 104_832))
    leases[median_lease.key] = evolve(median_lease, weight=None)
    assert list_planned_actions(leases, 21) == []
    assert load_moves({"a": [Lease("n-1"), Lease("n-2")], "b": []}, {"a": 9, "b": 9}, {"a": 9, "b": 9}, 1) == {
        "n-2": "b"
    }


def test_counts_decide_without_traffic() -> None:
    """If the stream has no traffic, leases are balanced by count, so a newcomer gets its share."""
    assert count_tolerance([evolve(lease, weight=0) for lease in make_leases(1).values()], 20) == 0


@pytest.mark.parametrize(
    ("each", "uneven", "tolerance"),
    [(10_000, False, 10), (9_999, False, 0), (9_999, True, 10), (5_000, True, 10), (4_999, True, 0), (0, True, 0)],
)
def test_counts_decide_below_a_hundredth_of_a_shards_capacity(each: int, uneven: bool, tolerance: int) -> None:
    """M13: With low traffic, leases are balanced by count. Traffic near the limit does not move them back and forth."""
    leases = [evolve(lease, weight=each) for lease in make_leases(1).values()]
    assert Counter(lease.owner for lease in leases) == dict.fromkeys(WORKERS, 20)
    if uneven:
        leases[0] = evolve(leases[0], owner=leases[1].owner)
    assert count_tolerance(leases, 20) == tolerance
    assert count_tolerance([evolve(leases[0], weight=None), *leases[1:]], 20) == tolerance


def test_gain_below_the_noise_moves_no_lease() -> None:
    """Differences between loads that are smaller than the noise of the measurements move no leases."""
    leases_by_worker = {
        "a": [Lease("big", weight=100_000), Lease("small", weight=500)],
        "b": [Lease("b-1", weight=70_000)],
    }
    assert load_moves(leases_by_worker, {"a": 9, "b": 9}, {"a": 9, "b": 9}) == {}
    leases_by_worker["a"] += [Lease("more", weight=20_000)]
    assert load_moves(leases_by_worker, {"a": 9, "b": 9}, {"a": 9, "b": 9}) == {"more": "b"}


def test_gain_at_the_limit_moves_a_lease() -> None:
    """M13: In all versions, a lease moves even if the gain is exactly at the limit."""
    leases_by_worker = {"a": [Lease("heavy", weight=218), Lease("light", weight=4)], "b": [Lease("b-1", weight=193)]}
    leases_by_worker |= {worker: [Lease(f"{worker}-1", weight=195)] for worker in "cde"}
    unlimited_room = dict.fromkeys(leases_by_worker, 9)
    assert load_moves(leases_by_worker, unlimited_room, unlimited_room) == {"light": "b"}
    leases_by_worker["a"][1] = Lease("light", weight=3)
    leases_by_worker["c"] = [Lease("c-1", weight=196)]
    assert load_moves(leases_by_worker, unlimited_room, unlimited_room) == {}


def test_moves_for_load_are_requested() -> None:
    """H2: A lease that moves for its load is requested if its owner answers requests, so no record is read twice."""
    leases = [
        Lease("s-1", owner="a", weight=90_000),
        Lease("s-2", owner="a", weight=90_000),
        Lease("s-3", owner="b", weight=10_000),
    ]
    actions = plan(leases, None, Me("b"), CONFIG)
    assert [(type(action), action.lease.key) for action in actions] == [(Steal, actions[0].lease.key)]
    (request,) = plan([evolve(lease, yields=True) for lease in leases], None, Me("b"), CONFIG)
    assert (request.rule, request.lease.key) == ("H2", actions[0].lease.key)


def test_move_that_only_swaps_roles_is_not_made() -> None:
    """A lease stays if its move would only make the other worker the fullest one."""
    weights = {"a": (100, 100, 100), "b": (110, 105, 85), "c": (100, 100)}
    leases_by_worker = {
        worker: [Lease(f"{worker}-{weight}", weight=weight) for weight in worker_weights]
        for worker, worker_weights in weights.items()
    }
    assert load_moves(leases_by_worker, dict.fromkeys(leases_by_worker, 9), dict.fromkeys(leases_by_worker, 9)) == {}


def test_counts_decide_beside_workers_of_other_libraries() -> None:
    """M13: Next to a KCL 3.x worker, leases are balanced by count, because that worker would undo other moves."""
    annotations = {worker: (("process", f"p/{worker}"),) for worker in "ab"}
    leases = [evolve(lease, annotations=annotations["a"]) for lease in make_leases(1).values()]
    owned_leases = [evolve(lease, owner="a") for lease in leases]
    assert count_tolerance(owned_leases, 20) == 10
    assert (
        count_tolerance([evolve(owned_leases[0], owner="j"), *owned_leases[1:]], 20) == 0
    )  # worker j has kept the annotation of the previous owner
    assert count_tolerance([evolve(owned_leases[0], owner=None), *owned_leases[1:]], 20) == 10
    assert (
        count_tolerance(
            [
                evolve(owned_leases[0], owner="b"),
                evolve(owned_leases[1], owner="b", annotations=annotations["b"]),
                *owned_leases[2:],
            ],
            20,
        )
        == 10
    )


def shares_of(*leases: Lease, led: tuple[str, ...] = (), **expected: int) -> Shares:
    """Return the shares in a fleet with these leases. Counts may differ by one so that loads can be balanced."""
    census = evolve(take_census(leases, Me("a"), CONFIG), led=led)
    counts = {**dict(census.counts), **expected}
    return Shares(census, CONFIG, counts, len(leases) // len(counts), 0, None, len(leases), 1, non_bulletin_last=False)


@pytest.mark.parametrize(("weight", "loaded"), [(45, True), (44, False), (None, True)])
def test_worker_near_the_mean_load_takes_no_lease_for_its_count(weight: int | None, loaded: bool) -> None:
    """M13: A worker near the mean load takes no lease, because it might have to give it back when measurements vary.

    Unmeasured leases count with the average weight.
    """
    other_lease = Lease("b-0", owner="b", weight=55 if weight is None else 100 - weight)
    assert shares_of(Lease("a-0", owner="a", weight=weight), other_lease).loaded("a") is loaded


def test_moving_lease_counts_for_its_next_owner() -> None:
    """H1: A lease that is being handed off counts only for its next owner, in counts and in loads."""
    moving_lease = Lease("b-1", owner="b", weight=45, next_owner="a", yields=True)
    shares = shares_of(Lease("a-0", owner="a", weight=10), Lease("b-0", owner="b", weight=45), moving_lease)
    assert (shares.loaded("a"), shares.loaded("b")) == (True, True)
    shares = shares_of(Lease("a-0", owner="a", weight=10), Lease("b-0", owner="b", weight=40), moving_lease)
    assert (shares.loaded("a"), shares.loaded("b")) == (True, False)


def test_unmeasured_leases_have_the_average_weight() -> None:
    """M13: After a split, the unmeasured children have the average weight, so no worker looks idle."""
    measured_leases = (Lease("a-0", owner="a", weight=50), Lease("b-0", owner="b", weight=50))
    assert not shares_of(*measured_leases, Lease("b-1", owner="b"), Lease("b-2", owner="b")).loaded("a")


def test_only_present_or_led_workers_take_for_their_count() -> None:
    """M13: Loads are balanced without waiting for expected workers that have not joined."""
    leases_of_fullest = tuple(Lease(f"b-{index}", owner="b", weight=100) for index in range(11))
    single_lease = Lease("a-0", owner="a", weight=1)
    shares = shares_of(single_lease, *leases_of_fullest, led=("l",), expected=0, l=0)
    assert {worker for worker in shares.counts if shares.lacks_too_many(worker)} == {"a", "l"}
    heavy_lease = evolve(single_lease, weight=2000)
    assert not shares_of(heavy_lease, *leases_of_fullest).lacks_too_many("a")
