"""What a MultiLangDaemon takes in memory and processor time, beside KCL's own on a JVM, and with 500 shards.

    LEASEHOLD_DYNAMODB_LOCAL=1 python benchmarks/multilang.py [--records N] [--shards 500]

The stream is kinesis-local's; leases are in DynamoDB Local, each daemon's in a table of its own, and both read the same
`.properties` file but for that. The children are the same Python program, which decodes each record and
checkpoints each message. What is printed is of the daemon's process alone, as Linux counts it: its processor time from
its start to its first record, its processor time for each record after that, and its memory at the first and the last
one. Seconds are not printed: they depend on what else runs here.

Bars: at most half of the JVM's memory, at most its processor time for a record, and at most a third of it until the
first record. With `--shards`, ours alone holds so many, each with a child. It ends with 1 where a bar is not met.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "multilang"))

import boto3
from attrs import frozen
from libraries import java_daemon
from standins.dynamodb_local import dynamodb_local

from leasehold.adapters.demo.child import ENVIRONMENT
from leasehold.adapters.local.services import kinesis_local
from leasehold.balancer.model import HASH_KEYS

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

SHARDS, SIZE, PUT = 4, 1000, 500
WAIT_SECONDS = 900
TICK = os.sysconf("SC_CLK_TCK")
MIB = 2**20

CHILD = """
import base64, json, os, sys
path = os.path.join(os.environ["COUNTS"], str(os.getpid()))
count = 0
for line in sys.stdin:
    message = json.loads(line)
    action = message["action"]
    if action == "checkpoint":
        continue
    if action == "processRecords":
        for each in message["records"]:
            base64.b64decode(each["data"])
        count += len(message["records"])
        with open(path + ".new", "w") as out:
            out.write(str(count))
        os.replace(path + ".new", path)
        print('{"action": "checkpoint", "sequenceNumber": null, "subSequenceNumber": null}', flush=True)
    print(json.dumps({"action": "status", "responseFor": action}), flush=True)
"""


def filled(client: "KinesisClient", shards: int, records: int) -> str:
    """A stream of so many shards with so many records in each."""
    name, width = f"multilang-{uuid4().hex[:8]}", HASH_KEYS[1] // shards
    client.create_stream(StreamName=name, ShardCount=shards)
    client.get_waiter("stream_exists").wait(StreamName=name, WaiterConfig={"Delay": 1})
    for shard in range(shards):
        key = str(shard * width + width // 2)
        for start in range(0, records, PUT):
            rows: list[Any] = [
                {"Data": os.urandom(SIZE), "PartitionKey": f"k-{number}", "ExplicitHashKey": key}
                for number in range(start, min(start + PUT, records))
            ]
            assert client.put_records(StreamName=name, Records=rows)["FailedRecordCount"] == 0
    return name


@frozen
class Taken:
    """What a daemon took until some moment."""

    processor_seconds: float
    memory_bytes: int


def taken(pid: int) -> Taken:
    """By this process so far, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    memory = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
    return Taken((int(fields[11]) + int(fields[12])) / TICK, memory)


def counts(folder: Path) -> list[int]:
    """The records that each child was given."""
    return [int(file.read_text()) for file in folder.iterdir() if not file.suffix]


def awaited(process: "subprocess.Popen[bytes]", log: Path, holds: Callable[[], bool]) -> None:
    """Wait for it; end with the daemon's last words where it does not come."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"no records came:\n{log.read_text()[-3000:]}")
        time.sleep(0.05)


@contextmanager
def daemon(command: Sequence[str], folder: Path, properties: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """A daemon with this file, ended in good order."""
    file, told = folder / "app.properties", folder / "counts"
    told.mkdir(parents=True)
    file.write_text("".join(f"{key} = {value}\n" for key, value in properties.items()))
    there = {**os.environ, "COUNTS": str(told)}
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen((*command, str(file)), stdout=log, stderr=log, env=there) as run,  # noqa: S603  as above
    ):
        try:
            yield run
            run.send_signal(signal.SIGTERM)
            run.wait(WAIT_SECONDS)
        finally:
            run.kill()


def measured(
    command: Sequence[str], folder: Path, properties: dict[str, str], shards: int, records: int
) -> list[Taken]:
    """What was taken at the first record of each shard, and at the last."""
    found: list[Taken] = []
    with daemon(command, folder, properties) as process:
        for holds in (
            lambda: len(counts(folder / "counts")) == shards,
            lambda: sum(counts(folder / "counts")) == shards * records,
        ):
            awaited(process, folder / "log", holds)
            found.append(taken(process.pid))
    return found


def main() -> None:
    """Print a table; end with 1 where a bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=1_500, help="of each of four shards")
    parser.add_argument("--shards", type=int, help="hold so many by one of ours, and nothing else")
    chosen = parser.parse_args()
    ours = (sys.executable, "-m", "leasehold.adapters.cli.main", "multilang")
    work = Path(tempfile.mkdtemp(prefix="leasehold-multilang-"))
    (work / "child.py").write_text(CHILD)
    shards, records = chosen.shards or SHARDS, 1 if chosen.shards else chosen.records
    try:
        with kinesis_local() as stream, dynamodb_local() as table:
            os.environ |= ENVIRONMENT
            client = boto3.client("kinesis", region_name="eu-west-1", endpoint_url=stream.url)
            properties = {
                "executableName": f"{sys.executable} {work / 'child.py'}",
                "streamName": filled(client, shards, records),
                "AwsCredentialsProvider": "DefaultCredentialsProvider",
                "initialPositionInStream": "TRIM_HORIZON",
                "regionName": "eu-west-1",
                "kinesisEndpoint": stream.url,
                "dynamoDBEndpoint": table.url,
                "retrievalMode": "POLLING",
                "idleTimeBetweenReadsInMillis": "250",
                "metricsLevel": "NONE",
            }
            found = {
                name: measured(
                    command, work / name, properties | {"applicationName": f"app-{uuid4().hex[:8]}"}, shards, records
                )
                for name, command in (("ours", ours),) + (() if chosen.shards else (("Java", java_daemon()),))
            }
    finally:
        shutil.rmtree(work)
    good = report(found, shards, records)
    sys.exit(0 if good else 1)


def report(found: dict[str, list[Taken]], shards: int, records: int) -> bool:
    """Print what was found; whether the bars are met."""
    print(f"{shards} shards, {records} records of {SIZE} bytes in each\n")
    print("| | " + " | ".join(found) + " | bar |\n|---|" + "---|" * (len(found) + 1))
    rows: list[tuple[str, Callable[[list[Taken]], float], float]] = [
        ("processor seconds until each shard's first record", lambda told: told[0].processor_seconds, 1 / 3),
        ("MiB then", lambda told: told[0].memory_bytes / MIB, 1 / 2),
        ("MiB at the last record", lambda told: told[1].memory_bytes / MIB, 1 / 2),
        (
            "processor microseconds a record",
            lambda told: 1e6 * (told[1].processor_seconds - told[0].processor_seconds) / (shards * records),
            1.0,
        ),
    ]
    good = True
    for name, figure, bar in rows:
        figures = [figure(told) for told in found.values()]
        met = len(figures) == 1 or figures[0] <= bar * figures[1]
        good = good and met
        verdict = "" if len(figures) == 1 else f"{bar:.2f} x {'pass' if met else 'FAIL'}"
        print(f"| {name} | " + " | ".join(f"{each:.1f}" for each in figures) + f" | {verdict} |")
    return good


if __name__ == "__main__":
    main()
