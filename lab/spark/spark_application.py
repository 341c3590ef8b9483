"""Runs Spark applications, each with its own Java process, so that they can be killed or stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from standins.spark import LATE, SOON

from leasehold_lab.demo.child import Child
from leasehold_lab.demo.stage import Tail

END_SECONDS = 30.0
LOOK_SECONDS = 0.05


class Application(Child):
    """A process of `leasehold pipeline`, with its Java process and the processes that Java started."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path, *, cores: int = 1) -> None:
        # The child of this process that starts Java reads the variable.
        submit_arguments = f"--master local[{cores}] --driver-java-options '{SOON}' pyspark-shell"
        with patch.dict(os.environ, {"PYSPARK_SUBMIT_ARGS": submit_arguments}):
            super().__init__(name, ("-m", "leasehold.adapters.cli.main", "pipeline", *arguments), folder)
        self._progress_lines = Tail(self.out, json.loads)

    def progress(self) -> list[dict[str, Any]]:
        """Return the progress that the pipeline has printed since the last call."""
        return self._progress_lines.read_new_items()

    def kill_java(self) -> dict[str, float]:
        """Kill the Java process with SIGKILL, and return for how many seconds its descendants kept running, by program.

        The descendants are not notified of the kill, so each of them must detect it.
        """
        descendants_by_id = list_descendants(self._process.pid)
        java_pid = next(
            pid
            for pid, command_line in descendants_by_id.items()
            if "org.apache.spark.deploy.SparkSubmit" in command_line
        )
        programs = {pid: _find_program_name(command_line) for pid, command_line in list_descendants(java_pid).items()}
        os.kill(java_pid, signal.SIGKILL)
        kill_time = time.monotonic()
        seconds_lived: dict[str, float] = {}
        while remaining_pids := [pid for pid in programs if _is_running(pid)]:
            elapsed_seconds = time.monotonic() - kill_time
            seconds_lived |= {programs[pid]: round(elapsed_seconds, 1) for pid in remaining_pids}
            assert elapsed_seconds < END_SECONDS, (
                f"still there after {elapsed_seconds:.0f} s: {[programs[pid] for pid in remaining_pids]}"
            )
            time.sleep(LOOK_SECONDS)
        self.kill()
        return seconds_lived

    @property
    def failed_to_start_python(self) -> bool:
        """Whether the pipeline ended because the machine was too busy to start Python in time."""
        return not self.is_running and LATE in self._log.read_text(errors="replace")

    def stop(self) -> int:
        """Send SIGINT, as Ctrl-C does, so that the pipeline stops its query and ends. Return its exit status."""
        for pid, command_line in list_descendants(self._process.pid).items():
            if "leasehold.adapters.cli.main" in command_line and "pipeline" in command_line:
                os.kill(pid, signal.SIGINT)
        return self._process.wait(END_SECONDS)


def list_descendants(pid: int) -> Mapping[int, str]:
    """Return the command lines of all descendants of a process, by process id."""
    process_list = subprocess.run(["ps", "-Aww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in process_list.stdout.splitlines()]
    commands: dict[int, str] = {}
    parents = {pid}
    while parents:
        children = [(int(row[0]), row[-1]) for row in rows if int(row[1]) in parents]
        commands |= dict(children)
        parents = {child_pid for child_pid, _ in children}
    return commands


def measure_resident_mib(pid: int) -> int:
    """Return the resident memory of a process in MiB."""
    process_list = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return int(process_list.stdout) // 1024


def _find_program_name(command: str) -> str:
    for name in ("python_streaming_source_runner", "pyspark.daemon", "pyspark"):
        if name in command:
            return name
    return command.split(maxsplit=1)[0]


def _is_running(pid: int) -> bool:
    """Return whether a process is running. A zombie does not count."""
    with suppress(ProcessLookupError, FileNotFoundError):
        return subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout[:1] not in {"", "Z"}
    return False
