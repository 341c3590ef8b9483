"""Computes the monthly price of a lease store, from the requests of a simulated fleet whose shards are always busy.

`python benchmarks/store_price.py` prints the table in docs/choosing-a-store.md. All prices and sizes are options.
"""

from math import ceil
from typing import Annotated

import typer
from attrs import evolve, frozen

from leasehold.adapters.consumer.handling import CHECKPOINT_SECONDS
from leasehold.adapters.ops.doctor.examination import LIST_PRICES, MILLION, MONTH, ROW_BYTES, UNIT_BYTES
from leasehold_lab.simulator.question import SimulationQuestion, build_fleet
from leasehold_lab.simulator.run import run
from leasehold_lab.simulator.scenario import Network
from leasehold_lab.simulator.world.world import SimulatedHistory

WARM_SECONDS = 20.0
DYNAMODB, S3, GCS = (LIST_PRICES[scheme] for scheme in ("dynamodb", "s3", "gcs"))


@frozen
class Bill:
    """The number of requests per second, by the category in which they are billed."""

    writes: float
    lists: float
    reads: float

    def monthly_cost(self, write_price: float, read_price: float) -> float:
        """Return the price of 730 hours in US$, from prices per million. Listings of objects are billed as writes."""
        return MONTH * ((self.writes + self.lists) * write_price + self.reads * read_price) / MILLION


def dynamodb(requests: "Requests") -> Bill:
    """Return the capacity units: one per write, half a unit per 4 KB of a listing, and one per row read by key."""
    units = requests.scanned * ROW_BYTES / UNIT_BYTES / 2 + requests.fetched
    return Bill(requests.writes + requests.checkpoints, 0, units)


def s3(requests: "Requests") -> Bill:
    """Return the requests to S3.

    A checkpoint writes two objects. A read of the table is three listings, with 1,000 objects per page, and a read of
    each object that has changed.
    """
    looks = requests.lists * 3 * ceil(requests.leases / 1000)
    return Bill(requests.writes + 2 * requests.checkpoints, looks, requests.scanned + requests.fetched)


def azure(requests: "Requests") -> Bill:
    """Return the requests to Azure Blob Storage.

    A checkpoint writes two blobs. A read of the table is three listings, with 5,000 blobs per page. They contain the
    metadata, so changed blobs need not be read.
    """
    looks = requests.lists * 3 * ceil(requests.leases / 5000)
    return Bill(requests.writes + 2 * requests.checkpoints, looks, requests.fetched)


def google(requests: "Requests") -> Bill:
    """Return the requests to Google Cloud Storage. They are like those to Azure, but with 1,000 objects per page."""
    looks = requests.lists * 3 * ceil(requests.leases / 1000)
    return Bill(requests.writes + 2 * requests.checkpoints, looks, requests.fetched)


def postgres(requests: "Requests") -> Bill:
    """Return the statements to PostgreSQL. They are not billed, but the server is."""
    return Bill(requests.writes + requests.checkpoints, requests.lists, requests.fetched)


@frozen
class Requests:
    """The requests of a whole fleet per second. `scanned` counts rows in listings, and `fetched` rows read by key."""

    leases: int
    writes: float
    checkpoints: float
    lists: float
    scanned: float
    fetched: float


def count_requests(leases: int, workers: int, checkpoints: float, seconds: float, *, dated: bool) -> Requests:
    """Return the requests of a balanced fleet that reads its shards, without those of its start.

    When a fleet starts, its workers make additional listings to find each other.
    """
    question = SimulationQuestion(
        leases, (workers,), kind="steady", pace="own", cycles=0, checkpoints=checkpoints, dated=dated
    )
    scenario = evolve(build_fleet(question).scenario, network=Network(stall=0.0, unanswered=0.0), read_seconds=0.2)
    warm_up, total = (
        run(evolve(scenario, seconds=length, calm=length)) for length in (WARM_SECONDS, WARM_SECONDS + seconds)
    )

    def rate_of(figure: str) -> float:
        return (_figures(total)[figure] - _figures(warm_up)[figure]) / seconds

    return Requests(leases, *(rate_of(name) for name in ("writes", "checkpoints", "lists", "scanned", "fetched")))


def _figures(history: SimulatedHistory) -> dict[str, float]:
    requests = history.requests
    return {
        "writes": sum(count for verb, count in requests.items() if verb not in {"list", "get", "checkpoint"}),
        "checkpoints": requests["checkpoint"],
        "lists": requests["list"],
        "scanned": history.scanned,
        "fetched": history.fetched - history.fetched_stale / 2,
    }


def _parse_size(size: str) -> tuple[int, int]:
    leases, _, workers = size.partition("x")
    if not (leases.isdecimal() and workers.isdecimal() and int(leases) and int(workers)):
        raise typer.BadParameter(f"--fleet: {size!r} is not shards x workers, as in 10x2")
    return int(leases), int(workers)


def main(
    *,
    fleet: Annotated[list[str] | None, typer.Option(help="Shards and workers, as in 10x2; may be repeated.")] = None,
    checkpoint_seconds: Annotated[float, typer.Option(min=0)] = CHECKPOINT_SECONDS,
    dynamodb_write: Annotated[float, typer.Option(help="US$ for a million write units.")] = DYNAMODB.write,
    dynamodb_read: Annotated[float, typer.Option(help="US$ for a million read units.")] = DYNAMODB.read,
    s3_write: Annotated[float, typer.Option(help="US$ for a million writes and listings.")] = S3.write,
    s3_read: Annotated[float, typer.Option(help="US$ for a million reads.")] = S3.read,
    gcs_write: Annotated[float, typer.Option(help="US$ for a million writes and listings.")] = GCS.write,
    gcs_read: Annotated[float, typer.Option(help="US$ for a million reads.")] = GCS.read,
    azure_write: Annotated[float | None, typer.Option(help="US$ for a million writes and listings.")] = None,
    azure_read: Annotated[float | None, typer.Option(help="US$ for a million reads.")] = None,
    seconds: Annotated[float, typer.Option(min=10, help="How long each fleet is watched, in virtual time.")] = 40.0,
) -> None:
    """Count the requests, and print the table of prices."""
    sizes = {size: _parse_size(size) for size in fleet or ["4x2", "100x10"]}
    print(f"{'shards x workers':<18}{'store':<10}{'writes/s':>10}{'listings/s':>12}{'reads/s':>10}{'US$ a month':>13}")
    for size, (leases, workers) in sizes.items():
        table, objects = (
            count_requests(leases, workers, checkpoint_seconds, seconds, dated=dated) for dated in (False, True)
        )
        lines = (
            ("dynamodb", dynamodb(table), dynamodb_write, dynamodb_read),
            ("s3", s3(objects), s3_write, s3_read),
            ("gcs", google(objects), gcs_write, gcs_read),
            ("azblob", azure(objects), azure_write, azure_read),
            ("postgres", postgres(table), None, None),
        )
        for store, bill, write, read in lines:
            price = (
                "a server"
                if store == "postgres"
                else "?"
                if write is None or read is None
                else f"{bill.monthly_cost(write, read):,.2f}"
            )
            figures = f"{bill.writes:>10.1f}{bill.lists:>12.2f}{bill.reads:>10.1f}"
            print(f"{size:<18}{store:<10}{figures}{price:>13}")


if __name__ == "__main__":
    typer.run(main)
