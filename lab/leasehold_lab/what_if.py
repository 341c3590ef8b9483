"""Shows what would move if workers came or left, by simulating real workers on the given table under virtual time."""

import random
from collections.abc import Sequence

from attrs import evolve, frozen

from leasehold.adapters.report.watching import WatchedTable, without_dead_owners
from leasehold.balancer.census import our_workers
from leasehold.balancer.config import Config
from leasehold.stores.fields import decimal
from leasehold_lab.simulator.question import Forecast, forecast_of
from leasehold_lab.simulator.scenario import Member, MemberEnding, Network, Scenario

SETTLE_CYCLES = 2.0
"""Cycles before the change, in which the simulated workers find each other and moves that are due anyway happen."""


@frozen
class FleetChange:
    """The change to try.

    Attributes:
        add: The names of the workers that come.
        remove: The names of the workers that leave.
        ending: How they leave.
        cycles: How many cycles to simulate after the change.
        seed: The seed of everything that is random.
    """

    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    ending: MemberEnding = "leave"
    cycles: float = 20.0
    seed: int = 0


ADDED_MAX = 10_000
"""The most workers that a number may stand for. Simulating more would take too long to wait for."""


def names_of(add: Sequence[str], present: Sequence[str]) -> tuple[str, ...]:
    """Return the workers that come: numbers stand for that many workers, others are names. Raises ValueError."""
    names: list[str] = []
    for name_or_count in add:
        count = decimal(name_or_count, ADDED_MAX)
        if count is None and name_or_count.isascii() and name_or_count.isdigit():
            raise ValueError(f"--add: at most {ADDED_MAX} workers can be simulated")
        if count is not None:
            free = (f"added-{number}" for number in range(1, 1_000_000))
            fresh = (name for name in free if name not in names and name not in present)
            names += [next(fresh) for _ in range(count)]
        elif not name_or_count or name_or_count in names or name_or_count in present:
            raise ValueError(
                f"--add: there is a worker {name_or_count!r} already; give another name, or a number of workers"
            )
        else:
            names.append(name_or_count)
    return tuple(names)


def forecast(table: WatchedTable, config: Config, change: FleetChange, *, dated: bool = False) -> Forecast:
    """Simulate the change.

    Args:
        table: The table as it is now.
        config: The configuration of all workers.
        change: The change to simulate.
        dated: Whether the rows of the table show their age.

    Raises:
        ValueError: A worker to remove holds no lease, or there is nothing to simulate.
    """
    rows = without_dead_owners(table.unended, config)
    present = tuple(sorted({row.owner for row in rows if row.owner is not None}))
    for worker in change.remove:
        if worker not in present:
            raise ValueError(f"--remove: no living worker {worker!r} holds a lease; choose among {', '.join(present)}")
    if not rows:
        raise ValueError("the table has no unfinished lease; there is nothing to simulate")
    if not set(present) | set(change.add):
        raise ValueError("--add: nobody holds a lease; say how many workers come")
    since = SETTLE_CYCLES * config.cycle_seconds
    draw, ours = random.Random(change.seed), our_workers(table.leases)  # noqa: S311  a seed is the point
    members = [
        Member(
            worker,
            config,
            starts=draw.uniform(0.0, 1.0),
            phase=draw.uniform(0.0, config.cycle_seconds),
            foreign=worker not in ours or not config.rules.keeps_lookout,
        )
        for worker in present
    ]
    members = [
        evolve(member, ends=since, ending=change.ending) if member.worker in change.remove else member
        for member in members
    ]
    foreign = not config.rules.keeps_lookout
    members += [Member(name, config, since + draw.uniform(0.0, 1.0), foreign=foreign) for name in change.add]
    scenario = Scenario(
        change.seed,
        tuple(row.owner for row in rows),
        tuple(members),
        since + change.cycles * config.cycle_seconds,
        calm=since + change.cycles * config.cycle_seconds,
        network=Network(stall=0.0, unanswered=0.0),
        weights=tuple(row.weight for row in rows) if any(row.weight is not None for row in rows) else (),
        names=tuple(row.key for row in rows),
        dated=dated,
    )
    return forecast_of(scenario, config, since)
