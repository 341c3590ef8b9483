"""Measures the effect of each rule of the cadence, by simulating the same small fleets without the rule.

`python benchmarks/cadence_ablation.py` prints the table in specs/cadence.md. To disable a rule, the benchmark replaces
a constant of the rule, or the function that implements it, in its own process. The library has no such switches.
"""

import logging
import math
import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from types import ModuleType
from typing import Annotated

import typer
from attrs import evolve
from convergence_rows import asking
from lookout_deaths import OURS, Death, Fleet, seconds_unread
from store_traffic import measure as measure_traffic

from leasehold.adapters.worker import table_view
from leasehold.balancer import lookout as ranks
from leasehold.balancer import lookout as schedule
from leasehold.balancer.lookout import lookout_ranks, scale_to_lease_seconds
from leasehold.balancer.model import Lease
from leasehold.balancer.rules import shares as joining
from leasehold.balancer.watch import Watch
from leasehold_lab.judge.rights import measure_unowned_seconds
from leasehold_lab.processes import processes
from leasehold_lab.simulator.question import simulate_question
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Member, Network, Scenario, assign_owners_evenly

Change = tuple[ModuleType, str, object]
"""A module, a name in it, and the value to assign to the name."""


def _constants(**values: object) -> tuple[Change, ...]:
    """Return changes that assign these values to constants of the schedule or of the ranks."""
    return tuple((schedule if hasattr(schedule, name) else ranks, name, value) for name, value in values.items())


NO_WARNINGS = _constants(WARNED_SECONDS=0.0)
NO_EXACT_LOOK: tuple[Change, ...] = (
    (
        schedule,
        "_seconds_to_next_listing",
        lambda _census, _me, config: scale_to_lease_seconds(schedule.LOOKOUT_LISTING_SECONDS, config),
    ),
)
NO_STAND_IN = _constants(ROW_SILENCE_SECONDS=math.inf, LOOKS_SILENCE_SECONDS=math.inf)
NO_EARLY_LISTING = _constants(EARLY_SECONDS=math.inf)
NO_LAST_RESORT = _constants(LAST_RESORT_SECONDS=math.inf)
NO_ABDICATION: tuple[Change, ...] = ((schedule, "_last_bulletin", lambda *_: ()),)
LISTINGS: tuple[Change, ...] = ((table_view, "first_watch", lambda *_: Watch()),)

ABLATIONS: dict[str, tuple[Change, ...]] = {
    "as it is": (),
    "C3: nobody says that it is replaced": NO_ABDICATION,
    "C4: no warnings": NO_WARNINGS,
    "C5: no look at the limit of a suspect": NO_EXACT_LOOK,
    "C5: a look every 5 s": _constants(LOOKOUT_LISTING_SECONDS=5.0, LOOKS_SILENCE_SECONDS=12.5),
    "C7: owners do not read what is asked for": _constants(REQUESTS_EXPECTED_SECONDS=-1.0),
    "C7: a reading every second": _constants(BULLETIN_READ_SECONDS=1.0),
    "C8: nobody stands in": NO_STAND_IN,
    "C8: the next in rank alone stands in": _constants(STAND_IN_SECONDS=1e9),
    "C8: all stand in at once": _constants(STAND_IN_SECONDS=0.0),
    "C8: *looks* are not watched": _constants(LOOKS_SILENCE_SECONDS=math.inf),
    "C8: no early listing": NO_EARLY_LISTING,
    "C10: newcomers do not wait for others": ((joining, "JOIN_WAIT", 1e-9),),
    "C11: no last resort": NO_LAST_RESORT,
    "C15: all look at once": _constants(START_WAIT_SECONDS=0.0),
    "without warnings, C5's look and C8": NO_WARNINGS + NO_EXACT_LOOK + NO_STAND_IN + NO_EARLY_LISTING,
    "listings alone (C14)": LISTINGS,
}

FEW, SOME = Fleet("5", 100, 5), Fleet("12", 60, 12)
ONE, FIRST, FOUR = Death("one", 0), Death("the lookout", 1), Death("the first four", 4)


def seconds_after_failed_lookout(seed: int, *, joins: bool) -> float:
    """Return the seconds until all leases are owned again, if one of twelve workers dies while the lookout has failed.

    Args:
        seed: The seed of the scenario.
        joins: If true, a new worker with the first rank has joined four seconds before the death. Otherwise the lookout
            has become a zombie, which renews its leases but does not plan.
    """
    draw = random.Random(seed)  # noqa: S311  a seed is the point
    death_at = 40.0 + draw.uniform(0.0, 20.0)
    row = [Lease(name, owner=name, annotations=(("process", f"p/{name}"),)) for name in SOME.names]
    first, *_, last = lookout_ranks(row, OURS).ranks
    members = [
        Member(name, OURS, draw.uniform(0.0, 1.0), death_at if name == last else math.inf) for name in SOME.names
    ]
    failed_lookout = evolve(members[SOME.names.index(first)], starts=death_at - 4.0) if joins else None
    failed_lookout = failed_lookout or evolve(members[SOME.names.index(first)], plans=death_at - 10.0)
    members = [failed_lookout if member.worker == first else member for member in members]
    owners = assign_owners_evenly(
        SOME.leases, tuple(name for name in SOME.names if not (joins and name == first)), draw
    )
    scenario = Scenario(
        seed,
        owners,
        tuple(sorted(members, key=lambda member: member.starts)),
        death_at + 50.0,
        calm=death_at + 50.0,
        network=Network(),
    )
    history = run(scenario)
    seconds = [
        seconds_unowned
        for seconds_unowned in measure_unowned_seconds(history, history.end, death_at).values()
        if seconds_unowned > OURS.lease_seconds / 2
    ]
    # Leases that fall to the share of a zombie stay free until other workers give up waiting for it (M9).
    return max(seconds) if joins else median(seconds)


def _seconds_of_join(seed: int) -> float:
    question = evolve(asking(100, 10, 10), pace="own", start="together", cycles=5.0, kind="scale-out", seed=seed)
    return simulate_question(question).seconds


def _read_units(leases: int, workers: int) -> float:
    return measure_traffic((leases, workers, None), "minimal", 10.0)["read_units"]


FIGURES: dict[str, Callable[[int], float]] = {
    "5: the lookout": lambda seed: seconds_unread(FEW, FIRST, seed),
    "12: one dies": lambda seed: seconds_unread(SOME, ONE, seed),
    "12: the lookout": lambda seed: seconds_unread(SOME, FIRST, seed),
    "12: the first four": lambda seed: seconds_unread(SOME, FOUR, seed),
    "12: after a new lookout": lambda seed: seconds_after_failed_lookout(seed, joins=True),
    "12: the lookout is stuck": lambda seed: seconds_after_failed_lookout(seed, joins=False),
    "10+10 join": _seconds_of_join,
    "5: read units": lambda _seed: _read_units(100, 5),
}
"""The measured figures by name, in seconds. The last one is in read units per lease and hour."""


@contextmanager
def _disabled(ablation: str) -> Iterator[None]:
    changes = ABLATIONS[ablation]
    originals = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in originals:
            setattr(module, name, value)


def measure(ablation: str, name: str, seed: int) -> float:
    """Return one figure of one seed, with the rule disabled."""
    logging.disable(logging.CRITICAL)
    with _disabled(ablation):
        return FIGURES[name](seed)


def main(
    *,
    seeds: Annotated[int, typer.Option(min=1, help="Of each figure.")] = 8,
    only: Annotated[str, typer.Option(help="Ablations whose name matches this expression.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Measure, and print a table with the median and the maximum over several seeds."""
    print(f"| | {' | '.join(FIGURES)} |", "|---|" + "---|" * len(FIGURES), sep="\n", flush=True)
    with processes(jobs) as pool:
        futures = {
            (ablation, name): [
                pool.submit(measure, ablation, name, seed) for seed in range(1 if "units" in name else seeds)
            ]
            for ablation in ABLATIONS
            if re.search(only, ablation)
            for name in FIGURES
        }
        for ablation in dict.fromkeys(ablation for ablation, _ in futures):
            cells = []
            for name in FIGURES:
                results = [future.result() for future in futures[ablation, name]]
                cells.append(f"{results[0]:.0f}" if "units" in name else f"{median(results):.1f}, {max(results):.1f}")
            print(f"| {ablation} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
