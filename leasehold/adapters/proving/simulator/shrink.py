"""Makes a failing scenario smaller while it goes on failing in the same way: greedy removal, one thing at a time."""

from collections.abc import Callable, Iterator
from typing import Any

from attrs import evolve

from leasehold.adapters.proving.simulator.scenario import Scenario

EVENTS = ("reshapes", "emptyings", "misdeeds")
FAULTS = ("stall", "lost", "unanswered", "late", "twice", "stale")


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool], *, most_runs: int = 200) -> Scenario:
    """The smallest scenario found in so many runs that still fails."""
    runs = 0
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(scenario):
            runs += 1
            if runs > most_runs:
                return scenario
            if fails(smaller):
                scenario, progress = smaller, True
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Smaller scenarios, those that remove most first."""
    members, network = scenario.members, scenario.network
    for place, member in enumerate(members):
        without = (*members[:place], *members[place + 1 :])
        gone = {member.worker} - {other.worker for other in without}
        owners = tuple(None if owner in gone else owner for owner in scenario.owners)
        yield evolve(scenario, members=without, owners=owners)
    for what in EVENTS:
        events = getattr(scenario, what)
        for place in range(len(events)):
            without_one: dict[str, Any] = {what: (*events[:place], *events[place + 1 :])}
            yield evolve(scenario, **without_one)
    if len(scenario.owners) > 1:
        yield evolve(scenario, owners=scenario.owners[:-1])
    if network.outages:
        yield evolve(scenario, network=evolve(network, outages=()))
    for fault in FAULTS:
        if getattr(network, fault):
            without_it: dict[str, Any] = {fault: 0.0}
            yield evolve(scenario, network=evolve(network, **without_it))
    for place, member in enumerate(members):
        if member.naps:
            calmer = evolve(member, naps=member.naps[1:])
            yield evolve(scenario, members=(*members[:place], calmer, *members[place + 1 :]))


def described(scenario: Scenario) -> str:
    """A description of the scenario, one fact a line."""
    network = [
        f"{fault} {getattr(scenario.network, fault):.4f}" for fault in FAULTS if getattr(scenario.network, fault)
    ]
    return "\n".join(
        (
            f"seed {scenario.seed}, {len(scenario.owners)} leases owned by {', '.join(map(str, scenario.owners))}",
            *(f"member {member}" for member in scenario.members),
            *(f"{reshape}" for reshape in scenario.reshapes),
            *(f"{emptying}" for emptying in scenario.emptyings),
            *(f"{misdeed}" for misdeed in scenario.misdeeds),
            f"network: {', '.join(network) or 'no faults'}; outages {scenario.network.outages or 'none'}",
        )
    )
