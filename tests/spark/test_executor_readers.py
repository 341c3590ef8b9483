"""Readers on the executors of a real cluster, which are killed while they read."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from attrs import define
from standins.spark import spark_cluster
from types_boto3_kinesis import KinesisClient
from waiting import until

pytestmark = [
    pytest.mark.spark,
    pytest.mark.services,
    pytest.mark.more,
    pytest.mark.xdist_group("spark"),
    pytest.mark.timeout(1800),  # it starts six processes of Java, on a machine that may have much else to do
]

PATIENCE = 400.0
LISTENS, CONNECTED = "0A", "01"
CAME = re.compile(r"reader \('127\.0\.0\.1', (\d+)\) has come")


@define
class Program:
    """The user's program, and what has been sent for it to read."""

    process: "subprocess.Popen[str]"
    words: Path
    client: KinesisClient
    stream: str
    sent: int = 0

    def put(self, count: int) -> None:
        """So many records more."""
        for number in range(self.sent, self.sent + count):
            self.client.put_record(StreamName=self.stream, Data=f"{number}".encode(), PartitionKey=f"{number}")
        self.sent += count

    def tell(self) -> None:
        """Have it take its next step."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def say(self) -> object:
        """The next line that it prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.words.read_text()
        return json.loads(line)

    def rows(self, count: int) -> list[tuple[str, str, str]]:
        """What it prints until so many rows have come."""
        found: list[tuple[str, str, str]] = []
        while len(found) < count:
            said = self.say()
            assert isinstance(said, list)
            found += [(shard, number, text) for shard, number, text in said]
        return found

    def came(self) -> list[int]:
        """The ports from which readers have come to the planner, so far."""
        return [int(port) for port in CAME.findall(self.words.read_text())]

    def readers(self, least: int) -> set[int]:
        """The processes that read now, once there are so many."""
        until(lambda: len(sockets(self.came(), CONNECTED)) >= least, f"{least} readers: {self.words}", PATIENCE)
        return set(sockets(self.came(), CONNECTED).values())


def sockets(ports: list[int] | None, state: str) -> dict[int, int]:
    """Processes that have sockets over IPv4 in this state, by the port that is theirs; of these ports, or of all."""
    fields = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = {row[9]: int(row[1].split(":")[1], 16) for row in fields if row[3] == state}
    wanted = {f"socket:[{inode}]": port for inode, port in found.items() if ports is None or port in ports}
    holders = {}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if (port := wanted.get(str(link.readlink()))) is not None:
                holders[port] = int(link.parts[2])
    return holders


def parent(pid: int) -> int:
    """Who started it."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def executor_of(pid: int) -> int:
    """The Java process below which this is."""
    while b"CoarseGrainedExecutorBackend" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = parent(pid)
    return pid


@contextmanager
def running(
    place: tuple[KinesisClient, str, Path], master: str, url: str, environment: dict[str, str]
) -> Iterator[Program]:
    """The program, which does not outlive the block."""
    client, stream, folder = place
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.executor.cores": "2",
        "spark.cores.max": "4",  # of which all are waited for
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
        "spark.ui.enabled": "false",
    }
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
    place: tuple[KinesisClient, str, Path], environment: dict[str, str], kinesis_url: str
) -> None:
    """Without it a query could not grow with its cluster, or would lose what a lost executor had read."""
    with spark_cluster(environment, cores=2) as master, running(place, master, kinesis_url, environment) as program:
        program.put(40)
        rows = program.rows(40)
        readers = program.readers(2)
        assert (len(readers), all(map(executor_of, readers))) == (2, True)
        os.kill(min(readers), signal.SIGKILL)
        program.put(40)
        rows += program.rows(40)
        os.kill(executor_of(min(program.readers(2))), signal.SIGKILL)
        program.put(40)
        rows += program.rows(40)
        left = program.readers(2)
        program.tell()
        rows += [row for said in iter(program.say, 0) for row in said]  # type: ignore[attr-defined]  # 0: no job is left
        until(lambda: not left & set(sockets(None, LISTENS).values()), "no reader is left", PATIENCE)
        program.tell()
        assert program.process.wait(240) == 0
    assert sorted(int(text) for _, _, text in rows) == list(range(program.sent))
