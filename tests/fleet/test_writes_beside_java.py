"""The writes of our worker and of a real Java worker, on one table and at the same time."""

import time

import java_kcl
import pytest
from faulty_line import line
from mixed import mixed

pytestmark = [pytest.mark.more, pytest.mark.services, pytest.mark.xdist_group("java")]

SECONDS = 20.0
MOST = 2.5
"""Our writes per lease and second."""


def test_our_workers_write_a_lease_no_more_often_than_java(kinesis_url: str, dynamodb_local_url: str) -> None:
    if absent := java_kcl.missing():
        pytest.skip(f"the Java KCL is not run: no {absent}")
    java_kcl.built("2.7.2")
    with (
        line(dynamodb_local_url) as of_ours,
        line(dynamodb_local_url) as of_java,
        mixed(kinesis_url, of_ours.url, "2.7.2", "own") as fleet,
    ):
        fleet.dynamodb = of_java.url
        fleet.join_java("java-1")
        fleet.balanced()
        fleet.stage.join("ours-1")
        fleet.balanced()
        begun = time.monotonic()
        before = of_ours.requests["UpdateItem"], of_java.requests["UpdateItem"]
        fleet.stage.pause(SECONDS)
        seconds = time.monotonic() - begun
        ours, java = of_ours.requests["UpdateItem"] - before[0], of_java.requests["UpdateItem"] - before[1]
        print(f"in {seconds:.0f} s, two leases each: ours {ours} writes, Java {java}")  # noqa: T201  shown if it fails
        assert fleet.stage.count_leases_of_workers() == {"java-1": 2, "ours-1": 2}
        # A checkpoint per second, a renewal per half lease, and the lookout's counts
        assert 2 <= ours <= min(java, 2 * MOST * seconds)
        verdict = fleet.finish()
        assert (verdict.faults, verdict.lost) == ((), 0), verdict
