"""Balance by throughput: a fleet enters the band with few moves, then stays quiet (M13)."""

from collections import Counter
from random import Random

import pytest
from attrs import evolve

from leasehold.balancer.actions import Action, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.counting import take_census
from leasehold.balancer.model import Lease, Me
from leasehold.balancer.plan import plan
from leasehold.balancer.rules.loads import BAND, relief, slack
from leasehold.balancer.rules.minimal import Minimal
from leasehold.balancer.rules.shares import Shares

WORKERS = tuple(f"w-{number:02d}" for number in range(15))
CONFIG = Config(rules=Minimal())


def fleet(seed: int) -> dict[str, Lease]:
    """Return three hundred leases of log-normal throughput, twenty for each worker."""
    random = Random(seed)  # noqa: S311  a seed, not a secret
    keys = [f"s-{number:03d}" for number in range(300)]
    return {
        key: Lease(key, owner=WORKERS[place % 15], weight=round(65_536 * random.lognormvariate(0, 1)))
        for place, key in enumerate(keys)
    }


def loads(leases: dict[str, Lease]) -> dict[str, int]:
    return {worker: sum(each.weight or 0 for each in leases.values() if each.owner == worker) for worker in WORKERS}


def plans(leases: dict[str, Lease], turn: int) -> list[tuple[str, Action]]:
    """Return the plans of all workers for one listing."""
    return [(worker, action) for worker in WORKERS for action in plan(leases.values(), None, Me(worker, turn), CONFIG)]


@pytest.mark.parametrize("seed", range(5))
def test_loads_come_into_the_band_and_stay(seed: int) -> None:
    """S9: Each round lowers the sum of squares, so it ends. Few leases move, and a single lease may be too heavy."""
    leases = fleet(seed)
    moved = 0
    for turn in range(20):
        before = sum(load**2 for load in loads(leases).values())
        actions = plans(leases, turn)
        if not actions:
            break
        assert {action.rule for _, action in actions} == {"M13"}
        keys = [action.lease.key for _, action in actions]
        assert len(set(keys)) == len(keys)
        for worker, action in actions:
            leases[action.lease.key] = evolve(action.lease, owner=worker)
        moved += len(actions)
        assert sum(load**2 for load in loads(leases).values()) < before
    assert plans(leases, 20) == []
    mean = sum(loads(leases).values()) / len(WORKERS)
    hottest = max(lease.weight or 0 for lease in leases.values())
    assert max(loads(leases).values()) <= max((1 + BAND) * mean, hottest + BAND * mean)
    assert 0 < moved <= 0.08 * len(leases)


def unmeasured(leases: list[Lease], first: int, last: int) -> list[Lease]:
    return [evolve(lease, weight=None) if first <= place < last else lease for place, lease in enumerate(leases)]


def test_many_unknown_weights_leave_it_to_the_counts() -> None:
    """Next to peers that measure nothing, no weight is assumed for their leases."""
    leases = [*fleet(1).values()]
    assert slack(leases, 20) == slack(unmeasured(leases, 0, 30), 20) == 10
    assert slack(unmeasured(leases, 0, 31), 20) == slack(unmeasured(leases, 200, 231), 20) == 0
    assert slack([], 0) == 0


def test_a_split_in_a_fleet_of_even_loads_moves_nothing() -> None:
    """Unmeasured children do not switch the fleet from loads to counts, which would move many leases."""
    leases = fleet(1)
    for turn in range(20):
        for worker, action in plans(leases, turn):
            leases[action.lease.key] = evolve(action.lease, owner=worker)
    counts = Counter(lease.owner for lease in leases.values())
    assert max(counts.values()) > min(counts.values()) + 1
    typical = min(leases.values(), key=lambda lease: abs((lease.weight or 0) - 104_832))
    leases[typical.key] = evolve(typical, weight=None)
    assert plans(leases, 21) == []
    assert relief({"a": [Lease("n-1"), Lease("n-2")], "b": []}, {"a": 9, "b": 9}, {"a": 9, "b": 9}, 1) == {"n-2": "b"}


def test_where_nothing_flows_the_counts_decide() -> None:
    """A newcomer to an idle stream gets its share of leases."""
    assert slack([evolve(lease, weight=0) for lease in fleet(1).values()], 20) == 0


@pytest.mark.parametrize(
    ("each", "uneven", "tolerance"),
    [(10_000, False, 10), (9_999, False, 0), (9_999, True, 10), (5_000, True, 10), (4_999, True, 0), (0, True, 0)],
)
def test_below_a_hundredth_of_what_a_shard_takes_counts_decide(each: int, uneven: bool, tolerance: int) -> None:
    """M13: Leases do not follow a few bytes, and traffic near the limit does not move them back and forth."""
    leases = [evolve(lease, weight=each) for lease in fleet(1).values()]
    assert Counter(lease.owner for lease in leases) == dict.fromkeys(WORKERS, 20)
    if uneven:
        leases[0] = evolve(leases[0], owner=leases[1].owner)
    assert slack(leases, 20) == tolerance
    assert slack([evolve(leases[0], weight=None), *leases[1:]], 20) == tolerance


def test_a_gain_below_the_noise_moves_nothing() -> None:
    """Noise in the measurements does not keep a fleet moving."""
    held = {"a": [Lease("big", weight=100_000), Lease("small", weight=500)], "b": [Lease("b-1", weight=70_000)]}
    assert relief(held, {"a": 9, "b": 9}, {"a": 9, "b": 9}) == {}
    held["a"] += [Lease("more", weight=20_000)]
    assert relief(held, {"a": 9, "b": 9}, {"a": 9, "b": 9}) == {"more": "b"}


def test_a_gain_that_is_just_worth_it_moves_its_lease() -> None:
    """M13: Workers of two versions agree on the limit, so neither waits for the other."""
    held = {"a": [Lease("heavy", weight=218), Lease("light", weight=4)], "b": [Lease("b-1", weight=193)]}
    held |= {worker: [Lease(f"{worker}-1", weight=195)] for worker in "cde"}
    anybody = dict.fromkeys(held, 9)
    assert relief(held, anybody, anybody) == {"light": "b"}
    held["a"][1] = Lease("light", weight=3)
    held["c"] = [Lease("c-1", weight=196)]
    assert relief(held, anybody, anybody) == {}


def test_a_taker_asks_where_the_owner_answers() -> None:
    """H2: A move for load is no more urgent than one for counts, so no record needs to be read twice."""
    leases = [
        Lease("s-1", owner="a", weight=90_000),
        Lease("s-2", owner="a", weight=90_000),
        Lease("s-3", owner="b", weight=10_000),
    ]
    stolen = plan(leases, None, Me("b"), CONFIG)
    assert [(type(action), action.lease.key) for action in stolen] == [(Steal, stolen[0].lease.key)]
    (request,) = plan([evolve(lease, yields=True) for lease in leases], None, Me("b"), CONFIG)
    assert (request.rule, request.lease.key) == ("H2", stolen[0].lease.key)


def test_few_leases_stay_where_a_move_would_only_turn_the_tables() -> None:
    """Eight leases on three workers moved back and forth as long as their loads varied."""
    weights = {"a": (100, 100, 100), "b": (110, 105, 85), "c": (100, 100)}
    held = {worker: [Lease(f"{worker}-{each}", weight=each) for each in mine] for worker, mine in weights.items()}
    assert relief(held, dict.fromkeys(held, 9), dict.fromkeys(held, 9)) == {}


def test_beside_workers_that_do_not_sign_only_counts_tell() -> None:
    """M13: A KCL 3.x worker measures too, but shares by counts, and would undo what we balance by load."""
    notes = {worker: (("process", f"p/{worker}"),) for worker in "ab"}
    leases = [evolve(lease, annotations=notes["a"]) for lease in fleet(1).values()]
    ours = [evolve(lease, owner="a") for lease in leases]
    assert slack(ours, 20) == 10
    assert slack([evolve(ours[0], owner="j"), *ours[1:]], 20) == 0  # it kept the previous owner's attribute
    assert slack([evolve(ours[0], owner=None), *ours[1:]], 20) == 10
    assert slack([evolve(ours[0], owner="b"), evolve(ours[1], owner="b", annotations=notes["b"]), *ours[2:]], 20) == 10


def shares_of(*leases: Lease, led: tuple[str, ...] = (), **expected: int) -> Shares:
    """Return the shares of these leases if counts may differ by one for the sake of loads."""
    census = evolve(take_census(leases, Me("a"), CONFIG), led=led)
    counts = {**dict(census.counts), **expected}
    return Shares(census, CONFIG, counts, len(leases) // len(counts), 0, None, len(leases), 1, non_bulletin_last=False)


@pytest.mark.parametrize(("weight", "loaded"), [(45, True), (44, False), (None, True)])
def test_a_worker_with_its_load_less_a_tenth_takes_no_more_for_its_count(weight: int | None, loaded: bool) -> None:
    """M13: A worker near the mean load takes no lease that it would lose again when measurements vary.

    Unmeasured leases weigh the average.
    """
    other = Lease("b-0", owner="b", weight=55 if weight is None else 100 - weight)
    assert shares_of(Lease("a-0", owner="a", weight=weight), other).loaded("a") is loaded


def test_a_lease_on_its_way_counts_for_its_heir_alone() -> None:
    """H1: The next owner counts with the lease, so it is given no more leases because of its count."""
    going = Lease("b-1", owner="b", weight=45, next_owner="a", yields=True)
    shares = shares_of(Lease("a-0", owner="a", weight=10), Lease("b-0", owner="b", weight=45), going)
    assert (shares.loaded("a"), shares.loaded("b")) == (True, True)
    shares = shares_of(Lease("a-0", owner="a", weight=10), Lease("b-0", owner="b", weight=40), going)
    assert (shares.loaded("a"), shares.loaded("b")) == (True, False)


def test_the_unmeasured_weigh_the_average_in_everybodys_load() -> None:
    """M13: A split does not make every worker look idle."""
    measured = (Lease("a-0", owner="a", weight=50), Lease("b-0", owner="b", weight=50))
    assert not shares_of(*measured, Lease("b-1", owner="b"), Lease("b-2", owner="b")).loaded("a")


def test_a_worker_that_takes_for_its_count_is_seen_or_led() -> None:
    """M13: Loads do not wait forever for workers that were announced and did not come."""
    fullest = tuple(Lease(f"b-{place}", owner="b", weight=100) for place in range(11))
    one = Lease("a-0", owner="a", weight=1)
    shares = shares_of(one, *fullest, led=("l",), expected=0, l=0)
    assert {worker for worker in shares.counts if shares.lacks_too_many(worker)} == {"a", "l"}
    carries_all = evolve(one, weight=2000)
    assert not shares_of(carries_all, *fullest).lacks_too_many("a")
