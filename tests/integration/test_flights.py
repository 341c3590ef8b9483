"""Sends real flights through a fleet of worker processes while workers are killed and added and shards change."""

import pytest
from flights import format_verdict, read_flights, run
from standins.dynamodb_local import opted_in
from standins.flight_rows import ROWS


def verdict_of(kinesis: str, dynamodb: str, count: int, *, rate: int, plain: int) -> None:
    """Send this many rows through the fleet, print the verdict, and check that it is good."""
    rows = list(read_flights(count))
    verdict = run(kinesis, dynamodb, rows, rate=rate, plain=plain, report=print)
    print(format_verdict(verdict, changes=True))  # noqa: T201  shown if it fails, or with -s
    assert (verdict.faults, verdict.produced, verdict.delivered) == ((), count, count)
    assert [change.duplicates for change in verdict.owner_changes if change.duplicates > change.since] == []


@pytest.mark.more
@pytest.mark.services
@pytest.mark.xdist_group("runs")
def test_some_flights_survive_a_crash_a_split_and_a_merge(kinesis_url: str, dynalite_url: str) -> None:
    verdict_of(kinesis_url, dynalite_url, 8000, rate=2000, plain=1200)


@pytest.mark.more
@pytest.mark.timeout(600)
def test_all_flights_arrive(kinesis_url: str, request: pytest.FixtureRequest) -> None:
    """A year of flights has busy and rare keys in realistic proportions.

    If the license of DynamoDB Local was accepted, the test uses it, because it is closer to DynamoDB than dynalite.
    """
    table: str = request.getfixturevalue("dynamodb_local_url" if opted_in() else "dynalite_url")
    verdict_of(kinesis_url, table, ROWS, rate=5000, plain=4000)
