"""Compares the histories of simulated fleets with stored digests, which a refactoring must not change.

After an intended change of behavior, `python -m leasehold_lab.simulator.digests --write tests/proving/digests.txt`
stores the new digests. The commit message explains the change.
"""

from pathlib import Path

import pytest
from attrs import evolve

from leasehold_lab.simulator import digests
from leasehold_lab.simulator.digests import (
    compute_digest,
    compute_digests_of_seeds,
    create_scenario,
    find_first_difference,
    format_trace,
    read_digests,
)
from leasehold_lab.simulator.question import suppress_logs
from leasehold_lab.simulator.run import run

STORED = Path(__file__).with_name("digests.txt")
CHUNK = 50
CHUNKS = [
    range(8),
    *(pytest.param(range(start, start + CHUNK), marks=pytest.mark.more) for start in range(0, 200, CHUNK)),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seeds", CHUNKS, ids=str)
def test_histories_match_the_stored_digests(seeds: range) -> None:
    """All writes, records and incidents of the simulated fleets are those of the stored digests."""
    expected = read_digests(STORED)
    assert dict(zip(seeds, compute_digests_of_seeds(seeds), strict=True)) == {seed: expected[seed] for seed in seeds}


def test_seeds_cover_all_layouts_and_consumers() -> None:
    """All stores, both kinds of handlers, and all times of acknowledgment occur among the stored digests."""
    scenarios = [create_scenario(seed) for seed in range(digests.SEEDS)]
    assert {(scenario.sessions, bool(scenario.swaps)) for scenario in scenarios} == {
        (False, False),
        (True, False),
        (False, True),
        (True, True),
    }
    assert {scenario.acknowledges for scenario in scenarios} == {"return", "late", "random", "never"}
    assert {scenario.dated for scenario in scenarios} == {True, False}


@pytest.mark.slow
def test_missing_event_changes_the_digest_and_is_named() -> None:
    """A difference is reported with the first event that differs."""
    with suppress_logs():
        history = run(create_scenario(0))
    digest_before, full_trace = compute_digest(history), list(format_trace(history))
    removed_write = history.writes.pop(3)
    assert compute_digest(history) != digest_before
    difference = find_first_difference(full_trace, format_trace(history)) or ""
    assert f"{removed_write.t}, {removed_write.sent}" in difference.splitlines()[1]
    assert find_first_difference(full_trace, full_trace) is None


@pytest.mark.slow
def test_every_field_changes_the_digest() -> None:
    """Digests contain every field of every event."""
    with suppress_logs():
        history = run(create_scenario(0))
    digest_before = compute_digest(history)
    history.events[0] = evolve(history.events[0], token=(history.events[0].token or 0) + 1)
    assert compute_digest(history) != digest_before
