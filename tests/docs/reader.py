"""Simulates a reader who types the code on a page: commands in terminals, and Python in one session."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import TextIO

from attrs import define, field

HERE = Path(__file__).parent
STAYS = re.compile(r"\bleasehold (consume|serve(?!.*--once))\b|--watch|^python \w+\.py")
"""Commands that run until the user presses Ctrl-C."""
USES_DEFAULT_PORT = re.compile(r"\bleasehold serve\b(?!.*(--port|--once))")
"""Commands that listen on the default port, which only one process at a time can use."""
SECONDS = 240
"""The time limit of a page's command in seconds, on a busy machine."""


@define
class Terminal:
    """A terminal in which a command keeps running."""

    command: str
    process: "subprocess.Popen[str]"
    errors: Path
    statuses: Collection[int] = (0,)
    """The exit statuses that Ctrl-C may lead to."""
    _lines: "Queue[str]" = field(factory=Queue)
    _listening: Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._listening = Thread(target=self.listen, daemon=True)
        self._listening.start()

    def listen(self) -> None:
        """Read everything that the command prints, so that it never blocks on a full pipe."""
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def line(self) -> str:
        """Return the next line that the command prints."""
        try:
            text = self._lines.get(timeout=SECONDS)
        except Empty:
            text = ""
        assert text, f"{self.command}\nsaid nothing\n{self.errors.read_text()}"
        return text

    def end(self) -> None:
        """Press Ctrl-C, and check that the command exits with one of its allowed statuses."""
        allowed_statuses = {0, 130, -signal.SIGINT} if "|" in self.command else self.statuses
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        try:
            status = self.process.wait(SECONDS)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
            self._listening.join(SECONDS)
        assert status in allowed_statuses, f"{self.command}\nended with {status}\n{self.errors.read_text()}"


@define
class Reader:
    """A reader with a folder of their own, who has pasted the variables that `leasehold dev` printed."""

    folder: Path
    pasted: Mapping[str, str]
    _staying: list[Terminal] = field(factory=list)
    _session: "subprocess.Popen[str] | None" = None
    _turn: TextIO | None = None
    """The lock on the default port, while a command of this reader listens there. Other readers wait for it."""

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of a shell in which the project is installed."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, **self.pasted, "PATH": path, "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}

    def types(self, command: str) -> str:
        """Run a command and return its output. A command that does not end by itself gets its own terminal."""
        if STAYS.search(command):
            self.starts(command).line()
            return ""
        shell = ("bash", "-o", "pipefail", "-c", command)
        completed = subprocess.run(
            shell, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False, timeout=SECONDS
        )
        assert completed.returncode == 0, (
            f"{command}\nended with {completed.returncode}\n{completed.stdout}{completed.stderr}"
        )
        return completed.stdout

    def starts(self, command: str) -> Terminal:
        """Open a terminal in which the command runs until the reader has finished the page."""
        if USES_DEFAULT_PORT.search(command) and self._turn is None:
            self._turn = (Path(tempfile.gettempdir()) / "leasehold-tests-usual-port").open("w")
            flock(self._turn, LOCK_EX)
        errors = self.folder / f".errors-{len(self._staying)}"
        with errors.open("w") as log:
            process = subprocess.Popen(
                ("bash", "-o", "pipefail", "-c", command),
                cwd=self.folder,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        terminal = Terminal(command, process, errors)
        self._staying.append(terminal)
        return terminal

    def runs(self, location: str, text: str) -> str:
        """Run a block in the page's Python session, and return what it prints."""
        if self._session is None:
            self._session = subprocess.Popen(
                (sys.executable, str(HERE / "session.py")),
                cwd=self.folder,
                env={**self.environment, "PYTHONPATH": str(self.folder)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._session.stdin is not None
        assert self._session.stdout is not None
        print(json.dumps([location, text]), file=self._session.stdin, flush=True)
        response = self._session.stdout.readline()
        assert response, f"{location} ended the session with {self._session.wait()}; its last words are above"
        return str(json.loads(response))

    def close(self) -> None:
        """Close all terminals, beginning with the last one."""
        if self._session is not None:
            self._session.communicate(timeout=SECONDS)
        problems = []
        for terminal in reversed(self._staying):
            try:
                terminal.end()
            except AssertionError as problem:
                problems.append(str(problem))
        if self._turn is not None:
            self._turn.close()
        assert not problems, "\n".join(problems)


@contextmanager
def stand_ins(line: str, folder: Path) -> Iterator[Mapping[str, str]]:
    """Run `leasehold dev` and the worker that it suggests. Yield the variables that it prints to paste."""
    reader = Reader(folder, {})
    try:
        dev = reader.starts(line)
        while not (export_line := dev.line()).startswith("export "):
            pass
        reader.pasted = dict(word.split("=", 1) for word in shlex.split(export_line)[1:])
        while not (worker_command := dev.line()).startswith("leasehold consume "):
            pass
        reader.types(worker_command.strip())
        yield reader.pasted
    finally:
        reader.close()
