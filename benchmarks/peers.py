"""What a row, a small poll and a start cost a whole process tree, ours beside what else reads Kinesis.

    python benchmarks/peers.py [--rounds N] [--seconds N] [--only NAME] [--also NAME=COMMAND]

One canned server, a process of its own, answers every question for a shard at once and counts what it has told. Each
contestant is a process of its own with all that it starts; what counts is the processor time of that tree between two
marks behind its first poll, divided by the server's count of polls; what was spent up to the first poll is the start.
Medians over rounds in turn, in one run. Ours is `leasehold consume` with a table in SQLite, compiled as in a wheel,
whose handler takes the data of each record; boto3 is a bare loop without leases; async-kinesis, in an environment of
its own, hands out one record after the other. `--also` adds any other as a command, in which `{url}` is the server's
address: the stream is `canned`, and any credentials do. Below each table: what ours is measured by, met or not, and how
many times as much each of the others takes.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from urllib.request import urlopen

from attrs import frozen
from compiled import as_installed
from producer_speed import peer_python
from wire_server import NEXT, Handler, Load, _answer, _served, forms_of, rows_of

from leasehold.adapters.demo.child import ENVIRONMENT
from leasehold.balancer.model import HASH_KEYS

SETTLING_SECONDS = 3.0
"""From the first poll to the first mark."""
TICKS = os.sysconf("SC_CLK_TCK")


@frozen
class Case:
    """What is served: to so many shards answers of so many records; to those of a quiet stream nothing comes.

    bars  what ours is to take at most, by the name of a column
    pace  seconds between two questions of ours for a shard; None: as set by default
    """

    name: str
    shards: int
    records: int
    size: int
    bars: Mapping[str, float]
    pace: float | None = 0.2


ROW, POLL, CORE, THREADS, START = "us a row", "ms a poll", "% of a core", "threads", "start, s"
CASES = (
    Case("1 KB rows, 4 shards", 4, 1000, 1000, {ROW: 3.0, START: 0.8}),
    Case("100 B rows, 4 shards", 4, 5000, 100, {ROW: 1.1}),
    Case("polls of 10 records, 20 shards", 20, 10, 100, {POLL: 1.0}),
    Case("100 quiet shards, each asked five times a second", 100, 0, 0, {}),
    Case("100 shards at rest, asked as by default", 100, 0, 0, {CORE: 5.0, THREADS: 40}, pace=None),
)


class Counting(Handler):
    """One connection; counts what has been told."""

    case: ClassVar[Case]
    polls: ClassVar[int] = 0

    def handle(self) -> None:
        """Serve one connection, which may end at any time."""
        with suppress(ConnectionError):
            super().handle()

    def do_GET(self) -> None:  # noqa: N802  as the server looks it up
        """What has been told so far."""
        self._say("application/json", json.dumps({"polls": Counting.polls}).encode())

    def do_POST(self) -> None:  # noqa: N802  likewise
        """One question."""
        if self.headers["X-Amz-Target"].endswith("GetRecords"):
            Counting.polls += 1  # lost additions of threads side by side are few, and the same for all
        super().do_POST()

    def _told(self, wanted: str, asked: dict[str, Any]) -> dict[str, Any]:
        if wanted == "DescribeStream":  # as async-kinesis asks
            whole = {"StreamName": "canned", "StreamStatus": "ACTIVE", "HasMoreShards": False}
            return {"StreamDescription": {**whole, **self._told("ListShards", asked)}}
        if wanted != "ListShards":
            return super()._told(wanted, asked)
        width = (HASH_KEYS[1] + 1) // self.case.shards
        ranges = [(each * width, (each + 1) * width - 1) for each in range(self.case.shards)]
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
    """Answer until ended; in a process of its own."""
    Counting.case = case
    rows = rows_of(Load(case.name, case.records, case.size))
    told = {"Records": rows, "MillisBehindLatest": 60_000 if rows else 0, "NextShardIterator": NEXT}
    Counting.answers = forms_of({**told, "ChildShards": None})
    _answer(Counting, ports)


HANDLER = "def handle(delivery):\n    sum(len(record.data) for record in delivery.records)\n"
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


def contestants(case: Case, also: Mapping[str, str]) -> dict[str, Sequence[str]]:
    """The command of each."""
    consume = [sys.executable, "-c", "from leasehold.adapters.cli import run; run()", "consume"]
    pace = "" if case.pace is None else f"&poll_seconds={case.pace}"
    ours = [*consume, f"kinesis://canned?region=eu-west-1{pace}&endpoint={{url}}"]
    rest = [
        "--store",
        "sqlite:///{folder}/leases.db",
        "--handler",
        "handler:handle",
        "--initial-position",
        "TRIM_HORIZON",
    ]
    through = [*ours[:-1], f"{ours[-1]}&wire=boto3"]
    others = {name: shlex.split(command) for name, command in also.items()}
    mine: dict[str, Sequence[str]] = {
        "ours": [*ours, *rest],
        "ours, wire=boto3": [*through, *rest],
        "boto3": [sys.executable, "-c", BOTO3, "{url}"],
    }
    if case.records:  # it ends its loop where nothing comes
        mine["async-kinesis"] = [str(peer_python()), "-c", ASYNC_KINESIS, "{url}"]
    return {**mine, **others}


@frozen
class Cost:
    """Processor seconds up to the first poll; of a poll; and a share of a core; threads, and MiB of memory."""

    start: float
    poll: float
    core: float
    threads: int
    memory: float


def _tree(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, IndexError, ValueError):
            children.setdefault(int((entry / "stat").read_text().rpartition(")")[2].split()[1]), []).append(
                int(entry.name)
            )
    found = [root]
    for each in found:
        found += children.get(each, [])
    return found


def _used(root: int) -> tuple[float, int, float]:
    """Processor seconds, threads and MiB of a process and all that it started."""
    ticks, threads, kilobytes = 0, 0, 0
    for each in _tree(root):
        with suppress(OSError, IndexError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            threads += int(fields[17])
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text()
            kilobytes += int(rollup.partition("\nPss:")[2].split()[0])
    return ticks / TICKS, threads, kilobytes / 1024


def _polls(url: str) -> int:
    with urlopen(url) as told:  # noqa: S310  our own server
        return int(json.load(told)["polls"])


def run(command: Sequence[str], case: Case, seconds: float, installed: Path) -> Cost:
    """One contestant, from its start to the second mark."""
    with _served(serve, case) as url, tempfile.TemporaryDirectory() as folder:
        Path(folder, "handler.py").write_text(HANDLER)
        words = [word.replace("{url}", url).replace("{folder}", folder) for word in command]
        path = f"{installed}{os.pathsep}{folder}"
        with Path(folder, "log").open("w+") as log:
            process = subprocess.Popen(  # noqa: S603  commands of our own, or our user's
                words, cwd=folder, env={**os.environ, "PYTHONPATH": path}, stdout=log, stderr=log
            )
            try:
                while not _polls(url):
                    assert process.poll() is None, Path(folder, "log").read_text()[-2000:]
                    time.sleep(0.01)
                start = _used(process.pid)[0]
                time.sleep(SETTLING_SECONDS)
                (spent, _, _), polls, began = _used(process.pid), _polls(url), time.monotonic()
                time.sleep(seconds)
                (more, threads, memory), count = _used(process.pid), _polls(url) - polls
                passed = time.monotonic() - began
            finally:
                process.terminate()
                process.wait()
    assert count, "it asked for nothing between the marks"
    return Cost(start, (more - spent) / count, (more - spent) / passed, threads, memory)


def medians(case: Case, found: Sequence[Cost]) -> dict[str, float]:
    """What a contestant took, by the name of a column."""
    start, poll, core, threads, memory = (
        statistics.median(each)
        for each in zip(*((c.start, c.poll, c.core, c.threads, c.memory) for c in found), strict=True)
    )
    row = {ROW: poll / case.records * 1e6} if case.records else {}
    return {**row, POLL: poll * 1e3, CORE: 100 * core, THREADS: threads, "MiB": memory, START: start}


def told(case: Case, costs: Mapping[str, list[Cost]]) -> None:
    """Print a table, the bars, and ours beside each of the others."""
    rows = {name: medians(case, found) for name, found in costs.items()}
    ours, columns = rows["ours"], list(rows["ours"])
    print(f"\n{case.name}\n| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|", sep="\n")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in row.values())} |")
    for column, bar in case.bars.items():
        print(f"{column}: {ours[column]:.2f}, at most {bar:g}: {'met' if ours[column] <= bar else 'NOT MET'}")
    for name, row in rows.items():
        if name != "ours":
            print(f"{name} takes {row[columns[0]] / ours[columns[0]]:.1f} times as much: {columns[0]}")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--only", default="", help="the cases whose names begin so")
    parser.add_argument("--also", action="append", default=[], metavar="NAME=COMMAND")
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    also = dict(each.split("=", 1) for each in options.also)
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with as_installed() as installed:
        for case in (each for each in CASES if each.name.startswith(options.only)):
            commands = contestants(case, also)
            costs: dict[str, list[Cost]] = {name: [] for name in commands}
            for _ in range(options.rounds):
                for name, command in commands.items():
                    costs[name].append(run(command, case, options.seconds, installed))
            told(case, costs)


if __name__ == "__main__":
    main()
