"""Real flights through three worker processes that are killed, added, and resharded under."""

import pytest
from flights import ROWS, flights, printed, run


def verdict_of(kinesis: str, dynamodb: str, count: int, *, rate: int, plain: int) -> None:
    """Send so many rows, print what became of them, and insist that it is good."""
    rows = list(flights(count))
    verdict = run(kinesis, dynamodb, rows, rate=rate, plain=plain, told=print)
    print(printed(verdict, changes=True))  # noqa: T201  shown if it fails, or with -s
    assert (verdict.faults, verdict.produced, verdict.delivered) == ((), count, count)
    assert [change.duplicates for change in verdict.owner_changes if change.duplicates > change.since] == []


@pytest.mark.services
@pytest.mark.xdist_group("fleets")
def test_a_slice_survives_a_crash_a_split_and_a_merge(kinesis_url: str, dynalite_url: str) -> None:
    """Without it the worker, the poller and the table could each be right and lose records between them."""
    verdict_of(kinesis_url, dynalite_url, 20_000, rate=2000, plain=3000)


@pytest.mark.more
@pytest.mark.timeout(600)
def test_all_flights_arrive_by_dynalite(kinesis_url: str, dynalite_url: str) -> None:
    """Without it what shows only with a year of real keys, busy and rare, would be met by users."""
    verdict_of(kinesis_url, dynalite_url, ROWS, rate=5000, plain=4000)


@pytest.mark.more
@pytest.mark.timeout(600)
def test_all_flights_arrive_by_dynamodb_local(kinesis_url: str, dynamodb_local_url: str) -> None:
    """Without it a table that only dynalite understands could be called DynamoDB."""
    verdict_of(kinesis_url, dynamodb_local_url, ROWS, rate=5000, plain=4000)
