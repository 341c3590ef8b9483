"""An operator that runs `leasehold swap` repeatedly: it is killed, sends leases back, and in the end may finish."""

import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

from attrs import define, field

from leasehold_lab.demo.child import Child

COMMAND = "command"
"""The command's name on the lines to the tables."""
RUN_SECONDS = 1.5, 8.0
"""Less than the command waits at the end of a swap, so that no swap ends before it may."""
REST_SECONDS = 0.5


@define
class SwapOperator:
    """The swap command, one process after the other.

    addresses    FROM and TO
    environment  what the stores need there
    folder       where it writes
    seed         decides how long each process may run, and which way it sends the leases
    """

    addresses: tuple[str, str]
    environment: Mapping[str, str]
    folder: Path
    seed: str
    may_finish: bool = False
    over: bool = False
    runs: int = 0
    kills: int = 0
    backs: int = 0
    said: str = ""
    """The last output of a command that was refused, or failed."""
    _draw: random.Random = field(init=False)
    _child: Child | None = None
    _back: bool = False
    _until: float = 0.0

    def __attrs_post_init__(self) -> None:
        self._draw = random.Random(self.seed)  # noqa: S311  a seed is the point

    def __str__(self) -> str:
        ended = "over" if self.over else "NOT OVER"
        return (
            f"{ended}; the command ran {self.runs} times, {self.backs} of them back, and was killed {self.kills} times"
        )

    @property
    def group(self) -> int:
        """The process group of the command, 0 while there is none."""
        return self._child.pid if self._child else 0

    @property
    def told(self) -> str:
        """How far the swap was when one of the processes last read the tables."""
        looks = [file.read_text() for file in sorted(self.folder.glob(f"{COMMAND}#*.jsonl"), key=os.path.getmtime)]
        return "".join(looks).strip().rpartition("\n")[2] or "no look"

    def tick(self) -> None:
        """Start the command if there is none, kill it when its time has come, and record its end."""
        now = time.monotonic()
        child = self._child
        if child is None:
            if not self.over and now >= self._until:
                self._start(now)
        elif not child.running:
            if child.wait():
                self.said = child.said
            elif not self._back:
                self.over = True
            self._rest(now)
        elif now >= self._until and not (self.may_finish and not self._back):
            self.kill()
            self._rest(now)

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child, self.kills = None, self.kills + 1

    def _rest(self, now: float) -> None:
        self._child, self._until = None, now + REST_SECONDS

    def _start(self, now: float) -> None:
        # The first run goes to TO, because there is nothing to send back yet.
        self._back = bool(self.runs) and not self.may_finish and self._draw.random() < 0.4
        self.runs, self.backs = self.runs + 1, self.backs + self._back
        back = ("--back",) if self._back else ()
        words = ("-m", "leasehold.adapters.cli.main", "swap", *self.addresses, "--json", *back)
        with patch.dict(os.environ, self.environment):
            self._child = Child(f"{COMMAND}#{self.runs}", words, self.folder)
        self._until = now + self._draw.uniform(*RUN_SECONDS)
