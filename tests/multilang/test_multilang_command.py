"""`leasehold multilang` itself: the command over stand-ins of the services, with children that are processes."""

import base64
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO, TYPE_CHECKING
from uuid import uuid4

import pytest

from leasehold.stores.urls import open_store

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

CHILD = Path(__file__).with_name("child.py")
COMMAND = (sys.executable, "-m", "leasehold.adapters.cli.main", "multilang")
WAIT = 60.0

pytestmark = pytest.mark.services


class Daemon:
    """The command at work, and the lines that it has said."""

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

    def await_line(self, wanted: Callable[[str], bool]) -> str:
        """The first line from here on that is wanted."""
        while True:
            try:
                line = self._lines.get(timeout=WAIT)
            except Empty:
                line = None
            assert line is not None, "".join(self.said)
            self.said.append(line)
            if wanted(line):
                return line

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Its status, once it was told to end."""
        self.process.send_signal(number)
        return self.await_end()

    def await_end(self) -> int:
        """Its status, with all that it said in `said`."""
        while (line := self._lines.get(timeout=WAIT)) is not None:
            self.said.append(line)
        return self.process.wait(WAIT)

    def children_said(self) -> list[str]:
        """What children wrote to standard error, of one shard or the others."""
        return [line.partition(": ")[2].partition(": ")[2].strip() for line in self.said if ": got " in line]

    def checkpoints(self) -> dict[str, str]:
        """The row of each shard, by its last number."""
        store = open_store(self.store, create=False)
        try:
            return {lease.shard: lease.checkpoint.sequence for lease in store.list().leases}
        finally:
            store.close()


class Ground:
    """The services of one test, and its stream."""

    def __init__(self, kinesis: "KinesisClient", kinesis_url: str, dynamodb_url: str, folder: Path) -> None:
        self.kinesis, self.folder = kinesis, folder
        self.stream = f"multilang-{uuid4().hex}"
        self._properties = {
            "streamName": self.stream,
            "applicationName": f"{self.stream}-app",
            "AwsCredentialsProvider": "DefaultCredentialsProvider",
            "initialPositionInStream": "TRIM_HORIZON",
            "regionName": "eu-west-1",
            "kinesisEndpoint": kinesis_url,
            "dynamoDBEndpoint": dynamodb_url,
            "retrievalMode": "POLLING",
            "idleTimeBetweenReadsInMillis": "250",
            "failoverTimeMillis": "3000",
        }
        self._store = f"dynamodb://{self.stream}-app?region=eu-west-1&endpoint={dynamodb_url}"

    def put(self, *texts: str) -> list[str]:
        """The sequence numbers of these records, put one by one."""
        return [
            self.kinesis.put_record(StreamName=self.stream, Data=text.encode(), PartitionKey=text)["SequenceNumber"]
            for text in texts
        ]

    @contextmanager
    def daemon(self, program: str, *arguments: str, **properties: str) -> Iterator[Daemon]:
        """The command over this stream, which is ended if the test has not ended it."""
        file = self.folder / "app.properties"
        told = self._properties | {"executableName": program} | properties
        file.write_text("".join(f"{key} = {value}\n" for key, value in told.items()))
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        command = (*COMMAND, str(file), *arguments)
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
            try:
                yield Daemon(process, self._store)
            finally:
                process.kill()


@pytest.fixture
def ground(dynalite_url: str, kinesis_url: str, kinesis_client: "KinesisClient", tmp_path: Path) -> Iterator[Ground]:
    """A stream of one shard."""
    made = Ground(kinesis_client, kinesis_url, dynalite_url, tmp_path)
    kinesis_client.create_stream(StreamName=made.stream, ShardCount=1)
    kinesis_client.get_waiter("stream_exists").wait(StreamName=made.stream, WaiterConfig={"Delay": 1})
    yield made
    kinesis_client.delete_stream(StreamName=made.stream)


def _child(how: str, at: str = "none") -> str:
    return f"{sys.executable} {CHILD} {how} {at}"


def _shard(line: str) -> str:
    found = re.search(r"shardId-[0-9]{12}", line)
    assert found is not None
    return found[0]


def test_a_stream_with_a_split_is_read_to_its_end_and_a_signal_drains(ground: Ground) -> None:
    """The end of a shard would be stored without its child's word, or the last records without a checkpoint."""
    ground.put("a", "b", "c")
    with ground.daemon(_child("faithful")) as daemon:
        daemon.await_line(lambda line: "got initialize" in line)
        daemon.await_line(lambda line: "got processRecords" in line)
        ground.kinesis.split_shard(
            StreamName=ground.stream, ShardToSplit="shardId-000000000000", NewStartingHashKey=str(2**127)
        )
        daemon.await_line(lambda line: "got shardEnded" in line)
        daemon.await_line(lambda line: "ended with status 0" in line)
        begun = {_shard(daemon.await_line(lambda line: "got initialize" in line)) for _ in range(2)}
        assert begun == {"shardId-000000000001", "shardId-000000000002"}
        (last,) = ground.put("d")
        shard = _shard(daemon.await_line(lambda line: "got processRecords" in line))
        assert daemon.end() == 0
        found = daemon.checkpoints()
        assert (found[shard], found.get("shardId-000000000000", "SHARD_END")) == (last, "SHARD_END")
        ends = [each.partition(" ")[2] for each in daemon.children_said() if "initialize" not in each][-4:]
        assert sorted(ends) == ["leaseLost 0", "leaseLost 0", "shutdownRequested 0", "shutdownRequested 0"]


def test_a_record_that_ends_its_child_goes_to_the_dead_letter(ground: Ground, tmp_path: Path) -> None:
    """In Java it ends the daemon again and again; here it would keep its shard on the bench."""
    ground.put("a", "b", "poison", "c")
    letters = tmp_path / "letters"
    arguments = ("--dead-letter", f"file://{letters}", "--attempts", "2")
    with ground.daemon(_child("poison"), *arguments) as daemon:
        daemon.await_line(lambda line: "went to the dead letter" in line)
        daemon.await_line(lambda line: "got processRecords" in line)
        (last,) = ground.put("d")
        daemon.await_line(lambda line: "got processRecords 1" in line)
        assert daemon.end() == 0
        assert list(daemon.checkpoints().values()) == [last]
    (letter,) = letters.iterdir()
    assert "poison" in letter.read_text() or base64.b64encode(b"poison").decode() in letter.read_text()


def test_empty_readings_are_said_where_the_file_asks_for_them(ground: Ground) -> None:
    """A child that flushes by the clock would keep its last records for ever."""
    with ground.daemon(_child("well"), callProcessRecordsEvenForEmptyRecordList="true") as daemon:
        for _ in range(2):
            daemon.await_line(lambda line: "got processRecords 0" in line)
        ground.put("a")
        daemon.await_line(lambda line: "got processRecords 1" in line)
        assert daemon.end() == 0


@pytest.mark.parametrize("how", ["crash", "SIGTERM", "SIGINT"])
def test_with_strict_the_status_is_javas(how: str, ground: Ground) -> None:
    """Whoever restarts a daemon by its status would leave it down, or think that it has failed."""
    ground.put("a")
    with ground.daemon(_child(how, "processRecords"), "--strict") as daemon:
        daemon.await_line(lambda line: "got processRecords 1" in line)
        if how == "crash":
            assert daemon.await_end() == 1
        else:
            assert daemon.end(signal.Signals[how]) == 128 + signal.Signals[how]
        assert set(daemon.checkpoints().values()) == {"TRIM_HORIZON"}


def test_a_child_that_cannot_be_started_leaves_the_daemon_at_work(ground: Ground) -> None:
    """One wrong path would end the daemon, as in Java, or be silent."""
    ground.put("a")
    with ground.daemon("/no/such/program", "--attempts", "2") as daemon:
        daemon.await_line(lambda line: "/no/such/program" in line)
        daemon.await_line(lambda line: "stops here" in line)
        assert daemon.end() == 0


@pytest.mark.skipif(find_spec("amazon_kclpy") is None, reason="amazon_kclpy is not installed: it brings Java's jars")
def test_the_sample_of_amazon_kclpy_runs_unchanged(ground: Ground) -> None:
    """A processor that has to be changed would not be moved."""
    ground.put("a", "b", "c")
    with ground.daemon("sample_kclpy_app.py") as daemon:
        # It ends no line, so that what it says of several records is one.
        daemon.await_line(lambda line: "Record (Partition Key: c, " in line)
        ground.kinesis.split_shard(
            StreamName=ground.stream, ShardToSplit="shardId-000000000000", NewStartingHashKey=str(2**127)
        )
        daemon.await_line(lambda line: "Shard has ended checkpointing" in line)
        ground.put("d")
        daemon.await_line(lambda line: "Record (Partition Key: d, " in line)
        assert daemon.end() == 0
        assert daemon.checkpoints().get("shardId-000000000000", "SHARD_END") == "SHARD_END"
