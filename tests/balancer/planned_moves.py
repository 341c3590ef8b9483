"""Runs hand-offs between real workers whose writes fail or get no response, or who die after a write.

`python tests/balancer/planned_moves.py` tries every fault alone and in pairs on all cores, and prints each breach. The
checker tests the decisions of the rules in every possible order of events. This script tests that no record is lost or
repeated when workers carry out these decisions.
"""

import logging
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Annotated

import typer
from attrs import evolve, frozen
from rich.console import Console
from rich.progress import track

from leasehold.balancer.config import Config
from leasehold.balancer.model import TRIM_HORIZON
from leasehold_lab.judge.breach import JudgeLimits
from leasehold_lab.judge.explanations import judge_history
from leasehold_lab.judge.rights import find_owner_changes
from leasehold_lab.simulator.call_faults import DEATHS, READ_CALLS, CallFault
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Member, Network, Scenario
from leasehold_lab.simulator.world.world import SimulatedHistory

GIVER, TAKER = "a-0", "b-0"
CALM, SETTLED, SECONDS = 30.0, 110.0, 130.0
STARTS = (3.0, 4.1, 5.2, 6.3, 7.4)
"""The times at which the taker joins: different points in the giver's cycle."""

app = typer.Typer(add_completion=False)

FAULTS = ("pause + raise unanswered", "do + pause + raise unanswered", *DEATHS)
"""Faults of a write: the request or the response is lost, or the process dies and may be restarted."""


@frozen
class MoveScenario:
    """A worker that owns two leases, another one that joins and takes one of them, and the faults of their writes."""

    starts: float
    call_faults: tuple[CallFault, ...] = ()

    def told(self) -> SimulatedHistory:
        """Run the scenario, and return its history."""
        config = Config(initial_position=TRIM_HORIZON)
        members = (Member(GIVER, config), Member(TAKER, config, starts=self.starts))
        network, owners = Network(stall=0.0, unanswered=0.0), (GIVER, GIVER)
        scenario = Scenario(1, owners, members, SECONDS, calm=CALM, network=network, reading=True, full=True)
        return run(evolve(scenario, call_faults=self.call_faults))


def breaches(scenario: MoveScenario) -> tuple[str, ...]:
    """Return the breaches in this scenario. A record that is handled twice is a breach, too, unless a worker died."""
    history = scenario.told()
    has_death = any(incident.what == "crash" for incident in history.incidents)
    limits = JudgeLimits(dict.fromkeys((GIVER, TAKER), Config().lease_seconds), SETTLED, duplicates=has_death)
    return tuple(str(breach) for breach in judge_history(history, limits))


def writes_of(history: SimulatedHistory) -> list[int]:
    """Return the numbers of the write calls, from the request for the hand-off to shortly after it."""
    requested_at = min((write.sent for write in history.writes if write.verb == "request"), default=math.inf)
    last_move_at = max((change.t for change in find_owner_changes(history.writes)), default=0.0)
    return [
        number
        for number, call in enumerate(history.calls)
        if requested_at <= call.t <= last_move_at + 3.0
        and call.what.startswith("store.")
        and call.what not in READ_CALLS
    ]


def alone(start_times: Iterable[float] = STARTS) -> Iterator[MoveScenario]:
    """Yield a scenario for each write and each of its faults."""
    for start in start_times:
        yield from _with_later_fault(MoveScenario(start))


def pairs(start_times: Iterable[float] = STARTS) -> Iterator[MoveScenario]:
    """Yield the scenarios with two faults. The second fault may affect any write after the first one.

    Pairs are needed because a hand-off takes additional writes after a first fault.
    """
    for scenario in alone(start_times):
        yield from _with_later_fault(scenario)


def _with_later_fault(scenario: MoveScenario) -> Iterator[MoveScenario]:
    last_number = max((call_fault.number for call_fault in scenario.call_faults), default=-1)
    for number, fault in product(writes_of(scenario.told()), FAULTS):
        if number > last_number:
            yield evolve(scenario, call_faults=(*scenario.call_faults, CallFault(number, fault)))


@app.command()
def main(*, jobs: Annotated[int, typer.Option(min=1, help="Stories told at a time.")] = os.cpu_count() or 1) -> None:
    """Try each fault at each write of a hand-off, and some pairs of faults. Exit with status 1 if a law is broken."""
    logging.disable(logging.CRITICAL)  # otherwise workers would log each fault
    scenarios = [*alone(), *pairs(STARTS[:2])]
    with ProcessPoolExecutor(jobs) as pool:
        breaches_by_scenario = zip(
            scenarios, track(pool.map(breaches, scenarios, chunksize=50), "moves", len(scenarios)), strict=True
        )
        failures = [
            f"{scenario}: {'; '.join(scenario_breaches)}"
            for scenario, scenario_breaches in breaches_by_scenario
            if scenario_breaches
        ]
    Console().print(*failures, f"{len(scenarios)} stories, {len(failures)} with something wrong", sep="\n")
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    app()
