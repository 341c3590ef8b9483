"""Runs several processes of one command side by side, restarts those that end by themselves, and drains all together.

Each process has the other end of its standard input here. Closing it asks the process to drain; a supervisor that dies,
however suddenly, closes it too, so that nothing of it stays. Its output comes through here, in whole lines.
"""

import errno
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from subprocess import PIPE, Popen
from threading import Lock, Thread
from typing import IO

from attrs import define, field

from leasehold.adapters.consumer.events import WholeLines
from leasehold.adapters.signals import replace_handler
from leasehold.adapters.sources.call_patience import Backoff
from leasehold.adapters.threads import ThreadQueue, spawn
from leasehold.stores.printable import escaped, said

log = escaped(logging.getLogger("leasehold.supervisor"))

SUPERVISED = "LEASEHOLD_SUPERVISED"
"""Set for a process that has to drain once its standard input ends."""

LEAST_PAUSE_SECONDS = 1.0
MOST_PAUSE_SECONDS = 60.0
STEADY_SECONDS = 60.0
"""After that long at work the next restart of a process waits for the least pause again."""
SLACK_SECONDS = 5.0
"""More than the time to drain before a process is killed: to start, to close, to end."""
CHUNK_BYTES = 2**16

PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.EIO, errno.ENOMEM, errno.ENOBUFS, errno.EROFS})
"""Errors with which a file may refuse a write for a while."""

REFUSED_SECONDS = 0.1, 5.0


@define
class _SupervisedProcess:
    """A process of the fleet, from its latest start on."""

    name: str
    command: Sequence[str]
    process: "Popen[bytes] | None" = None
    started: float = 0.0
    due: float = 0.0
    pause: float = LEAST_PAUSE_SECONDS


@define
class _SupervisedEnded:
    """A process has ended, and all it wrote is out."""

    child: _SupervisedProcess
    status: int


@define
class Supervisor:
    """A fixed number of processes.

    commands       each process by its name, which a restart keeps
    drain_seconds  most time from the word to end until a process has ended; it is killed five seconds later
    final          statuses that a restart would not better: one process that ends with one of them ends all
    """

    commands: Mapping[str, Sequence[str]]
    drain_seconds: float
    final: Collection[int]
    _news: ThreadQueue = field(factory=lambda: ThreadQueue(time.monotonic), init=False)
    _out: Lock = field(factory=Lock, init=False)
    _sinks: tuple[WholeLines, WholeLines] = field(
        factory=lambda: (WholeLines(sys.stdout), WholeLines(sys.stderr)), init=False
    )

    def run(self, ending: Iterable[signal.Signals]) -> int:
        """Run them until one of these signals comes; the exit status.

        0 after a drain of all, the status of a process that ended all or ended worse than that while it drained, 1 if
        one had to be killed, 128 and its number after a second signal, at which all are killed. In the main thread.
        """
        for each in ending:
            replace_handler(each, lambda number, _frame: self._news.put(number))
        children = self.made()
        try:
            worst = self._kept(children)
            # All are asked to end, and waited for.
            left = [child for child in children if child.process is not None]
            for child in left:
                _ask(child)
            until = time.monotonic() + self.drain_seconds + SLACK_SECONDS
            while left:
                match self._news.get(until):
                    case _SupervisedEnded(child, status):
                        left.remove(child)
                        worst = worst or _shell_status(status)
                    case int(number):
                        self._say("a second signal: %d processes are killed, and their leases expire", len(left))
                        return 128 + number
                    case None:
                        names = ", ".join(child.name for child in left)
                        self._say("not ended within %g s, killed: %s", self.drain_seconds, names)
                        return worst or 1
            return worst
        finally:
            for child in children:
                if child.process is not None and child.process.poll() is None:
                    child.process.kill()

    def made(self) -> list[_SupervisedProcess]:
        """Each process, not started yet."""
        return [_SupervisedProcess(name, command) for name, command in self.commands.items()]

    def _kept(self, children: list[_SupervisedProcess]) -> int:
        """Keep them running; the status that ends all, 0 after a signal."""
        while True:
            now = time.monotonic()
            for child in children:
                if child.process is None and child.due <= now:
                    self.attempt(child)
            match self._news.get(min((child.due for child in children if child.process is None), default=math.inf)):
                case _SupervisedEnded(child, status):
                    # A process that has ended needs no standard input, which takes a file of this process.
                    _ask(child)
                    child.process = None
                    if status in self.final:
                        self._say("%s ended with status %d: all end", child.name, status)
                        return status
                    now = time.monotonic()
                    if now - child.started >= STEADY_SECONDS:
                        child.pause = LEAST_PAUSE_SECONDS
                    shown = _shell_status(status)
                    self._say("%s ended with status %d: it starts again in %g s", child.name, shown, child.pause)
                    child.due = now + child.pause
                    child.pause = min(MOST_PAUSE_SECONDS, 2 * child.pause)
                case int():
                    return 0
                case None:
                    pass

    def attempt(self, child: _SupervisedProcess) -> None:
        """Start it; where the system refuses that for want of something, later: the others go on meanwhile."""
        try:
            self._start(child)
        except (OSError, RuntimeError, MemoryError) as fault:
            self._say("%s cannot be started: %s; tried again in %g s", child.name, said(fault), child.pause)
            child.process, child.due = None, time.monotonic() + child.pause
            child.pause = min(MOST_PAUSE_SECONDS, 2 * child.pause)

    def _start(self, child: _SupervisedProcess) -> None:
        child.started = time.monotonic()
        process = child.process = Popen(  # noqa: S603  the command is this program's own
            child.command,
            bufsize=0,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env={**os.environ, SUPERVISED: "1"},
            # Ctrl-C goes to a terminal's whole group; they are told to end by their standard input.
            start_new_session=True,
        )
        ways = ((process.stdout, self._sinks[0]), (process.stderr, self._sinks[1]))
        relays: list[Thread] = []

        def unheard(fault: BaseException) -> None:
            """Log it; the process ends, since its output is closed."""
            self._say("what %s writes cannot be passed on: %s", child.name, said(fault))

        def watch() -> None:
            status = process.wait()
            for relay in relays:
                relay.join(SLACK_SECONDS)  # a process that it has left behind may keep them open
            self._news.put(_SupervisedEnded(child, status))

        def unseen(fault: BaseException) -> None:
            """Nobody would notice the end of this process, so it ends now, and starts again."""
            self._say("%s is killed: its end could not be waited for: %s", child.name, said(fault))
            process.kill()
            self._news.put(_SupervisedEnded(child, process.wait()))

        try:
            for source, sink in ways:
                assert source is not None  # noqa: S101  it is a pipe
                relays.append(spawn(f"relay-{child.name}", partial(self._relay, process, source, sink), unheard))
            spawn(f"watch-{child.name}", watch, unseen)
        except RuntimeError:  # no thread: nobody would hear it, nor notice its end
            process.kill()
            process.wait()
            for pipe in (process.stdin, *(source for source, _ in ways[len(relays) :])):
                if pipe is not None:
                    pipe.close()
            raise

    def _relay(self, process: "Popen[bytes]", source: IO[bytes], sink: WholeLines) -> None:
        """Pass whole lines on, until there are no more or nobody reads them; then the process finds its own out closed.

        While the sink takes none, as a full disk, they wait here, and the process waits with those that follow. What a
        killed process had not written to the end of its line is left out.
        """
        rest = b""
        with source, suppress(BrokenPipeError):
            while chunk := source.read(CHUNK_BYTES):
                lines, end, rest = (rest + chunk).rpartition(b"\n")
                self._write(sink, lines + end)
            if rest and process.wait() >= 0:
                self._write(sink, rest + b"\n")

    def _write(self, sink: WholeLines, data: bytes) -> None:
        pause = Backoff(*REFUSED_SECONDS)
        while True:
            with self._out:
                refused = sink.write(data)
            if refused is None:
                return
            if refused.why.errno not in PASSING:
                raise refused.why
            if not pause.faults:
                self._say("output is refused, and tried again until it is taken: %s", said(refused.why))
            data = refused.left
            time.sleep(pause.next())

    def _say(self, text: str, *values: object) -> None:
        with self._out:
            log.warning(text, *values)


def _ask(child: _SupervisedProcess) -> None:
    if child.process is not None and child.process.stdin is not None:
        child.process.stdin.close()


def _shell_status(status: int) -> int:
    return status if status >= 0 else 128 - status


def at_end_of_supervisor(stop: Callable[[], None]) -> None:
    """Call this once the supervisor of this process asks for it, or has died; nothing happens if there is none."""

    def wait() -> None:
        while os.read(0, CHUNK_BYTES):
            pass
        stop()

    if os.environ.pop(SUPERVISED, None) is not None:
        # Where it cannot be heard any more, its end would not be noticed either.
        spawn("leasehold-supervised", wait, lambda _fault: stop())
