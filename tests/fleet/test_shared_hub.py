"""Our workers and official workers, as processes, share a consumer group and a container of blobs."""

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
    """Create a hub with twelve partitions, a container, and a group without workers."""
    with a_container() as container:
        store = f"azblob://{AZURITE_ACCOUNT}/{container}?eventhub={hubs.namespace}/{hub}&group=$Default"
        with a_group(Feed(HubStream(hubs, hub, 12), rows, a_tick), folder, store, container) as group:
            yield group


def start_two_of_each(group: Group) -> None:
    """Start one of our workers, which reads all partitions, and then another one and two official ones.

    Then kill one of the official workers.
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


def check_shared_hub_run(group: Group, count: int) -> None:
    """Finish the run, print the verdict, and check it."""
    verdict = group.finish()
    killed_workers = [incident.subject for incident in group.stage.history.incidents if incident.what == "crash"]
    takeover_times = {worker: group.takeover_seconds(worker) for worker in killed_workers}
    print(takeover_times, group.doubled_seconds(), verdict)  # noqa: T201  shown if it fails
    assert (verdict.faults, verdict.produced, verdict.lost) == ((), count, 0)
    # Workers of each kind resumed checkpoints of the other kind, and repeated only records after these checkpoints.
    assert group.passed(verdict) >= BOTH_WAYS
    assert [change for change in verdict.owner_changes if change.duplicates > change.since] == []


def test_two_workers_of_each_kind_share_twelve_partitions_and_a_death(hubs: LocalHubs, tmp_path: Path) -> None:
    with a_mixed_group(hubs, "shared", flights(6000), 40, tmp_path) as group:
        start_two_of_each(group)
        check_shared_hub_run(group, 6000)


@pytest.mark.timeout(600)
def test_a_mixed_group_reads_all_flights_despite_two_deaths(hubs: LocalHubs, tmp_path: Path) -> None:
    with a_mixed_group(hubs, "year", flights(ROWS), 1000, tmp_path) as group:
        start_two_of_each(group)
        group.stage.kill("ours-2")
        assert group.settle() == [6, 6]
        check_shared_hub_run(group, ROWS)
        wanted_seconds = EXPIRY_SECONDS + CYCLE_SECONDS + 1
        takeover_times = {worker: round(group.takeover_seconds(worker), 1) for worker in ("official-1", "ours-2")}
        doubled_seconds = group.doubled_seconds()
        print(f"taken over after {takeover_times} s of {wanted_seconds}; read twice for {doubled_seconds:.1f} s")  # noqa: T201  a measurement
