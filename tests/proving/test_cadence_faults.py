"""Faults that are planted into the cadence make a simulated fleet miss its limits, which a fault-free fleet keeps."""

import math
import random
import sys
from collections.abc import Sequence
from functools import cache
from statistics import median

import pytest
from attrs import frozen

from leasehold.balancer import bulletin
from leasehold.balancer import lookout as cadence
from leasehold.balancer import lookout as ranks
from leasehold.balancer.actions import Release
from leasehold.balancer.bulletin import BULLETIN, CALL
from leasehold.balancer.census import Census
from leasehold.balancer.config import Config
from leasehold.balancer.lookout import LookoutRanks, lookout_ranks
from leasehold.balancer.model import Annotations, BulletinState, Lease, Me
from leasehold.balancer.rules.minimal import Minimal
from leasehold_lab.judge.breach import JudgeLimits
from leasehold_lab.judge.explanations import judge_history
from leasehold_lab.judge.rights import find_owner_changes, find_owners_at, measure_unowned_seconds
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Member, Nap, Network, Scenario, assign_owners_evenly, name_group_workers
from leasehold_lab.simulator.world.world import SimulatedHistory

pytestmark = pytest.mark.slow

CONFIG = Config(Minimal())
WORKERS = name_group_workers(0, 12)
LOOKOUT, *OTHERS = lookout_ranks(
    [Lease(name, owner=name, annotations=(("process", f"p/{name}"),)) for name in WORKERS], CONFIG
).ranks
ORDINARY = OTHERS[5]
CRASH, END = 44.0, 90.0

OWNED_AGAIN_SECONDS = 18.0
"""The longest time in seconds that a lease may have no living owner after a death: `lease_seconds` and 8 s."""


@frozen
class Story:
    """A fleet in which the worker `dies` dies at CRASH. `joins` starts four seconds before; `stuck` stops planning."""

    dies: str
    joins: str = ""
    stuck: str = ""


STORIES = {
    "an ordinary worker dies": Story(ORDINARY),
    "the lookout dies": Story(LOOKOUT),
    "a new lookout comes, and somebody dies": Story(ORDINARY, joins=LOOKOUT),
}


def simulate_story(story: Story) -> SimulatedHistory:
    """Simulate the story with 48 leases, and return the history."""
    draw = random.Random(1)  # noqa: S311  a seed is the point
    present_workers = tuple(name for name in WORKERS if name != story.joins)
    members = [
        Member(
            name,
            CONFIG,
            starts=draw.uniform(0.0, 1.0),
            ends=CRASH if name == story.dies else math.inf,
            phase=draw.uniform(0.0, 20.0),
            plans=CRASH - 10.0 if name == story.stuck else math.inf,
        )
        for name in present_workers
    ]
    if story.joins:
        members.append(Member(story.joins, CONFIG, starts=CRASH - 4.0))
    return run(Scenario(1, assign_owners_evenly(48, present_workers, draw), tuple(members), END, calm=END, full=True))


def longest_unowned(history: SimulatedHistory) -> float:
    return max(measure_unowned_seconds(history, END, CRASH).values())


def test_stand_in_replaces_stuck_lookout_until_it_reads_again() -> None:
    """A stand-in keeps the role until the stuck lookout reads the table again, so the fleet gets calls at all times."""
    history = simulate_story(Story(ORDINARY, stuck=LOOKOUT))
    unowned_seconds = [
        seconds
        for seconds in measure_unowned_seconds(history, END, CRASH).values()
        if seconds > CONFIG.lease_seconds / 2
    ]
    # Other workers wait patiently before they take the leases in the share of the stuck worker (M9).
    assert median(unowned_seconds) <= OWNED_AGAIN_SECONDS


@cache
def faultless_history(name: str) -> SimulatedHistory:
    return simulate_story(STORIES[name])


@pytest.mark.parametrize("name", STORIES)
def test_fleet_without_faults_owns_all_leases_in_time(name: str) -> None:
    """After a death, a fleet without planted faults owns all leases again within the documented limit."""
    assert longest_unowned(faultless_history(name)) <= OWNED_AGAIN_SECONDS
    assert judge_history(faultless_history(name), JudgeLimits(dict.fromkeys(WORKERS, 10.0), settled=END - 5.0)) == ()


def test_lookout_without_stand_in_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """C8: Without stand-ins, the death is noticed only when each worker lists the table itself."""
    monkeypatch.setattr(ranks, "ROW_SILENCE_SECONDS", math.inf)
    monkeypatch.setattr(ranks, "EARLY_SECONDS", math.inf)
    assert longest_unowned(simulate_story(STORIES["the lookout dies"])) > OWNED_AGAIN_SECONDS


@pytest.mark.more
def test_lookout_without_calls_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """C6: Without calls, the leases that the lookout freed wait for the last resort (C11)."""
    original_next_bulletin = cadence._next_bulletin  # noqa: SLF001  the fault is planted there

    def omit_call(actions: object, leases: object, census: Census, me: Me, config: Config) -> Annotations:
        annotations = dict(original_next_bulletin(actions, leases, census, me, config))  # type: ignore[arg-type]
        looks, acts = annotations[BULLETIN].split()[0], (me.history.hearing or BulletinState()).latest.acts
        call = annotations.get(CALL, "").split()
        return ((BULLETIN, f"{looks} {acts} 0"), (CALL, " ".join(call[:3])))

    monkeypatch.setattr(cadence, "_next_bulletin", omit_call)
    assert longest_unowned(simulate_story(STORIES["an ordinary worker dies"])) > OWNED_AGAIN_SECONDS


@pytest.mark.more
def test_early_freeing_causes_two_holders(monkeypatch: pytest.MonkeyPatch) -> None:
    """C6: If a lease is freed too early, it is claimed while its owner still reads the shard."""

    def free_early(_census: Census, leases: Sequence[Lease], me: Me, *_: object) -> tuple[Release, ...]:
        return tuple(
            Release(lease, "C6") for lease in leases if me.worker == LOOKOUT and lease.idle > 2.0 and not lease.ended
        )

    monkeypatch.setattr(sys.modules["leasehold.balancer.plan"], "free_expired", free_early)
    history = simulate_story(STORIES["an ordinary worker dies"])
    breaches = judge_history(history, JudgeLimits(dict.fromkeys(WORKERS, 10.0), settled=END))
    assert "two holders" in {breach.what for breach in breaches}


@pytest.mark.more
def test_fleet_of_lookouts_reads_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """C3: If every worker acts as the lookout, the number of reads is far above that of a fleet with one lookout."""
    name = "an ordinary worker dies"
    usual_rows_scanned = faultless_history(
        name
    ).scanned  # read before the fault is planted, because this may be the first call
    monkeypatch.setattr(LookoutRanks, "on_duty", lambda *_: True)
    assert simulate_story(STORIES[name]).scanned > 3 * usual_rows_scanned


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "story", ["an ordinary worker dies", "the lookout dies", "a new lookout comes, and somebody dies"]
)
def test_fleet_whose_keys_fit_no_call_owns_all_leases_in_time(story: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C6: A call cannot contain a key with a separator. All workers then read the table when the count *acts* grows."""
    monkeypatch.setattr(bulletin, "_fits_in_call", lambda _key: False)
    history = simulate_story(STORIES[story])
    assert longest_unowned(history) <= OWNED_AGAIN_SECONDS
    assert judge_history(history, JudgeLimits(dict.fromkeys(WORKERS, 10.0), settled=END - 5.0)) == ()


def test_one_event_causes_few_listings() -> None:
    """C6, C7: One event causes few listings, however large the fleet is."""
    history = faultless_history("an ordinary worker dies")
    listing_ends = [end_time for _, end_time, _ in history.listings if CRASH <= end_time < CRASH + 30.0]
    assert len(listing_ends) <= 10 + 8, "ten at rest"
    assert {process for _, end_time, process in history.listings if CRASH + 2.0 <= end_time < CRASH + 20.0} <= {
        f"{LOOKOUT}#{n}" for n in range(20)
    }


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seconds", [8.0, 15.0, 60.0])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.more)])
def test_an_outage_of_the_store_moves_no_lease(seconds: float, seed: int) -> None:
    """After an outage of the store, no lease is freed or taken before its owner could renew it."""
    draw = random.Random(seed)  # noqa: S311  a seed is the point
    members = [Member(name, CONFIG, starts=draw.uniform(0.0, 1.0), phase=draw.uniform(0.0, 20.0)) for name in WORKERS]
    outage, end = Nap(CRASH, seconds), CRASH + seconds + 60.0
    network = Network(stall=0.0, unanswered=0.0, outages=(outage,))
    history = run(
        Scenario(
            seed, assign_owners_evenly(48, WORKERS, draw), tuple(members), end, calm=end, network=network, full=True
        )
    )
    owners_before = find_owners_at(history, CRASH)
    changes = [
        change
        for change in find_owner_changes(history.writes)
        if change.t >= CRASH and change.after != owners_before[change.key]
    ]
    assert changes == []
    assert find_owners_at(history, end) == owners_before
