"""Compares layout `sessions` with the other layouts and with KCL 2.x: monthly prices, and the effects of events.

`python benchmarks/sessions_price.py` prints the tables in docs/sessions.md.
"""

import os
from collections import Counter
from typing import Annotated

import typer
from attrs import evolve
from checkpoint_writes import of_kcl
from session_requests import bills, simulate_requests
from store_price import count_requests, dynamodb, s3

from leasehold.adapters.ops.doctor.examination import LIST_PRICES, MILLION, MONTH
from leasehold_lab.processes import processes
from leasehold_lab.simulator.question import Kind, SimulationQuestion, build_fleet, simulate_question
from leasehold_lab.simulator.run import run

SIZES = ((10, 2), (100, 10), (1000, 50))
"""The numbers of shards and workers."""


def month(service: str, writes: float, reads: float) -> float:
    """Return the price of 730 hours in US$, by the list prices that `leasehold doctor` uses."""
    prices = LIST_PRICES[service]
    return MONTH * (writes * prices.write + reads * prices.read) / MILLION


def price_lines(shards: int, workers: int, checkpoints: float, seconds: float) -> list[str]:
    """Return the lines of the table for one fleet."""
    kcl = of_kcl(shards, workers)
    usual = count_requests(shards, workers, checkpoints, seconds, dated=False)
    objects = count_requests(shards, workers, checkpoints, seconds, dated=True)
    table, bucket = dynamodb(usual), s3(objects)
    ours = bills(shards, workers, simulate_requests(shards, workers, checkpoints, seconds))
    requests = {
        ("KCL 2.x, computed", "dynamodb"): (kcl.writes, kcl.reads),
        ("usual", "dynamodb"): (table.writes, table.reads),
        ("sessions", "dynamodb"): ours[0],
        ("usual", "s3"): (bucket.writes + bucket.lists, bucket.reads),
        ("sessions", "s3"): ours[1],
    }
    lines = []
    for (layout, service), (writes, reads) in requests.items():
        price, usual_price = month(service, writes, reads), month(service, *requests["usual", service])
        figures = f"{writes:,.1f} | {reads:,.1f} | {price:,.0f} | {price / usual_price:.1%}"
        lines.append(f"| {shards}, {workers} | {service} | {layout} | {figures} |")
    return lines


EVENTS: tuple[Kind, ...] = ("crash", "leave", "scale-out")


def event(kind: Kind, seed: int, *, sessions: bool) -> dict[str, float]:
    """Simulate a fleet of 60 leases and 6 workers in which one worker ends or two join, and return its figures."""
    workers = (4, 2) if kind == "scale-out" else (6,)
    question = SimulationQuestion(60, workers, kind=kind, pace="own", seed=seed, cycles=6, sessions=sessions)
    outcome = simulate_question(question)
    return {
        "seconds": outcome.seconds,
        "moves": outcome.moves,
        "unread": outcome.unowned_lease_cycles_max * 20.05,
        "refused": outcome.failed_writes,
        "again": _repeated_dispatches(evolve(question, checkpoints=1.0)),
    }


def _repeated_dispatches(question: SimulationQuestion) -> float:
    """Return the number of repeated dispatches, if each shard gets a record every 0.2 s."""
    scenario = build_fleet(question).scenario
    history = run(evolve(scenario, full=True, read_seconds=0.2))
    dispatch_counts = Counter(
        (record_event.shard, record_event.place) for record_event in history.events if record_event.event == "record"
    )
    return sum(count - 1 for count in dispatch_counts.values())


def main(
    *,
    checkpoint_seconds: Annotated[float, typer.Option(min=0)] = 1.0,
    seconds: Annotated[float, typer.Option(min=10, help="How long each fleet is watched, in virtual time.")] = 30.0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each event.")] = 5,
    only: Annotated[str, typer.Option(help="One fleet, as in 1000x50.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Run all simulations, and print the tables."""
    with processes(jobs) as pool:
        sizes = [size for size in SIZES if only in {"", f"{size[0]}x{size[1]}"}]
        fleets = [pool.submit(price_lines, *size, checkpoint_seconds, seconds) for size in sizes]
        runs = {
            (kind, sessions, seed): pool.submit(event, kind, seed, sessions=sessions)
            for kind in EVENTS
            for sessions in (False, True)
            for seed in range(seeds)
        }
        print("| shards, workers | store | layout | writes a second | reads a second | US$ a month | of the usual |")
        print("|---|---|---|---|---|---|---|")
        for fleet in fleets:
            print(*fleet.result(), sep="\n", flush=True)
        print(
            "\n| event | layout | s until the last move | moves | longest s unread | refused writes | records again |"
        )
        print("|---|---|---|---|---|---|---|")
        for kind in EVENTS:
            for sessions in (False, True):
                results = [runs[kind, sessions, seed].result() for seed in range(seeds)]
                means = [sum(result[name] for result in results) / seeds for name in results[0]]
                figures = " | ".join(f"{mean:.1f}" for mean in means)
                print(f"| {kind} | {'sessions' if sessions else 'usual'} | {figures} |")


if __name__ == "__main__":
    typer.run(main)
