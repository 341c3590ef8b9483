"""Many workers join one that owns everything."""

from attrs import evolve

from adapters.simulator.fleets import group_of, scale_out
from adapters.simulator.run import run
from adapters.simulator.scenario import Network
from balancer.config import Config

SLOW = Network(latency=(0.4, 0.5), stall=0.0, unanswered=0.0)


def test_an_owner_that_is_asked_for_much_at_once_stays_alive() -> None:
    """Without it one that gives lease by lease renews nothing meanwhile, and loses what nobody had asked it for."""
    fleet = scale_out(120, ("a-000",), group_of(1, 40), Config(), seed=1, start="together", cycles=2.0)
    history = run(evolve(fleet.scenario, network=SLOW))
    lost = [
        (write.verb, write.key)
        for write in history.writes
        if write.done and write.before is not None and write.before.owner == "a-000"
        if write.verb in {"claim", "release"} and write.worker != "a-000"
    ]
    assert lost == []
