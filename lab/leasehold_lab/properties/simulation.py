"""Simulates fleets of real workers with your own rules and handler under virtual time, and judges the runs.

A run depends only on its arguments, which include a seed, so the same call has the same result on every machine.
`settled` is a simpler simulation, in which the workers of a small fleet plan and act in turn until nothing changes.
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
from leasehold_lab.judge.breach import Breach, JudgeLimits
from leasehold_lab.judge.explanations import judge_history
from leasehold_lab.properties.strategies import Scene, SmallFleet, format_as_code
from leasehold_lab.simulator.chaos import Trial, trial
from leasehold_lab.simulator.question import Kind, SimulationQuestion, build_fleet
from leasehold_lab.simulator.run import FleetOutcome, explain_failure, measure_outcome, run
from leasehold_lab.simulator.scenario import Network, Scenario
from leasehold_lab.simulator.world.world import SimulatedHistory

REST_CYCLES = 2.0
"""The number of cycles at the end of a run in which workers may write only renewals."""


class SimulationFailed(AssertionError):
    """Raised if the judge found breaches. The message contains a simplified fleet and its breaches."""

    __module__ = "leasehold.testing"  # as users import it


@frozen
class SimulationResult:
    """The result of a simulated run.

    Attributes:
        scenario: The simulated fleet and its faults. The repr is Python code that can be pasted into a test.
        outcome: The figures that `leasehold simulate` prints.
        breaches: The laws that the run broke, for example lost records, or two owners of a lease at the same time.
        history: All recorded writes, reads and records.
    """

    scenario: Scenario
    outcome: FleetOutcome
    breaches: tuple[Breach, ...]
    history: SimulatedHistory
    _limits: JudgeLimits

    def check(self) -> None:
        """If there are breaches, raise SimulationFailed with the smallest fleet that was found to cause them."""
        if self.breaches:
            raise SimulationFailed(explain_failure(Trial(self.scenario, self._limits)))


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
) -> SimulationResult:
    """Simulate a fleet during one event, with records that are read, handled and checkpointed.

    Args:
        rules: The rule set of every worker.
        leases: The number of leases.
        workers: The number of workers in each group. In a `scale-out`, the last group joins the others.
        event: One of cold, scale-out, crash, leave, rolling, reshard, steady and weights.
        going: The number of workers that crash or leave.
        seed: The seed of all random numbers.
        cycles: The duration after the event, in units of `Config(rules).cycle_seconds`. During the last two cycles the
            fleet must be balanced, and make no moves.
        handler: Called with every batch. No virtual time passes while it runs. Without a handler, records are only
            added to the history.
        network: The delays and faults of requests. By default, two in a thousand requests stall, and as many responses
            are lost. There are no faults in the second half of the run.

    Raises:
        ValueError: No fleet with these arguments is possible.
    """
    config = Config(rules)
    question = SimulationQuestion(leases, workers, kind=event, going=going, seed=seed, cycles=cycles, pace="own")
    fleet = build_fleet(question, config)
    end_time, cycle_seconds = fleet.scenario.seconds, config.cycle_seconds
    scenario = evolve(
        fleet.scenario,
        network=fleet.scenario.network if network is None else network,
        calm=(fleet.since + end_time) / 2,
        reading=True,
        full=True,
        handler=handler,
    )
    limits = JudgeLimits(
        {member.worker: config.lease_seconds for member in scenario.members},
        settled=end_time - REST_CYCLES * cycle_seconds,
        even=rules.evens_out,
        groups=rules.groups,
        callable_faults=handler is not None,
    )
    return _run_trial(Trial(scenario, limits), fleet.since, cycle_seconds)


def chaos(rules: RuleSet, *, seed: int, handler: Handler | None = None) -> SimulationResult:
    """Simulate a random fleet with all kinds of faults, both determined by the seed.

    The fleet has two to six workers. They crash, drain, pause and return. Shards split and merge. Requests and
    responses are lost, late or repeated. Handlers raise exceptions and hang. After two minutes of virtual time all
    faults end, and the fleet must come to rest. `make soak` runs this simulation with leasehold's own rules.
    """
    chosen_trial = trial(seed, rules)
    chosen_trial = evolve(chosen_trial, scenario=evolve(chosen_trial.scenario, handler=handler))
    if handler is not None:
        chosen_trial = evolve(chosen_trial, limits=evolve(chosen_trial.limits, callable_faults=True))
    return _run_trial(chosen_trial, 0.0, Config(rules).cycle_seconds)


def _run_trial(trial_run: Trial, since: float, cycle_seconds: float) -> SimulationResult:
    history = run(trial_run.scenario)
    figures = measure_outcome(history, since=since, cycle_seconds=cycle_seconds, groups=trial_run.limits.groups)
    return SimulationResult(
        trial_run.scenario, figures, judge_history(history, trial_run.limits), history, trial_run.limits
    )


ROUNDS_PER_LEASE, EXTRA_ROUNDS = 4, 20
"""The number of rounds that a fleet may take to settle, per lease and in addition.

The limit grows with the number of leases, because some rule sets move only one lease per turn.
"""

STORY_LINES_MAX = 8

WAIT_SECONDS = 1e6
"""A lease that has been idle for this many seconds has exceeded every timeout of the rule sets.

All leases become idle for this long when no worker has anything to do.
"""


class Planner(Protocol):
    """A function with the arguments and the result of `leasehold.plan`."""

    def __call__(
        self, leases: Iterable[Lease], shards: Iterable[Shard] | None, me: Me, config: Config
    ) -> tuple[Action, ...]:
        """Return the actions that the worker `me` should carry out."""


class LawBroken(AssertionError):
    """Raised if a law is broken. The message contains the fault, the case as Python code, and the plan."""

    __module__ = "leasehold.testing"  # as users import it

    def __init__(self, fault: str, case: Scene | SmallFleet, actions: Iterable[Action], details: str = "") -> None:
        worker_line = f"me      {format_as_code(case.me)}\n" if isinstance(case, Scene) else ""
        table_text = "\n        ".join(map(format_as_code, case.leases)) or "none"
        planned_text = format_actions(actions)
        super().__init__(
            f"{fault}\n{worker_line}rules   {format_as_code(case.config.rules)}\nleases  {table_text}"
            + (f"\nplan    {planned_text}" if planned_text else "")
            + (f"\n{details}" if details else "")
        )


def format_actions(actions: Iterable[Action]) -> str:
    """Format each action with its rule, for example `T1 Claim s-0`."""
    return "; ".join(f"{action.rule} {type(action).__name__} {action.lease.key}" for action in actions)


@frozen
class SettledFleet:
    """A fleet that has come to rest, so that no worker has anything left to do.

    Attributes:
        owners: The owner of each lease.
        moves: The number of times that a lease was taken from another worker.
        claims: The number of times that a free lease was taken.
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
    """Let workers plan and act in turn until nothing changes, even after all timeouts have expired.

    Raises LawBroken if the fleet does not come to rest.
    """
    leases_by_key = {lease.key: lease for lease in fleet.leases}
    move_lines: list[str] = []
    move_count = claim_count = 0
    waited_seconds = 0.0
    for turn in range(EXTRA_ROUNDS + ROUNDS_PER_LEASE * len(leases_by_key)):
        line_count_before = len(move_lines)
        for worker in fleet.workers:
            leases_as_read = [
                evolve(lease, idle=waited_seconds) if lease.owner is None else lease for lease in leases_by_key.values()
            ]
            me = Me(worker, fleet.turn + turn, History(owners_still=waited_seconds, fleet_still=waited_seconds))
            for action in plan(leases_as_read, None, me, fleet.config):
                owner = new_owner = action.lease.owner
                match action:
                    case Claim() | Steal() | RequestHandoff():
                        new_owner = worker
                    case Release(next_owner=next_owner):
                        new_owner = next_owner
                    case _:
                        pass
                if new_owner != owner:
                    move_count, claim_count = move_count + (owner is not None), claim_count + (owner is None)
                    leases_by_key[action.lease.key] = evolve(action.lease, owner=new_owner, idle=fleet.idle)
                    change_text = f"{owner or 'nobody'} -> {new_owner or 'nobody'}"
                    move_lines.append(f"turn {turn}  {format_actions((action,))} by {worker}: {change_text}")
        last_moves = "\n".join(move_lines[-STORY_LINES_MAX:])
        if len(move_lines) > line_count_before:
            waited_seconds = 0.0
        elif waited_seconds:
            return SettledFleet(
                {key: lease.owner for key, lease in leases_by_key.items()}, move_count, claim_count, last_moves
            )
        else:
            # Timeouts expire only if no worker has anything to do, because only then are all workers known to be
            # waiting.
            waited_seconds = WAIT_SECONDS
    raise LawBroken(f"after {turn + 1} turns of each worker leases still move", fleet, (), last_moves)


def least_moves(counts: Iterable[int]) -> int:
    """Return the least number of moves after which the lease counts of any two workers differ by at most one.

    Args:
        counts: The number of leases of each worker.
    """
    workers = {str(index): count for index, count in enumerate(counts)}
    owners = {(worker, lease_number): worker for worker, count in workers.items() for lease_number in range(count)}
    return groups.least_moves(owners, workers)
