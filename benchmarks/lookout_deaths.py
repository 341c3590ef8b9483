"""How long leases stay unread after the deaths that matter to the cadence: of the lookout, and of its deputies.

`python benchmarks/lookout_deaths.py` prints a table; specs/cadence.md quotes it.
"""

import logging
import math
import random
from typing import Annotated

import typer

from adapters.simulator.fleets import balanced, group_of
from adapters.simulator.ledger import unowned
from adapters.simulator.run import run
from adapters.simulator.scenario import Member, Scenario
from balancer.cadence import DEPUTIES, crew
from balancer.config import Config, Kcl, Minimal
from balancer.model import Lease

CRASH, AFTER = 30.0, 60.0


def unread(leases: int, workers: int, dead: int, config: Config, seed: int) -> float:
    """Seconds until all is owned again; `dead` are so many of the first in rank, of the last if below 0."""
    names = group_of(0, workers)
    ours = [Lease(name, owner=name, notes=(("process", f"p/{name}"),)) for name in names]
    ranks = crew(ours, Config(Minimal())).ranks
    gone = frozenset(ranks[:dead] if dead > 0 else ranks[dead:])
    draw = random.Random(seed)  # noqa: S311  a seed is the point
    at = CRASH + draw.uniform(0.0, config.cycle_seconds)
    foreign = isinstance(config.rules, Kcl)
    members = tuple(
        Member(name, config, draw.uniform(0.0, 1.0), at if name in gone else math.inf, foreign=foreign)
        for name in names
    )
    history = run(Scenario(seed, balanced(leases, names, draw), members, at + AFTER, calm=at + AFTER))
    return max(unowned(history, history.end, at).values())


def main(
    *,
    leases: Annotated[int, typer.Option(min=1)] = 200,
    workers: Annotated[int, typer.Option(min=6)] = 20,
    seeds: Annotated[int, typer.Option(min=1)] = 8,
) -> None:
    """Measure and print."""
    logging.getLogger("leasehold").setLevel(logging.CRITICAL)
    print(f"{leases} leases, {workers} workers, {seeds} seeds; seconds until all are owned again: median, worst")
    minimal = Config(Minimal())
    for what, dead, config in (
        ("KCL 2.x, one worker", -1, Config(Kcl())),
        ("one worker", -1, minimal),
        ("the lookout", 1, minimal),
        ("the lookout and a deputy", 2, minimal),
        ("the lookout and all deputies", 1 + DEPUTIES, minimal),
    ):
        told = sorted(unread(leases, workers, dead, config, seed) for seed in range(seeds))
        print(f"{what}: {told[len(told) // 2]:.1f}, {told[-1]:.1f}", flush=True)


if __name__ == "__main__":
    typer.run(main)
