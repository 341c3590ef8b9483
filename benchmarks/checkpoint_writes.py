"""Measures the cost of checkpoints: writes per second and lease, and the monthly bill, with constantly busy shards.

`python benchmarks/checkpoint_writes.py` prints the table in docs/from-java-kcl.md.
"""

import os
from typing import Annotated

import typer
from attrs import evolve, frozen
from session_requests import bills, simulate_requests

from leasehold.adapters.consumer.handling import CHECKPOINT_SECONDS
from leasehold.balancer.config import Config
from leasehold.balancer.rules.kcl import Kcl
from leasehold_lab.processes import processes
from leasehold_lab.simulator.question import SimulationQuestion, build_fleet
from leasehold_lab.simulator.run import measure_traffic, run
from leasehold_lab.simulator.scenario import Network

SIZES = ((10, 2), (100, 10), (1000, 50))
"""The numbers of shards and workers."""
READ_SECONDS = 0.2
"""The time between two batches of a shard, which is that of our workers while there are records."""
KCL_READ_SECONDS = 1.5
"""The KCL's default time between two batches. Typical record processors checkpoint each batch."""
WARM_SECONDS = 20.0
MONTH = 730 * 3600
MILLION = 1_000_000


@frozen
class TableCost:
    """The read and write units of a whole table per second."""

    writes: float
    reads: float

    def bill(self, write_price: float, read_price: float) -> float:
        """Return the monthly price, from prices per million units."""
        return MONTH * (self.writes * write_price + self.reads * read_price) / MILLION


def measure(shards: int, workers: int, checkpoints: float, seconds: float) -> TableCost:
    """Simulate a balanced fleet for `seconds`, and return its cost without that of the start.

    When a fleet starts, its workers make additional listings to find each other.
    """
    question = SimulationQuestion(shards, (workers,), kind="steady", pace="own", cycles=0, checkpoints=checkpoints)
    scenario = evolve(build_fleet(question).scenario, network=Network(stall=0.0, unanswered=0.0))
    warm_up, total = (
        measure_traffic(run(evolve(scenario, seconds=length, calm=length, read_seconds=READ_SECONDS)))
        for length in (WARM_SECONDS, WARM_SECONDS + seconds)
    )
    writes, reads = total.write_units - warm_up.write_units, total.read_units - warm_up.read_units
    return TableCost(writes / seconds, reads / seconds)


def of_sessions(shards: int, workers: int, seconds: float) -> TableCost:
    """Return the cost in layout `sessions`, with one checkpoint per second."""
    return TableCost(*bills(shards, workers, simulate_requests(shards, workers, CHECKPOINT_SECONDS, seconds))[0])


def of_kcl(shards: int, workers: int) -> TableCost:
    """Compute the cost of KCL 2.x with default settings.

    Each worker renews its leases, checkpoints every batch, and scans the table.
    """
    config = Config(Kcl())
    writes = shards * (1 / config.renew_seconds + 1 / KCL_READ_SECONDS)
    return TableCost(writes, workers * max(0.5, shards * 360 / 4096 / 2) / config.cycle_seconds)


def main(
    *,
    seconds: Annotated[float, typer.Option(min=10, help="How long each fleet is watched, in virtual time.")] = 30.0,
    write_price: Annotated[float, typer.Option(help="US$ for a million write units.")] = 0.625,
    read_price: Annotated[float, typer.Option(help="US$ for a million read units.")] = 0.125,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = os.cpu_count() or 1,
) -> None:
    """Measure and print."""
    print("| shards, workers | checkpoints | writes a second | for each lease | read units a second | US$ a month |")
    print("|---|---|---|---|---|---|")
    paces = {
        "every batch (`--checkpoint-seconds 0`)": 0.0,
        "once a second (default)": CHECKPOINT_SECONDS,
        "every 10 s": 10.0,
    }
    with processes(jobs) as pool:
        futures = {
            (size, name): pool.submit(measure, *size, pace, seconds) for size in SIZES for name, pace in paces.items()
        }
        session_futures = {size: pool.submit(of_sessions, *size, seconds) for size in SIZES}
        for size in SIZES:
            costs = {name: futures[size, name].result() for name in paces} | {
                "once a second, layout `sessions`": session_futures[size].result(),
                "KCL 2.x, computed": of_kcl(*size),
            }
            for name, cost in costs.items():
                figures = f"{cost.writes:.1f} | {cost.writes / size[0]:.2f} | {cost.reads:.1f}"
                print(f"| {size[0]}, {size[1]} | {name} | {figures} | {cost.bill(write_price, read_price):,.0f} |")


if __name__ == "__main__":
    typer.run(main)
