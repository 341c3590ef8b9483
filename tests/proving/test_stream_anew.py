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

FIRST_NEW_NUMBER = 2_000_000
"""All sequence numbers of the recreated stream are at least this number."""

SLOW, MORE = pytest.mark.slow, pytest.mark.more
LISTED_LATE = (1180, 1556, 1848)
"""Seeds in which the owners' rows are blobs.

Such owners read the second stream until their next listing of shards, five minutes later.
"""
DELETED_WHILE_FREE = (1564, 2655)
"""Seeds in which all rows are deleted while the new stream's leases are free, so a joining worker starts at LATEST."""
SEEDS = [
    0,
    2,
    1,
    *(pytest.param(seed, marks=SLOW) for seed in DELETED_WHILE_FREE),
    *(pytest.param(seed, marks=MORE) for seed in range(3, 40)),
]


def _scenario(seed: int) -> Scenario:
    """Return the scenario of this seed. The stream is recreated after a reshard, and perhaps resharded again."""
    scenario, draw = trial(seed, Minimal()).scenario, random.Random(f"anew {seed}")  # noqa: S311  a seed is the point
    recreation_time = draw.uniform(30.0, FAULTS_END - 30.0)
    early_reshapes = tuple(reshape for reshape in scenario.reshapes if reshape.at < recreation_time)
    first_reshapes = early_reshapes or (Reshape(draw.uniform(5.0, 20.0), draw.choice(("double", "split"))),)
    later_reshapes = (
        Reshape(recreation_time + draw.uniform(0.5, 25.0), draw.choice(("double", "split", "merge"))),
    ) * draw.randrange(2)
    seconds = scenario.seconds + 2 * SETTLE_SECONDS  # Each lease of the old stream must be released and taken again.
    lasting_member = Member("z", scenario.members[0].config)  # At least one worker must be there at the end.
    scenario = evolve(scenario, members=(*scenario.members, lasting_member))
    return evolve(
        scenario,
        reshapes=(*first_reshapes, Reshape(recreation_time, "anew"), *later_reshapes),
        callable_faults=(),
        seconds=seconds,
    )


def _list_dispatches_of_new_stream(history: SimulatedHistory) -> list[ReadingEvent]:
    """Return the handled records of the recreated stream, in order of time."""
    return [event for event in history.events if event.event == "record" and event.place[0] >= FIRST_NEW_NUMBER]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_recreated_stream_is_dispatched_in_order(seed: int) -> None:
    """All records of the recreated stream are dispatched in order, despite crashes, pauses and lost responses."""
    with suppress_logs():
        history = run(evolve(_scenario(seed), if_recreated="TRIM_HORIZON"))
    numbers_by_shard: dict[str, list[int]] = {record.key: [] for record in history.sent}
    for event in _list_dispatches_of_new_stream(history):
        if event.place[0] not in numbers_by_shard[event.shard]:
            numbers_by_shard[event.shard].append(event.place[0])
    assert history.faults == []
    assert numbers_by_shard == {
        key: [record.number for record in history.sent if record.key == key] for key in numbers_by_shard
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(seed, marks=SLOW) for seed in LISTED_LATE)])
def test_recreated_stream_is_not_read_unless_requested(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """A worker never continues at positions of the old stream, because it would then skip records of the new one.

    Until a worker lists the shards again, it does not know the new stream, and may take a lease that another worker
    released.
    If rows are deleted while no worker holds their leases, this counts as a request to start again: the next worker
    begins
    as a new group does.
    """
    scenario = evolve(_scenario(seed), emptyings=())
    history = run(scenario)
    noticed_time = FAULTS_END + 2 * scenario.members[0].config.cycle_seconds
    assert (history.faults, [event for event in _list_dispatches_of_new_stream(history) if event.t > noticed_time]) == (
        [],
        [],
    )
    late_writes = [(item.before, item.after) for item in history.writes if item.done and item.t > noticed_time]
    assert [row for old_row, row in late_writes if old_row and row and row.checkpoint != old_row.checkpoint] == []
    assert [row for _, row in late_writes if row and row.owner is not None] == [], "nobody holds a lease of it"
    warnings = [text for text in caplog.messages if "stream listed was made anew at 2 s since 1970" in text]
    living_count = sum(
        member.is_running_at(scenario.seconds) and member.plans > FAULTS_END for member in scenario.members
    )
    assert living_count <= len(warnings) <= sum(item.what == "start" for item in history.incidents), (
        "each process says it, once"
    )
