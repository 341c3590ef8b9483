"""Fleets with all faults on, a few hundred of them; `make soak` runs many more."""

import pytest

from adapters.simulator.soak import breaches_of

CHUNKS, CHUNK = 12, 25


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_judge_has_nothing_to_say(chunk: int) -> None:
    """Without it some interleaving of faults could lose a record, a lease, or the peace of a balanced fleet."""
    seeds = range(chunk * CHUNK, (chunk + 1) * CHUNK)
    said = {seed: [str(breach) for breach in breaches] for seed, breaches in map(breaches_of, seeds)}
    assert {seed: breaches for seed, breaches in said.items() if breaches} == {}
