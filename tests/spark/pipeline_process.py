"""Runs `leasehold pipeline` in a process, and observes it from outside."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyspark
from attrs import define
from types_boto3_kinesis import KinesisClient

from leasehold.stores.urls import open_store

WAIT = 240
SHARDS = 2
SECRET = "hush-hush-hush"  # noqa: S105  of a stand-in that takes any
SPARK = Path(pyspark.__file__).parent


@define
class Application:
    """A pipeline in a separate process, and the number of rows that it has reported so far."""

    process: "subprocess.Popen[str]"
    folder: Path
    client: KinesisClient
    stream: str
    sent: int = 0
    landed: int = 0

    def put(self, numbers: Sequence[int]) -> None:
        """Put one record for each number."""
        for number in numbers:
            self.client.put_record(StreamName=self.stream, Data=b"%d" % number, PartitionKey=str(number))
        self.sent += len(numbers)

    def wait_until_landed(self) -> None:
        """Read the output of the pipeline until it has reported all rows."""
        lines = iter(self.process.stdout or ())
        while self.landed < self.sent:
            line = next(lines, None)
            assert line is not None, f"it ended: {self.words}"
            self.landed += json.loads(line)["rows"]

    def end(self, number: signal.Signals) -> int:
        """Signal the whole process group, as a terminal does, and return the exit status."""
        os.killpg(self.process.pid, number)
        return self.process.wait(WAIT)

    def owners(self) -> list[str | None]:
        return [lease.owner for lease in open_store(f"sqlite:///{self.folder}/leases.db").list().leases]

    @property
    def words(self) -> str:
        """The text that the pipeline has written to standard error."""
        return (self.folder / "words").read_text()


@contextmanager
def started(
    location: tuple[KinesisClient, str, Path],
    command: Sequence[str],
    environment: dict[str, str],
    url: str,
    *more_arguments: str,
) -> Iterator[Application]:
    """Start a pipeline with this command and additional arguments, and end it after the block."""
    client, stream, folder = location
    options = {"kinesis.streamName": stream, "kinesis.endpointUrl": url, "kinesis.region": "eu-west-1"}
    options |= {"kinesis.startingPosition": "TRIM_HORIZON", "lease.store": f"sqlite:///{folder}/leases.db"}
    arguments = ["kinesis-leased", *(f"--set={name}={value}" for name, value in options.items())]
    arguments += ["--folder", str(folder / "out"), *more_arguments]
    with (folder / "words").open("w") as error_file:
        process = subprocess.Popen(
            [*command, *arguments],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=error_file,
            text=True,
            start_new_session=True,
        )
    try:
        yield Application(process, folder, client, stream)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdout:
            process.stdout.close()


def freed(application: Application) -> None:
    """Wait until no lease has an owner. This must happen long before the leases would expire."""
    deadline = time.monotonic() + 8
    while any(application.owners()):
        assert time.monotonic() < deadline, (application.owners(), application.words)
        time.sleep(0.1)
    assert len(application.owners()) == SHARDS
