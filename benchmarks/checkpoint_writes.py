"""What checkpoints cost: writes a second for each lease, and the month's bill, of a fleet whose shards never rest.

`python benchmarks/checkpoint_writes.py` prints the table of docs/from-java-kcl.md.
"""

import os
from typing import Annotated

import typer
from attrs import evolve, frozen
from session_requests import bills, requested

from leasehold.adapters.consumer.handling import CHECKPOINT_SECONDS
from leasehold.balancer.config import Config
from leasehold.balancer.rules.kcl import Kcl
from leasehold_lab.processes import processes
from leasehold_lab.simulator.question import SimulationQuestion, fleet_of
from leasehold_lab.simulator.run import run, traffic
from leasehold_lab.simulator.scenario import Network

SIZES = ((10, 2), (100, 10), (1000, 50))
"""Shards and workers."""
READ_SECONDS = 0.2
"""Between two batches of a shard: as often as ours ask while records flow."""
KCL_READ_SECONDS = 1.5
"""What KCL waits by default between two batches, each of which its usual processor checkpoints."""
WARM_SECONDS = 20.0
MONTH = 730 * 3600
MILLION = 1_000_000


@frozen
class TableCost:
    """Read and write units of a whole table in a second."""

    writes: float
    reads: float

    def bill(self, write_price: float, read_price: float) -> float:
        """Of a month, at these prices of a million units."""
        return MONTH * (self.writes * write_price + self.reads * read_price) / MILLION


def measured(shards: int, workers: int, checkpoints: float, seconds: float) -> TableCost:
    """Of `seconds` of a fleet that only reads, less those of its beginning, when everybody lists to find the others."""
    question = SimulationQuestion(shards, (workers,), kind="steady", pace="own", cycles=0, checkpoints=checkpoints)
    scenario = evolve(fleet_of(question).scenario, network=Network(stall=0.0, unanswered=0.0))
    warm, whole = (
        traffic(run(evolve(scenario, seconds=length, calm=length, read_seconds=READ_SECONDS)))
        for length in (WARM_SECONDS, WARM_SECONDS + seconds)
    )
    writes, reads = whole.write_units - warm.write_units, whole.read_units - warm.read_units
    return TableCost(writes / seconds, reads / seconds)


def of_sessions(shards: int, workers: int, seconds: float) -> TableCost:
    """The same in layout `sessions`, once a second."""
    return TableCost(*bills(shards, workers, requested(shards, workers, CHECKPOINT_SECONDS, seconds))[0])


def of_kcl(shards: int, workers: int) -> TableCost:
    """Of KCL 2.x by its defaults, computed: it renews, checkpoints every batch, and every worker scans the table."""
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
        asked = {
            (size, name): pool.submit(measured, *size, pace, seconds) for size in SIZES for name, pace in paces.items()
        }
        grouped = {size: pool.submit(of_sessions, *size, seconds) for size in SIZES}
        for size in SIZES:
            found = {name: asked[size, name].result() for name in paces} | {
                "once a second, layout `sessions`": grouped[size].result(),
                "KCL 2.x, computed": of_kcl(*size),
            }
            for name, cost in found.items():
                figures = f"{cost.writes:.1f} | {cost.writes / size[0]:.2f} | {cost.reads:.1f}"
                print(f"| {size[0]}, {size[1]} | {name} | {figures} | {cost.bill(write_price, read_price):,.0f} |")


if __name__ == "__main__":
    typer.run(main)
