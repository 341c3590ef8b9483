"""Measures the effects of one event on a fleet: additional listings, and the time until all leases are owned and even.

    python benchmarks/fleet_events.py [--workers 10,20,40,80] [--each 20] [--only PATTERN] [--json]

The fleet has twenty leases per worker, or the number given by --each. It runs in the simulator under virtual time, so
the figures are the same on all machines, except the number of virtual seconds simulated in one second of processor
time.
All workers except those that join were running before the run began, and know the table (`Member.present`).

"above rest" is the number of listings in the minute after the event, minus those in the same minute of the same fleet
without the event. With --at and --after, a large fleet can be simulated for less than 30 s before the event and 60 s
after it. The rolling replacement is compared with KCL 2.x, whose workers list the table every 20 s.
"""

import argparse
import json
import logging
import random
import re
import time
from collections.abc import Callable
from functools import partial

from attrs import evolve, frozen

from leasehold.balancer.config import Config
from leasehold.balancer.lookout import lookout_ranks
from leasehold.balancer.model import Lease
from leasehold.balancer.rules.kcl import Kcl
from leasehold.balancer.rules.minimal import Minimal
from leasehold_lab.judge.rights import drop_taken_back_handoffs, find_owner_changes, measure_unowned_seconds
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import (
    Capacity,
    Member,
    Network,
    Scenario,
    assign_owners_evenly,
    create_rolling_fleet,
    name_group_workers,
)

EACH, AT, AFTER = 20, 30.0, 60.0
OURS, KCL = Config(Minimal()), Config(Kcl())

Change = Callable[[list[Member], tuple[str, ...], float], list[Member]]
"""Applies an event to the members. The arguments are the members, the workers in order of rank, and the time.

The worker with the first rank is the lookout.
"""


@frozen
class EventFigures:
    """The figures of one run.

    Attributes:
        listings: The listings after the event.
        rows: The rows that these listings returned.
        unowned: The longest time in seconds that a lease had no owner.
        even: The seconds until the last change of owner.
        moves: The number of changes of owner.
        together: The maximum number of simultaneous listings.
        speed: Virtual seconds simulated in one second of processor time.
    """

    listings: int
    rows: int
    unowned: float
    even: float
    moves: int
    together: int
    speed: float


def _crash(ranks_chosen: slice, members: list[Member], ranks: tuple[str, ...], event_at: float) -> list[Member]:
    dying_workers = frozenset(ranks[ranks_chosen])
    return [evolve(member, ends=event_at) if member.worker in dying_workers else member for member in members]


def _leave(ranks_chosen: slice, members: list[Member], ranks: tuple[str, ...], event_at: float) -> list[Member]:
    leaving_workers = frozenset(ranks[ranks_chosen])
    return [
        evolve(member, ends=event_at, ending="leave") if member.worker in leaving_workers else member
        for member in members
    ]


def _join(name: str, members: list[Member], _ranks: tuple[str, ...], event_at: float) -> list[Member]:
    return [*members, Member(name, OURS, event_at)]


EVENTS: dict[str, Change] = {
    "at rest": lambda members, _ranks, _at: members,
    "one dies": partial(_crash, slice(-1, None)),
    "the lookout dies": partial(_crash, slice(0, 1)),
    "one leaves": partial(_leave, slice(-1, None)),
    "the lookout leaves": partial(_leave, slice(0, 1)),
    "one joins": partial(_join, "zz-9"),
}


def simulate(
    event: Change,
    workers: int,
    seed: int,
    *,
    capacity: Capacity | None = None,
    leases: int = 0,
    event_at: float = AT,
    seconds_after: float = AFTER,
) -> EventFigures:
    """Simulate a fleet with this event, and return its figures."""
    logging.disable(logging.CRITICAL)
    names, draw = name_group_workers(0, workers), random.Random(seed)  # noqa: S311  a seed is the point
    ranks = lookout_ranks(
        [Lease(name, owner=name, annotations=(("process", f"p/{name}"),)) for name in names], OURS
    ).ranks
    members = event([Member(name, OURS, draw.uniform(0.0, 1.0), present=True) for name in names], ranks, event_at)
    owners = assign_owners_evenly(leases or EACH * workers, names, draw)
    end = event_at + seconds_after
    scenario = Scenario(seed, owners, tuple(members), end, calm=end, network=Network(), capacity=capacity or Capacity())
    return _figures(scenario, event_at)


def simulate_slow_listings(seconds: float, share: float, seed: int) -> EventFigures:
    """Return the figures of 20 workers whose listings take `seconds`, and of which the fraction `share` dies."""
    leases, workers = 200, 20
    capacity = Capacity(bytes_per_second=leases * Capacity().row_bytes / seconds, page_bytes=8 * Capacity().row_bytes)
    dying = slice(-round(share * workers), None) if share else slice(0, 0)
    return simulate(partial(_crash, dying), workers, seed, capacity=capacity, leases=leases)


def _figures(scenario: Scenario, since: float) -> EventFigures:
    began_at = time.process_time()
    history = run(scenario)
    speed = scenario.seconds / (time.process_time() - began_at)
    listings = [(began, ended) for began, ended, _ in history.listings if ended >= since]
    edges = sorted([(began, 1) for began, _ in listings] + [(ended, -1) for _, ended in listings])
    most_at_once = current = 0
    for _, step in edges:
        current += step
        most_at_once = max(most_at_once, current)
    changes_after = [
        change for change in find_owner_changes(history.writes) if change.t >= since and change.after is not None
    ]
    owner_changes = drop_taken_back_handoffs(changes_after)
    last_change = max((change.t for change in owner_changes), default=since) - since
    longest = max(measure_unowned_seconds(history, history.end, since).values(), default=0.0)
    rows = len(listings) * len(history.first)
    return EventFigures(
        len(listings), rows, round(longest, 1), round(last_change, 1), len(owner_changes), most_at_once, round(speed, 2)
    )


def simulate_replacement(workers: int, rules: Config, seed: int) -> EventFigures:
    """Return the figures of a rolling replacement of all workers, one every 10 s."""
    logging.disable(logging.CRITICAL)
    fleet = create_rolling_fleet(EACH * workers, name_group_workers(0, workers), rules, gap=10.0, seed=seed, cycles=3.0)
    return _figures(evolve(fleet.scenario, scan_per_cycle=rules is KCL), fleet.since)


def main() -> None:
    """Measure and print."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--workers", default="10,20,40", help="sizes of the fleet, with commas between them")
    options.add_argument("--each", type=int, default=EACH, help="leases of a worker")
    options.add_argument("--only", default="", help="events whose name matches this expression")
    options.add_argument("--at", type=float, default=AT, help="when the event comes")
    options.add_argument("--after", type=float, default=AFTER, help="seconds that are simulated after it")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--json", action="store_true", help="print one JSON object a line")
    arguments = options.parse_args()
    for seconds, share in ((12.0, 0.0), (8.0, 0.3)):
        if re.search(arguments.only, "slow"):
            for seed in range(arguments.seed, arguments.seed + 3):
                figures = simulate_slow_listings(seconds, share, seed)
                print(
                    f"a listing takes {seconds:g} s, {share:.0%} of 20 workers die (seed {seed}): "
                    f"{figures.listings} listings, {figures.together} at once at most, owned after {figures.unowned} s",
                    flush=True,
                )
    for size in map(int, arguments.workers.split(",")):
        simulate_event = partial(
            simulate,
            workers=size,
            seed=arguments.seed,
            leases=arguments.each * size,
            event_at=arguments.at,
            seconds_after=arguments.after,
        )
        figures_at_rest = simulate_event(EVENTS["at rest"])
        for name, event in EVENTS.items():
            if re.search(arguments.only, name):
                figures = figures_at_rest if name == "at rest" else simulate_event(event)
                _print(name, size, figures, as_json=arguments.json, above=figures.listings - figures_at_rest.listings)
        if re.search(arguments.only, "rolling"):
            ours, kcl = (simulate_replacement(size, rules, arguments.seed) for rules in (OURS, KCL))
            _print("rolling", size, ours, as_json=arguments.json, kcl=kcl.rows)


def _print(
    name: str, size: int, figures: EventFigures, *, as_json: bool, above: int | None = None, kcl: int | None = None
) -> None:
    if as_json:
        row = {"event": name, "workers": size, "listings": figures.listings, "above_rest": above, "rows": figures.rows}
        print(
            json.dumps(
                {**row, "kcl_rows": kcl, "unowned": figures.unowned, "even": figures.even, "speed": figures.speed}
            ),
            flush=True,
        )
        return
    comparison = f"{above:5} above rest" if kcl is None else f"{figures.rows / kcl:5.2f} x KCL 2.x's rows"
    print(
        f"{name:20} {size:5} workers {figures.listings:6} listings {comparison}  "
        f"owned after {figures.unowned:5.1f} s, even after {figures.even:5.1f} s, {figures.moves} changes of owner, "
        f"{figures.speed:g} virtual seconds a second",
        flush=True,
    )


if __name__ == "__main__":
    main()
