"""A failing scenario is simplified for as long as it still fails."""

from leasehold_lab.simulator.chaos import trial
from leasehold_lab.simulator.run import FAULTS, describe_scenario, shrink_scenario
from leasehold_lab.simulator.scenario import Scenario


def has_fault(scenario: Scenario) -> bool:
    """Return whether the scenario has a fault that needs one worker, two leases, and lost requests."""
    return (
        any(member.worker == "b-1" for member in scenario.members)
        and len(scenario.owners) >= 2
        and scenario.network.lost > 0
    )


def test_only_necessary_parts_of_the_failure_remain() -> None:
    """A simplified scenario contains only the workers and faults that the failure needs."""
    seed = next(seed for seed in range(100) if has_fault(trial(seed).scenario))
    smallest = shrink_scenario(trial(seed).scenario, has_fault)
    assert [member.worker for member in smallest.members] == ["b-1"]
    assert (len(smallest.owners), smallest.reshapes, smallest.network.outages) == (2, (), ())
    assert [fault for fault in FAULTS if getattr(smallest.network, fault)] == ["lost"]
    assert smallest.members[0].naps == ()
    assert f"seed {seed}, 2 leases" in describe_scenario(smallest)
