"""Workers of a simulated fleet rarely list the whole table, whether balanced or during a rolling replacement."""

from attrs import evolve

from leasehold.balancer.config import Config
from leasehold.balancer.lookout import LOOKOUT_LISTING_SECONDS
from leasehold.balancer.rules.kcl import Kcl
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Member, Network, Scenario, create_rolling_fleet, name_group_workers


def test_present_workers_list_nothing_at_the_start() -> None:
    """Workers that were present before the run start without listing the table."""
    names = name_group_workers(0, 8)
    members = tuple(Member(name, Config(), present=True) for name in names)
    scenario_with_death = Scenario(
        1, tuple(names) * 5, (evolve(members[0], ends=20.0), *members[1:]), 60.0, network=Network()
    )
    quiet_scenario = evolve(scenario_with_death, members=members)
    assert len({process for _, _, process in run(quiet_scenario).listings}) == 1
    history = run(scenario_with_death)
    owners = {write.after.owner for write in history.writes if write.after is not None and write.t > 20.0}
    assert None in owners  # the dead worker's leases are released
    assert names[0] not in owners  # and other workers take them


def test_rolling_replacement_lists_no_more_than_kcl() -> None:
    """A fleet whose workers are replaced in turn lists no more rows than a fleet of KCL 2.x does."""
    fleet = create_rolling_fleet(200, name_group_workers(0, 10), Config(), gap=10.0, seed=1, cycles=3.0)
    listing_times = [start_time for start_time, _, _ in run(fleet.scenario).listings if start_time >= fleet.since]
    seconds = fleet.scenario.seconds - fleet.since
    assert len(listing_times) <= 10 * seconds / Config(Kcl()).cycle_seconds
    assert len(listing_times) > seconds / LOOKOUT_LISTING_SECONDS - 1
