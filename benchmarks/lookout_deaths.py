"""Measures how long leases remain unread after the death of the lookout, or of the workers with the next ranks.

`python benchmarks/lookout_deaths.py` prints the table that specs/cadence.md quotes. The fleets have two to a thousand
workers. In one fleet, every second worker simulates KCL 2.x. In another, the table loses requests and responses,
applies writes late and twice, returns stale rows, and cannot be reached for three seconds after the death.
"""

import logging
import math
import os
import random
import re
import sys
from statistics import median
from typing import Annotated

import typer
from attrs import evolve, frozen

from leasehold.balancer.config import Config
from leasehold.balancer.lookout import lookout_ranks
from leasehold.balancer.model import Lease
from leasehold.balancer.rules.kcl import Kcl
from leasehold.balancer.rules.minimal import Minimal
from leasehold_lab.judge.rights import measure_unowned_seconds
from leasehold_lab.processes import processes
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Member, Nap, Network, Scenario, assign_owners_evenly, name_group_workers

CRASH, AFTER = 30.0, 60.0
OURS, KCL = Config(Minimal()), Config(Kcl())
OUTAGE = (4.0, 3.0)
"""The start of the outage, in seconds after the death, and its length."""

LONGEST = OURS.lease_seconds + 15.0
"""The limit for the time that a lease may be unread after a death, in seconds and without the outage."""

ROUGH = Network(stall=0.005, lost=0.01, unanswered=0.01, late=0.005, late_seconds=10.0, twice=0.01, stale=0.1)


@frozen
class Fleet:
    """A fleet in which workers die.

    Attributes:
        kcl: Which workers simulate KCL 2.x: "none", "half" (every second one) or "all".
        rough: Whether requests to the table fail often.
        most: The limit after any death, in seconds.
        seeds: The maximum number of seeds, because a large fleet takes minutes.
    """

    name: str
    leases: int
    workers: int
    kcl: str = "none"
    rough: bool = False
    most: float = LONGEST
    seeds: int = 8

    @property
    def names(self) -> tuple[str, ...]:
        """The ids of all workers."""
        return name_group_workers(0, self.workers)

    def config(self, number: int) -> Config:
        """Return the configuration of a worker."""
        return KCL if self.kcl == "all" or (self.kcl == "half" and number % 2) else OURS


FLEETS = (
    Fleet("all KCL 2.x", 200, 20, "all", most=math.inf),
    Fleet("2 workers", 20, 2),
    Fleet("20 workers", 200, 20),
    Fleet("20, half of them KCL 2.x", 200, 20, "half"),
    Fleet("20, a table that fails often", 200, 20, rough=True, most=LONGEST + OUTAGE[1]),
    Fleet("200 workers", 500, 200, seeds=3),
    Fleet("1000 workers", 2000, 1000, seeds=1),
)


@frozen
class Death:
    """The workers that die: the `first` ones in rank, or if that is 0, the last one.

    `most` is the limit in seconds, if it is lower than that of the fleet.
    """

    name: str
    first: int
    most: float = math.inf


DEATHS = (
    Death("one worker", 0, OURS.lease_seconds + 8.0),
    Death("the lookout", 1, OURS.lease_seconds + 9.0),
    Death("the lookout and the next", 2),
    Death("the lookout and the next three", 4),
)


def seconds_unread(fleet: Fleet, death: Death, seed: int) -> float:
    """Simulate the deaths, and return the seconds until all leases are owned again."""
    logging.disable(logging.CRITICAL)
    our_workers = [name for number, name in enumerate(fleet.names) if fleet.config(number) is OURS] or fleet.names
    ranks = lookout_ranks(
        [Lease(name, owner=name, annotations=(("process", f"p/{name}"),)) for name in our_workers], OURS
    ).ranks
    dying = frozenset(ranks[: death.first] if death.first else ranks[-1:])
    draw = random.Random(seed)  # noqa: S311  a seed is the point
    death_at = CRASH + draw.uniform(0.0, KCL.cycle_seconds)
    members = []
    for number, name in enumerate(fleet.names):
        config, end = fleet.config(number), death_at if name in dying else math.inf
        members.append(Member(name, config, draw.uniform(0.0, 1.0), end, foreign=config is KCL))
    network = evolve(ROUGH, outages=(Nap(death_at + OUTAGE[0], OUTAGE[1]),)) if fleet.rough else Network()
    owners = assign_owners_evenly(fleet.leases, fleet.names, draw)
    history = run(Scenario(seed, owners, tuple(members), death_at + AFTER, calm=death_at + AFTER, network=network))
    return max(measure_unowned_seconds(history, history.end, death_at).values())


def print_line(fleet: Fleet, death: Death, results: list[float]) -> bool:
    """Print a line of the table, and return whether the limit is met."""
    limit = fleet.most if fleet.rough or fleet.kcl == "all" else min(fleet.most, death.most)
    meets_limit = max(results) <= limit
    verdict = "" if limit == math.inf else f"<= {limit:g}  {'pass' if meets_limit else 'FAIL'}"
    seconds = f"{median(results):8.1f} {max(results):8.1f}"
    print(f"{fleet.name:30} {death.name:30} {len(results):5} {seconds}   {verdict}", flush=True)
    return meets_limit


def main(
    *,
    seeds: Annotated[int, typer.Option(min=1, help="At most; fewer of large fleets.")] = 8,
    only: Annotated[str, typer.Option(help="Fleets whose name matches this expression.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Measure, and print the seconds until all leases are owned again. The exit status is 1 if a limit is not met."""
    fleets = [fleet for fleet in FLEETS if re.search(only, fleet.name)]
    print(f"{'fleet':30} {'who dies':30} seeds   median    worst   limit")
    all_good = True
    with processes(jobs) as pool:
        futures = [
            (fleet, death, [pool.submit(seconds_unread, fleet, death, seed) for seed in range(min(seeds, fleet.seeds))])
            for fleet in fleets
            for death in DEATHS
            if death.first < fleet.workers
        ]
        for fleet, death, results in futures:
            all_good &= print_line(fleet, death, [future.result() for future in results])
    sys.exit(0 if all_good else 1)


if __name__ == "__main__":
    typer.run(main)
