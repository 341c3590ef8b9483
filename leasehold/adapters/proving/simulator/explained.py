"""The judgement of a trial, with the smallest fleet in which what is wrong still is."""

from attrs import evolve

from leasehold.adapters.history.breach import Breach, BreachKind
from leasehold.adapters.history.judge import judge
from leasehold.adapters.proving.simulator.chaos import Trial
from leasehold.adapters.proving.simulator.run import run
from leasehold.adapters.proving.simulator.scenario import Scenario
from leasehold.adapters.proving.simulator.shrink import described, shrink


def judged(tested: Trial) -> tuple[Breach, ...]:
    """The breaches in a run of this trial."""
    return judge(run(tested.scenario), tested.limits)


def explained(tested: Trial) -> str:
    """A report of the breaches, and the smallest fleet found that still shows them."""
    what = {breach.what for breach in judged(tested)}
    smallest = shrink(tested.scenario, lambda smaller: _still(tested, smaller, what))
    breaches = judged(evolve(tested, scenario=smallest))
    return "\n".join((*map(str, breaches), "in the smallest fleet found:", described(smallest)))


def _still(tested: Trial, smaller: Scenario, what: set[BreachKind]) -> bool:
    return bool(what & {breach.what for breach in judged(evolve(tested, scenario=smaller))})
