"""Chaos on plain workers, for as long as a test may take: what `make chaos` does for longer."""

from pathlib import Path

import pytest
from plain_workers import Wanted, run

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.xdist_group("runs")]


@pytest.mark.more
@pytest.mark.usefixtures("amqp_engine")
def test_faults_of_workers_of_a_hub_lose_no_record(tmp_path: Path) -> None:
    """Without it faults that only real processes and services have would be met by users."""
    outcome = run(Wanted(6, 22.0, "event-hubs", "sqlite", workers=3), tmp_path, print)
    print(outcome)  # noqa: T201  shown if it fails, or with -s
    assert (outcome.verdict.faults, outcome.verdict.lost) == ((), 0)


def test_faults_of_workers_of_a_stream_lose_no_record(tmp_path: Path) -> None:
    """Without it likewise; streams end, and have services that are restarted."""
    outcome = run(Wanted(5, 22.0, "kinesis", "dynamodb", workers=3), tmp_path, print)
    print(outcome)  # noqa: T201  shown if it fails, or with -s
    assert (outcome.verdict.faults, outcome.verdict.lost) == ((), 0)


@pytest.mark.more
def test_faults_of_daemons_and_their_children_lose_no_record(tmp_path: Path) -> None:
    """Without it children that crash, hang and fork would be tried behind daemons that nothing befalls."""
    outcome = run(Wanted(12, 22.0, "kinesis", "dynamodb", consumer="multilang", workers=3), tmp_path, print)
    print(outcome)  # noqa: T201  shown if it fails, or with -s
    assert (outcome.verdict.faults, outcome.verdict.lost) == ((), 0)


@pytest.mark.more
def test_faults_during_a_swap_lose_no_record(tmp_path: Path) -> None:
    """Without it a swap would be tried where all who take part in it live to its end."""
    outcome = run(Wanted(8, 22.0, "kinesis", "dynamodb", to="postgres", workers=3), tmp_path, print)
    print(outcome)  # noqa: T201  shown if it fails, or with -s
    assert (outcome.verdict.faults, outcome.verdict.lost) == ((), 0)
    assert outcome.swap.startswith("over; ")
