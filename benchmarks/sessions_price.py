"""Layout `sessions` beside the usual layouts and KCL 2.x: what a month costs, and what a death and a move cost.

`python benchmarks/sessions_price.py` prints the tables of docs/sessions.md.
"""

import os
import random
from collections import Counter
from math import ceil
from typing import Annotated

import typer
from attrs import evolve, frozen
from checkpoint_writes import of_kcl
from store_price import counted, dynamodb, s3

from leasehold.adapters.proving.processes import processes
from leasehold.adapters.proving.simulator.question import Kind, SimulationQuestion, answer, fleet_of
from leasehold.adapters.proving.simulator.run import run
from leasehold.adapters.proving.simulator.scenario import Network
from leasehold.adapters.proving.simulator.world.world import SimulatedHistory
from leasehold.adapters.steering.doctor.examination import LIST_PRICES, MILLION, MONTH, ROW_BYTES, UNIT_BYTES
from leasehold.adapters.worker.holding import Reach
from leasehold.balancer.model import Position
from leasehold.stores.dynamodb.cells import written_bytes
from leasehold.stores.sessions.rows import Remark, Session, SessionEntry, session_fields, told_fields

SIZES = ((10, 2), (100, 10), (1000, 50))
"""Shards and workers."""
WARM_SECONDS = 20.0
DIGITS = 56
"""Of a sequence number of Kinesis."""
WRITE_BYTES = 1024


@frozen
class Rows:
    """Bytes of the rows of a session with so many leases, as DynamoDB counts them."""

    session: int
    told: int


def row_bytes(leases: int) -> Rows:
    """With names, sequence numbers and notes as long as real ones; digits are drawn, for they do not get smaller."""
    draw = random.Random(leases)  # noqa: S311  a seed is the point
    worker = "ip-10-0-1-23.eu-west-1.compute.internal-12345"
    keys = [f"shardId-{draw.randrange(10**6):012}" for _ in range(leases)]
    entries = {
        key: SessionEntry(draw.randrange(1000), Position("49" + "".join(draw.choices("0123456789", k=DIGITS - 2))))
        for key in keys
    }
    now = 1_764_064_762.0

    def ago() -> float:
        return round(now - 60 * draw.random(), 3)

    told = {
        key: Remark(
            draw.randrange(1000),
            {
                "reach": (
                    Reach(
                        now,
                        worker,
                        worker,
                        3,
                        draw.random(),
                        arrived=ago(),
                        read=ago(),
                        done=ago(),
                        tried=ago(),
                        lease=10.0,
                    ).note,
                    draw.randrange(10**5),
                )
            },
            draw.randrange(10**6),
        )
        for key in keys
    }
    return Rows(
        written_bytes("session/" + "0" * 32, session_fields(Session(worker, 10**6, entries=entries))),
        written_bytes("told/" + "0" * 32, told_fields(told)),
    )


@frozen
class Requested:
    """Of a fleet at rest that reads, in a second; `changed` are rows that a listing shows changed."""

    sessions: float
    told: float
    leases: float
    lists: float
    read: float
    changed: float


def requested(shards: int, workers: int, checkpoints: float, seconds: float) -> Requested:
    """Of `seconds`, less those of the beginning, when everybody looks for the others."""
    question = SimulationQuestion(
        shards, (workers,), kind="steady", pace="own", cycles=0, checkpoints=checkpoints, sessions=True
    )
    scenario = evolve(fleet_of(question).scenario, network=Network(stall=0.0, unanswered=0.0), read_seconds=0.2)
    warm, whole = (
        _figures(run(evolve(scenario, seconds=length, calm=length)))
        for length in (WARM_SECONDS, WARM_SECONDS + seconds)
    )
    return Requested(*((whole[place] - warm[place]) / seconds for place in range(len(whole))))


def _figures(history: SimulatedHistory) -> tuple[float, ...]:
    asked = history.requests
    read = history.fetched - history.glimpsed / 2
    return asked["session"], asked["told"], asked["lease"], asked["list"], read, history.refetched


def bills(shards: int, workers: int, found: Requested) -> tuple[tuple[float, float], tuple[float, float]]:
    """Writes and reads in a second, as DynamoDB and S3 bill them; listings of objects are priced as writes."""
    rows = row_bytes(ceil(shards / workers))
    units = ceil(rows.session / WRITE_BYTES) * found.sessions + ceil(rows.told / WRITE_BYTES) * found.told
    table = shards * ROW_BYTES + workers * (rows.session + rows.told)
    listed = found.lists * table / UNIT_BYTES / 2
    pages = 2 * ceil(workers / 1000) + ceil(shards / 1000)
    objects = found.sessions + found.told + found.leases + found.lists * pages
    return (units + found.leases, listed + found.read), (objects, found.changed + found.read)


def month(service: str, writes: float, reads: float) -> float:
    """US$ of 730 hours by the list prices that doctor has."""
    prices = LIST_PRICES[service]
    return MONTH * (writes * prices.write + reads * prices.read) / MILLION


def priced(shards: int, workers: int, checkpoints: float, seconds: float) -> list[str]:
    """The lines of one fleet."""
    kcl = of_kcl(shards, workers)
    usual = counted(shards, workers, checkpoints, seconds, dated=False)
    objects = counted(shards, workers, checkpoints, seconds, dated=True)
    table, bucket = dynamodb(usual), s3(objects)
    ours = bills(shards, workers, requested(shards, workers, checkpoints, seconds))
    told = {
        ("KCL 2.x, computed", "dynamodb"): (kcl.writes, kcl.reads),
        ("usual", "dynamodb"): (table.writes, table.reads),
        ("sessions", "dynamodb"): ours[0],
        ("usual", "s3"): (bucket.writes + bucket.lists, bucket.reads),
        ("sessions", "s3"): ours[1],
    }
    lines = []
    for (layout, service), (writes, reads) in told.items():
        price, before = month(service, writes, reads), month(service, *told["usual", service])
        figures = f"{writes:,.1f} | {reads:,.1f} | {price:,.0f} | {price / before:.1%}"
        lines.append(f"| {shards}, {workers} | {service} | {layout} | {figures} |")
    return lines


EVENTS: tuple[Kind, ...] = ("crash", "leave", "scale-out")


def event(kind: Kind, seed: int, *, sessions: bool) -> dict[str, float]:
    """What becomes of a fleet of 60 leases and 6 workers; one dies or leaves, or two join."""
    workers = (4, 2) if kind == "scale-out" else (6,)
    question = SimulationQuestion(60, workers, kind=kind, pace="own", seed=seed, cycles=6, sessions=sessions)
    found = answer(question)
    return {
        "seconds": found.seconds,
        "moves": found.moves,
        "unread": found.unowned_lease_cycles_max * 20.05,
        "refused": found.failed_writes,
        "again": _again(evolve(question, checkpoints=1.0)),
    }


def _again(question: SimulationQuestion) -> float:
    """Records that were handed over more than once, where one comes every 0.2 s."""
    scenario = fleet_of(question).scenario
    history = run(evolve(scenario, full=True, read_seconds=0.2))
    seen = Counter((one.shard, one.place) for one in history.events if one.event == "record")
    return sum(count - 1 for count in seen.values())


def main(
    *,
    checkpoint_seconds: Annotated[float, typer.Option(min=0)] = 1.0,
    seconds: Annotated[float, typer.Option(min=10, help="How long each fleet is watched, in virtual time.")] = 30.0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each event.")] = 5,
    only: Annotated[str, typer.Option(help="One fleet, as in 1000x50.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Count and print."""
    with processes(jobs) as pool:
        sizes = [size for size in SIZES if only in {"", f"{size[0]}x{size[1]}"}]
        fleets = [pool.submit(priced, *size, checkpoint_seconds, seconds) for size in sizes]
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
                found = [runs[kind, sessions, seed].result() for seed in range(seeds)]
                means = [sum(one[name] for one in found) / seeds for name in found[0]]
                figures = " | ".join(f"{mean:.1f}" for mean in means)
                print(f"| {kind} | {'sessions' if sessions else 'usual'} | {figures} |")


if __name__ == "__main__":
    typer.run(main)
