"""Sends flights through Spark applications that are killed: short versions of the runs in `make chaos-spark`."""

from pathlib import Path

import pytest
from spark_flights import read_rows, run_flights
from spark_ground import open_hub_ground, open_kinesis_ground
from spark_kills import run_kills

pytestmark = [pytest.mark.more, pytest.mark.spark, pytest.mark.services, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("java")
def test_two_applications_and_a_plain_worker_share_a_stream(
    kinesis_url: str, dynalite_url: str, tmp_path: Path
) -> None:
    """No row is lost or counted twice when shards move between the applications and the worker."""
    count = 6000
    with open_kinesis_ground(kinesis_url, dynalite_url) as environment:
        result = run_flights(environment, list(read_rows(count)), tmp_path, rate=2000, report=print)
    print(result)  # noqa: T201  shown if it fails, or with -s
    assert (result.sent, result.landed, result.lost, result.strangers) == (count, count, 0, 0)
    assert result.duplicates == result.explained
    assert result.at_tip == (9, 9)


@pytest.mark.usefixtures("java", "amqp_engine")
def test_a_kill_between_sink_and_commit_loses_no_event(azurite_connection: str, tmp_path: Path) -> None:
    """A repeated batch contains no rows that the first attempt did not have, which a sink that skips it would lose.

    For Kinesis, tests/spark/test_kills.py tests this without a JVM.
    """
    with open_hub_ground(azurite_connection) as environment:
        result = run_kills(environment, tmp_path, kills=1, report=print)
    print(result)  # noqa: T201  shown if it fails, or with -s
    assert (result.kills, result.repeated, result.same, result.lost, result.owned) == (1, 1, 1, 0, 0)
