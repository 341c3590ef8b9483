"""Predicts which leases move when workers join or leave, by simulating real workers on a copy of the lease table."""

import random
from collections.abc import Sequence

from attrs import evolve, frozen

from leasehold.adapters.ops.watching import WatchedTable, without_dead_owners
from leasehold.balancer.census import our_workers
from leasehold.balancer.config import Config
from leasehold.stores.fields import parse_decimal
from leasehold_lab.simulator.question import FleetForecast, run_forecast
from leasehold_lab.simulator.scenario import Member, MemberEnding, Network, Scenario

SETTLE_CYCLES = 2.0
"""The number of cycles before the change.

In this time the simulated workers discover each other, and complete the moves that would happen without the change.
"""


@frozen
class FleetChange:
    """The change of a fleet whose effects are predicted.

    Attributes:
        add: The names of the workers that join.
        remove: The names of the workers that leave.
        ending: How the leaving workers end: "leave" lets them drain, and "crash" kills them.
        cycles: The number of cycles to simulate after the change.
        seed: The seed of all random numbers.
    """

    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    ending: MemberEnding = "leave"
    cycles: float = 20.0
    seed: int = 0


ADDED_MAX = 10_000
"""The maximum number of workers that `--add` accepts as a number. Simulating more would take too long."""


def choose_joining_names(add: Sequence[str], present: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the workers that join.

    Args:
        add: The names of workers, or numbers. A number N adds N workers with generated names.
        present: The names of the workers that are already in the fleet.

    Raises:
        ValueError: A number is too large, or a name is empty or already taken.
    """
    names: list[str] = []
    for name_or_count in add:
        joining_count = parse_decimal(name_or_count, ADDED_MAX)
        if joining_count is None and name_or_count.isascii() and name_or_count.isdigit():
            raise ValueError(f"--add: at most {ADDED_MAX} workers can be simulated")
        if joining_count is not None:
            free_names = (f"added-{number}" for number in range(1, 1_000_000))
            new_names = (name for name in free_names if name not in names and name not in present)
            names += [next(new_names) for _ in range(joining_count)]
        elif not name_or_count or name_or_count in names or name_or_count in present:
            raise ValueError(
                f"--add: there is a worker {name_or_count!r} already; give another name, or a number of workers"
            )
        else:
            names.append(name_or_count)
    return tuple(names)


def forecast_change(table: WatchedTable, config: Config, change: FleetChange, *, dated: bool = False) -> FleetForecast:
    """Simulate a change of the fleet, and return its effects.

    Args:
        table: The current contents of the lease table.
        config: The configuration of all workers.
        change: The change to simulate.
        dated: Whether listings of the table contain the age of each row.

    Raises:
        ValueError: A worker to remove holds no lease, or there is nothing to simulate.
    """
    rows = without_dead_owners(table.unfinished_leases, config)
    present_workers = tuple(sorted({row.owner for row in rows if row.owner is not None}))
    for worker in change.remove:
        if worker not in present_workers:
            raise ValueError(
                f"--remove: no living worker {worker!r} holds a lease; choose among {', '.join(present_workers)}"
            )
    if not rows:
        raise ValueError("the table has no unfinished lease; there is nothing to simulate")
    if not set(present_workers) | set(change.add):
        raise ValueError("--add: nobody holds a lease; say how many workers come")
    change_time = SETTLE_CYCLES * config.cycle_seconds
    rng, leasehold_workers = random.Random(change.seed), our_workers(table.leases)  # noqa: S311  a seed is the point
    members = [
        Member(
            worker,
            config,
            starts=rng.uniform(0.0, 1.0),
            phase=rng.uniform(0.0, config.cycle_seconds),
            foreign=worker not in leasehold_workers or not config.rules.keeps_lookout,
        )
        for worker in present_workers
    ]
    members = [
        evolve(member, ends=change_time, ending=change.ending) if member.worker in change.remove else member
        for member in members
    ]
    is_foreign = not config.rules.keeps_lookout
    members += [Member(name, config, change_time + rng.uniform(0.0, 1.0), foreign=is_foreign) for name in change.add]
    scenario = Scenario(
        change.seed,
        tuple(row.owner for row in rows),
        tuple(members),
        change_time + change.cycles * config.cycle_seconds,
        calm=change_time + change.cycles * config.cycle_seconds,
        network=Network(stall=0.0, unanswered=0.0),
        weights=tuple(row.weight for row in rows) if any(row.weight is not None for row in rows) else (),
        names=tuple(row.key for row in rows),
        dated=dated,
    )
    return run_forecast(scenario, config, change_time)
