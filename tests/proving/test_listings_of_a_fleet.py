"""How often the workers of a simulated fleet list the whole table, where they were there before the run began."""

from attrs import evolve

from leasehold.adapters.proving.simulator.run import run
from leasehold.adapters.proving.simulator.scenario import Member, Network, Scenario, group_of
from leasehold.balancer.config import Config


def test_who_was_there_before_the_run_lists_nothing_at_its_start() -> None:
    """A thousand workers that each read a table of ten thousand rows at once cannot be simulated in time."""
    names = group_of(0, 8)
    members = tuple(Member(name, Config(), present=True) for name in names)
    ended = Scenario(1, tuple(names) * 5, (evolve(members[0], ends=20.0), *members[1:]), 60.0, network=Network())
    rest = evolve(ended, members=members)
    assert len({process for _, _, process in run(rest).listings}) == 1
    history = run(ended)
    owners = {write.after.owner for write in history.writes if write.after is not None and write.t > 20.0}
    assert None in owners  # the dead worker's leases are let go
    assert names[0] not in owners  # and are taken by others
