"""A forecast: what a change does to a fleet, told from the run of a scenario."""

from collections import Counter
from typing import Any

from attrs import evolve, frozen

from leasehold.adapters.history.ownership import OwnerChange, changes, owners_at, settled
from leasehold.adapters.proving.simulator.outcome import FleetOutcome, outcome
from leasehold.adapters.proving.simulator.run import run
from leasehold.adapters.proving.simulator.scenario import Scenario
from leasehold.balancer.config import Config
from leasehold.stores.fields import kilobytes


@frozen
class Forecast:
    """The answer of the simulation.

    before   moves that would come without the change
    moves    those after it, in order of time, which counts from the change
    held     leases by worker at the end
    figures  how the fleet fared
    """

    before: tuple[OwnerChange, ...]
    moves: tuple[OwnerChange, ...]
    held: dict[str, int]
    loads: dict[str, float]
    figures: FleetOutcome

    def as_json(self) -> dict[str, Any]:
        """Values that `json.dumps` takes."""
        told = [{"t": round(one.t, 3), "key": one.key, "from": one.before, "to": one.after} for one in self.moves]
        return {
            "moves": told,
            "moves_before": len(self.before),
            "workers": [
                {"worker": name, "leases": count, "weight": self.loads[name]} for name, count in self.held.items()
            ],
            "figures": {name: value for name, value in self.figures.as_json().items() if name != "traffic"},
        }


def forecast_of(scenario: Scenario, config: Config, since: float) -> Forecast:
    """Run the scenario, whose change comes at `since`."""
    history = run(scenario)
    passed = [change for change in changes(history.writes) if change.after is not None]
    living = [member.worker for member in scenario.members if member.alive(scenario.seconds - 1e-6)]
    owners = owners_at(history, history.end)
    counts = Counter(owners.values())
    weights = {row.key: row.weight or 0 for row in history.first}
    loads = {name: sum(weights.get(key, 0) for key, owner in owners.items() if owner == name) for name in living}
    return Forecast(
        settled(change for change in passed if change.t < since),
        tuple(evolve(change, t=change.t - since) for change in settled(one for one in passed if one.t >= since)),
        {worker: counts[worker] for worker in sorted(living)},
        {worker: round(kilobytes(load), 3) for worker, load in loads.items()},
        outcome(history, since=since, cycle_seconds=config.cycle_seconds, groups=config.rules.groups),
    )
