"""A run is determined by its scenario alone."""

import gc
import os
import subprocess
import sys

import pytest
from attrs import evolve

from leasehold_lab.simulator.digests import compute_digest, compute_digest_of_seed
from leasehold_lab.simulator.question import SimulationQuestion, build_fleet
from leasehold_lab.simulator.run import run

pytestmark = pytest.mark.slow

SEEDS = (3, 5, 18)
SMALL = build_fleet(SimulationQuestion(leases=4, workers=(3,), cycles=2.0)).scenario
CODE = f"""
from leasehold_lab.simulator.digests import compute_digest_of_seed
print(*map(compute_digest_of_seed, {SEEDS}))
"""


def compute_digests(hash_seed: str) -> list[str]:
    """Return the digests of the same runs in another process."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    completed = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True
    )
    return completed.stdout.split()


def test_same_seed_gives_the_same_history_in_every_process() -> None:
    """A failure that was found with a seed can be replayed."""
    own_digests = [compute_digest_of_seed(seed) for seed in SEEDS]
    assert compute_digests("1") == own_digests


def test_another_seed_gives_another_history() -> None:
    """The history of a run depends on its seed."""
    assert compute_digest(run(SMALL)) != compute_digest(run(evolve(SMALL, seed=12345)))


@pytest.mark.parametrize("collects", [True, False])
def test_run_restores_the_garbage_collector(collects: bool) -> None:
    """A run enables the garbage collector again if it was enabled before."""
    was_enabled = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        run(SMALL)
        assert gc.isenabled() is collects
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_run_leaves_no_objects_behind() -> None:
    """The memory and the time that a run takes stay constant over many runs."""
    # The fleet has no faults, because faults are logged, and pytest's captured log keeps references to objects.
    fault_free = evolve(SMALL, calm=0.0)

    def objects() -> int:
        run(fault_free)
        gc.collect()
        return len(gc.get_objects())

    # The first two runs create objects that are cached permanently.
    count_before = [objects() for _ in range(3)][-1]
    # Other threads of the test process create a few objects meanwhile.
    assert sum(objects() - count_before for _ in range(3)) < 300
