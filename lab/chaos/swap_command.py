"""Runs `leasehold swap` repeatedly. The command is killed, or run with `--back`, until it may finish at the end."""

import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

from attrs import define, field

from leasehold_lab.demo.child import Child

COMMAND = "command"
"""The name under which the swap command gets proxies (lines) of its own to the tables."""
RUN_SECONDS = 1.5, 8.0
"""The shortest and the longest time in seconds after which a command is killed.

The command waits longer than this at the end of a swap, so that no swap ends before `may_finish` is set.
"""
REST_SECONDS = 0.5


@define
class SwapOperator:
    """Runs the swap command in one process after another.

    Attributes:
        addresses: The URLs of the tables FROM and TO.
        environment: The environment variables that the stores need.
        folder: The folder for the output of the command.
        seed: Determines how long each process may run, and in which direction it moves the leases.
    """

    addresses: tuple[str, str]
    environment: Mapping[str, str]
    folder: Path
    seed: str
    may_finish: bool = False
    over: bool = False
    runs: int = 0
    kills: int = 0
    backward_runs: int = 0
    last_output: str = ""
    """The last output of a command that was rejected or that failed."""
    _draw: random.Random = field(init=False)
    _child: Child | None = None
    _is_backward_run: bool = False
    _until: float = 0.0

    def __attrs_post_init__(self) -> None:
        self._draw = random.Random(self.seed)  # noqa: S311  a seed is the point

    def __str__(self) -> str:
        state = "over" if self.over else "NOT OVER"
        return (
            f"{state}; the command ran {self.runs} times, {self.backward_runs} of them back, "
            f"and was killed {self.kills} times"
        )

    @property
    def group(self) -> int:
        """The process group of the running command, or 0 if none is running."""
        return self._child.pid if self._child else 0

    @property
    def progress(self) -> str:
        """The latest progress line that a command printed, or "no look" if there is none."""
        output_texts = [
            file.read_text() for file in sorted(self.folder.glob(f"{COMMAND}#*.jsonl"), key=os.path.getmtime)
        ]
        return "".join(output_texts).strip().rpartition("\n")[2] or "no look"

    def tick(self) -> None:
        """Start the command if none is running, kill it when its time is up, and record how it ended."""
        now = time.monotonic()
        child = self._child
        if child is None:
            if not self.over and now >= self._until:
                self._start_command(now)
        elif not child.is_running:
            if child.wait():
                self.last_output = child.last_output
            elif not self._is_backward_run:
                self.over = True
            self._schedule_restart(now)
        elif now >= self._until and not (self.may_finish and not self._is_backward_run):
            self.kill()
            self._schedule_restart(now)

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child, self.kills = None, self.kills + 1

    def _schedule_restart(self, now: float) -> None:
        self._child, self._until = None, now + REST_SECONDS

    def _start_command(self, now: float) -> None:
        # The first run moves leases to TO, because none can be moved back yet.
        self._is_backward_run = bool(self.runs) and not self.may_finish and self._draw.random() < 0.4
        self.runs, self.backward_runs = self.runs + 1, self.backward_runs + self._is_backward_run
        back_option = ("--back",) if self._is_backward_run else ()
        arguments = ("-m", "leasehold.adapters.cli.main", "swap", *self.addresses, "--json", *back_option)
        with patch.dict(os.environ, self.environment):
            self._child = Child(f"{COMMAND}#{self.runs}", arguments, self.folder)
        self._until = now + self._draw.uniform(*RUN_SECONDS)
