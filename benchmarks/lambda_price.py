"""Compares the monthly price of a Lambda function with an event source mapping, and of leasehold in containers.

`python benchmarks/lambda_price.py` prints the table in docs/from-lambda.md. All prices and sizes are options. The
requests to the lease table are computed as in `store_price.py`. The price of the stream is the same for both, and is
not included.
"""

from math import ceil
from typing import Annotated

import typer
from store_price import DYNAMODB, count_requests, dynamodb

from leasehold.adapters.ops.doctor.examination import MILLION, MONTH

BUSY = 0.5
"""The fraction of time in which a worker calls the function. The rest is a reserve for bursts and dead workers."""


def main(
    *,
    shards: Annotated[list[int] | None, typer.Option(min=1, help="Shards of the stream; may be repeated.")] = None,
    calls: Annotated[float, typer.Option(help="Calls a second for each shard.")] = 1.0,
    call_seconds: Annotated[float, typer.Option(help="How long one call takes.")] = 0.1,
    memory_mb: Annotated[int, typer.Option(help="Memory of the function, in MB.")] = 512,
    checkpoint_seconds: Annotated[float, typer.Option(min=0, help="As of `leasehold consume`.")] = 1.0,
    request: Annotated[float, typer.Option(help="Lambda: US$ for a million requests.")] = 0.20,
    gb_second: Annotated[float, typer.Option(help="Lambda: US$ for a GB-second.")] = 0.0000166667,
    vcpu: Annotated[float, typer.Option(help="vCPUs of a worker's container.")] = 0.25,
    gb: Annotated[float, typer.Option(help="GB of a worker's container.")] = 0.5,
    vcpu_hour: Annotated[float, typer.Option(help="Fargate: US$ for an hour of a vCPU.")] = 0.04048,
    gb_hour: Annotated[float, typer.Option(help="Fargate: US$ for an hour of a GB.")] = 0.004445,
) -> None:
    """Compute the prices, and print a table."""
    print(
        f"{'shards':<8}{'calls/s':>8}{'Lambda':>12}{'workers':>9}{'containers':>12}{'lease table':>13}{'leasehold':>12}"
    )
    for count in shards or [10, 100]:
        calls_per_second = count * calls
        mapping = MONTH * calls_per_second * (request / MILLION + call_seconds * memory_mb / 1024 * gb_second)
        # A worker without a shard does nothing, and a worker alone could not fail over.
        workers = max(2, min(count, ceil(calls_per_second * call_seconds / BUSY)))
        containers = MONTH / 3600 * workers * (vcpu * vcpu_hour + gb * gb_hour)
        leases = dynamodb(count_requests(count, workers, checkpoint_seconds, 40.0, dated=False))
        table = leases.monthly_cost(DYNAMODB.write, DYNAMODB.read)
        figures = f"{containers:>12,.2f}{table:>13,.2f}{containers + table:>12,.2f}"
        print(f"{count:<8}{calls_per_second:>8g}{mapping:>12,.2f}{workers:>9}{figures}")


if __name__ == "__main__":
    typer.run(main)
