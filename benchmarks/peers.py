"""Measures the processor time per row, per poll and for the start of leasehold and of other Kinesis readers.

    LEASEHOLD_DYNAMODB_LOCAL=1 python benchmarks/peers.py [--rounds N] [--seconds N] [--only NAME] [--without NAME]
        [--also NAME=COMMAND] [--parts]

A local server in a separate process responds to all requests immediately, and counts the polls. Each reader runs as a
process tree. The cost of a poll is the processor time of the tree between two moments after its first poll, divided by
the number of polls that the server counted. The cost of the start is the processor time until the first poll, with the
bytecode already compiled, as after an installation by pip. The results are medians of several rounds, in which the
readers take turns.

- "ours" is `leasehold consume` with a table in SQLite, compiled as in a wheel. Its handler reads the data of each
  record.
- boto3, Rust and Go are plain loops without leases.
- async-kinesis returns one record after another. It is installed in a separate environment.
- The Java KCL reads the data of each record, checkpoints once per second like ours, and has its leases in DynamoDB
  Local, which is not counted.
- The KCL's daemon with amazon_kclpy does the same. A proxy, which is not counted, translates its HTTP/2.

Readers whose tools are missing (Java and Maven, cargo, go) are left out, with a message. `--also` adds another reader
as a command, in which `{url}` is replaced by the URL of the server. The stream is `canned`, and any credentials work.

Below each table, the output shows whether ours meets its limits, and the relative cost of the other readers. A summary
table follows at the end. `--parts` measures only ours, and prints the processor time of a poll by thread name.
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar
from urllib.request import urlopen
from uuid import uuid4

from attrs import frozen
from compiled import as_installed
from other_languages import Peer, peers, proxy
from producer_speed import peer_python
from standins.dynamodb_local import dynamodb_local
from wire_server import ARN, FIRST, NEXT, Handler, Load, _run_http_server, _run_server, encodings_of, rows_of

from leasehold.adapters.toolchain import ServiceError
from leasehold.balancer.model import HASH_KEYS
from leasehold_lab.demo.child import ENVIRONMENT

SETTLING_SECONDS = 3.0
TICKS = os.sysconf("SC_CLK_TCK")
CHILDREN = 20
"""The maximum number of shards for a reader that has a process for each shard."""


@frozen
class Case:
    """A stream to serve: the number of shards, and the number and size of the records in a response.

    Attributes:
        bars: The limits for ours, by the name of a column.
        pace: The seconds between two requests of ours for a shard; None means the default.
    """

    name: str
    shards: int
    records: int
    size: int
    bars: Mapping[str, float]
    pace: float | None = 0.2


ROW, POLL, CORE, THREADS, MEMORY, START = "us a row", "ms a poll", "% of a core", "threads", "MiB", "start, s"
CASES = (
    Case("1 KB rows, 4 shards", 4, 1000, 1000, {ROW: 3.0, START: 0.8}),
    Case("100 B rows, 4 shards", 4, 5000, 100, {ROW: 1.1}),
    Case("polls of 10 records, 20 shards", 20, 10, 100, {POLL: 1.0}),
    Case("100 quiet shards, each asked five times a second", 100, 0, 0, {}),
    Case("100 shards at rest, asked as by default", 100, 0, 0, {CORE: 5.0, THREADS: 40}, pace=None),
)


class Counting(Handler):
    """A connection. Counts the polls of all connections."""

    case: ClassVar[Case]
    polls: ClassVar[int] = 0

    def handle(self) -> None:
        """Serve the connection, which the client may close at any time."""
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:  # noqa: N802  http.server requires this name
        """Return the number of polls so far."""
        self._write("application/json", json.dumps({"polls": Counting.polls}).encode())

    def do_POST(self) -> None:  # noqa: N802  likewise
        """Respond to a request, and count it if it is a poll."""
        if self.headers["X-Amz-Target"].endswith("GetRecords"):
            Counting.polls += 1  # this is not atomic, but few increments are lost, and equally many for all readers
        super().do_POST()

    def _records(self, form: str) -> bytes:
        # Sequence numbers increase, because the KCL drops records that are not after its checkpoint.
        return self.answers[form].replace(b"%d" % FIRST, b"%d" % (FIRST + Counting.polls))

    def _respond(self, operation: str, request: dict[str, Any]) -> dict[str, Any]:
        stream_description = {"StreamName": "canned", "StreamARN": ARN, "StreamStatus": "ACTIVE"}
        if operation == "DescribeStream":  # used by async-kinesis
            shards = self._respond("ListShards", request)
            return {"StreamDescription": {**stream_description, "HasMoreShards": False, **shards}}
        if operation == "DescribeStreamSummary":
            return {"StreamDescriptionSummary": {**stream_description, "OpenShardCount": self.case.shards}}
        if operation != "ListShards":
            return super()._respond(operation, request)
        range_starts = [
            (HASH_KEYS[1] + 1) * shard_number // self.case.shards for shard_number in range(self.case.shards + 1)
        ]
        ranges = [(first, next_start - 1) for first, next_start in pairwise(range_starts)]
        return {
            "Shards": [
                {
                    "ShardId": f"shardId-{number:012}",
                    "HashKeyRange": {"StartingHashKey": str(first), "EndingHashKey": str(last)},
                    "SequenceNumberRange": {"StartingSequenceNumber": "1"},
                }
                for number, (first, last) in enumerate(ranges)
            ]
        }


def serve(case: Case, ports: Any) -> None:  # noqa: ANN401  a queue
    """Serve requests until the process is terminated."""
    Counting.case = case
    rows = rows_of(Load(case.name, case.records, case.size))
    response = {"Records": rows, "MillisBehindLatest": 60_000 if rows else 0, "NextShardIterator": NEXT}
    Counting.answers = encodings_of({**response, "ChildShards": None})
    _run_http_server(Counting, ports)


HANDLER = "def handle(delivery):\n    sum(len(record.data) for record in delivery.records)\n"
TELLING = """
import json, os, re, threading, time

def tell():
    while True:
        spent = {}
        for thread in threading.enumerate():
            try:
                with open(f"/proc/self/task/{thread.native_id}/schedstat") as counted:
                    name = re.sub("[-_0-9]+$", "", thread.name)
                    spent[name] = spent.get(name, 0) + int(counted.read().split()[0])
            except OSError:
                pass
        with open("threads.new", "w") as file:
            json.dump(spent, file)
        os.replace("threads.new", "threads")
        time.sleep(0.5)

threading.Thread(target=tell, name="measuring", daemon=True).start()
"""
"""Code for the handler's module that writes the processor time of threads, by name, to a file twice a second."""
BOTO3 = """
import sys, boto3
client = boto3.client("kinesis", region_name="eu-west-1", endpoint_url=sys.argv[1])
shards = [row["ShardId"] for row in client.list_shards(StreamName="canned")["Shards"]]
asked = {"StreamName": "canned", "ShardIteratorType": "TRIM_HORIZON"}
places = [client.get_shard_iterator(ShardId=each, **asked)["ShardIterator"] for each in shards]
while True:
    for place in places:
        sum(len(row["Data"]) for row in client.get_records(ShardIterator=place)["Records"])
"""
ASYNC_KINESIS = """
import asyncio, sys
from kinesis import Consumer

class Plain:
    def parse(self, data):
        return [data]

async def main():
    options = {"region_name": "eu-west-1", "endpoint_url": sys.argv[1], "processor": Plain()}
    async with Consumer("canned", iterator_type="TRIM_HORIZON", **options) as consumer:
        while True:
            async for data in consumer:
                len(data)

asyncio.run(main())
"""


def readers(case: Case, also: Mapping[str, str]) -> dict[str, Peer]:
    """Return the readers by name, and print those that are left out."""
    consume = [sys.executable, "-c", "from leasehold.adapters.cli import run; run()", "consume"]
    pace = "" if case.pace is None else f"&poll_seconds={case.pace}"
    stream = f"kinesis://canned?region=eu-west-1{pace}&endpoint={{url}}"
    leases = ("--store", "sqlite:///{folder}/leases.db", "--initial-position", "TRIM_HORIZON")
    arguments, files = (*leases, "--handler", "handler:handle"), {"handler.py": HANDLER}
    readers_by_name = {
        "ours": Peer([*consume, stream, *arguments], files),
        "ours, wire=boto3": Peer([*consume, f"{stream}&wire=boto3", *arguments], files),
        "boto3": Peer([sys.executable, "-c", BOTO3, "{url}"]),
    }
    if case.records:  # its loop ends if there are no records
        readers_by_name["async-kinesis"] = Peer([str(peer_python()), "-c", ASYNC_KINESIS, "{url}"])
    for name, build in peers(case.pace).items():
        if case.shards > CHILDREN and "kclpy" in name:
            print(f"{name} is left out: it would be {case.shards} processes")
            continue
        try:
            readers_by_name[name] = build()
        except ServiceError as error:
            print(f"{name} is left out: {error}")
    return readers_by_name | {name: Peer(shlex.split(command)) for name, command in also.items()}


@frozen
class Cost:
    """The costs of a reader.

    Attributes:
        start: Processor seconds until the first poll.
        poll: Processor seconds per poll.
        core: The fraction of a core.
        threads: The number of threads.
        memory: Memory in MiB.
    """

    start: float
    poll: float
    core: float
    threads: int
    memory: float


def _process_tree(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, IndexError, ValueError):
            children.setdefault(int((entry / "stat").read_text().rpartition(")")[2].split()[1]), []).append(
                int(entry.name)
            )
    processes = [root]
    for process in processes:
        processes += children.get(process, [])
    return processes


def _resources(root: int) -> tuple[float, int, float]:
    """Return the processor seconds, the number of threads and the memory (MiB) of a process tree."""
    ticks, threads, kilobytes = 0, 0, 0
    for process in _process_tree(root):
        with suppress(OSError, IndexError):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            threads += int(fields[17])
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
            kilobytes += int(rollup.partition("\nPss:")[2].split()[0])
    return ticks / TICKS, threads, kilobytes / 1024


def _polls(url: str) -> int:
    with urlopen(url) as polls_response:  # noqa: S310  our own server
        return int(json.load(polls_response)["polls"])


@contextmanager
def start_reader(peer: Peer, case: Case, installed: Path, dynamodb: str) -> Iterator[tuple[str, int]]:
    """Start a reader, and yield the URL of its server and its process id after the first poll.

    The reader is killed at the end of the block.
    """
    with ExitStack() as stack:
        url = stack.enter_context(_run_server(serve, case))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        placeholders = {"url": url, "folder": folder, "dynamodb": dynamodb, "table": f"peers-{uuid4().hex[:8]}"}
        if any("{proxy}" in text for text in peer.files.values()):
            placeholders["proxy"] = stack.enter_context(proxy(url))

        def fill_placeholders(text: str) -> str:
            for name, value in placeholders.items():
                text = text.replace(f"{{{name}}}", value)
            return text

        for name, text in peer.files.items():
            Path(folder, name).write_text(fill_placeholders(text))
        environment = {
            **os.environ,
            "PYTHONPATH": f"{installed}{os.pathsep}{folder}",
            "PYTHONPYCACHEPREFIX": str(installed / "bytecode"),
            "PYTHONDONTWRITEBYTECODE": "",
            **peer.environment,
        }
        log = stack.enter_context(Path(folder, "log").open("w+"))
        process = subprocess.Popen(  # noqa: S603  a command of this file, or of its user
            [fill_placeholders(word) for word in peer.words], cwd=folder, env=environment, stdout=log, stderr=log
        )
        try:
            while not _polls(url):
                assert process.poll() is None, Path(folder, "log").read_text()[-2000:]
                time.sleep(0.01)
            yield url, process.pid
        finally:
            for child in _process_tree(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            process.wait()


def measure(peer: Peer, case: Case, seconds: float, installed: Path, dynamodb: str) -> Cost:
    """Run a reader, and return its costs."""
    with start_reader(peer, case, installed, dynamodb) as (url, process):
        start = _resources(process)[0]
        time.sleep(SETTLING_SECONDS)
        while _polls(url) < peer.settling:
            time.sleep(0.1)
        (spent, _, _), polls, began = _resources(process), _polls(url), time.monotonic()
        time.sleep(seconds)
        (processor_seconds, threads, memory), count = _resources(process), _polls(url) - polls
        elapsed = time.monotonic() - began
    assert count, "it asked for nothing between the marks"
    return Cost(start, (processor_seconds - spent) / count, (processor_seconds - spent) / elapsed, threads, memory)


def medians(case: Case, costs: Sequence[Cost]) -> dict[str, float]:
    """Return the median costs of a reader, by the name of a column."""
    start, poll, core, threads, memory = (
        statistics.median(values)
        for values in zip(*((c.start, c.poll, c.core, c.threads, c.memory) for c in costs), strict=True)
    )
    row_cost = {ROW: poll / case.records * 1e6} if case.records else {}
    return {**row_cost, POLL: poll * 1e3, CORE: 100 * core, THREADS: threads, MEMORY: memory, START: start}


def print_parts(case: Case, seconds: float, installed: Path) -> None:
    """Print the processor time of a poll for each kind of thread of our worker."""
    ours = readers(case, {})["ours"]
    measured_reader = Peer(ours.words, {"handler.py": HANDLER + TELLING})
    with start_reader(measured_reader, case, installed, "") as (url, process):
        time.sleep(SETTLING_SECONDS)
        thread_file = Path(f"/proc/{process}/cwd/threads")
        first_sample, polls = json.loads(thread_file.read_bytes()), _polls(url)
        time.sleep(seconds)
        second_sample, count = json.loads(thread_file.read_bytes()), _polls(url) - polls
    spent = {
        name: (second_sample[name] - first_sample.get(name, 0)) / count / 1e6
        for name in second_sample
        if name != "measuring"
    }
    print(f"\n{case.name}, {sum(spent.values()):.2f} ms a poll of ours\n| threads | ms a poll |\n|---|---|")
    for name, cost in sorted(spent.items(), key=lambda item: -item[1]):
        print(f"| {name} | {cost:.2f} |")


def print_table(case: Case, rows: Mapping[str, Mapping[str, float]]) -> None:
    """Print a table, the limits, and the costs of the other readers relative to ours."""
    ours, columns = rows["ours"], list(rows["ours"])
    print(f"\n{case.name}\n| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|", sep="\n")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in row.values())} |")
    for column, bar in case.bars.items():
        print(f"{column}: {ours[column]:.2f}, at most {bar:g}: {'met' if ours[column] <= bar else 'NOT MET'}")
    for name, row in rows.items():
        if name != "ours":
            print(f"{name} takes {row[columns[0]] / ours[columns[0]]:.1f} times as much: {columns[0]}")


def print_summary(costs: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Print a summary: for each reader the first column of each case, and the other columns of the first case."""
    first_case, *other_cases = costs
    columns = [(case.name, next(iter(costs[case.name]["ours"]))) for case in CASES if case.name in costs]
    more_columns = [(first_case, column) for column in (THREADS, MEMORY, START)]
    headings = [f"{column}, {name}" for name, column in columns] + [column for _, column in more_columns]
    print(f"\n| | {' | '.join(headings)} |")
    print("|---" * (len(columns) + len(more_columns) + 1) + "|")
    for name in dict.fromkeys(name for case in (first_case, *other_cases) for name in costs[case]):
        row = [costs[case][name][column] if name in costs[case] else None for case, column in (*columns, *more_columns)]
        print(f"| {name} | {' | '.join('' if value is None else f'{value:.2f}' for value in row)} |")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--only", default="", help="the cases whose names begin so")
    parser.add_argument(
        "--without", action="append", default=[], metavar="NAME", help="leave out who has this in its name"
    )
    parser.add_argument("--also", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--parts", action="store_true", help="ours alone, by its threads")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    also = dict(option.split("=", 1) for option in options.also)
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    results: dict[str, dict[str, dict[str, float]]] = {}
    cases = [case for case in CASES if case.name.startswith(options.only)]
    with as_installed() as installed, ExitStack() as stack:
        if options.parts:
            for case in cases:
                print_parts(case, options.seconds, installed)
            return
        try:
            dynamodb = stack.enter_context(dynamodb_local()).url
        except ServiceError as error:
            dynamodb = ""
            print(f"what keeps its leases in DynamoDB is left out: {error}")
        for case in cases:
            chosen = {
                name: peer
                for name, peer in readers(case, also).items()
                if (dynamodb or not _in_dynamodb(peer)) and not any(option in name for option in options.without)
            }
            costs: dict[str, list[Cost]] = {name: [] for name in chosen}
            for peer in () if results else chosen.values():
                with start_reader(peer, case, installed, dynamodb):
                    pass  # this compiles the bytecode of all imported modules
            for _ in range(options.rounds):
                for name, peer in chosen.items():
                    costs[name].append(measure(peer, case, options.seconds, installed, dynamodb))
            results[case.name] = {name: medians(case, reader_costs) for name, reader_costs in costs.items()}
            print_table(case, results[case.name])
    print_summary(results)
    print(f"load at the end {os.getloadavg()[0]:.1f}")


def _in_dynamodb(peer: Peer) -> bool:
    return any("{dynamodb}" in text for text in (*peer.words, *peer.files.values()))


if __name__ == "__main__":
    main()
