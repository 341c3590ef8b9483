"""Measures requests to DynamoDB with boto3's own parser and with orjson in its place, to decide whether it is worth it.

    python benchmarks/wire_more.py [--rounds N] [--seconds N]

The requests are a listing of 10,000 leases in pages of 1 MB, a renewal and a checkpoint. A local server in a separate
process responds immediately. The result is the processor time of the client: the median of several rounds, in which
both sides take turns.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import boto3
import orjson
from botocore.config import Config as ClientConfig
from wire_server import served_by
from wire_speed import REGION, cost_per_row, run_in_process

from leasehold.stores.dynamodb.store import parse_listings_with_orjson
from leasehold_lab.demo.child import ENVIRONMENT

LEASES, PAGE = 10_000, 2_500
RENEWAL = "SET leaseCounter = :next"
CHECKPOINT = "SET leaseCounter = :next, checkpoint = :checkpoint, checkpointSubSequenceNumber = :sub"


def lease(number: int) -> dict[str, Any]:
    """Return a row with the size of a real one."""
    return {
        "leaseKey": {"S": f"shardId-{number:012}"},
        "leaseOwner": {"S": f"worker-{number % 60}.example.internal:{number % 7}"},
        "leaseCounter": {"N": str(1000 + number)},
        "ownerSwitchesSinceCheckpoint": {"N": "0"},
        "checkpoint": {"S": f"{49680464258228814498658494596102438859221974134693 * 10**6 + number}"},
        "checkpointSubSequenceNumber": {"N": "0"},
        "startingHashKey": {"S": str(number * 2**114)},
        "endingHashKey": {"S": str((number + 1) * 2**114 - 1)},
        "throughputKBps": {"N": "512.25"},
    }


def table_responses() -> dict[str, bytes]:
    """Return the response to each kind of request."""
    page = {"Items": [lease(number) for number in range(PAGE)], "Count": PAGE, "ScannedCount": PAGE}
    return {
        "Scan": json.dumps({**page, "LastEvaluatedKey": {"leaseKey": {"S": "more"}}}).encode(),
        "UpdateItem": json.dumps({"Attributes": lease(7)}).encode(),
    }


def table_client(url: str, *, quick: bool) -> Any:  # noqa: ANN401  the service's own type has no name at run time
    """Return a boto3 client. If `quick`, responses are parsed by orjson, as the store does for scans."""
    config = ClientConfig(retries={"mode": "standard", "total_max_attempts": 2})
    client = boto3.client("dynamodb", region_name=REGION, endpoint_url=url, config=config)

    def read(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_event: object) -> None:
        customized_response_dict.update(orjson.loads(response_dict["body"]))
        response_dict["body"] = b"{}"

    if quick:
        parse_listings_with_orjson(client)
        client.meta.events.register("before-parse.dynamodb.UpdateItem", read)
    return client


def measure_listing(url: str, seconds: float, *, quick: bool) -> float:
    """Measure a listing, and return the microseconds per row."""
    client = table_client(url, quick=quick)

    def step() -> int:
        return sum(len(client.scan(TableName="t")["Items"]) for _ in range(LEASES // PAGE))

    return cost_per_row(step, seconds)


def measure_writes(url: str, seconds: float, *, expression: str, quick: bool) -> float:
    """Measure writes, and return the microseconds per write."""
    client = table_client(url, quick=quick)
    values: dict[str, Any] = {":next": {"N": "8"}, ":seen": {"N": "7"}, ":me": {"S": "worker-1"}}
    if ":checkpoint" in expression:
        values |= {":checkpoint": {"S": "4" * 56}, ":sub": {"N": "3"}}

    def step() -> int:
        for _ in range(20):
            client.update_item(
                TableName="t",
                Key={"leaseKey": {"S": "shardId-000000000007"}},
                UpdateExpression=expression,
                ConditionExpression="leaseCounter = :seen AND leaseOwner = :me",
                ExpressionAttributeValues=values,
                ReturnValues="ALL_NEW",
                ReturnValuesOnConditionCheckFailure="ALL_OLD",
            )
        return 20

    return cost_per_row(step, seconds)


def compare(name: str, unit: str, work: Callable[..., float], url: str, times: tuple[int, float]) -> None:
    """Measure both clients, and print a line of the table."""
    plain, quick = (
        statistics.median(run_in_process(partial(work, quick=quick), url, times[1]) for _ in range(times[0]))
        for quick in (False, True)
    )
    print(f"| {name} | {plain:.1f} us a {unit} | {quick:.1f} us | {plain / quick:.1f} x |")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    times = options.rounds, options.seconds
    os.environ.update(ENVIRONMENT)
    print(f"Python {sys.version.split()[0]}, boto3 {boto3.__version__}, load {os.getloadavg()[0]:.1f}")
    print("| | boto3 | by hooks | |\n|---|---|---|---|")
    with served_by(table_responses()) as url:
        compare(f"listing {LEASES:,} leases", "row", measure_listing, url, times)
        for name, expression in (("renewal", RENEWAL), ("checkpoint", CHECKPOINT)):
            work = partial(measure_writes, expression=expression)
            compare(name, "write", work, url, times)


if __name__ == "__main__":
    main()
