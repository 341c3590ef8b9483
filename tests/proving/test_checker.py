"""The exhaustive checker finds the faults that it must find and no others, and specs/ has its current results."""

from pathlib import Path

import pytest
from attrs import evolve

from leasehold.balancer.rules import shares
from leasehold.balancer.rules.minimal import Minimal
from leasehold_lab.checker.cases import OURS, build_quick_cases
from leasehold_lab.checker.fleet import FleetModel
from leasehold_lab.checker.verdict import Fault, FleetCase, find_surprises, format_page, judge_case

pytestmark = pytest.mark.slow

PROOF = Path(__file__).parents[2] / "specs" / "proof.md"


def faults_of(case: FleetCase) -> set[Fault]:
    return set(judge_case(case).faults)


CASES = [
    pytest.param(
        case,
        id=f"{case.name}, {case.fleet.leases}",
        # Crashes and more leases multiply the interleavings.
        marks=[pytest.mark.more] * (case.fleet.leases == 5 or case.fleet.crashes > 0),
    )
    for case in build_quick_cases()
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_every_interleaving_has_only_known_faults(case: FleetCase) -> None:
    """The checker finds only the known faults, and the stored page is current."""
    verdict = judge_case(case)
    assert find_surprises((case,), (verdict,)) == []
    row = format_page((verdict,), "").splitlines()[-1]
    assert verdict.expanded == verdict.discovered
    assert row in PROOF.read_text().splitlines(), "run `make prove`"


@pytest.mark.more
def test_shares_that_change_with_moves_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """This planted fault gives the extra leases to the workers with the fewest, so each move changes the shares."""

    def divide_by_counts(counts: dict[str, int], _floor: int, extras: int, _groups: None) -> frozenset[str]:
        return frozenset(sorted(counts, key=lambda worker: (counts[worker], worker))[:extras])

    monkeypatch.setattr(shares, "workers_with_extra", divide_by_counts)
    assert "livelock" in faults_of(FleetCase("fickle", FleetModel(4, ("a", "b", "c"), (OURS,) * 3)))


def test_missing_patience_is_detected() -> None:
    """With the planted fault, workers wait forever for a worker that renews but never plans (M9)."""
    faulty_config = evolve(OURS, rules=Minimal(patience=10**9))
    assert faults_of(
        FleetCase("patient", FleetModel(5, ("x-0", "y-1", "x-2"), (faulty_config, None, faulty_config)))
    ) == {
        "unowned",
        "uneven",
    }
