"""Kills a Spark pipeline from Kinesis to Kinesis: a short version of the run in `spark_pipeline_kills.py`."""

import time
from pathlib import Path

import pytest
from spark_pipeline_kills import Pipeline, run_pipeline

pytestmark = [pytest.mark.more, pytest.mark.spark, pytest.mark.services, pytest.mark.timeout(900)]


@pytest.mark.usefixtures("java")
def test_rows_of_a_killed_pipeline_come_once_and_in_order(kinesis_url: str, dynalite_url: str, tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, kinesis_url, dynalite_url, 3, "", time.monotonic() + 600)
    result = run_pipeline(pipeline, 4, report=print)
    print(result)  # noqa: T201  shown if it fails, or with -s
    assert sum(result.kills.values()) == 4
    assert {name: receiver.rows for name, receiver in result.received.items()} == {
        "plain": result.sent,
        "spark": result.sent,
    }
    assert result.faults == 0
