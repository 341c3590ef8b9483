"""Our workers and official workers, as processes, in one consumer group over one container of blobs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_stage import (
    CYCLE_SECONDS,
    EXPIRY_SECONDS,
    OURS,
    SETTLE_SECONDS,
    Feed,
    Group,
    HubStream,
    a_container,
    a_group,
    flights,
)
from standins.flight_rows import ROWS

from leasehold_lab.standins.hubs.event_hubs import LocalHubs
from leasehold_lab.standins.services import AZURITE_ACCOUNT

pytestmark = [pytest.mark.more, pytest.mark.services, pytest.mark.xdist_group("fleets")]

BOTH_WAYS = {(OURS, "python"), ("python", OURS)}


@contextmanager
def a_mixed_group(hubs: LocalHubs, hub: str, rows: Iterator[str], a_tick: int, folder: Path) -> Iterator[Group]:
    """Run a group without workers on a hub with twelve partitions. Both connection strings are in the environment."""
    with a_container() as container:
        store = f"azblob://{AZURITE_ACCOUNT}/{container}?eventhub={hubs.namespace}/{hub}&group=$Default"
        with a_group(Feed(HubStream(hubs, hub, 12), rows, a_tick), folder, store, container) as group:
            yield group


def start_two_of_each(group: Group) -> None:
    """Start one of our workers, which reads everything, then another one and two official ones.

    Kill an official one.
    """
    stage = group.stage
    stage.join("ours-1")
    assert stage.until(group.balanced, SETTLE_SECONDS)
    group.join_official("official-1")
    group.join_official("official-2")
    stage.join("ours-2")
    assert group.settle() == [3, 3, 3, 3]
    stage.kill("official-1")
    assert group.settle() == [4, 4, 4]


def judged(group: Group, count: int) -> None:
    """Finish, print the verdict on the history, and check that it is good."""
    verdict = group.finish()
    killed = [incident.subject for incident in group.stage.history.incidents if incident.what == "crash"]
    takeover_times = {worker: group.takeover_seconds(worker) for worker in killed}
    print(takeover_times, group.doubled_seconds(), verdict)  # noqa: T201  shown if it fails
    assert (verdict.faults, verdict.produced, verdict.lost) == ((), count, 0)
    # Each make resumed the other's checkpoints, and only records after them were read again.
    assert group.passed(verdict) >= BOTH_WAYS
    assert [change for change in verdict.owner_changes if change.duplicates > change.since] == []


def test_two_workers_of_each_kind_share_twelve_partitions_and_a_death(hubs: LocalHubs, tmp_path: Path) -> None:
    with a_mixed_group(hubs, "shared", flights(6000), 40, tmp_path) as group:
        start_two_of_each(group)
        judged(group, 6000)


@pytest.mark.timeout(600)
def test_a_mixed_group_reads_all_flights_despite_two_deaths(hubs: LocalHubs, tmp_path: Path) -> None:
    with a_mixed_group(hubs, "year", flights(ROWS), 1000, tmp_path) as group:
        start_two_of_each(group)
        group.stage.kill("ours-2")
        assert group.settle() == [6, 6]
        judged(group, ROWS)
        wanted_seconds = EXPIRY_SECONDS + CYCLE_SECONDS + 1
        takeover_times = {worker: round(group.takeover_seconds(worker), 1) for worker in ("official-1", "ours-2")}
        doubled_seconds = group.doubled_seconds()
        print(f"taken over after {takeover_times} s of {wanted_seconds}; read twice for {doubled_seconds:.1f} s")  # noqa: T201  a measurement
