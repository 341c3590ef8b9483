"""The writes of one of our workers and of a real Java worker to the same table, at the same time."""

import time

import java_kcl
import pytest
from faulty_line import line
from mixed import mixed

pytestmark = [pytest.mark.more, pytest.mark.services, pytest.mark.xdist_group("java")]

SECONDS = 20.0
MOST = 2.5
"""The maximum number of writes of our worker per lease and second."""


def test_our_workers_write_a_lease_no_more_often_than_java(kinesis_url: str, dynamodb_local_url: str) -> None:
    if missing_tools := java_kcl.missing():
        pytest.skip(f"the Java KCL is not run: no {missing_tools}")
    java_kcl.built("2.7.2")
    with (
        line(dynamodb_local_url) as our_connection,
        line(dynamodb_local_url) as java_connection,
        mixed(kinesis_url, our_connection.url, "2.7.2", "own") as fleet,
    ):
        fleet.dynamodb = java_connection.url
        fleet.join_java("java-1")
        fleet.balanced()
        fleet.stage.join("ours-1")
        fleet.balanced()
        started_at = time.monotonic()
        requests_before = our_connection.requests["UpdateItem"], java_connection.requests["UpdateItem"]
        fleet.stage.pause(SECONDS)
        seconds = time.monotonic() - started_at
        our_writes, java_writes = (
            our_connection.requests["UpdateItem"] - requests_before[0],
            java_connection.requests["UpdateItem"] - requests_before[1],
        )
        print(f"in {seconds:.0f} s, two leases each: ours {our_writes} writes, Java {java_writes}")  # noqa: T201  shown if it fails
        assert fleet.stage.count_leases_of_workers() == {"java-1": 2, "ours-1": 2}
        # The limit covers a checkpoint per second, a renewal per half lease, and the counters of the lookout.
        assert 2 <= our_writes <= min(java_writes, 2 * MOST * seconds)
        verdict = fleet.finish()
        assert (verdict.faults, verdict.lost) == ((), 0), verdict
