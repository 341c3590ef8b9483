"""What a month of a Lambda function costs behind an event source mapping, and under leasehold in containers.

`python benchmarks/lambda_price.py` prints what docs/from-lambda.md shows; every price and size is an option. The lease
table's requests are those of `store_price.py`. The stream costs the same for both and is left out.
"""

from math import ceil
from typing import Annotated

import typer
from store_price import DYNAMODB, counted, dynamodb

from leasehold.adapters.ops.doctor.examination import MILLION, MONTH

BUSY = 0.5
"""The part of its time for which a worker calls the function; the rest is left for bursts and a worker that dies."""


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
    """Count and print."""
    print(
        f"{'shards':<8}{'calls/s':>8}{'Lambda':>12}{'workers':>9}{'containers':>12}{'lease table':>13}{'leasehold':>12}"
    )
    for count in shards or [10, 100]:
        called = count * calls
        mapping = MONTH * called * (request / MILLION + call_seconds * memory_mb / 1024 * gb_second)
        # A worker without a shard does nothing, and a worker alone could not fail over.
        workers = max(2, min(count, ceil(called * call_seconds / BUSY)))
        containers = MONTH / 3600 * workers * (vcpu * vcpu_hour + gb * gb_hour)
        leases = dynamodb(counted(count, workers, checkpoint_seconds, 40.0, dated=False))
        table = leases.month(DYNAMODB.write, DYNAMODB.read)
        figures = f"{containers:>12,.2f}{table:>13,.2f}{containers + table:>12,.2f}"
        print(f"{count:<8}{called:>8g}{mapping:>12,.2f}{workers:>9}{figures}")


if __name__ == "__main__":
    typer.run(main)
