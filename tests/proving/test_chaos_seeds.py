"""Fleets with all faults on: twenty-five here, more in `make test-more`; `make soak` runs ten thousand."""

import logging
from collections.abc import Iterator

import pytest
from soak import breaches_of

pytestmark = pytest.mark.slow

CHUNK = 25
CHUNKS = [0, *(pytest.param(chunk, marks=pytest.mark.more) for chunk in range(1, 12))]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """That things go wrong is the point."""
    log = logging.getLogger("leasehold")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_judge_has_nothing_to_say(chunk: int) -> None:
    """Without it some interleaving of faults could lose a record, a lease, or the peace of a balanced fleet."""
    seeds = range(chunk * CHUNK, (chunk + 1) * CHUNK)
    said = {seed: [str(breach) for breach in breaches] for seed, breaches in map(breaches_of, seeds)}
    assert {seed: breaches for seed, breaches in said.items() if breaches} == {}
