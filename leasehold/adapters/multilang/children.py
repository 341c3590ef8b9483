"""Runs the children of a daemon, one process for each held shard. One event loop serves all children.

If a child crashes, hangs, closes its pipe or sends an unexpected response, only this child is ended. The caller that
waits for the child's response gets a `ChildFault`. The next message for the shard starts another child at the stored
checkpoint. The caller decides how long to wait before the next message, and when to give up.

Rule 1: A shard never has two children. A child is started only after the previous process has ended and its process
group was killed. No child is started after `close` was called.
Rule 2: Standard output is always read, even between two messages, because Node treats a full pipe as an error.
Rule 3: When a child must end, every wait for it has a timeout, including the wait for a batch in progress. The wait for
the response to `shardEnded` has a timeout too, because the lease is still renewed and no other worker would notice that
the child hangs. After the timeout we close the child's pipe, and then send TERM and KILL to its process group. Each
child has its own process group, so a signal to ours doesn't reach the child.
Rule 4: If the daemon is killed, a small shell process (the keeper) kills the process groups of all children.
"""

import asyncio
import logging
import math
import os
import re
import signal
import subprocess
import sys
from asyncio import Task
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from leasehold.adapters.consumer.handling import NotAwaited
from leasehold.adapters.multilang.protocol import (
    DEFAULT_MAX_RECORDS,
    CheckpointError,
    CheckpointRequested,
    Conversation,
    ConversationBroken,
    InvalidLine,
    StatusReceived,
)
from leasehold.adapters.sources.protocol import Record
from leasehold.balancer.model import Position
from leasehold.stores.printable import error_summary, make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.child"))

EXIT_SECONDS = 5.0
"""How long to wait for a child to end after its pipe was closed, after TERM, and after KILL."""

LEASE_MOVING_SECONDS = 30.0
"""How long to wait for a child whose lease is moving to another worker. As in the KCL, the next owner waits this long
after the lease has expired."""

SHARD_END_SECONDS = 300.0
"""How long to wait for the response to `shardEnded` if `timeoutInSeconds` is not set. The timeout is long because some
children flush all their data before they respond."""

CHECK_SECONDS = 0.5
"""The interval, in seconds, at which a child that has not responded is checked for its end or a timeout."""

READ_BYTES = 2**16
INCOMPLETE_LINE_SECONDS = 1.0
"""How long an incomplete line of standard error is kept before it is logged."""

MAX_LOGGED_CHARACTERS = 300
"""The maximum number of characters of an invalid line that are logged."""

WriteCheckpoint = Callable[[Position], Awaitable[CheckpointError | None]]
"""Stores a checkpoint. Returns None on success, or else the name of the error to send to the child."""

_LEVEL_PATTERN = re.compile(r"\b(DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b")
_LEVEL_SEARCH_CHARACTERS = 80  # look for a level only in a line's first characters, because the message follows

# The keeper is a shell process that kills orphaned children. It reads a line for each process group that starts (+) or
# has ended (-). When the daemon exits for any reason, its end of the pipe is closed, and the keeper kills the remaining
# groups: children that hang, and processes that children started. If a child is killed before it has written its group,
# no entry is needed.
_KEEPER_SCRIPT = """
groups=' '
while read -r what group; do
  case $what in
    +) groups="$groups$group " ;;
    -) case $groups in *" $group "*) groups="${groups%% $group *} ${groups#* $group }" ;; esac ;;
  esac
done
for group in $groups; do kill -s KILL -- "-$group" 2>/dev/null; done
"""

# The child writes its group to the keeper's pipe before it executes its program, so the keeper always has an entry for
# it. The child must then close the pipe, because the keeper reads until every writer has closed it.
_LAUNCHER_SCRIPT = """
import os, sys
keeper = int(sys.argv[1])
os.write(keeper, b"+ %d\\n" % os.getpid())
os.close(keeper)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""


class ChildFault(Exception):
    """The child ended, or had to be ended, before it responded."""


class ChildNotStarted(NotAwaited):
    """No child could be started, or the child did not respond to `initialize`. Records cannot be the cause."""


class ChildProcess:
    """A child process and the conversation with it. `ChildProcesses` creates a `ChildProcess` for each shard."""

    def __init__(
        self, process: Process, conversation: Conversation, write_checkpoint: WriteCheckpoint, timeout: float | None
    ) -> None:
        self.conversation, self.pid = conversation, process.pid
        self._process, self._write_checkpoint, self._timeout = (
            process,
            write_checkpoint,
            math.inf if timeout is None else timeout,
        )
        self._loop = asyncio.get_running_loop()
        self._last_output_at = self._loop.time()
        self._is_storing_checkpoint = False
        self._invalid_line_count = 0
        self._response: asyncio.Future[None] | None = None
        self._fault: ChildFault | None = None
        self._tasks: list[Task[None]] = [
            asyncio.create_task(self._read_stdout()),
            asyncio.create_task(self._log_stderr()),
        ]

    async def request(self, send: Callable[[], object], timeout_seconds: float = math.inf) -> None:
        """Send a message, and wait up to `timeout_seconds` for the response. Raises ChildFault."""
        if self._fault is not None:
            raise self._fault
        send()
        self._last_output_at, self._response = self._loop.time(), self._loop.create_future()
        deadline = self._last_output_at + timeout_seconds
        self._write_pending_data()
        try:
            while not self._response.done():
                # Check the process too, because the pipe stays open if another process has inherited it from the child.
                exit_status = self._process.returncode
                await asyncio.wait({self._response}, timeout=CHECK_SECONDS)
                if self._response.done() or self._is_storing_checkpoint:
                    continue
                if exit_status is not None:
                    raise ChildFault(f"it exited with status {exit_status}")
                if self._loop.time() - self._last_output_at >= self._timeout:
                    raise ChildFault(f"it has sent nothing for {self._timeout:g} s")
                if self._loop.time() >= deadline:
                    raise ChildFault(
                        f"it has not answered {self.conversation.pending_action} within {timeout_seconds:g} s"
                    )
            self._response.result()
        finally:
            self._response = None

    async def end(self, *, gracefully: bool) -> None:
        """End the process and its group.

        Args:
            gracefully: Whether to give the child time to end by itself after its pipe is closed.
        """
        process = self._process
        if process.stdin is not None:
            process.stdin.close()
        if gracefully:
            await self._wait_for_exit()
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            if process.returncode is None:
                self.kill(signal_number)
                await self._wait_for_exit()
        self.kill()  # kill processes that the child started and left running
        await asyncio.wait(self._tasks, timeout=EXIT_SECONDS)  # read the remaining output from the pipes
        for task in self._tasks:
            task.cancel()
        invalid_lines_note = (
            f", and {self._invalid_line_count} lines on its standard output were not messages"
            if self._invalid_line_count
            else ""
        )
        log.info(
            "shard %s, child %d: ended with status %s%s",
            self.conversation.shard,
            self.pid,
            process.returncode,
            invalid_lines_note,
        )

    def kill(self, signal_number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process group. The caller that waits for a response detects the end and cleans up."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal_number)

    async def _wait_for_exit(self) -> None:
        """Wait until the process ends. Don't wait for its pipes, which other processes may have inherited."""
        deadline = self._loop.time() + EXIT_SECONDS
        while self._process.returncode is None and self._loop.time() < deadline:  # noqa: ASYNC110  see above
            await asyncio.sleep(EXIT_SECONDS / 100)

    def _write_pending_data(self) -> None:
        data = self.conversation.data_to_send()
        if data and self._process.stdin is not None:
            # Don't wait for the pipe to drain. If the child doesn't read its input, it sends no response either, so the
            # request times out.
            self._process.stdin.write(data)

    async def _read_stdout(self) -> None:
        stdout = self._process.stdout
        while stdout is not None and self._fault is None:
            data = await stdout.read(READ_BYTES)
            self._last_output_at = self._loop.time()
            self.conversation.receive_data(data)
            while (event := self.conversation.next_event()) is not None:
                await self._handle_event(event)
            self._write_pending_data()
            if not data:
                return

    async def _handle_event(
        self, event: StatusReceived | ConversationBroken | CheckpointRequested | InvalidLine
    ) -> None:
        match event:
            case StatusReceived():
                if self._response is not None and not self._response.done():
                    self._response.set_result(None)
            case CheckpointRequested(position):
                self._is_storing_checkpoint = True
                try:
                    error_name = await self._write_checkpoint(position)
                except Exception:
                    error_name = "KinesisClientLibDependencyException"
                    log.exception(
                        "shard %s, child %d: its checkpoint was not stored", self.conversation.shard, self.pid
                    )
                self._is_storing_checkpoint, self._last_output_at = False, self._loop.time()
                if error_name is None:
                    self.conversation.checkpoint_stored()
                else:
                    self.conversation.checkpoint_failed(error_name)
                self._write_pending_data()
            case InvalidLine(line, reason):
                self._invalid_line_count += 1
                if self._invalid_line_count == 1:
                    message_format = (
                        "shard %s, child %d: a line on its standard output is not a message (%s); logged once: %s"
                    )
                    log.warning(message_format, self.conversation.shard, self.pid, reason, line[:MAX_LOGGED_CHARACTERS])
            case ConversationBroken(reason):
                self._fault = ChildFault(reason)
                if self._response is not None and not self._response.done():
                    self._response.set_exception(self._fault)

    async def _log_stderr(self) -> None:
        """Log the lines of the child's standard error, each at the log level that it contains."""
        stderr, incomplete_line = self._process.stderr, b""
        while stderr is not None:
            try:
                # The amazon_kclpy sample writes no line ends, so an incomplete line is logged after a moment too.
                async with asyncio.timeout(INCOMPLETE_LINE_SECONDS if incomplete_line else None):
                    data = await stderr.read(READ_BYTES)
            except TimeoutError:
                self._log_line(incomplete_line)
                incomplete_line = b""
                continue
            *lines, incomplete_line = (incomplete_line + data).split(b"\n")
            for line in lines:
                self._log_line(line)
            if not data or len(incomplete_line) >= READ_BYTES:
                self._log_line(incomplete_line)
                incomplete_line = b""
            if not data:
                return

    def _log_line(self, line: bytes) -> None:
        if text := line.decode("utf-8", "replace").rstrip():
            named_level = _LEVEL_PATTERN.search(text[:_LEVEL_SEARCH_CHARACTERS])
            level = logging.getLevelNamesMapping()[named_level[1]] if named_level else logging.INFO
            log.log(level, "shard %s, child %d: %s", self.conversation.shard, self.pid, text)


class ChildProcesses:
    """The children of one daemon, by shard. All methods run on one event loop.

    Args:
        argv: The program and its arguments.
        max_records: The maximum number of records in a message.
        timeout_seconds: A child that sends nothing for this long while a response is due is killed; None for no limit.
        shard_end_seconds: How long to wait for the response to `shardEnded` if `timeout_seconds` is None.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        max_records: int = DEFAULT_MAX_RECORDS,
        timeout_seconds: float | None = None,
        shard_end_seconds: float = SHARD_END_SECONDS,
    ) -> None:
        self._argv, self._max_records, self._timeout = tuple(argv), max_records, timeout_seconds
        self._shard_end_seconds = shard_end_seconds
        self._children: dict[str, ChildProcess] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._closed = False
        self._keeper_process: subprocess.Popen[bytes] | None = None
        self._keeper_pipe = -1  # our end of the keeper's pipe

    @property
    def pids(self) -> dict[str, int]:
        """The process id of each shard's child."""
        return {shard: child.pid for shard, child in self._children.items()}

    async def start_child(self, shard: str, checkpoint: Position, write_checkpoint: WriteCheckpoint) -> None:
        """Start a child for a shard that has none. Raises ChildNotStarted."""
        async with self._get_lock(shard):
            await self._get_or_start(shard, checkpoint, write_checkpoint)

    async def process_batch(
        self,
        shard: str,
        checkpoint: Position,
        records: Sequence[Record],
        behind_seconds: float | None,
        write_checkpoint: WriteCheckpoint,
    ) -> None:
        """Send records, and wait until the child has responded to all of them.

        Args:
            shard: The id of the shard.
            checkpoint: The stored checkpoint, in case a child must be started first.
            records: The records.
            behind_seconds: How far behind the tip these records are, if known.
            write_checkpoint: Stores checkpoints, in case a child must be started first.

        Raises:
            ChildFault: If the child failed. The child has then been ended.
            ChildNotStarted: If no child could be started.
        """
        async with self._get_lock(shard):
            child = await self._get_or_start(shard, checkpoint, write_checkpoint)
            processed_count = 0
            while True:
                sent_count = 0

                def send_records(remaining: Sequence[Record]) -> None:
                    nonlocal sent_count
                    sent_count = child.conversation.send_records(remaining, behind_seconds)

                await self._request_or_end(shard, child, lambda: send_records(records[processed_count:]))  # noqa: B023  used only during this call
                processed_count += sent_count
                if processed_count >= len(records):
                    return

    async def request_shutdown(self, shard: str) -> None:
        """Let the child write its final checkpoint before the lease moves. Do nothing if the shard has no child."""
        async with self._get_lock(shard):
            if (child := self._children.get(shard)) is not None:
                await self._request_or_end(
                    shard, child, child.conversation.send_shutdown_requested, LEASE_MOVING_SECONDS
                )

    async def end_shard(self, shard: str, checkpoint: Position, write_checkpoint: WriteCheckpoint) -> bool:
        """Notify the child that its shard has ended, and end the child.

        Returns:
            Whether the child has checkpointed the end of the shard.

        Raises:
            ChildFault: If the child failed, or didn't respond within `timeout_seconds` (`shard_end_seconds` if None).
            ChildNotStarted: If no child could be started.
        """
        async with self._get_lock(shard):
            child = await self._get_or_start(shard, checkpoint, write_checkpoint)
            timeout_seconds = self._shard_end_seconds if self._timeout is None else math.inf
            await self._request_or_end(shard, child, child.conversation.send_shard_ended, timeout_seconds)
            await self._end_child(shard, gracefully=True)
            return child.conversation.acknowledged.ended

    async def lose_lease(self, shard: str) -> None:
        """Wait for the batch in progress, then notify the child that its lease is lost, and end the child."""
        lock = self._get_lock(shard)
        # Request the lock now. Otherwise the shard's next child could start before this child is ended.
        lock_acquisition = asyncio.ensure_future(lock.acquire())
        finished_tasks, _ = await asyncio.wait({lock_acquisition}, timeout=LEASE_MOVING_SECONDS)
        if not finished_tasks and (child := self._children.get(shard)) is not None:
            # Kill the child, because another worker may already process the same records, and the shard's next child
            # cannot start until this one has ended.
            log.warning(
                "shard %s, child %d: killed, because its lease is lost and it is still working", shard, child.pid
            )
            child.kill()
        await lock_acquisition
        try:
            if (child := self._children.get(shard)) is not None:
                with suppress(ChildFault):
                    await self._request_or_end(shard, child, child.conversation.send_lease_lost, LEASE_MOVING_SECONDS)
                await self._end_child(shard, gracefully=True)
        finally:
            lock.release()

    async def close(self) -> None:
        """End all children, even if they are processing records, and start no others."""
        self._closed = True
        await asyncio.gather(*(self._end_child(shard, gracefully=True) for shard in tuple(self._children)))
        if self._keeper_process is not None:
            os.close(self._keeper_pipe)
            await asyncio.to_thread(self._keeper_process.wait)
            self._keeper_process = None

    def _ensure_keeper(self) -> int:
        """Return our end of the pipe to the keeper, which kills process groups that outlive the daemon.

        If no keeper is running, start one and send it all current groups.
        """
        if self._keeper_process is None or self._keeper_process.poll() is not None:
            if self._keeper_process is not None:
                os.close(self._keeper_pipe)
            read_end, self._keeper_pipe = os.pipe()
            # Start the keeper in its own session, so that a signal to our process group doesn't reach it.
            self._keeper_process = subprocess.Popen(  # noqa: S603  the script above
                ("/bin/sh", "-c", _KEEPER_SCRIPT), stdin=read_end, start_new_session=True
            )
            os.close(read_end)
            for child in self._children.values():
                self._notify_keeper("+", child.pid)
        return self._keeper_pipe

    def _notify_keeper(self, operation: str, process_group: int) -> None:
        with suppress(BrokenPipeError):  # the next keeper gets all groups
            os.write(self._keeper_pipe, f"{operation} {process_group}\n".encode())

    def _get_lock(self, shard: str) -> asyncio.Lock:
        return self._locks.setdefault(shard, asyncio.Lock())

    async def _get_or_start(self, shard: str, checkpoint: Position, write_checkpoint: WriteCheckpoint) -> ChildProcess:
        if (child := self._children.get(shard)) is not None:
            return child
        if self._closed:
            raise ChildNotStarted("the daemon is shutting down")
        try:
            keeper_pipe = self._ensure_keeper()
            command = (sys.executable, "-ISc", _LAUNCHER_SCRIPT, str(keeper_pipe), *self._argv)
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, pass_fds=(keeper_pipe,)
            )
        except OSError as error:
            raise ChildNotStarted(f"{self._argv[0]} cannot be started: {error_summary(error)}") from error
        child = self._children[shard] = ChildProcess(
            process, Conversation(shard, checkpoint, self._max_records), write_checkpoint, self._timeout
        )
        log.info("shard %s, child %d: started", shard, child.pid)
        try:
            await self._request_or_end(shard, child, child.conversation.send_initialize)
        except ChildFault as fault:
            raise ChildNotStarted(f"{self._argv[0]} does not answer: {fault}") from fault
        return child

    async def _request_or_end(
        self, shard: str, child: ChildProcess, send: Callable[[], object], timeout_seconds: float = math.inf
    ) -> None:
        """Send a request. If it fails or is canceled, end the child before the shard's next operation."""
        try:
            await child.request(send, timeout_seconds)
        except BaseException as fault:
            await asyncio.shield(self._end_child(shard, gracefully=False))
            log.warning("shard %s, child %d: given up: %s", shard, child.pid, error_summary(fault))
            raise

    async def _end_child(self, shard: str, *, gracefully: bool) -> None:
        if (child := self._children.get(shard)) is not None:
            await child.end(gracefully=gracefully)
            self._children.pop(shard, None)
            self._notify_keeper("-", child.pid)
