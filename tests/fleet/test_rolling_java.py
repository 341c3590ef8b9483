"""During rolling restarts in a group with Java workers, no shard is left unread for long."""

import time
from itertools import pairwise

import java_kcl
import pytest
from mixed import LEASE_SECONDS, Mixed, mixed
from types_boto3_dynamodb import DynamoDBClient

from leasehold.balancer.watch import LEADER_MEMORY_SECONDS, REPORT_AGE_MAX

pytestmark = [pytest.mark.more, pytest.mark.services, pytest.mark.xdist_group("rolling")]

POLL_SECONDS = LEASE_SECONDS
"""A KCL 3.x worker looks for leases that were assigned to it every `failoverTimeMillis`."""
UNREAD_SECONDS = 2 * LEASE_SECONDS + POLL_SECONDS
DOWN_SECONDS = 8.0
"""The time between the end of a worker and the start of the next one, as a container scheduler may need."""


def built(version: str) -> None:
    """Build the Java KCL, or skip the test if Java cannot be run."""
    if missing_tools := java_kcl.missing():
        pytest.skip(f"the Java KCL is not run: no {missing_tools}")
    java_kcl.built(version)


def replaced(fleet: Mixed, old_worker: str, new_worker: str, *, gives_share: bool) -> None:
    """Stop a Java worker in good order, and start another one.

    If `gives_share`, our worker gives the new worker its share. Otherwise, the new worker must not get one.

    Our worker waits until the old worker is forgotten and the new worker has reported once more. It waits longer if the
    old worker was the leader and did not release its lock in time.
    """
    stopping_worker = fleet.stage.drain_worker(old_worker)
    fleet.stage.pause(DOWN_SECONDS)
    fleet.join_java(new_worker)
    seconds_until_known = LEADER_MEMORY_SECONDS + REPORT_AGE_MAX
    assert (
        fleet.stage.until(
            lambda: fleet.stage.count_leases_of_workers()[new_worker] == 2,
            1.5 * seconds_until_known if gives_share else seconds_until_known,
        )
        == gives_share
    )
    fleet.stage.pause(5 * LEASE_SECONDS)
    stopping_worker.wait()


def reported(fleet: Mixed, worker: str) -> str:
    """Return the time stamp of a Java worker's last report, or an empty string before its first report."""
    return dict(fleet.stage.store.list().reports.stamps).get(worker, "")


def unread_seconds(fleet: Mixed, since: float) -> float:
    """Return the longest time between two dispatched records of the same shard after the time `since`.

    Each shard gets several records per second, so a long time means that the shard was unread.
    """
    longest = 0.0
    events = fleet.stage.history.events
    for shard in {event.shard for event in events}:
        dispatch_times = [
            reading_event.t
            for reading_event in events
            if reading_event.shard == shard and reading_event.event == "record"
        ]
        times = [since, *sorted(dispatch_time for dispatch_time in dispatch_times if dispatch_time >= since)]
        longest = max([longest, *(after - before for before, after in pairwise(times))])
    return longest


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("version", "given"), [("3.5.1", True), ("3.0.3", False)])
def test_a_rolling_restart_of_java_leaves_no_shard_unread(
    version: str, given: bool, kinesis_url: str, dynamodb_local_url: str
) -> None:
    """Our leases must not go to the stopped worker, because they would then be unread for 20 s (M14).

    Workers of version 3.0.3 report in a separate table. Our worker does not see these reports, and keeps its leases.
    """
    built(version)
    with mixed(kinesis_url, dynamodb_local_url, version, "own") as fleet:
        fleet.join_java("java-1")
        fleet.balanced()
        fleet.stage.join("ours-1")
        fleet.balanced()
        since = time.time()
        replaced(fleet, "java-1", "java-2", gives_share=given)
        replaced(fleet, "java-2", "java-3", gives_share=given)
        longest_unread, leases_given = unread_seconds(fleet, since), fleet.gifts()
        print(f"unread for {longest_unread:.1f} s at most; from ours to Java: {leases_given}")  # noqa: T201  a measurement
        verdict = fleet.finish()
        assert (verdict.faults, verdict.lost) == ((), 0), verdict
        assert longest_unread <= UNREAD_SECONDS
        assert bool(leases_given) == given
        assert all(was_read for _, _, was_read in leases_given)


@pytest.mark.timeout(400)
def test_no_lease_is_given_to_a_newcomer_that_ended(
    kinesis_url: str, dynamodb_local_url: str, dynamodb_local_client: DynamoDBClient
) -> None:
    """Our leases must not be given to a dead worker, because they would be unread until they expire (M14).

    The test simulates a worker that reports once and dies. Its report arrives while our workers have a lease to give,
    but wait until another dead worker is forgotten. At that moment, the report is still as young as that of a live
    worker.
    """
    built("3.5.1")
    with mixed(kinesis_url, dynamodb_local_url, "3.5.1", "own") as fleet:
        fleet.join_java("java-1")
        fleet.balanced()
        # Four workers have one lease each. When java-2 dies, our workers have one lease too many by their own rules,
        # but not by those of the leader.
        for worker in ("ours-1", "ours-2"):
            fleet.stage.join(worker)
        fleet.balanced()
        fleet.join_java("java-2")
        fleet.balanced()
        report_before = reported(fleet, "java-2")
        assert fleet.stage.until(lambda: reported(fleet, "java-2") != report_before, REPORT_AGE_MAX)
        fleet.stage.kill("java-2")
        since = time.time()
        # Wait until shortly before java-2 is forgotten, 60 s after its last report. The leader also takes java-3 for
        # alive, and may move one of the leader's own leases to it.
        forgotten_at = int(reported(fleet, "java-2")) + LEADER_MEMORY_SECONDS
        fleet.stage.pause(max(0.0, forgotten_at - 2 * LEASE_SECONDS - time.time()))
        row = {"leaseKey": {"S": "java-3"}, "entityType": {"S": "WORKER_METRIC_STATS"}, "wid": {"S": "java-3"}}
        dynamodb_local_client.put_item(TableName=fleet.table, Item=row | {"lut": {"N": str(int(time.time()))}})
        if time.time() >= forgotten_at:
            pytest.skip("this machine stood still for 6 s: java-2 was forgotten before java-3 reported")
        fleet.stage.pause(LEADER_MEMORY_SECONDS)
        longest_unread, leases_given = unread_seconds(fleet, since), fleet.gifts()
        print(f"unread for {longest_unread:.1f} s at most; from ours to Java: {leases_given}")  # noqa: T201  likewise
        verdict = fleet.finish()
        assert (verdict.faults, verdict.lost) == ((), 0), verdict
        assert all(worker != "java-3" for _, worker, _ in leases_given)


@pytest.mark.parametrize("version", ["2.7.2", "3.5.1"])
def test_a_rolling_restart_next_to_java_leaves_no_shard_unread(
    version: str, kinesis_url: str, dynamodb_local_url: str
) -> None:
    """Leases that our workers release must not wait for a Java worker, which looks only every two failover times."""
    built(version)
    with mixed(kinesis_url, dynamodb_local_url, version, "own") as fleet:
        fleet.join_java("java-1")
        fleet.balanced()
        for worker in ("ours-1", "ours-2"):
            fleet.stage.join(worker)
        fleet.balanced()
        since = time.time()
        for old_worker, new_worker in (("ours-1", "ours-3"), ("ours-2", "ours-4")):
            stopping_worker = fleet.stage.drain_worker(old_worker)
            fleet.stage.pause(DOWN_SECONDS)
            fleet.stage.join(new_worker)
            fleet.balanced()
            assert stopping_worker.wait() == 0
        longest_unread = unread_seconds(fleet, since)
        verdict = fleet.finish()
        assert (verdict.faults, verdict.lost) == ((), 0), verdict
        assert longest_unread <= UNREAD_SECONDS
