"""Runs several processes of one command, restarts processes that end by themselves, and drains all of them together.

The standard input of each process is a pipe from the supervisor. When the supervisor closes the pipe, the process
drains. If the supervisor dies, even by SIGKILL, the pipe is also closed, so no process keeps running. The supervisor
also passes on the output of the processes in whole lines.
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

from leasehold.adapters.consumer.events import LineWriter
from leasehold.adapters.signals import replace_handler
from leasehold.adapters.sources.call_timeouts import Backoff
from leasehold.adapters.threads import ThreadQueue, spawn
from leasehold.stores.printable import error_summary, make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.supervisor"))

SUPERVISED_VARIABLE = "LEASEHOLD_SUPERVISED"
"""If this environment variable is set, the process is supervised, and drains when its standard input ends."""

RESTART_PAUSE_MIN = 1.0
RESTART_PAUSE_MAX = 60.0
PAUSE_RESET_SECONDS = 60.0
"""If a process has run for this long, the pause before its next restart is reset to the minimum."""
EXIT_LIMIT_SECONDS = 5.0
"""How long a process may take to start, close and exit, in addition to the time to drain, before it is killed."""
CHUNK_BYTES = 2**16

TEMPORARY_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.EIO, errno.ENOMEM, errno.ENOBUFS, errno.EROFS}
)
"""Errors after which a write may succeed later."""

WRITE_RETRY_SECONDS = 0.1, 5.0


@define
class _SupervisedProcess:
    """One of the processes, with the times of its last and its next start."""

    name: str
    command: Sequence[str]
    process: "Popen[bytes] | None" = None
    started: float = 0.0
    due: float = 0.0
    pause: float = RESTART_PAUSE_MIN


@define
class _SupervisedProcessEnded:
    """The event that a process has ended and that all its output has been passed on."""

    child: _SupervisedProcess
    status: int


@define
class Supervisor:
    """Runs a fixed number of processes.

    Attributes:
        commands: The command of each process, by the name of the process. A restarted process keeps its name.
        drain_seconds: How long a process may take to drain. It is killed `EXIT_LIMIT_SECONDS` after that.
        final_statuses: The exit statuses after which a restart would not help. If a process ends with one of them, the
            supervisor drains the others and ends.
    """

    commands: Mapping[str, Sequence[str]]
    drain_seconds: float
    final_statuses: Collection[int]
    _events: ThreadQueue = field(factory=lambda: ThreadQueue(time.monotonic), init=False)
    _output_lock: Lock = field(factory=Lock, init=False)
    _sinks: tuple[LineWriter, LineWriter] = field(
        factory=lambda: (LineWriter(sys.stdout), LineWriter(sys.stderr)), init=False
    )

    def run(self, end_signals: Iterable[signal.Signals]) -> int:
        """Run the processes until one of these signals arrives. Must be called in the main thread.

        Returns:
            The exit status. It is 0 if all processes drained, and 1 if one had to be killed. If a process ended with a
            status in `final_statuses`, or failed while it drained, that status is returned. A second signal kills all
            processes, and the status is 128 plus the number of the signal.
        """
        for signal_number in end_signals:
            replace_handler(signal_number, lambda number, _frame: self._events.put(number))
        children = self.create_processes()
        try:
            exit_status = self._keep_running(children)
            # Ask all processes to end, and wait for them.
            running_children = [child for child in children if child.process is not None]
            for child in running_children:
                _request_drain(child)
            deadline = time.monotonic() + self.drain_seconds + EXIT_LIMIT_SECONDS
            while running_children:
                match self._events.get(deadline):
                    case _SupervisedProcessEnded(child, status):
                        running_children.remove(child)
                        exit_status = exit_status or _convert_to_shell_status(status)
                    case int(number):
                        self._log_line(
                            "a second signal: %d processes are killed, and their leases expire", len(running_children)
                        )
                        return 128 + number
                    case None:
                        process_names = ", ".join(child.name for child in running_children)
                        self._log_line("not ended within %g s, killed: %s", self.drain_seconds, process_names)
                        return exit_status or 1
            return exit_status
        finally:
            for child in children:
                if child.process is not None and child.process.poll() is None:
                    child.process.kill()

    def create_processes(self) -> list[_SupervisedProcess]:
        """Return the processes, which are not started yet."""
        return [_SupervisedProcess(name, command) for name, command in self.commands.items()]

    def _keep_running(self, children: list[_SupervisedProcess]) -> int:
        """Start the processes, and restart those that end.

        Return 0 after a signal. If a process ends with a status in `final_statuses`, return that status.
        """
        while True:
            now = time.monotonic()
            for child in children:
                if child.process is None and child.due <= now:
                    self.start_or_postpone(child)
            match self._events.get(min((child.due for child in children if child.process is None), default=math.inf)):
                case _SupervisedProcessEnded(child, status):
                    # Close the pipe to the ended process, because the pipe uses a file descriptor of this process.
                    _request_drain(child)
                    child.process = None
                    if status in self.final_statuses:
                        self._log_line("%s ended with status %d, so all processes end", child.name, status)
                        return status
                    now = time.monotonic()
                    if now - child.started >= PAUSE_RESET_SECONDS:
                        child.pause = RESTART_PAUSE_MIN
                    shell_status = _convert_to_shell_status(status)
                    self._log_line(
                        "%s ended with status %d: it starts again in %g s", child.name, shell_status, child.pause
                    )
                    child.due = now + child.pause
                    child.pause = min(RESTART_PAUSE_MAX, 2 * child.pause)
                case int():
                    return 0
                case None:
                    pass

    def start_or_postpone(self, child: _SupervisedProcess) -> None:
        """Start a process. If the system lacks resources, try again later while the other processes continue."""
        try:
            self._start_child(child)
        except (OSError, RuntimeError, MemoryError) as fault:
            self._log_line(
                "%s cannot be started: %s; tried again in %g s", child.name, error_summary(fault), child.pause
            )
            child.process, child.due = None, time.monotonic() + child.pause
            child.pause = min(RESTART_PAUSE_MAX, 2 * child.pause)

    def _start_child(self, child: _SupervisedProcess) -> None:
        child.started = time.monotonic()
        process = child.process = Popen(  # noqa: S603  the command is our own
            child.command,
            bufsize=0,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env={**os.environ, SUPERVISED_VARIABLE: "1"},
            # Ctrl-C sends a signal to the terminal's whole process group, but only the supervisor must receive it.
            start_new_session=True,
        )
        pipes = ((process.stdout, self._sinks[0]), (process.stderr, self._sinks[1]))
        relay_threads: list[Thread] = []

        def on_relay_failure(fault: BaseException) -> None:
            """Log that output is no longer passed on. The process will end, because its output pipe is now closed."""
            self._log_line("the output of %s cannot be passed on: %s", child.name, error_summary(fault))

        def wait_for_exit() -> None:
            status = process.wait()
            for relay in relay_threads:
                relay.join(
                    EXIT_LIMIT_SECONDS
                )  # limited, because a process that the child has started may keep the pipes open
            self._events.put(_SupervisedProcessEnded(child, status))

        def on_watch_failure(fault: BaseException) -> None:
            """Kill the process so that it is restarted, because no thread waits for its end any more."""
            self._log_line("%s is killed: its end could not be waited for: %s", child.name, error_summary(fault))
            process.kill()
            self._events.put(_SupervisedProcessEnded(child, process.wait()))

        try:
            for source, sink in pipes:
                assert source is not None  # noqa: S101  it is a pipe
                relay_threads.append(
                    spawn(f"relay-{child.name}", partial(self._relay_output, process, source, sink), on_relay_failure)
                )
            spawn(f"watch-{child.name}", wait_for_exit, on_watch_failure)
        except RuntimeError:  # no thread could be started to pass on the process's output or to detect its end
            process.kill()
            process.wait()
            for pipe in (process.stdin, *(source for source, _ in pipes[len(relay_threads) :])):
                if pipe is not None:
                    pipe.close()
            raise

    def _relay_output(self, process: "Popen[bytes]", source: IO[bytes], sink: LineWriter) -> None:
        """Pass on whole lines until the process closes its output, or the reader of our output has gone.

        If the reader has gone, close the process's output. While the sink cannot be written, for example because a disk
        is full, keep the lines here, so that the process blocks. If the process was killed, drop an incomplete last
        line.
        """
        partial_line = b""
        with source, suppress(BrokenPipeError):
            while chunk := source.read(CHUNK_BYTES):
                lines, end, partial_line = (partial_line + chunk).rpartition(b"\n")
                self._write_with_retries(sink, lines + end)
            if partial_line and process.wait() >= 0:
                self._write_with_retries(sink, partial_line + b"\n")

    def _write_with_retries(self, sink: LineWriter, data: bytes) -> None:
        backoff = Backoff(*WRITE_RETRY_SECONDS)
        while True:
            with self._output_lock:
                partial_write = sink.write(data)
            if partial_write is None:
                return
            if getattr(partial_write.error, "errno", None) not in TEMPORARY_ERRORS:
                raise partial_write.error
            if not backoff.faults:
                self._log_line(
                    "output cannot be written now, and is tried again: %s", error_summary(partial_write.error)
                )
            data = partial_write.unwritten
            time.sleep(backoff.next())

    def _log_line(self, text: str, *values: object) -> None:
        with self._output_lock:
            log.warning(text, *values)


def _request_drain(child: _SupervisedProcess) -> None:
    if child.process is not None and child.process.stdin is not None:
        child.process.stdin.close()


def _convert_to_shell_status(status: int) -> int:
    return status if status >= 0 else 128 - status


def call_at_end_of_supervisor(stop: Callable[[], None]) -> None:
    """Call `stop` once the supervisor requests this process to drain, or dies. Do nothing if there is no supervisor."""

    def wait_for_closed_input() -> None:
        while os.read(0, CHUNK_BYTES):
            pass
        stop()

    if os.environ.pop(SUPERVISED_VARIABLE, None) is not None:
        # Also stop if reading fails. Otherwise this process would not notice the death of its supervisor.
        spawn("leasehold-supervised", wait_for_closed_input, lambda _fault: stop())
