"""Measures what one HTTP response costs with leasehold's own connections, next to `http.client` and urllib3.

    python benchmarks/http_connections.py [--rounds N] [--seconds N]

A local server in another process responds immediately. Each contender sends the same request over one connection that
it keeps open, and reads the body of the response without parsing it. All three limit the time of each read. The result
is the processor time of the reading process for one response: the median of several rounds, in which the contenders
take turns. The ratios divide the cost of the others by the cost of our own.
"""

import argparse
import http.client
import os
import statistics
from collections.abc import Callable
from urllib.parse import urlsplit

import cbor2
import urllib3
from wire_server import CBOR, NEXT, Load, served
from wire_speed import cost_per_row, run_in_process

from leasehold.stores.aws_calls.connections import HostConnections

LOADS = (Load("10 records of 1 KB", 10, 1000), Load("1,000 records of 1 KB", 1000, 1000))
TIMEOUT_SECONDS = 30.0
HEADERS = {"Content-Type": CBOR, "X-Amz-Target": "Kinesis_20131202.GetRecords"}
REQUEST = cbor2.dumps({"ShardIterator": NEXT})
WARM_UP_RESPONSES = 20


def own_connections(url: str) -> Callable[[], int]:
    """Return a function that fetches one response with leasehold's own connections."""
    address = urlsplit(url)
    connections = HostConnections(
        str(address.hostname),
        address.port or 80,
        None,
        connect_seconds=TIMEOUT_SECONDS,
        read_seconds=TIMEOUT_SECONDS,
    )
    lines = ["POST / HTTP/1.1", f"Host: {address.netloc}", f"Content-Length: {len(REQUEST)}"]
    lines += [f"{name}: {value}" for name, value in HEADERS.items()]
    head = "\r\n".join([*lines, "", ""]).encode()
    return lambda: len(connections.send(head, REQUEST, repeatable=True).body)


def standard_library(url: str) -> Callable[[], int]:
    """Return a function that fetches one response with `http.client`."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_SECONDS)

    def fetch() -> int:
        connection.request("POST", "/", REQUEST, HEADERS)
        return len(connection.getresponse().read())

    return fetch


def urllib3_pool(url: str) -> Callable[[], int]:
    """Return a function that fetches one response with a connection pool of urllib3."""
    address = urlsplit(url)
    pool = urllib3.HTTPConnectionPool(str(address.hostname), address.port, timeout=TIMEOUT_SECONDS, retries=False)
    return lambda: len(pool.urlopen("POST", "/", REQUEST, HEADERS).data)


CONTENDERS = {"leasehold": own_connections, "http.client": standard_library, "urllib3": urllib3_pool}


def cost_per_response(contender: str, url: str, seconds: float) -> float:
    """Return the processor time of one response, in microseconds."""
    fetch = CONTENDERS[contender](url)
    for _ in range(WARM_UP_RESPONSES):
        fetch()
    return cost_per_row(lambda: bool(fetch()), seconds)


def measure(load: Load, rounds: int, seconds: float) -> dict[str, float]:
    """Return the median cost of each contender, with each run in a separate process."""
    costs: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with served(load) as url:
        for _ in range(rounds):
            for name, measured in costs.items():
                measured.append(run_in_process(cost_per_response, name, url, seconds))
    return {name: statistics.median(measured) for name, measured in costs.items()}


def main() -> None:
    """Print a table for each size of the response."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for load in LOADS:
        costs = measure(load, options.rounds, options.seconds)
        print(f"\n{load.name} in a response\n| | us a response | of leasehold's |\n|---|---|---|")
        for name, cost in costs.items():
            print(f"| {name} | {cost:.0f} | {cost / costs['leasehold']:.2f} x |")


if __name__ == "__main__":
    main()
