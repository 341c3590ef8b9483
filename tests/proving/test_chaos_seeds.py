"""Random fleets with all kinds of faults break no law. `make test-more` tests more seeds, `make soak` ten thousand."""

from collections.abc import Iterable, Iterator

import pytest
from soak import breaches_of_seed

from leasehold_lab.simulator.chaos import trial
from leasehold_lab.simulator.question import suppress_logs

pytestmark = pytest.mark.slow

CHUNK = 10
JOINED = (257, 3703, 6439, 20531, 21184, 214836, 801220, 806531)
"""Seeds of fleets that workers join after rows were deleted. Each seed has revealed a fault in the past."""
CHUNKS = [0, *(pytest.param(chunk, marks=pytest.mark.more) for chunk in range(1, 20))]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silence the log, because faults are expected."""
    with suppress_logs():
        yield


@pytest.mark.parametrize("chunk", CHUNKS)
def test_judge_finds_no_breach(chunk: int) -> None:
    """Under random interleavings of faults, no record and no lease is lost, and a balanced fleet makes no moves."""
    assert _said(range(chunk * CHUNK, (chunk + 1) * CHUNK)) == {}


def test_fleets_include_all_ways_of_acknowledging() -> None:
    """Some fleets have handlers that write checkpoints themselves, and these lose no unacknowledged record."""
    kinds = {trial(seed).scenario.acknowledges for seed in range(25)}
    assert kinds == {"return", "late", "random", "never"}


def test_fleets_include_streams_without_hash_ranges() -> None:
    """Some fleets have streams like those of DynamoDB tables, whose shards have parents but no hash ranges."""
    assert {trial(seed).scenario.ranged for seed in range(25)} == {True, False}


@pytest.mark.more
def test_joiner_after_deleted_rows_skips_no_record() -> None:
    """A worker that starts after a table was emptied skips no record that is still unread."""
    assert _said(JOINED) == {}


def _said(seeds: Iterable[int]) -> dict[int, list[str]]:
    descriptions_by_seed = {
        seed: [str(breach) for breach in breaches] for seed, breaches in map(breaches_of_seed, seeds)
    }
    return {seed: breaches for seed, breaches in descriptions_by_seed.items() if breaches}
