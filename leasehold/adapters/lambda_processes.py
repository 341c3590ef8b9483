"""Calls a Lambda function for several partition keys of a batch at the same time, each call in a separate process.

`ParallelFunction` splits each batch by partition key, as the parallelization factor of an event source mapping does.
The calls run in processes because few Lambda functions are thread-safe: on Lambda, too, each concurrent call has its
own process.

1. A key always goes to the same process. Its records are handled one call after another, in order.
2. Everything before the lowest sequence number that failed in any part is checkpointed, and the batch fails from there.
   The records after it that have succeeded in another part are not repeated while this worker holds the lease.
3. A process that ends during a call fails its part of the batch; the next call starts another process.
4. A process whose call takes longer than `handler_seconds` is killed, which fails its part, too. The time counts from
   when the function is loaded, as on Lambda, so a slow import does not use it up.
5. However a worker ends, its processes end, too: their connections are then closed, and each process ends at once, even
   if its function never returns to the interpreter. Until then it ignores SIGTERM, SIGINT and SIGHUP, because the
   worker waits for its call.
"""

import hashlib
import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from queue import SimpleQueue
from typing import Any

from attrs import define, field, frozen

from leasehold.adapters.consumer.attempts import PositionKey
from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.lambda_handlers import FunctionSettings, LambdaFunction, ReportedFailure
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.threads import spawn
from leasehold.stores.printable import said

START = """
import signal, sys
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    # Before the imports, which take a while. Not SIG_IGN, which programs that the function starts would inherit.
    signal.signal(number, lambda _number, _frame: None)
from leasehold.adapters.lambda_processes import serve_function_calls
serve_function_calls(int(sys.argv[1]), int(sys.argv[2]))
"""

WATCH_SECONDS = 1.0
"""How often to check whether a process has ended. The connection does not show this if a child of the process keeps it
open."""

LOAD_SECONDS = 60.0
"""How long a process may take to load its function, in addition to the time limit of the call."""


@frozen
class FunctionSetup:
    """What a process needs to load the function."""

    settings: FunctionSettings
    handler_seconds: float
    path: Sequence[str]


@frozen
class FunctionCall:
    """A call for some records of a shard."""

    shard: str
    arn: str
    records: Sequence[Record]


@frozen
class FunctionReply:
    """How a call ended.

    Attributes:
        failed: The index of the first record that failed; None if all succeeded.
        why: Why the call failed, without the message of an exception, which may contain a record.
        trace: The traceback of the exception.
    """

    failed: int | None = None
    why: str = ""
    trace: str = ""


@frozen
class FunctionLoaded:
    """The process has loaded the function, and begins the call."""


@frozen
class StartedProcess:
    """A process that was started.

    Attributes:
        process: The process.
        connection: For calls and replies.
        lifeline: Nothing is ever sent on it. The process ends when it is closed.
    """

    process: "subprocess.Popen[bytes]"
    connection: Connection
    lifeline: Connection


class ProcessTraceback(Exception):
    """The traceback of an exception that was raised in another process."""


@define(eq=False)
class FunctionProcess:
    """A process that calls the function. It is started when it is first needed, and restarted after it has ended.

    Attributes:
        setup: What it needs to load the function.
        loaded: Whether it has loaded the function.
    """

    setup: FunctionSetup
    loaded: bool = False
    _running: StartedProcess | None = None

    @property
    def has_ended(self) -> bool:
        """Whether there is no process, or it has ended."""
        return self._running is None or self._running.process.poll() is not None

    @property
    def limit_seconds(self) -> float:
        """The most seconds from now until its call has ended."""
        return self.setup.handler_seconds + (0.0 if self.loaded else LOAD_SECONDS)

    def send_call(self, call: FunctionCall) -> Connection:
        """Begin this call, and return the connection on which the reply will be received.

        Raises OSError, and RuntimeError if no thread can be started.
        """
        if self._running is None or self.has_ended:
            self.kill_process()
            self._running = self._start_process()
        running, sent = self._running, threading.Event()
        limit_seconds = min(self.limit_seconds, threading.TIMEOUT_MAX)

        def kill_after_limit() -> None:
            if not sent.wait(limit_seconds):
                running.process.kill()

        # Limit the time of the send in a second thread, because a suspended process reads nothing, and sending a large
        # call to it would block forever.
        spawn("leasehold-send", kill_after_limit, lambda _fault: None)
        try:
            running.connection.send(call)
        finally:
            sent.set()
        return running.connection

    def receive_reply(self) -> FunctionReply | FunctionLoaded:
        """Return what was received from the process, or a failure if it has ended."""
        try:
            if self._running is not None and self._running.connection.poll():
                reply: FunctionReply | FunctionLoaded = self._running.connection.recv()
                self.loaded = self.loaded or isinstance(reply, FunctionLoaded)
                return reply
        except (EOFError, OSError):
            pass  # it has ended
        return FunctionReply(0, f"the process of its function has ended with status {self.kill_process()}")

    def kill_process(self) -> int | None:
        """Kill the process, if there is one, and return its status."""
        if self._running is None:
            return None
        running, self._running, self.loaded = self._running, None, False
        running.connection.close()
        running.lifeline.close()
        running.process.kill()
        return running.process.wait()

    def _start_process(self) -> StartedProcess:
        our_end, their_end = Pipe()
        watched, lifeline = Pipe(duplex=False)
        with their_end, watched:
            descriptors = (their_end.fileno(), watched.fileno())
            arguments = [sys.executable, "-P", "-c", START, *map(str, descriptors)]
            # Do not pass on the standard input, through which a supervisor may request this worker to drain.
            process = subprocess.Popen(arguments, pass_fds=descriptors, stdin=subprocess.DEVNULL)  # noqa: S603  our own program
        our_end.send(self.setup)
        return StartedProcess(process, our_end, lifeline)


@define(eq=False)
class ParallelFunction(LambdaFunction):
    """A handler that calls a Lambda function in several processes at once.

    Attributes:
        concurrency: The most parts of a batch, and the number of processes.
    """

    concurrency: int = field(kw_only=True)
    _processes: list[FunctionProcess] = field(init=False, factory=list)
    # For each lease whose batch failed: its fencing number, and the records that succeeded and must not be repeated.
    _succeeded: dict[str, tuple[int | None, frozenset[PositionKey]]] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        setup = FunctionSetup(self.settings, self.handler_seconds, [*sys.path])
        self._processes = [FunctionProcess(setup) for _ in range(self.concurrency)]

    def __call__(self, delivery: Delivery) -> None:
        """Call the function for each part. Raises ReportedFailure."""
        epoch, succeeded = self._succeeded.pop(delivery.lease, (None, frozenset[PositionKey]()))
        if epoch != delivery.epoch:
            succeeded = frozenset()  # another worker had the lease, and it may have been reset
        records_by_process = dict[FunctionProcess, list[Record]]()
        for record in delivery.records:
            if record.position.order not in succeeded:
                process = self._processes[_slot_for_key(record.partition_key or "", self.concurrency)]
                records_by_process.setdefault(process, []).append(record)
        replies = self._collect_replies(delivery, records_by_process)
        failures = list[tuple[Record, FunctionReply]]()
        for process, records in records_by_process.items():
            reply = replies[process]
            succeeded |= {record.position.order for record in records[: reply.failed]}
            if reply.failed is not None:
                failures.append((records[reply.failed], reply))
        first, reply = min(failures, key=lambda failure: failure[0].position.order, default=(None, FunctionReply()))
        failed_order = delivery.read_to.order if first is None else first.position.order
        if succeeded_later := frozenset(order for order in succeeded if order > failed_order):
            self._succeeded[delivery.lease] = delivery.epoch, succeeded_later
        if first is None:
            return
        completed_records = [record for record in delivery.records if record.position.order < failed_order]
        if completed_records:
            delivery.checkpoint(completed_records[-1])
        raise ReportedFailure(reply.why) from (ProcessTraceback(f"\n{reply.trace}") if reply.trace else None)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill_process()

    def _collect_replies(
        self, delivery: Delivery, records_by_process: Mapping[FunctionProcess, Sequence[Record]]
    ) -> dict[FunctionProcess, FunctionReply]:
        arn = self.arn(delivery)
        running_calls = dict[
            Any, tuple[FunctionProcess, float]
        ]()  # by connection, with the time when the call must end
        replies = dict[FunctionProcess, FunctionReply]()
        for process, records in records_by_process.items():
            try:
                connection = process.send_call(FunctionCall(delivery.shard, arn, records))
            except (OSError, RuntimeError) as error:
                process.kill_process()
                replies[process] = FunctionReply(0, f"no process of its function could be called: {said(error)}")
            else:
                running_calls[connection] = process, self.clock() + process.limit_seconds
        while running_calls:
            seconds_left = min(deadline for _, deadline in running_calls.values()) - self.clock()
            ready_connections = wait(running_calls, max(0.0, min(WATCH_SECONDS, seconds_left)))
            for connection, (process, deadline) in tuple(running_calls.items()):
                if connection in ready_connections or process.has_ended:
                    reply = process.receive_reply()
                    if isinstance(reply, FunctionLoaded):
                        running_calls[connection] = process, self.clock() + process.limit_seconds
                        continue
                elif self.clock() >= deadline:
                    process.kill_process()
                    reply = FunctionReply(0, f"its function took longer than {self.handler_seconds:g} s")
                else:
                    continue
                replies[process] = reply
                del running_calls[connection]
        return replies


def _slot_for_key(key: str, slots: int) -> int:
    # Do not use MD5, by which Kinesis chooses shards. The MD5 hashes of all keys of one shard are in the same range.
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) % slots


def serve_function_calls(descriptor: int, lifeline: int) -> None:
    """Call the function for each `FunctionCall` that this connection receives, and exit when it is closed.

    Args:
        descriptor: The connection.
        lifeline: A pipe from the worker, which ends this process when it is closed.
    """
    import fcntl  # noqa: PLC0415  Windows has none, and no such processes

    os.set_inheritable(descriptor, False)
    os.set_inheritable(lifeline, False)
    # The kernel then sends SIGIO, which ends this process. The thread below cannot while the function holds the
    # interpreter's lock, as a regular expression does.
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    # Configure logging as the command does, because functions may rely on the handler that Lambda's runtime installs.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    connection, calls = Connection(descriptor), SimpleQueue[FunctionCall]()
    setup: FunctionSetup = connection.recv()

    def receive_calls() -> None:
        try:
            while True:
                calls.put(connection.recv())
        finally:  # exit without waiting for a running call, because the worker has ended
            os._exit(0)

    spawn("leasehold-receive", receive_calls, lambda _fault: None)
    function: LambdaFunction | None = None
    while True:
        call = calls.get()
        try:
            if function is None:
                function = _load_function(setup)
                connection.send(FunctionLoaded())
            connection.send(_call_function(function, call))
        except BaseException as error:  # noqa: BLE001  the worker has to know why the call failed
            connection.send(FunctionReply(0, f"its function raised {type(error).__name__}", traceback.format_exc()))


def _load_function(setup: FunctionSetup) -> LambdaFunction:
    sys.path[:] = setup.path
    module, _, name = setup.settings.target.partition(":")
    return LambdaFunction(getattr(importlib.import_module(module), name), setup.settings, setup.handler_seconds)


def _call_function(function: LambdaFunction, call: FunctionCall) -> FunctionReply:
    try:
        failed_index = function.call_and_find_failure(call.shard, call.arn, call.records)
    except ReportedFailure as failure:
        return FunctionReply(0, str(failure))
    finally:
        sys.stdout.flush()  # the process may be killed before its buffer is full
    why = (
        ""
        if failed_index is None
        else f"its response reports record {call.records[failed_index].sequence_number} as failed"
    )
    return FunctionReply(failed_index, why)
