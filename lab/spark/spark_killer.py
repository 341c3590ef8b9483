"""Kills processes of a Spark application, and records the processes that remain after the application has ended."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

from attrs import define
from spark_application import list_descendants
from standins import executors
from standins.spark import SOON, spark_cluster

from leasehold.adapters.toolchain import find_java_home
from leasehold_lab.demo.child import ENVIRONMENT

PLANNER_COMMAND, EXECUTOR_COMMAND = "python_streaming_source_runner", "CoarseGrainedExecutorBackend"
HERE = ("planner", "application")
ON_CLUSTER = ("executor", "executor", "planner", "application")
"""The kinds of processes to choose from on a cluster. A worker of the cluster restarts a killed executor."""
BATCHES_BEFORE_APPLICATION_KILL = 3
"""With random kills, the batch in which the application is killed if it is still running."""
MARK = "LEASEHOLD_KILLS"
"""The environment variable with the run's folder, set in each process of an application."""
END_TIMEOUT_SECONDS, QUIET_SECONDS = 90.0, 1.0
"""How long an application may take to end, and for how long none of its processes may be visible until it has ended.

A process that was just started may not have the mark in its environment yet.
"""


@define
class Killer:
    """Kills a process once per batch, and logs the kill.

    Attributes:
        java: The id of the application's Java process.
        drawn: The seed that decides which process is killed, and when. If "", the application is killed after every
            batch.
        among: The kinds of processes from which one is chosen.
    """

    folder: Path
    java: int
    drawn: str
    among: Sequence[str]
    next: tuple[str, str] = ("application", "behind")
    lifetime: int = 0
    planner_died: bool = False

    def __call__(self, number: int, moment: str) -> None:
        if moment == "before":
            self.lifetime += 1
            if self.drawn:
                self.next = self._choose_process()
        target, kill_moment = self.next
        if kill_moment != moment or not (pids := self._list_processes_of(target)):
            return
        with (self.folder / "kills.jsonl").open("a") as kills_file:
            kills_file.write(json.dumps([target, kill_moment, number]) + "\n")
        self.planner_died = self.planner_died or target == "planner"
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def _choose_process(self) -> tuple[str, str]:
        rng = Random(f"{self.drawn} {len(read_kills(self.folder))}")  # noqa: S311  a seed is the point
        target = rng.choice(self.among)
        return target if self.lifetime < BATCHES_BEFORE_APPLICATION_KILL else "application", rng.choice(
            ("before", "behind")
        )

    def _list_processes_of(self, target: str) -> list[int]:
        if target == "application":
            return [self.java, os.getpid()]
        on_executor = target == "executor"
        processes = executors.marked(f"{MARK}={self.folder}") if on_executor else list_descendants(self.java)
        return [
            pid
            for pid, command_line in processes.items()
            if (EXECUTOR_COMMAND if on_executor else PLANNER_COMMAND) in command_line
        ][:1]


def read_kills(folder: Path) -> list[list[Any]]:
    """Return the kills. Each consists of the kind of the killed process, the moment, and the number of the batch."""
    return read_json_lines(folder / "kills.jsonl")


def read_leftovers(folder: Path) -> list[str]:
    """Return the command lines of the processes that `record_leftovers` found."""
    return [command_line for _, command_line in read_json_lines(folder / "left.jsonl")]


def read_json_lines(path: Path) -> list[Any]:
    """Return the values in a file of JSON lines, or an empty list if the file does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def record_leftovers(folder: Path) -> None:
    """Wait until no process of an ended application is running. Record and kill the processes that remain."""
    now = last_seen = time.monotonic()
    deadline, remaining_processes = now + END_TIMEOUT_SECONDS, dict[int, str]()
    while now < deadline and now - last_seen < QUIET_SECONDS:
        remaining_processes, now = executors.marked(f"{MARK}={folder}"), time.monotonic()
        last_seen = now if remaining_processes else last_seen
        time.sleep(0.1)
    with (folder / "left.jsonl").open("a") as leftovers_file:
        leftovers_file.writelines(json.dumps(process) + "\n" for process in remaining_processes.items())
    for pid in remaining_processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def run_cluster() -> Iterator[str]:
    """Start a master and two workers with the environment that an application's tasks need, and yield the address."""
    java_variables = {"JAVA_HOME": str(find_java_home()), "JAVA_TOOL_OPTIONS": SOON}
    python_variables = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    with spark_cluster({**ENVIRONMENT, **java_variables, **python_variables}, cores=2) as master_url:
        yield master_url
