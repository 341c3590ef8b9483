"""Many workers join one worker that owns all leases."""

import pytest
from attrs import evolve

from leasehold.balancer.config import Config
from leasehold_lab.simulator.question import SimulationQuestion, simulate_question
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Network, create_scaled_out_fleet, name_group_workers

pytestmark = pytest.mark.slow

DATED = SimulationQuestion(80, (4, 20), kind="scale-out", pace="own", dated=True, cycles=4.0)
SLOW = Network(latency=(0.4, 0.5), stall=0.0, unanswered=0.0)


def test_owner_with_many_requests_renews_its_other_leases() -> None:
    """An owner renews its other leases while it gives many leases away."""
    fleet = create_scaled_out_fleet(
        120, ("a-000",), name_group_workers(1, 40), Config(), seed=1, start="together", cycles=2.0
    )
    history = run(evolve(fleet.scenario, network=SLOW))
    lost_leases = [
        (write.verb, write.key)
        for write in history.writes
        if write.done and write.before is not None and write.before.owner == "a-000"
        if write.verb in {"claim", "release"} and write.worker != "a-000"
    ]
    assert lost_leases == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", [1, 2])
def test_joiners_wait_for_each_other_if_annotations_cost_requests(seed: int) -> None:
    """Early joiners do not take leases that later joiners need, which saves a third of the moves."""
    outcome = simulate_question(evolve(DATED, seed=seed))
    assert (outcome.moves, outcome.spread) == (outcome.moves_minimum, 1)
