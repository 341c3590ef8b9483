"""Measures the memory and processor time of our MultiLangDaemon, next to the KCL's daemon on a JVM, or with 500 shards.

    LEASEHOLD_DYNAMODB_LOCAL=1 python benchmarks/multilang.py [--records N] [--shards 500]

The stream is in kinesis-local. The leases are in DynamoDB Local, in a separate table for each daemon. Apart from the
table, both daemons have the same `.properties` file. The children run the same Python program, which decodes each
record and checkpoints each message. The figures are those of the daemon's process alone, as counted by Linux: its
processor time from its start to its first record, its processor time per record after that, and its memory at the first
and the last record. Elapsed time is not printed, because it depends on other load on the machine.

The limits are half of the JVM's memory, the JVM's processor time per record, and a third of its processor time until
the first record. With `--shards`, only our daemon runs, with that many shards and a child for each. The exit status is
1 if a limit is not met.
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

from leasehold.balancer.model import HASH_KEYS
from leasehold_lab.demo.child import ENVIRONMENT
from leasehold_lab.standins.services import run_kinesis_local

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

SMALL_CHILD = """
while read -r line; do
  case $line in
    *'"action":"checkpoint"'*) continue ;;
    '{"action":"initialize"'*) action=initialize ;;
    '{"action":"processRecords"'*) action=processRecords; echo 1 > "$COUNTS/$$"; echo '{"action":"checkpoint"}' ;;
    '{"action":"shutdownRequested"'*) action=shutdownRequested ;;
    *) action=leaseLost ;;
  esac
  echo "{\\"action\\":\\"status\\",\\"responseFor\\":\\"$action\\"}"
done
"""
"""A child that needs only one MiB of memory. Hundreds of Python children would measure the machine instead."""


@frozen
class FilledStream:
    """A stream whose shards all get the same number of records."""

    client: "KinesisClient"
    name: str
    shards: int

    @classmethod
    def create(cls, client: "KinesisClient", shards: int) -> "FilledStream":
        """Create a stream with one record in each shard."""
        stream = cls(client, f"multilang-{uuid4().hex[:8]}", shards)
        client.create_stream(StreamName=stream.name, ShardCount=shards)
        client.get_waiter("stream_exists").wait(StreamName=stream.name, WaiterConfig={"Delay": 1})
        stream.put(1)
        return stream

    def put(self, records: int) -> None:
        """Put this many records into each shard."""
        width = HASH_KEYS[1] // self.shards
        keys = [str(shard * width + width // 2) for shard in range(self.shards)]
        rows: list[Any] = [
            {"Data": os.urandom(SIZE), "PartitionKey": "k", "ExplicitHashKey": key}
            for _ in range(records)
            for key in keys
        ]
        for start in range(0, len(rows), PUT):
            response = self.client.put_records(StreamName=self.name, Records=rows[start : start + PUT])
            assert response["FailedRecordCount"] == 0


@frozen
class Resources:
    """The processor time that a daemon has used so far, and its current memory."""

    processor_seconds: float
    memory_bytes: int


def resources_of(pid: int) -> Resources:
    """Return the resources of a process, without those of its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    memory = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
    return Resources((int(fields[11]) + int(fields[12])) / TICK, memory)


def record_counts(folder: Path) -> list[int]:
    """Return the number of records that each child has received."""
    return [int(file.read_text()) for file in folder.iterdir() if not file.suffix]


def wait_until(process: "subprocess.Popen[bytes]", log: Path, holds: Callable[[], bool]) -> None:
    """Wait until `holds` returns True. If it doesn't in time, exit with the daemon's last output."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not holds():
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"no records came:\n{log.read_text()[-3000:]}")
        time.sleep(0.05)


@contextmanager
def daemon(command: Sequence[str], folder: Path, properties: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a daemon with these properties, and stop it by SIGTERM at the end of the block."""
    properties_file, counts_folder = folder / "app.properties", folder / "counts"
    counts_folder.mkdir(parents=True)
    properties_file.write_text("".join(f"{key} = {value}\n" for key, value in properties.items()))
    environment = {**os.environ, "COUNTS": str(counts_folder)}
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen((*command, str(properties_file)), stdout=log, stderr=log, env=environment) as process,  # noqa: S603  as above
    ):
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            process.wait(WAIT_SECONDS)
        finally:
            process.kill()


def measure(
    command: Sequence[str], folder: Path, properties: dict[str, str], stream: FilledStream, records: int
) -> list[Resources]:
    """Return the daemon's resources when each shard has a record, and when all records have been processed."""
    counts_folder = folder / "counts"
    with daemon(command, folder, properties | {"streamName": stream.name, "applicationName": stream.name}) as process:
        wait_until(process, folder / "log", lambda: len(record_counts(counts_folder)) == stream.shards)
        at_first_record = resources_of(process.pid)
        stream.put(records)
        wait_until(process, folder / "log", lambda: sum(record_counts(counts_folder)) == stream.shards * (records + 1))
        return [at_first_record, resources_of(process.pid)]


def main() -> None:
    """Print a table. The exit status is 1 if a limit is not met."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=1_500, help="of each of four shards")
    parser.add_argument("--shards", type=int, help="hold so many by one of ours, and nothing else")
    options = parser.parse_args()
    ours = (sys.executable, "-m", "leasehold.adapters.cli.main", "multilang")
    work_folder = Path(tempfile.mkdtemp(prefix="leasehold-multilang-"))
    (work_folder / "child.py").write_text(CHILD)
    (work_folder / "child.sh").write_text(SMALL_CHILD)
    child = f"/bin/sh {work_folder / 'child.sh'}" if options.shards else f"{sys.executable} {work_folder / 'child.py'}"
    shards, records = options.shards or SHARDS, 0 if options.shards else options.records
    try:
        with run_kinesis_local() as stream, dynamodb_local() as table:
            os.environ |= ENVIRONMENT
            client = boto3.client("kinesis", region_name="eu-west-1", endpoint_url=stream.url)
            properties = {
                "executableName": child,
                "AwsCredentialsProvider": "DefaultCredentialsProvider",
                "initialPositionInStream": "TRIM_HORIZON",
                "regionName": "eu-west-1",
                "kinesisEndpoint": stream.url,
                "dynamoDBEndpoint": table.url,
                "retrievalMode": "POLLING",
                "idleTimeBetweenReadsInMillis": "250",
                "metricsLevel": "NONE",
            }
            commands = {"ours": ours} if options.shards else {"ours": ours, "Java": java_daemon()}
            results = {
                name: measure(command, work_folder / name, properties, FilledStream.create(client, shards), records)
                for name, command in commands.items()
            }
    finally:
        shutil.rmtree(work_folder)
    meets_limits = report(results, shards, records)
    sys.exit(0 if meets_limits else 1)


def report(results: dict[str, list[Resources]], shards: int, records: int) -> bool:
    """Print the table, and return whether the limits are met."""
    print(f"{shards} shards, {records} records of {SIZE} bytes in each\n")
    print("| | " + " | ".join(results) + " | bar |\n|---|" + "---|" * (len(results) + 1))
    rows: list[tuple[str, Callable[[list[Resources]], float], float]] = [
        ("processor seconds until each shard's first record", lambda resources: resources[0].processor_seconds, 1 / 3),
        ("MiB then", lambda resources: resources[0].memory_bytes / MIB, 1 / 2),
        ("MiB at the last record", lambda resources: resources[1].memory_bytes / MIB, 1 / 2),
        (
            "processor microseconds a record",
            lambda resources: (
                1e6 * (resources[1].processor_seconds - resources[0].processor_seconds) / (shards * max(records, 1))
            ),
            1.0,
        ),
    ]
    all_good = True
    for name, figure, bar in rows:
        figures = [figure(resources) for resources in results.values()]
        meets_limit = len(figures) == 1 or figures[0] <= bar * figures[1]
        all_good = all_good and meets_limit
        verdict = "" if len(figures) == 1 else f"{bar:.2f} x {'pass' if meets_limit else 'FAIL'}"
        print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in figures) + f" | {verdict} |")
    return all_good


if __name__ == "__main__":
    main()
