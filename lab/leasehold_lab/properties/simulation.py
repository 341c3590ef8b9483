"""Runs fleets of real workers under virtual time, with rules and a handler of your own, and judges the runs.

The seed decides everything: the same call gives the same run, down to the last write, on every machine. `settled` is
simpler: the workers of a small fleet plan and act in turn until nothing changes. `LawBroken` reports what went wrong.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from attrs import evolve, frozen

from leasehold.adapters.consumer.handling import Handler
from leasehold.balancer.actions import Action, Claim, Release, RequestHandoff, Steal
from leasehold.balancer.config import Config
from leasehold.balancer.model import History, Lease, Me, Shard
from leasehold.balancer.rule_set import RuleSet
from leasehold.balancer.rules import shares as groups
from leasehold_lab.judge.breach import Breach, Limits
from leasehold_lab.judge.explanations import judge
from leasehold_lab.properties.strategies import Scene, SmallFleet, brief
from leasehold_lab.simulator.chaos import Trial, trial
from leasehold_lab.simulator.question import Kind, SimulationQuestion, fleet_of
from leasehold_lab.simulator.run import FleetOutcome, explanation_of, outcome, run
from leasehold_lab.simulator.scenario import Network, Scenario
from leasehold_lab.simulator.world.world import SimulatedHistory

REST_CYCLES = 2.0
"""Cycles at the end in which only renewals may be written."""


class SimulationFailed(AssertionError):
    """The judge found breaches. The message has them, and the smallest fleet found that still has one."""

    __module__ = "leasehold.testing"  # as users import it


@frozen
class Simulated:
    """A run, and the verdict of the judge.

    Attributes:
        scenario: The run; its repr is Python that can be pasted into a test.
        outcome: The figures that `leasehold simulate` prints.
        breaches: What went wrong: records lost or out of order, two holders, no rest at the end, and more.
        history: Every write, every read and every record.
    """

    scenario: Scenario
    outcome: FleetOutcome
    breaches: tuple[Breach, ...]
    history: SimulatedHistory
    _limits: Limits

    def check(self) -> None:
        """Find the smallest fleet with a breach, and raise SimulationFailed, if there are breaches."""
        if self.breaches:
            raise SimulationFailed(explanation_of(Trial(self.scenario, self._limits)))


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

    Args:
        rules: The rule set of every worker.
        leases: The number of leases.
        workers: The number of workers in each group; at a `scale-out` the last group joins the others.
        event: One of cold, scale-out, crash, leave, rolling, reshard, steady and weights.
        going: How many workers crash or leave.
        seed: The seed of everything that is random.
        cycles: How long to continue after the event, in units of `Config(rules).cycle_seconds`. During the last two
            the fleet must be at rest.
        handler: Receives every batch. Time does not pass while it runs. Without a handler records are only recorded.
        network: The faults of requests. By default two in a thousand requests stall, and as many responses are lost.
            The last half of the time has no faults.

    Raises:
        ValueError: There can be no such fleet.
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
        callable_faults=handler is not None,
    )
    return _simulated(Trial(scenario, limits), fleet.since, cycle)


def chaos(rules: RuleSet, *, seed: int, handler: Handler | None = None) -> Simulated:
    """Run the fleet that this seed chooses, with all faults: `make soak` for rules and a handler of your own.

    Two to six workers crash, drain, pause and return; shards split and merge; requests and responses are lost, late or
    repeated; handlers raise and hang. After two minutes all faults end, and the fleet must come to rest.
    """
    tested = trial(seed, rules)
    tested = evolve(tested, scenario=evolve(tested.scenario, handler=handler))
    if handler is not None:
        tested = evolve(tested, limits=evolve(tested.limits, callable_faults=True))
    return _simulated(tested, 0.0, Config(rules).cycle_seconds)


def _simulated(tested: Trial, since: float, cycle: float) -> Simulated:
    history = run(tested.scenario)
    figures = outcome(history, since=since, cycle_seconds=cycle, groups=tested.limits.groups)
    return Simulated(tested.scenario, figures, judge(history, tested.limits), history, tested.limits)


ROUNDS_EACH, ROUNDS_MORE = 4, 20
"""The rounds that a fleet may take, for each lease and in addition.

A rule set that moves one lease a turn needs one for each lease.
"""

STORY_LINES = 8

WAIT_SECONDS = 1e6
"""Seconds that exhaust the patience of any rule set. They pass whenever no worker has anything to do."""


class Planner(Protocol):
    """The seam: a function with the arguments and the result of `leasehold.plan`."""

    def __call__(
        self, leases: Iterable[Lease], shards: Iterable[Shard] | None, me: Me, config: Config
    ) -> tuple[Action, ...]:
        """Return the actions of this worker."""


class LawBroken(AssertionError):
    """Raised if a law does not hold. The message contains the fault, the case as Python code, and the plan."""

    __module__ = "leasehold.testing"  # as users import it

    def __init__(self, wrong: str, case: Scene | SmallFleet, actions: Iterable[Action], more: str = "") -> None:
        who = f"me      {brief(case.me)}\n" if isinstance(case, Scene) else ""
        table = "\n        ".join(map(brief, case.leases)) or "none"
        planned = formatted(actions)
        super().__init__(
            f"{wrong}\n{who}rules   {brief(case.config.rules)}\nleases  {table}"
            + (f"\nplan    {planned}" if planned else "")
            + (f"\n{more}" if more else "")
        )


def formatted(actions: Iterable[Action]) -> str:
    """Format each action with its rule, as in `T1 Claim s-0`."""
    return "; ".join(f"{action.rule} {type(action).__name__} {action.lease.key}" for action in actions)


@frozen
class SettledFleet:
    """A fleet in which nobody has anything left to do.

    Attributes:
        owners: The owner of each lease.
        moves: How many leases were taken from another worker on the way.
        claims: How many free leases were taken.
        story: The last moves, one per line.
    """

    owners: dict[str, str | None]
    moves: int
    claims: int
    story: str

    @property
    def counts(self) -> Counter[str]:
        """The number of leases of each worker."""
        return Counter(owner for owner in self.owners.values() if owner is not None)


def settled(plan: Planner, fleet: SmallFleet) -> SettledFleet:
    """Let workers plan and act in turn until nothing changes, however long they wait.

    Raises LawBroken for a fleet that does not come to rest.
    """
    table = {lease.key: lease for lease in fleet.leases}
    story: list[str] = []
    moves = claims = 0
    waited = 0.0
    for turn in range(ROUNDS_MORE + ROUNDS_EACH * len(table)):
        passed = len(story)
        for worker in fleet.workers:
            seen = [evolve(lease, idle=waited) if lease.owner is None else lease for lease in table.values()]
            me = Me(worker, fleet.turn + turn, History(owners_still=waited, fleet_still=waited))
            for action in plan(seen, None, me, fleet.config):
                owner = after = action.lease.owner
                match action:
                    case Claim() | Steal() | RequestHandoff():
                        after = worker
                    case Release(next_owner=next_owner):
                        after = next_owner
                    case _:
                        pass
                if after != owner:
                    moves, claims = moves + (owner is not None), claims + (owner is None)
                    table[action.lease.key] = evolve(action.lease, owner=after, idle=fleet.idle)
                    change = f"{owner or 'nobody'} -> {after or 'nobody'}"
                    story.append(f"turn {turn}  {formatted((action,))} by {worker}: {change}")
        last = "\n".join(story[-STORY_LINES:])
        if len(story) > passed:
            waited = 0.0
        elif waited:
            return SettledFleet({key: lease.owner for key, lease in table.items()}, moves, claims, last)
        else:
            # Patience ends only by waiting, and all workers certainly wait only when none has anything to do.
            waited = WAIT_SECONDS
    raise LawBroken(f"after {turn + 1} turns of each worker leases still move", fleet, (), last)


def least_moves(counts: Iterable[int]) -> int:
    """Return the fewest moves, of one lease each, after which no two workers differ by more than one."""
    workers = {str(place): count for place, count in enumerate(counts)}
    owners = {(worker, number): worker for worker, count in workers.items() for number in range(count)}
    return groups.least_moves(owners, workers)
