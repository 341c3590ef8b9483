"""Which lease evens out two loads, and in which order: what each part of the choice is there for (M13)."""

from random import Random

import pytest

from leasehold.balancer.model import Lease
from leasehold.balancer.rules.loads import relief

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
