"""Many seeds, each a fleet with all faults on; whatever the judge says is printed with its seed, shrunk.

`python -m adapters.simulator.soak 10000` runs that many on all cores.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from typing import Annotated

import typer
from attrs import evolve
from rich.console import Console
from rich.progress import track

from adapters.processes import processes
from adapters.simulator.chaos import Trial, trial
from adapters.simulator.judge import Breach, What, judge
from adapters.simulator.run import run
from adapters.simulator.scenario import Scenario
from adapters.simulator.shrink import described, shrink

app = typer.Typer(add_completion=False)

CHUNK = 25


@app.command()
def main(
    seeds: Annotated[int, typer.Argument(min=1, help="How many seeds.")] = 10_000,
    *,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Simulate fleets with all faults on; exit 1 if the judge has anything to say."""
    console = Console(stderr=True)
    wanted = range(first, first + seeds)
    faulty = []
    for seed, breaches in track(tried(wanted, jobs), "simulating", total=seeds, console=console):
        if breaches:
            faulty.append(seed)
            console.print(explained(seed), markup=False, highlight=False)
    typer.echo(
        f"{seeds} fleets, {len(faulty)} with something to say{': ' if faulty else ''}{', '.join(map(str, faulty))}"
    )
    raise typer.Exit(1 if faulty else 0)


def tried(seeds: Iterable[int], jobs: int) -> Iterator[tuple[int, tuple[Breach, ...]]]:
    """Each seed with its breaches, in order."""
    if jobs == 1:
        yield from map(breaches_of, seeds)
        return
    with processes(jobs) as pool:
        yield from pool.map(breaches_of, seeds, chunksize=CHUNK)


def breaches_of(seed: int) -> tuple[int, tuple[Breach, ...]]:
    """What the judge says of this seed's fleet."""
    logging.getLogger("leasehold").setLevel(logging.CRITICAL)  # that things go wrong is the point here
    return seed, _judged(trial(seed))


def explained(seed: int) -> str:
    """What is wrong under this seed, and the smallest fleet found in which it still is."""
    tested = trial(seed)
    what = {breach.what for breach in _judged(tested)}
    smallest = shrink(tested.scenario, lambda smaller: _still(tested, smaller, what))
    breaches = _judged(evolve(tested, scenario=smallest))
    return "\n".join((f"seed {seed}:", *map(str, breaches), "in the smallest fleet found:", described(smallest)))


def _still(tested: Trial, smaller: Scenario, what: set[What]) -> bool:
    return bool(what & {breach.what for breach in _judged(evolve(tested, scenario=smaller))})


def _judged(tested: Trial) -> tuple[Breach, ...]:
    return judge(run(tested.scenario), tested.limits)


if __name__ == "__main__":
    app()
