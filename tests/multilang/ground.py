"""Runs `leasehold multilang` as a process on local services, and waits for lines of its output."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO, TYPE_CHECKING
from uuid import uuid4

from libraries import PATH

from leasehold.stores.urls import open_store

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

COMMAND = (sys.executable, "-m", "leasehold.adapters.cli.main", "multilang")
CHILD = Path(__file__).with_name("child.py")
WAIT = 60.0


def processor(behavior: str, action: str = "none") -> str:
    """Return the command line of a child that shows this behavior at this action."""
    return f"{sys.executable} {CHILD} {behavior} {action}"


class Daemon:
    """The running command, and its output so far."""

    def __init__(self, process: "subprocess.Popen[str]", store: str) -> None:
        self.process, self.store = process, store
        self.said: list[str] = []
        self._lines: Queue[str | None] = Queue()
        assert process.stderr is not None
        Thread(target=self._read, args=(process.stderr,), daemon=True).start()

    def _read(self, stderr: IO[str]) -> None:
        for line in stderr:
            self._lines.put(line)
        self._lines.put(None)

    def await_line(self, condition: Callable[[str], bool]) -> str:
        """Wait for the first new line for which `condition` is true, and return it."""
        while True:
            try:
                line = self._lines.get(timeout=WAIT)
            except Empty:
                line = None
            assert line is not None, "".join(self.said)
            self.said.append(line)
            if condition(line):
                return line

    def output(self) -> list[str]:
        """Return all output so far, without waiting for more."""
        with suppress(Empty):
            while (line := self._lines.get_nowait()) is not None:
                self.said.append(line)
            self._lines.put(None)  # put the end mark back for `await_end`
        return self.said

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop the command and return its status."""
        self.process.send_signal(number)
        return self.await_end()

    def await_end(self) -> int:
        """Wait for the end of the process, and return its status. `said` then contains all of its output."""
        while (line := self._lines.get(timeout=WAIT)) is not None:
            self.said.append(line)
        return self.process.wait(WAIT)

    def child_stderr(self) -> list[str]:
        """Return the lines with which children logged the messages that they got."""
        return [line.partition(": ")[2].partition(": ")[2].strip() for line in self.said if ": got " in line]

    def checkpoints(self) -> dict[str, str]:
        """Return the sequence number of each shard's checkpoint."""
        store = open_store(self.store, create=False)
        try:
            return {lease.shard: lease.checkpoint.sequence for lease in store.list().leases}
        finally:
            store.close()


class Ground:
    """The services and the stream of one test."""

    def __init__(
        self, kinesis: "KinesisClient", kinesis_url: str, dynamodb_url: str, folder: Path, region: str = "eu-west-1"
    ) -> None:
        self.kinesis, self.folder = kinesis, folder
        self.stream = f"multilang-{uuid4().hex}"
        self.properties = {
            "streamName": self.stream,
            "applicationName": f"{self.stream}-app",
            "AwsCredentialsProvider": "DefaultCredentialsProvider",
            "initialPositionInStream": "TRIM_HORIZON",
            "regionName": region,
            "kinesisEndpoint": kinesis_url,
            "dynamoDBEndpoint": dynamodb_url,
            "retrievalMode": "POLLING",
            "idleTimeBetweenReadsInMillis": "250",
            "failoverTimeMillis": "3000",
            "metricsLevel": "NONE",
        }
        self.store = f"dynamodb://{self.stream}-app?region={region}&endpoint={dynamodb_url}"

    def put(self, *texts: str) -> list[str]:
        """Put these records one by one, and return their sequence numbers."""
        return [
            self.kinesis.put_record(StreamName=self.stream, Data=text.encode(), PartitionKey=text)["SequenceNumber"]
            for text in texts
        ]

    @contextmanager
    def daemon(self, program: str, *arguments: str, **properties: str) -> Iterator[Daemon]:
        """Run the command on this stream. At the end of the block, kill it if it still runs."""
        with self.started(str(self.file("app", program, **properties)), *arguments) as daemon:
            yield daemon

    def file(self, name: str, program: str, **properties: str) -> Path:
        """Write a `.properties` file with this name for a daemon."""
        file = self.folder / f"{name}.properties"
        contents = self.properties | {"executableName": program} | properties
        file.write_text("".join(f"{key} = {value}\n" for key, value in contents.items()))
        return file

    @contextmanager
    def started(
        self, *arguments: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> Iterator[Daemon]:
        """Run the command with these arguments, in `folder` or else in the folder of the test."""
        variables = {**os.environ, "PATH": PATH, **(environment or {})}
        with subprocess.Popen(
            (*COMMAND, *arguments), stderr=subprocess.PIPE, text=True, env=variables, cwd=folder or self.folder
        ) as process:
            try:
                yield Daemon(process, self.store)
            finally:
                process.kill()
