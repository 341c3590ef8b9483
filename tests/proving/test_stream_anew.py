"""If a stream is deleted and recreated under the same name among other faults, no record of the new one is skipped."""

import random

import pytest
from attrs import evolve

from leasehold.balancer.rules.minimal import Minimal
from leasehold_lab.judge.events import ReadingEvent
from leasehold_lab.simulator.chaos import FAULTS_END, SETTLE_SECONDS, trial
from leasehold_lab.simulator.question import suppress_logs
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Member, Reshape, Scenario
from leasehold_lab.simulator.world.world import SimulatedHistory

FURTHER = 2_000_000
"""All sequence numbers of the recreated stream are at least this number."""

SLOW, MORE = pytest.mark.slow, pytest.mark.more
UNTOLD = (1180, 1556, 1848)
"""Seeds in which the owners' rows are blobs.

Such owners read the second stream until their next listing of shards, five minutes later.
"""
BEGUN_UNHELD = (1564, 2655)
"""Seeds in which all rows are deleted while the new stream's leases are free, so a joining worker starts at LATEST."""
SEEDS = [
    0,
    2,
    1,
    *(pytest.param(seed, marks=SLOW) for seed in BEGUN_UNHELD),
    *(pytest.param(seed, marks=MORE) for seed in range(3, 40)),
]


def _scenario(seed: int) -> Scenario:
    """Return the scenario of this seed. The stream is recreated after a reshard, and perhaps resharded again."""
    scenario, draw = trial(seed, Minimal()).scenario, random.Random(f"anew {seed}")  # noqa: S311  a seed is the point
    at = draw.uniform(30.0, FAULTS_END - 30.0)
    before = tuple(each for each in scenario.reshapes if each.at < at)
    early = before or (Reshape(draw.uniform(5.0, 20.0), draw.choice(("double", "split"))),)
    again = (Reshape(at + draw.uniform(0.5, 25.0), draw.choice(("double", "split", "merge"))),) * draw.randrange(2)
    seconds = scenario.seconds + 2 * SETTLE_SECONDS  # Each lease of the old stream must be released and taken again.
    stays = Member("z", scenario.members[0].config)  # At least one worker must be there at the end.
    scenario = evolve(scenario, members=(*scenario.members, stays))
    return evolve(scenario, reshapes=(*early, Reshape(at, "anew"), *again), callable_faults=(), seconds=seconds)


def _handed(history: SimulatedHistory) -> list[ReadingEvent]:
    """Return the handled records of the recreated stream, in order of time."""
    return [event for event in history.events if event.event == "record" and event.place[0] >= FURTHER]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_record_of_the_second_stream_is_handed_over_in_order(seed: int) -> None:
    """All records of the recreated stream are dispatched in order, despite crashes, pauses and lost responses."""
    with suppress_logs():
        history = run(evolve(_scenario(seed), if_recreated="TRIM_HORIZON"))
    handed: dict[str, list[int]] = {each.key: [] for each in history.sent}
    for event in _handed(history):
        if event.place[0] not in handed[event.shard]:
            handed[event.shard].append(event.place[0])
    assert history.faults == []
    assert handed == {key: [each.number for each in history.sent if each.key == key] for key in handed}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(seed, marks=SLOW) for seed in UNTOLD)])
def test_no_record_of_the_second_stream_is_handed_over_unasked(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """A worker never continues at positions of the old stream, because it would then skip records of the new one.

    Until a worker lists the shards again, it does not know the new stream, and may take a lease that another worker
    released.
    If rows are deleted while no worker holds their leases, this counts as a request to start again: the next worker
    begins
    as a new group does.
    """
    scenario = evolve(_scenario(seed), emptyings=())
    history = run(scenario)
    noticed = FAULTS_END + 2 * scenario.members[0].config.cycle_seconds
    assert (history.faults, [event for event in _handed(history) if event.t > noticed]) == ([], [])
    late = [(each.before, each.after) for each in history.writes if each.done and each.t > noticed]
    assert [row for old, row in late if old and row and row.checkpoint != old.checkpoint] == []
    assert [row for _, row in late if row and row.owner is not None] == [], "nobody holds a lease of it"
    said = [text for text in caplog.messages if "stream listed was made anew at 2 s since 1970" in text]
    here = sum(member.is_running_at(scenario.seconds) and member.plans > FAULTS_END for member in scenario.members)
    assert here <= len(said) <= sum(each.what == "start" for each in history.incidents), "each process says it, once"
