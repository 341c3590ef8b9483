"""A worker that gets no response from the stream does not prevent its shards from being read (L-one-way).

The worker's connection to the lease table works, so its leases do not expire. While another worker is healthy, no shard
is unread for longer than two lease durations.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
from attrs import evolve
from every_call import PLAIN

from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON
from leasehold.balancer.rules.event_hubs import EventHubs
from leasehold.balancer.rules.kcl import Kcl, KclRust
from leasehold.balancer.rules.minimal import Minimal
from leasehold_lab.simulator.question import suppress_logs
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Member, Nap, Scenario
from leasehold_lab.simulator.world.world import SimulatedHistory

LEASE_SECONDS = 10.0
SICK, WELL = "a-sick", "b-well"
SINCE, SECONDS = 60.0, 240.0


def config_of(rules: Kcl | KclRust | EventHubs) -> Config:
    """Return a configuration that reads the table four times per lease duration, as the SDKs of Event Hubs do."""
    return Config(rules, lease_seconds=LEASE_SECONDS, cycle_seconds=LEASE_SECONDS / 4, initial_position=TRIM_HORIZON)


CONFIGS = {
    "kcl": config_of(Kcl()),
    "kcl-rust": config_of(KclRust()),
    "minimal": Config(Minimal(), lease_seconds=LEASE_SECONDS, initial_position=TRIM_HORIZON),
    "event-hubs": config_of(EventHubs()),
}
LAYOUTS: dict[str, Scenario] = {
    "rows": PLAIN,
    "dated objects": evolve(PLAIN, dated=True),
    "sessions": evolve(PLAIN, sessions=True),
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silence the log, because faults are expected."""
    with suppress_logs():
        yield


def history_of(
    config: Config,
    layout: Scenario = PLAIN,
    *,
    shards: int,
    since: float,
    seconds: float = math.inf,
    deaf: tuple[str, ...] = (SICK,),
    well: int = 1,
    gives_up_seconds: float = 5.0,
) -> SimulatedHistory:
    """Simulate a fleet in which some workers get no response from the stream for a while, and return its history."""
    names = (SICK, *(f"{WELL}-{number}" for number in range(well)))
    members = tuple(
        Member(
            name,
            config,
            # A worker that gets no response from the start joins a fleet that is already running.
            starts=since if name == SICK else 0.0,
            deaf=(Nap(SINCE, seconds),) if name in deaf else (),
            gives_up_seconds=gives_up_seconds,
        )
        for name in names
    )
    return run(evolve(layout, owners=(None,) * shards, members=members, seconds=SECONDS, calm=SECONDS))


def longest_unread(history: SimulatedHistory, since: float = SINCE, until: float = SECONDS) -> float:
    """Return the longest time in seconds that a shard was not read."""
    longest_seconds = 0.0
    for key in {row.key for row in history.first}:
        read_times = [
            since,
            *(event.t for event in history.select_events("read") if event.shard == key and event.t > since),
        ]
        longest_seconds = max(
            longest_seconds,
            *(
                later_time - earlier_time
                for earlier_time, later_time in zip(read_times, [*read_times[1:], until], strict=True)
            ),
        )
    return longest_seconds


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rules", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shards", [2, *(pytest.param(many, marks=pytest.mark.more) for many in (1, 5))])
@pytest.mark.parametrize("from_the_start", [True, False])
@pytest.mark.parametrize("gives_up_seconds", [pytest.param(5.0, marks=pytest.mark.more), math.inf])
def test_shard_of_a_worker_without_stream_is_read_within_two_lease_times(
    layout: str, rules: str, shards: int, *, from_the_start: bool, gives_up_seconds: float
) -> None:
    """Calls time out or never return. The limit is four lease times if no other worker is known to read the stream."""
    history = history_of(
        CONFIGS[rules],
        LAYOUTS[layout],
        shards=shards,
        since=SINCE if from_the_start else 0.0,
        gives_up_seconds=gives_up_seconds,
    )
    # If each worker reads the table once per cycle, it finds a free lease up to a cycle later.
    extra_seconds = CONFIGS[rules].cycle_seconds if layout == "dated objects" else 0.0
    # A worker that knows of no other worker that reads the stream waits longer before it releases its leases (D4).
    knows_no_other_reader = shards == 1 or layout == "dated objects"
    assert longest_unread(history) <= (4 if knows_no_other_reader else 2) * LEASE_SECONDS + extra_seconds


def list_releases(history: SimulatedHistory, since: float = SINCE) -> list[tuple[str, str, float]]:
    """Return all releases of leases, with their workers and times."""
    return [
        (write.worker, write.key, write.t)
        for write in history.writes
        if write.done and write.verb in {"release", "give"} and write.t > since
    ]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("rules", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_workers_keep_their_leases_in_an_outage_of_the_stream(layout: str, rules: str) -> None:
    """If other workers get no response either, a release helps no shard. After the outage, each shard is read at once.

    If the layout has no annotations, other workers may be idle, so each worker releases one lease now and then.
    """
    seconds = 100.0
    history = history_of(
        CONFIGS[rules],
        LAYOUTS[layout],
        shards=6,
        since=0.0,
        seconds=seconds,
        deaf=(SICK, f"{WELL}-0", f"{WELL}-1"),
        well=2,
    )
    releases = [release for release in list_releases(history) if release[2] < SINCE + seconds]
    assert len(releases) <= (0 if layout != "dated objects" else 3 * 3)
    recovery_limit = 4 * 2 * LEASE_SECONDS if layout == "dated objects" else 15.0
    assert longest_unread(history, SINCE + seconds) <= recovery_limit


def test_single_worker_releases_one_lease_at_a_time() -> None:
    """A worker cannot know whether it is alone, because another worker may be idle. The waits between releases grow."""
    history = history_of(CONFIGS["minimal"], shards=3, since=0.0, well=0)
    times = [release_time - SINCE for _, _, release_time in list_releases(history)]
    assert len(times) in {2, 3}
    assert all(later_time - earlier_time >= 4 * LEASE_SECONDS for earlier_time, later_time in pairwise(times))


def test_worker_whose_stream_recovers_takes_its_share() -> None:
    """The worker takes leases again after its pause, and a response shortens the next pause."""
    history = history_of(CONFIGS["minimal"], shards=4, since=0.0, seconds=40.0)
    owners = {write.key: write.after.owner for write in history.writes if write.done and write.after is not None}
    assert [*owners.values()].count(SICK) == 2


def test_drain_does_not_wait_for_a_hanging_stream_call() -> None:
    """A drain releases a lease even if a call to the stream never returns."""
    member = Member(
        SICK, CONFIGS["minimal"], ends=70.0, ending="leave", deaf=(Nap(SINCE, math.inf),), gives_up_seconds=math.inf
    )
    history = run(evolve(PLAIN, owners=(None, None), members=(member,), seconds=SECONDS, calm=SECONDS))
    exit_time = next(incident.t for incident in history.incidents if incident.what == "gone")
    assert exit_time <= 70.0 + 5.0
    assert {key for _, key, _ in list_releases(history)} == {"s-0", "s-1"}


def simulate_deaf_shard(
    config: Config,
    layout: Scenario,
    *,
    since: float,
    seconds: float,
    deaf: tuple[str, ...] = (SICK,),
    gives_up_seconds: float = 5.0,
    lasting: float = math.inf,
) -> SimulatedHistory:
    """Simulate two workers with three leases each. Some of the workers get no response about one shard."""
    names = SICK, WELL
    members = tuple(
        Member(
            name,
            config,
            deaf=(Nap(since, lasting),) if name in deaf else (),
            deaf_to=frozenset({"s-2"}),
            gives_up_seconds=gives_up_seconds,
        )
        for name in names
    )
    owners = tuple(names[number % 2] for number in range(6))
    return run(evolve(layout, owners=owners, members=members, seconds=seconds, calm=seconds))


@pytest.mark.parametrize(
    "rules", ["minimal", *(pytest.param(name, marks=pytest.mark.more) for name in sorted(CONFIGS)[:3])]
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("from_the_start", [pytest.param(True, marks=pytest.mark.more), False])
@pytest.mark.parametrize("gives_up_seconds", [0.0, pytest.param(5.0, marks=pytest.mark.more)])
def test_shard_without_responses_moves_to_another_worker(
    layout: str, rules: str, *, from_the_start: bool, gives_up_seconds: float
) -> None:
    """Calls for one shard fail or time out, while other shards respond. A shard that was never read waits longer."""
    since = 0.0 if from_the_start else 20.0
    history = simulate_deaf_shard(
        CONFIGS[rules], LAYOUTS[layout], since=since, seconds=70.0, gives_up_seconds=gives_up_seconds
    )
    # As above, a free lease is found up to a cycle later.
    extra_seconds = CONFIGS[rules].cycle_seconds if layout == "dated objects" else 0.0
    assert longest_unread(history, since, 70.0) <= (4 if from_the_start else 2) * LEASE_SECONDS + extra_seconds


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.more) if name != "rows" else name for name in LAYOUTS]
)
def test_shard_that_responds_to_no_worker_moves_seldom(layout: str) -> None:
    """Each worker keeps the shard for longer every time, and moves no other lease because of it."""
    history = simulate_deaf_shard(
        CONFIGS["minimal"], LAYOUTS[layout], since=20.0, lasting=200.0, seconds=SECONDS + 40.0, deaf=(SICK, WELL)
    )
    releases = [release for release in list_releases(history, 20.0) if release[1] == "s-2"]
    other_moves = [release for release in list_releases(history, 20.0) if release[1] != "s-2"]
    assert len(releases) <= 5
    assert len(other_moves) <= 5
    assert longest_unread(history, 220.0, SECONDS + 40.0) <= 15.0
