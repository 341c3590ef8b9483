"""How long leases stay unread after the deaths that matter to the cadence: of the lookout, and of those next in rank.

`python benchmarks/lookout_deaths.py` prints a table; specs/cadence.md quotes it. Fleets from two workers to a
thousand; one in which every second worker is a model of KCL 2.x; one whose table loses requests and answers, lets
writes come late and twice, shows old rows, and answers nobody for three seconds after the death.
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
from leasehold_lab.judge.rights import unowned
from leasehold_lab.processes import processes
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Member, Nap, Network, Scenario, balanced, group_of

CRASH, AFTER = 30.0, 60.0
OURS, KCL = Config(Minimal()), Config(Kcl())
OUTAGE = (4.0, 3.0)
"""Seconds after the death, and its length."""

LONGEST = OURS.lease_seconds + 15.0
"""How long no death may leave anything unread, in seconds, the outage apart."""

ROUGH = Network(stall=0.005, lost=0.01, unanswered=0.01, late=0.005, late_seconds=10.0, twice=0.01, stale=0.1)


@frozen
class Fleet:
    """A fleet in which somebody dies.

    kcl    which workers are KCL 2.x: none, every second, or all
    rough  whether the table fails often
    most   the limit for any death, in seconds
    seeds  how many at most: a large fleet takes minutes
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
        """Of all workers."""
        return group_of(0, self.workers)

    def config(self, number: int) -> Config:
        """Of one worker."""
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
    """Who dies: so many of the first in rank, or the last; and the limit where that is tighter than the fleet's."""

    name: str
    first: int
    most: float = math.inf


DEATHS = (
    Death("one worker", 0, OURS.lease_seconds + 8.0),
    Death("the lookout", 1, OURS.lease_seconds + 9.0),
    Death("the lookout and the next", 2),
    Death("the lookout and the next three", 4),
)


def unread(fleet: Fleet, death: Death, seed: int) -> float:
    """Seconds until everything is owned again."""
    logging.disable(logging.CRITICAL)
    ours = [name for number, name in enumerate(fleet.names) if fleet.config(number) is OURS] or fleet.names
    ranks = lookout_ranks(
        [Lease(name, owner=name, annotations=(("process", f"p/{name}"),)) for name in ours], OURS
    ).ranks
    gone = frozenset(ranks[: death.first] if death.first else ranks[-1:])
    draw = random.Random(seed)  # noqa: S311  a seed is the point
    at = CRASH + draw.uniform(0.0, KCL.cycle_seconds)
    members = []
    for number, name in enumerate(fleet.names):
        config, end = fleet.config(number), at if name in gone else math.inf
        members.append(Member(name, config, draw.uniform(0.0, 1.0), end, foreign=config is KCL))
    network = evolve(ROUGH, outages=(Nap(at + OUTAGE[0], OUTAGE[1]),)) if fleet.rough else Network()
    owners = balanced(fleet.leases, fleet.names, draw)
    history = run(Scenario(seed, owners, tuple(members), at + AFTER, calm=at + AFTER, network=network))
    return max(unowned(history, history.end, at).values())


def line(fleet: Fleet, death: Death, told: list[float]) -> bool:
    """Print one; whether its limit holds."""
    most = fleet.most if fleet.rough or fleet.kcl == "all" else min(fleet.most, death.most)
    good = max(told) <= most
    verdict = "" if most == math.inf else f"<= {most:g}  {'pass' if good else 'FAIL'}"
    seconds = f"{median(told):8.1f} {max(told):8.1f}"
    print(f"{fleet.name:30} {death.name:30} {len(told):5} {seconds}   {verdict}", flush=True)
    return good


def main(
    *,
    seeds: Annotated[int, typer.Option(min=1, help="At most; fewer of large fleets.")] = 8,
    only: Annotated[str, typer.Option(help="Fleets whose name matches this expression.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Measure and print: seconds until all is owned again. Exits with 1 where a limit does not hold."""
    fleets = [fleet for fleet in FLEETS if re.search(only, fleet.name)]
    print(f"{'fleet':30} {'who dies':30} seeds   median    worst   limit")
    good = True
    with processes(jobs) as pool:
        asked = [
            (fleet, death, [pool.submit(unread, fleet, death, seed) for seed in range(min(seeds, fleet.seeds))])
            for fleet in fleets
            for death in DEATHS
            if death.first < fleet.workers
        ]
        for fleet, death, told in asked:
            good &= line(fleet, death, [each.result() for each in told])
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    typer.run(main)
