"""Fleets under virtual time with rules and a handler of one's own: real workers, a judge, and the smallest fleet.

Everything is decided by the seed: the same call gives the same run, to the last write, on every machine.
"""

from attrs import evolve, frozen

from leasehold.adapters.history.breach import Breach, Limits
from leasehold.adapters.history.judge import judge
from leasehold.adapters.proving.simulator.chaos import Trial, trial
from leasehold.adapters.proving.simulator.explained import explained
from leasehold.adapters.proving.simulator.outcome import FleetOutcome, outcome
from leasehold.adapters.proving.simulator.question import Kind, SimulationQuestion, fleet_of
from leasehold.adapters.proving.simulator.run import run
from leasehold.adapters.proving.simulator.scenario import Network, Scenario
from leasehold.adapters.proving.simulator.world.events import SimulatedHistory
from leasehold.adapters.reading.handlers.handling import Handler
from leasehold.balancer.config import Config
from leasehold.balancer.rule_set import RuleSet

REST_CYCLES = 2.0
"""Cycles at the end in which nothing but renewals may be written."""


class SimulationFailed(AssertionError):
    """The judge has something to say: what, with the smallest fleet found in which it still is so."""

    __module__ = "leasehold.testing"  # as users import it


@frozen
class Simulated:
    """A run, and what the judge says of it.

    scenario  what was run; Python that can be pasted into a test
    outcome   in figures, as `leasehold simulate` prints them
    breaches  what must not be: records lost or out of order, two holders, no rest at the end, and more
    history   every write, every reading and every record
    """

    scenario: Scenario
    outcome: FleetOutcome
    breaches: tuple[Breach, ...]
    history: SimulatedHistory
    _limits: Limits

    def check(self) -> None:
        """Raises SimulationFailed if there are breaches, after having looked for the smallest fleet with one."""
        if self.breaches:
            raise SimulationFailed(explained(Trial(self.scenario, self._limits)))


def simulate(
    rules: RuleSet,
    *,
    leases: int = 12,
    workers: tuple[int, ...] = (4,),
    event: Kind = "cold",
    going: int = 1,
    seed: int = 0,
    cycles: float = 10.0,
    handler: Handler | None = None,
    network: Network | None = None,
) -> Simulated:
    """Run one fleet through one event, with records that are read, handled and checkpointed.

    rules    of every worker
    workers  how many in each group; at a `scale-out` the last group joins the others
    event    cold, scale-out, crash, leave, rolling, reshard, steady or weights; `going` workers crash or leave
    cycles   how long to go on after the event, in `Config(rules).cycle_seconds`; the last two must be at rest
    handler  is given every batch; None: what is handed over is only recorded. Time stands still while it runs
    network  the faults of requests; None: two in a thousand stall, as many answers are lost. None in the last half
    Raises ValueError for a fleet that cannot be.
    """
    config = Config(rules)
    question = SimulationQuestion(leases, workers, kind=event, going=going, seed=seed, cycles=cycles, pace="own")
    fleet = fleet_of(question, config)
    end, cycle = fleet.scenario.seconds, config.cycle_seconds
    scenario = evolve(
        fleet.scenario,
        network=fleet.scenario.network if network is None else network,
        calm=(fleet.since + end) / 2,
        reading=True,
        full=True,
        handler=handler,
    )
    limits = Limits(
        {member.worker: config.lease_seconds for member in scenario.members},
        settled=end - REST_CYCLES * cycle,
        even=rules.evens_out,
        groups=rules.groups,
        misdeeds=handler is not None,
    )
    return _simulated(Trial(scenario, limits), fleet.since, cycle)


def chaos(rules: RuleSet, *, seed: int, handler: Handler | None = None) -> Simulated:
    """Run the fleet that this seed chooses, with every fault on: `make soak` for rules and a handler of one's own.

    Two to six workers crash, drain, pause, come back; shards split and merge; requests and answers are lost, late or
    repeated; handlers raise and hang. After two minutes all faults end, and the fleet must come to rest.
    """
    tested = trial(seed, rules)
    tested = evolve(tested, scenario=evolve(tested.scenario, handler=handler))
    if handler is not None:
        tested = evolve(tested, limits=evolve(tested.limits, misdeeds=True))
    return _simulated(tested, 0.0, Config(rules).cycle_seconds)


def _simulated(tested: Trial, since: float, cycle: float) -> Simulated:
    history = run(tested.scenario)
    figures = outcome(history, since=since, cycle_seconds=cycle, groups=tested.limits.groups)
    return Simulated(tested.scenario, figures, judge(history, tested.limits), history, tested.limits)
