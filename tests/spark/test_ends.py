"""When Spark closes the channel of a reader's process and sends SIGTERM, in any order, no lease stays held."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from fcntl import LOCK_EX, LOCK_SH, LOCK_UN, flock
from pathlib import Path
from typing import IO

import pytest
from attrs import define
from fake_stream import FakeReader, Place, Stream

from leasehold.adapters.sources.protocol import Batch
from leasehold.balancer.model import Lease, Position
from leasehold.stores.urls import open_store

pytestmark = pytest.mark.timeout(60)

WAIT = 30.0  # not imported from a test module, because this file is also run as a program
SHARDS = ("a", "b")
ANSWERS = "answers"
"""The name of a file whose lock represents the service.

While the test holds the lock, the service does not respond to reads.
"""


@define
class Process:
    """The process of a reader that holds both leases, and waits for a response for each shard."""

    process: "subprocess.Popen[str]"
    folder: Path
    answers: IO[str]

    def told(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close_channel(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def owners_after_end(self) -> list[str | None]:
        """Let the service respond. Return the owners of the leases after the process has ended."""
        flock(self.answers, LOCK_UN)
        assert self.process.wait(WAIT) == 0
        return [lease.owner for lease in open_store(f"sqlite:///{self.folder}/leases.db").list().leases]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Process]:
    """Yield a process that has just started to read."""
    command = [sys.executable, __file__, str(tmp_path)]
    with (tmp_path / ANSWERS).open("w") as answers_file:
        flock(answers_file, LOCK_EX)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            reader_process = Process(process, tmp_path, answers_file)
            assert reader_process.told() == "reads"
            yield reader_process
            process.kill()


@pytest.mark.slow
def test_signal_during_shutdown_interrupts_no_release(reader: Process) -> None:
    """Spark sends SIGTERM just after it has closed the channel, and the leases are still released."""
    reader.close_channel()
    assert reader.told() == "stops"
    for _ in range(2):  # Spark sometimes sends the signal twice.
        reader.process.send_signal(signal.SIGTERM)
    assert reader.owners_after_end() == [None] * len(SHARDS)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_alone_releases_the_leases_and_ends(reader: Process, number: signal.Signals) -> None:
    reader.process.send_signal(number)
    assert reader.owners_after_end() == [None] * len(SHARDS)


# The process itself


class SlowStream(Stream):
    """A stream whose reads return once the file `ANSWERS` can be locked."""

    def open(self, lease: Lease, start: Position) -> FakeReader:  # noqa: ARG002  as in the protocol
        return SlowReader(self, lease.shard, 0)


class SlowReader(FakeReader):
    """A reader whose reads wait until the file `ANSWERS` can be locked."""

    def read(self) -> Batch:
        self.stream.readings += 1
        with Path(sys.argv[1], ANSWERS).open() as answers_file:
            flock(answers_file, LOCK_SH)
        return super().read()


def main(folder: Path) -> None:
    """Wait for the channel to be closed, as Spark's process does, and then stop the reader."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the process that started the tests may ignore it
    stream = SlowStream({shard: [] for shard in SHARDS})
    query = Place(stream, folder / "leases.db").query()
    try:
        while stream.readings < len(SHARDS):
            query.reader.latestOffset(query.offset, query.reader.getDefaultReadLimit())
        tell("reads")
        sys.stdin.read()
        tell("stops")
    finally:
        query.reader.stop()


def tell(word: str) -> None:
    """Send this word to the process that started this one."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
