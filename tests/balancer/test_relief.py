"""Which lease evens out two loads, and in which order: what each part of the choice is there for (M13)."""

from random import Random

import pytest

from leasehold.balancer.config import Config
from leasehold.balancer.counting import take_census
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.rules.loads import relief, takers
from leasehold.balancer.rules.minimal import Minimal

WORKERS = tuple(f"w-{number}" for number in range(8))
ROOM = dict.fromkeys((*WORKERS, "a", "b"), 3)


def test_a_hot_lease_that_would_only_change_places_stays() -> None:
    """Whoever is the fullest would be the fullest elsewhere, and what is read most would be read twice for it."""
    held = {"a": [Lease("z-hot", weight=100), Lease("small", weight=2)], "b": []}
    assert relief(held, ROOM, ROOM) == {"small": "b"}


@pytest.mark.parametrize("seed", range(10))
def test_who_gains_gives_nothing_in_the_same_series(seed: int) -> None:
    """Each takes its own part: the second step of a lease's way, carried out before the first, is a move too many."""
    random = Random(seed)  # noqa: S311  a seed, not a secret
    held = {
        worker: [Lease(f"{worker}/{place}", weight=round(1024 * random.lognormvariate(0, 1))) for place in range(5)]
        for worker in WORKERS
    }
    taken = relief(held, ROOM, ROOM)
    gained: set[str] = set()
    for key, taker in taken.items():
        assert key.partition("/")[0] not in gained
        gained.add(taker)
    assert taken


def test_each_move_of_a_series_is_counted_once_for_both() -> None:
    """Counted twice, or its giver taken for poor after one, the series ends before the loads are even."""
    held = {"a": [Lease(f"s-{place}", weight=10) for place in range(6)], "b": []}
    assert list(relief(held, ROOM, dict.fromkeys(ROOM, 9)).values()) == ["b"] * 3


def test_a_load_is_that_of_all_leases_of_its_owner() -> None:
    """By its last lease alone nobody would look overloaded, and nothing be evened out."""
    leases = [
        Lease(f"{owner}-{place}", owner=owner, weight=10)
        for owner, most in (("a", 6), ("b", 3))
        for place in range(most)
    ]
    census = take_census(leases, Me("a"), Config(rules=Minimal()))
    assert set(takers(census, census.counts, 4, (), None).values()) == {"b"}
