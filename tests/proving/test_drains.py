"""A drain handles no record twice and lets no lease expire, however slow its batches are."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest

from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON
from leasehold_lab.judge.breach import JudgeLimits
from leasehold_lab.judge.explanations import judge_history
from leasehold_lab.simulator.question import suppress_logs
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Member, Network, Scenario
from leasehold_lab.simulator.world.world import SimulatedHistory

CONFIG = Config(initial_position=TRIM_HORIZON)
LEAVER, PEER, NEWCOMER = "a-0", "a-1", "a-2"
LEASE = CONFIG.lease_seconds
STOPS = 20.0

SLOW, MORE = pytest.mark.slow, pytest.mark.more
SEEDS = [0, *(pytest.param(seed, marks=SLOW if seed < 2 else MORE) for seed in range(1, 10))]
"""The seeds. Each history takes a fifth of a second of processor time."""


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    with suppress_logs():
        yield


def simulate_drain(
    seed: int,
    *,
    handling: float = 1.4 * LEASE,
    shards: int = 9,
    newcomer: float | None = None,
    config: Config = CONFIG,
    drain_seconds: float = 30.0,
    peers: bool = True,
) -> SimulatedHistory:
    """Stop a worker with many shards at a random moment of its batches, in a fleet with another worker.

    If `newcomer` is given, a third worker joins that many seconds before the stop, so that next owners are waiting for
    leases of the stopped worker.
    """
    stop_time = STOPS + Random(seed).uniform(0.0, min(handling, 14.0))  # noqa: S311  a seed, not a secret
    newcomers = () if newcomer is None else (Member(NEWCOMER, config, starts=stop_time - newcomer),)
    peer = Member(PEER, config, starts=0.0 if peers else stop_time + 70.0)
    # Allow for the longest drain and two batches of 14 s by the next owner, or for the peer that starts last.
    seconds = stop_time + (80.0 if peers else 110.0)
    scenario = Scenario(
        seed=seed,
        owners=tuple(PEER if peers and index % 2 else LEAVER for index in range(shards)),
        members=(Member(LEAVER, config, ends=stop_time, ending="leave", drain_seconds=drain_seconds), peer, *newcomers),
        seconds=seconds,
        calm=stop_time + 10.0,
        network=Network(latency=(0.005, 0.05), stall=0.0, unanswered=0.0, reading=(0.01, 0.1)),
        reading=True,
        full=True,
        handling_seconds=handling,
    )
    return run(scenario)


def list_repeated_records(history: SimulatedHistory) -> list[tuple[str, str]]:
    """Return the records that were handled more than once."""
    dispatch_counts = Counter((event.shard, event.digest) for event in history.events if event.event == "record")
    return sorted(record for record, count in dispatch_counts.items() if count > 1)


def list_expired_leases(history: SimulatedHistory) -> list[str]:
    """Return the leases that other workers took or freed before their owner released them."""
    return [
        f"{write.worker} {write.verb} {write.key} of {write.before.owner} at {write.t:.1f}"
        for write in history.writes
        if write.done and write.before is not None and write.before.owner not in {None, write.worker}
        if write.verb in {"claim", "steal", "release"}
    ]


def list_late_renewals(history: SimulatedHistory) -> list[str]:
    """Return the leases that the draining worker held, but did not renew in time."""
    (stop_time,) = (item.t for item in history.incidents if item.what == "leave")
    (end_time,) = (item.t for item in history.incidents if item.what == "gone")
    write_times = {item.key: [stop_time - LEASE] for item in history.first}
    release_times: dict[str, float] = {}
    for write in history.writes:
        if write.process.startswith(LEAVER) and write.done and write.after is not None:
            write_times[write.key].append(write.t)
            if write.after.owner != LEAVER:
                release_times[write.key] = write.t
    written_keys = {write.key for write in history.writes if write.process.startswith(LEAVER)}
    return [
        f"{key} at {earlier_time:.1f}"
        for key in sorted(written_keys)
        for earlier_time, later_time in pairwise([*write_times[key], release_times.get(key, end_time)])
        if earlier_time >= stop_time - LEASE and later_time - earlier_time > LEASE
    ]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("newcomer", [None, 0.3, 2.0, 9.0])
@pytest.mark.parametrize("lease_seconds", [LEASE, 3.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_drain_of_slow_batches_repeats_no_record(seed: int, newcomer: float | None, lease_seconds: float) -> None:
    """Renewals continue during a drain, so no lease expires while a batch is finished, and no record is repeated."""
    config = Config(lease_seconds=lease_seconds, initial_position=TRIM_HORIZON)
    history = simulate_drain(seed, newcomer=newcomer, config=config)
    limits = JudgeLimits(dict.fromkeys((LEAVER, PEER, NEWCOMER), lease_seconds), settled=history.end - 20.0)
    breaches = [str(breach) for breach in judge_history(history, limits)]
    assert (list_repeated_records(history), list_expired_leases(history), breaches) == ([], [], [])
    finished_records = {(item.shard, item.digest) for item in history.events if item.event == "finished"}
    assert finished_records == {(item.key, item.digest) for item in history.sent}


@pytest.mark.parametrize("handling", [0.1, 0.9 * LEASE, 2.9 * LEASE])
@pytest.mark.parametrize("seed", SEEDS)
def test_drain_renews_leases_until_their_release(seed: int, handling: float) -> None:
    """A draining worker renews its leases until it releases them, even if no other worker is present."""
    history = simulate_drain(seed, handling=handling, shards=5, peers=False)
    assert (list_late_renewals(history), list_repeated_records(history), list_expired_leases(history)) == ([], [], [])


@pytest.mark.parametrize("drain_seconds", [5.0, 12.0, 25.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_unfinished_lease_is_held_until_the_drain_ends(seed: int, drain_seconds: float) -> None:
    """A lease whose handler is still running is held for as long as the drain may last."""
    history = simulate_drain(seed, handling=60.0, shards=6, drain_seconds=drain_seconds)
    (stop_time,) = (incident.t for incident in history.incidents if incident.what == "leave")
    (end_time,) = (incident.t for incident in history.incidents if incident.what == "gone")
    assert end_time == pytest.approx(stop_time + drain_seconds, abs=1.0)
    expiry_times = [float(expiry.rpartition(" ")[2]) for expiry in list_expired_leases(history)]
    assert expiry_times
    assert min(expiry_times) >= end_time + LEASE / 3
    assert list_late_renewals(history) == []
