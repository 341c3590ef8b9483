"""Faults lose no record in chaos runs that are short enough for a test (`make chaos` runs longer)."""

from pathlib import Path

import pytest
from plain_workers import RunRequest, run_chaos

pytestmark = [pytest.mark.more, pytest.mark.services, pytest.mark.slow, pytest.mark.xdist_group("runs")]

MULTILANG_REQUEST = RunRequest(12, 22.0, "kinesis", "dynamodb", consumer="multilang", workers=3)


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param(RunRequest(6, 22.0, "event-hubs", "sqlite", workers=3), id="workers of a hub"),
        pytest.param(RunRequest(5, 22.0, "kinesis", "dynamodb", workers=3), id="workers of a stream"),
        pytest.param(MULTILANG_REQUEST, id="daemons and their children"),
        pytest.param(RunRequest(8, 22.0, "kinesis", "dynamodb", to="postgres", workers=3), id="during a swap"),
    ],
)
def test_faults_lose_no_record(wanted: RunRequest, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A run with faults that only real processes and services have loses no record."""
    if wanted.source == "event-hubs":
        request.getfixturevalue("amqp_engine")
    outcome = run_chaos(wanted, tmp_path, print)
    print(outcome)  # noqa: T201  pytest shows this if the test fails, or with -s
    assert (outcome.verdict.faults, outcome.verdict.lost) == ((), 0)
    assert outcome.swap.startswith("over; ") or not wanted.to
