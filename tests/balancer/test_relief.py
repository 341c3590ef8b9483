"""Tests which leases move to balance loads, and in which order (M13)."""

from random import Random

import pytest
from attrs import evolve

from leasehold.balancer.config import Config
from leasehold.balancer.counting import take_census
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.rules.loads import load_moves, load_takers, mean_weight
from leasehold.balancer.rules.minimal import Minimal

WORKERS = tuple(f"w-{number}" for number in range(8))
ROOM = dict.fromkeys((*WORKERS, "a", "b"), 3)


def test_hot_lease_that_would_only_swap_loads_stays() -> None:
    """A lease does not move if its new owner would become the fullest worker."""
    leases_by_worker = {"a": [Lease("z-hot", weight=100), Lease("small", weight=2)], "b": []}
    assert load_moves(leases_by_worker, ROOM, ROOM) == {"small": "b"}


@pytest.mark.parametrize("seed", range(10))
def test_worker_that_gains_gives_no_lease_in_the_same_series(seed: int) -> None:
    """In a series of moves, a worker either gains or gives leases, because workers carry out their own parts alone."""
    random = Random(seed)  # noqa: S311  a seed, not a secret
    leases_by_worker = {
        worker: [Lease(f"{worker}/{index}", weight=round(1024 * random.lognormvariate(0, 1))) for index in range(5)]
        for worker in WORKERS
    }
    taker_by_key = load_moves(leases_by_worker, ROOM, ROOM)
    gaining_workers: set[str] = set()
    for key, taker in taker_by_key.items():
        assert key.partition("/")[0] not in gaining_workers
        gaining_workers.add(taker)
    assert taker_by_key


def test_each_move_of_a_series_counts_once_for_both_workers() -> None:
    """Each move of a series changes the loads of both workers once."""
    leases_by_worker = {"a": [Lease(f"s-{index}", weight=10) for index in range(6)], "b": []}
    assert list(load_moves(leases_by_worker, ROOM, dict.fromkeys(ROOM, 9)).values()) == ["b"] * 3


def test_load_is_the_sum_of_all_leases() -> None:
    """The loads of all leases of an owner are added up."""
    leases = [
        Lease(f"{owner}-{index}", owner=owner, weight=10_000)
        for owner, lease_count in (("a", 6), ("b", 3))
        for index in range(lease_count)
    ]
    census = take_census(leases, Me("a"), Config(rules=Minimal()))
    assert set(load_takers(census, census.counts, 4, {}, None, settle_seconds=0.0).values()) == {"b"}


def leases_with_weights(**weights: tuple[int | None, ...]) -> dict[str, list[Lease]]:
    """Return leases with these weights in units of 10 kB/s, by owner. Each key ends with the weight."""
    return {
        owner: [
            Lease(f"{owner}-{weight}", owner=owner, weight=None if weight is None else 10_000 * weight)
            for weight in owner_weights
        ]
        for owner, owner_weights in weights.items()
    }


@pytest.mark.parametrize(
    ("held", "room", "spare", "taken"),
    [
        # The count of a must not fall below its share. So it gives leases after which its load is still above the mean,
        # and not the 21, which would even out the loads best.
        (leases_with_weights(a=(21, 10, 9), b=()), ROOM, dict.fromkeys(ROOM, 0), {"a-10": "b", "a-9": "b"}),
        (leases_with_weights(a=(21, 10, 9), b=()), ROOM, dict.fromkeys(ROOM, 1), {"a-21": "b"}),
        # After c has given one lease, its count must not fall further.
        (
            leases_with_weights(a=(), b=(), c=(2, 8, 4)),
            {"a": 3, "b": 1, "c": 3},
            {"a": 0, "b": 1, "c": 1},
            {"c-8": "a"},
        ),
        # After a move of the 40, the loads would be 20 and 50. After a move of the 20, they are 40 and 30.
        (leases_with_weights(a=(40, 20), b=(10,)), ROOM, ROOM, {"a-20": "b"}),
        # A lease that weighs nine tenths of the mean or more must not move. A lighter one may.
        (leases_with_weights(a=(38, 2), b=()), ROOM, ROOM, {"a-2": "b"}),
        # Loads that are exactly a tenth above the mean cause no move.
        (leases_with_weights(a=(10, 1), b=(10, 1), c=(8,)), dict.fromkeys("abc", 3), dict.fromkeys("abc", 3), {}),
        # The taker has room for two more leases, for one more, and for none.
        (leases_with_weights(a=(10, 9, 8, 7, 6), b=()), {"a": 3, "b": 2}, ROOM, {"a-10": "b", "a-9": "b"}),
        (leases_with_weights(a=(), b=(2, 7, 3)), {"a": 1, "b": 0}, {"a": 0, "b": -1}, {"b-3": "a"}),
        (leases_with_weights(a=(9, 9), b=()), {"a": 3, "b": 0}, ROOM, {}),
        # Unmeasured leases weigh nothing by default.
        (leases_with_weights(a=(None, None, None), b=()), ROOM, ROOM, {}),
    ],
)
def test_each_limit_of_a_move_holds(
    held: dict[str, list[Lease]], room: dict[str, int], spare: dict[str, int], taken: dict[str, str]
) -> None:
    """Moves respect all limits. So leases do not follow the noise, and no worker is left with hardly any leases."""
    assert load_moves(held, room, spare) == taken


def plan_moves(
    leases_by_worker: dict[str, list[Lease]],
    floor: int,
    moving: dict[str, tuple[str, str]] | None = None,
    max_leases: int | None = None,
    settling: float = 0.0,
) -> dict[str, str]:
    """Return the leases that should move in this fleet, while the leases in `moving` are being handed off."""
    census = take_census(
        [lease for owner_leases in leases_by_worker.values() for lease in owner_leases],
        Me("a"),
        Config(rules=Minimal()),
    )
    return load_takers(census, census.counts, floor, moving or {}, max_leases, settle_seconds=settling)


def test_counts_limit_moves_for_loads() -> None:
    """Counts limit the moves for loads, so a worker with light leases does not get nearly all heavy ones."""
    leases_by_worker = leases_with_weights(a=(10, 11, 12, 13), b=(1, 2))
    assert plan_moves(leases_by_worker, 1) == {"a-13": "b"}
    assert plan_moves(leases_by_worker, 2) == {"a-13": "b", "a-10": "b"}
    assert plan_moves(leases_by_worker, 1, max_leases=2) == {}
    fleet_at_minimum = leases_with_weights(a=(21, 10, 9), b=(0, 1, 2))
    assert plan_moves(fleet_at_minimum, 6) == {"a-10": "b"}


def test_free_leases_come_first_and_moving_leases_stay() -> None:
    """No lease is requested twice, and loads are balanced only when all leases have owners."""
    leases_by_worker = leases_with_weights(a=(20, 19, 18), b=(1,))
    assert plan_moves(leases_by_worker, 2) == {"a-20": "b"}
    assert plan_moves(leases_by_worker, 2, moving={"a-20": ("a", "c")}) == {"a-18": "b"}
    assert plan_moves({**leases_by_worker, "": [Lease("free", weight=10_000)]}, 2) == {}


def test_unmeasured_lease_has_the_average_weight() -> None:
    """The unmeasured children of a split have the average weight."""
    leases_by_worker = {
        "a": [*(Lease(f"a-{index}", owner="a", weight=100_000) for index in range(6)), Lease("z", owner="a")],
        "b": [Lease(f"b-{index}", owner="b", weight=100_000) for index in range(4)],
    }
    assert plan_moves(leases_by_worker, 5) == {"z": "b"}
    assert (mean_weight([Lease("x", weight=1), Lease("y", weight=2), Lease("z")]), mean_weight([])) == (1, 0)


def test_small_excess_of_few_leases_is_evened_out() -> None:
    """A fleet with few leases also reaches the band."""
    leases_by_worker = {
        "a": [Lease("a-6", owner="a", weight=60_000), Lease("a-1", owner="a", weight=10_000)],
        "b": [Lease("b-6", owner="b", weight=60_000), Lease("b-1", owner="b", weight=10_000)],
        "c": [Lease("c-5", owner="c", weight=50_000)],
    }
    assert plan_moves(leases_by_worker, 1) == {"a-1": "c"}


@pytest.mark.parametrize(
    ("held", "moving"),
    [
        # a gives two of its leases to c. Without them, it is not above the mean.
        (leases_with_weights(a=(10, 9, 8), b=(9, 8), c=(9,)), {"a-10": ("a", "c")}),
        # c is about to receive leases that add up to its share of the load.
        (leases_with_weights(a=(10, 5), b=(10, 1), c=(1,)), {"a-5": ("a", "c"), "b-1": ("b", "c")}),
    ],
)
def test_move_in_progress_counts_as_made(held: dict[str, list[Lease]], moving: dict[str, tuple[str, str]]) -> None:
    """H1: The weight of a lease that is being handed off counts for its next owner."""
    assert plan_moves(held, 1, moving) == {}


def test_lease_that_moved_in_the_last_cycle_stays() -> None:
    """A lease that moved within the last cycle does not move again for its load."""
    leases_by_worker = leases_with_weights(a=(20, 19), b=())
    leases_by_worker["a"][0] = evolve(leases_by_worker["a"][0], held=19.5)
    leases_by_worker["a"] = [*leases_by_worker["a"], evolve(Lease("a-18", owner="a", weight=180_000), held=20.0)]
    assert plan_moves({**leases_by_worker, "b": [Lease("b-1", owner="b", weight=1)]}, 2, settling=20.0) == {"a-19": "b"}
    assert plan_moves({**leases_by_worker, "b": [Lease("b-1", owner="b", weight=1)]}, 2) == {"a-20": "b"}
    leases_by_worker["a"][1] = evolve(leases_by_worker["a"][1], held=0.0)
    assert plan_moves({**leases_by_worker, "b": [Lease("b-1", owner="b", weight=1)]}, 2, settling=20.0) == {"a-18": "b"}
