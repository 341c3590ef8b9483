"""Readers on the executors of a real cluster, which are killed while they read."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from attrs import define
from standins.executors import LISTENS, executor_of, readers, sockets
from standins.spark import ON_CLUSTER
from types_boto3_kinesis import KinesisClient
from waiters import until

pytestmark = [
    pytest.mark.spark,
    pytest.mark.services,
    pytest.mark.more,
    pytest.mark.xdist_group("spark"),
    pytest.mark.timeout(1800),  # its cluster starts six processes of Java, on a machine that may have much else to do
]

PATIENCE = 400.0


@define
class Program:
    """The user's program, and the records that were sent for it to read."""

    process: "subprocess.Popen[str]"
    words: Path
    client: KinesisClient
    stream: str
    sent: int = 0

    def put(self, count: int) -> None:
        for number in range(self.sent, self.sent + count):
            self.client.put_record(StreamName=self.stream, Data=f"{number}".encode(), PartitionKey=f"{number}")
        self.sent += count

    def tell(self) -> None:
        """Have the program take its next step."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def say(self) -> object:
        """Return the next line that the program prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.words.read_text()
        return json.loads(line)

    def rows(self, count: int) -> list[tuple[str, str, str]]:
        """Return the rows that the program prints until there are this many."""
        rows: list[tuple[str, str, str]] = []
        while len(rows) < count:
            line = self.say()
            assert isinstance(line, list)
            rows += [(shard, number, text) for shard, number, text in line]
        return rows

    def readers(self, least: int) -> set[int]:
        """Return the reader processes once there are this many."""
        until(lambda: len(readers(self.words)) >= least, f"{least} readers: {self.words}", PATIENCE)
        return readers(self.words)


@contextmanager
def running(
    place: tuple[KinesisClient, str, Path], master: str, url: str, environment: dict[str, str]
) -> Iterator[Program]:
    """Run the program until the block ends."""
    client, stream, folder = place
    settings = {**ON_CLUSTER, "spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false"}
    submit = [*(word for name, value in settings.items() for word in ("--conf", f"{name}={value}")), "pyspark-shell"]
    script = str(Path(__file__).with_name("cluster_query.py"))
    words = folder / "words"
    with words.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, script, master, stream, url, str(folder), "auto"],
            env={**os.environ, **environment, "PYSPARK_SUBMIT_ARGS": " ".join(submit)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
        )
    with process:
        try:
            yield Program(process, words, client, stream)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_readers_on_executors_bring_every_record_once_though_they_are_killed(
    place: tuple[KinesisClient, str, Path], environment: dict[str, str], kinesis_url: str, master: str
) -> None:
    """A query that grows with its cluster keeps the rows that a lost executor had read."""
    with running(place, master, kinesis_url, environment) as program:
        program.put(40)
        rows = program.rows(40)
        first = program.readers(2)
        assert (len(first), all(map(executor_of, first))) == (2, True)
        os.kill(min(first), signal.SIGKILL)
        program.put(40)
        rows += program.rows(40)
        os.kill(executor_of(min(program.readers(2))), signal.SIGKILL)
        program.put(40)
        rows += program.rows(40)
        left = program.readers(2)
        program.tell()
        rows += [row for batch in iter(program.say, 0) for row in batch]  # type: ignore[attr-defined]  # 0: no job is left
        until(lambda: not left & set(sockets(None, LISTENS).values()), "no reader is left", PATIENCE)
        program.tell()
        assert program.process.wait(240) == 0
    assert sorted(int(text) for _, _, text in rows) == list(range(program.sent))
