"""Simulates fleets with all kinds of faults, one per seed, and prints each breach with its seed and a smaller fleet.

`python tests/proving/soak.py 10000` runs this many seeds on all cores. With `--acknowledging`, it runs only seeds whose
handlers acknowledge late, at random or never.
"""

import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from leasehold_lab.judge.breach import Breach
from leasehold_lab.processes import processes
from leasehold_lab.simulator.chaos import trial
from leasehold_lab.simulator.run import explain_failure, run_and_find_breaches

app = typer.Typer(add_completion=False)

CHUNK = 25


@app.command()
def main(
    seeds: Annotated[int, typer.Argument(min=1, help="How many seeds.")] = 10_000,
    *,
    first: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    acknowledging: Annotated[
        bool, typer.Option(help="Only fleets whose consumers acknowledge late, at random or never.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Simulate fleets with all kinds of faults. Exit with status 1 if the judge finds a breach."""
    console = Console(stderr=True)
    all_seeds = itertools.count(first)
    eligible_seeds = (
        (seed for seed in all_seeds if trial(seed).scenario.acknowledges != "return") if acknowledging else all_seeds
    )
    chosen_seeds = tuple(itertools.islice(eligible_seeds, seeds))
    failed_seeds, start_time = list[int](), time.monotonic()
    for seed, breaches in track(
        find_breaches(chosen_seeds, jobs), "simulating", total=len(chosen_seeds), console=console
    ):
        if breaches:
            failed_seeds.append(seed)
            console.print(f"seed {seed}:\n{explain_failure(trial(seed))}", markup=False, highlight=False)
    seconds = time.monotonic() - start_time
    timing_counts = Counter(trial(seed).scenario.acknowledges for seed in chosen_seeds)
    timings = ", ".join(f"{timing} {count}" for timing, count in sorted(timing_counts.items()))
    typer.echo(
        f"{len(chosen_seeds)} fleets in {seconds:.0f} s, {3600 * len(chosen_seeds) / seconds:.0f} an hour; "
        f"acknowledged: {timings}"
    )
    typer.echo(
        f"{len(failed_seeds)} with something to say{': ' if failed_seeds else ''}{', '.join(map(str, failed_seeds))}"
    )
    raise typer.Exit(1 if failed_seeds else 0)


def find_breaches(seeds: Iterable[int], jobs: int) -> Iterator[tuple[int, tuple[Breach, ...]]]:
    """Yield each seed with its breaches, in order. The workers' logs are discarded, because faults are expected."""
    logging.getLogger("leasehold").setLevel(logging.CRITICAL)
    if jobs == 1:
        yield from map(breaches_of_seed, seeds)
        return
    with processes(jobs) as pool:
        yield from pool.map(breaches_of_seed, seeds, chunksize=CHUNK)


def breaches_of_seed(seed: int) -> tuple[int, tuple[Breach, ...]]:
    """Return the breaches that the judge finds in this seed's fleet."""
    return seed, run_and_find_breaches(trial(seed))


if __name__ == "__main__":
    app()
