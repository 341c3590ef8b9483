"""Calls a Lambda function for several partition keys of a batch at the same time, each call in a separate process.

`ParallelFunction` splits each batch by partition key, as the parallelization factor of an event source mapping does.
The calls run in processes because few Lambda functions are thread-safe. On Lambda, each concurrent call also has its
own process.

1. A key always goes to the same process. Its records are handled one call after another, in order.
2. The checkpoint moves to just before the lowest sequence number that failed in any part, and the rest of the batch
   fails. Later records that have succeeded in another part are not repeated while this worker holds the lease.
3. If a process ends during a call, its part of the batch fails. The next call starts another process.
4. If a call takes longer than `handler_seconds`, its process is killed and its part of the batch fails. As on Lambda,
   the time starts once the function is loaded, so a slow import does not use it up.
5. However a worker ends, its processes end as well. Their connections are then closed, and each process ends at once,
   even if its function never returns to the interpreter. Until then a process ignores SIGTERM, SIGINT and SIGHUP,
   because the worker waits for its call.
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
from leasehold.stores.printable import error_summary

PROCESS_CODE = """
import signal, sys
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    # Before the imports, which take a while. Not SIG_IGN, which programs that the function starts would inherit.
    signal.signal(number, lambda _number, _frame: None)
from leasehold.adapters.lambda_processes import serve_function_calls
serve_function_calls(int(sys.argv[1]), int(sys.argv[2]))
"""

WATCH_SECONDS = 1.0
"""The interval at which to check whether a process has ended. The connection does not show this if a child of the
process keeps the connection open."""

LOAD_SECONDS = 60.0
"""How long a process may take to load its function, in addition to the time limit of the call."""


@frozen
class FunctionSetup:
    """The data that a process needs to load the function."""

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
    """The result of a call.

    Attributes:
        failed: The index of the first record that failed; None if all records succeeded.
        why: The reason why the call failed, without the message of an exception, which may contain a record.
        trace: The traceback of the exception.
    """

    failed: int | None = None
    why: str = ""
    trace: str = ""


@frozen
class FunctionLoaded:
    """A message that the process has loaded the function and now begins the call."""


@frozen
class StartedProcess:
    """A process that was started.

    Attributes:
        process: The process.
        connection: The connection for calls and replies.
        lifeline: A connection on which nothing is sent. The process ends when this connection is closed.
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
        setup: The data that the process needs to load the function.
        loaded: Whether the process has loaded the function.
    """

    setup: FunctionSetup
    loaded: bool = False
    _started_process: StartedProcess | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the process has not been started or has ended."""
        return self._started_process is None or self._started_process.process.poll() is not None

    @property
    def limit_seconds(self) -> float:
        """The time limit, in seconds, for a call that begins now."""
        return self.setup.handler_seconds + (0.0 if self.loaded else LOAD_SECONDS)

    def send_call(self, call: FunctionCall) -> Connection:
        """Begin this call, and return the connection on which the reply will be received.

        Raises OSError, and RuntimeError if no thread can be started.
        """
        if self._started_process is None or self.has_ended:
            self.kill_process()
            self._started_process = self._start_process()
        started_process, call_sent = self._started_process, threading.Event()
        limit_seconds = min(self.limit_seconds, threading.TIMEOUT_MAX)

        def kill_after_limit() -> None:
            if not call_sent.wait(limit_seconds):
                started_process.process.kill()

        # Limit the time of the send with a second thread. A suspended process reads nothing, so sending a large call to
        # it would block forever.
        spawn("leasehold-send", kill_after_limit, lambda _fault: None)
        try:
            started_process.connection.send(call)
        finally:
            call_sent.set()
        return started_process.connection

    def receive_reply(self) -> FunctionReply | FunctionLoaded:
        """Return the message that was received from the process, or a failure if the process has ended."""
        try:
            if self._started_process is not None and self._started_process.connection.poll():
                reply: FunctionReply | FunctionLoaded = self._started_process.connection.recv()
                self.loaded = self.loaded or isinstance(reply, FunctionLoaded)
                return reply
        except (EOFError, OSError):
            pass  # the process has ended
        return FunctionReply(0, f"the process of its function has ended with status {self.kill_process()}")

    def kill_process(self) -> int | None:
        """Kill the process if there is one. Return its exit status, or None if there was none."""
        if self._started_process is None:
            return None
        started_process, self._started_process, self.loaded = self._started_process, None, False
        started_process.connection.close()
        started_process.lifeline.close()
        started_process.process.kill()
        return started_process.process.wait()

    def _start_process(self) -> StartedProcess:
        worker_end, child_end = Pipe()
        lifeline_child_end, lifeline = Pipe(duplex=False)
        with child_end, lifeline_child_end:
            descriptors = (child_end.fileno(), lifeline_child_end.fileno())
            arguments = [sys.executable, "-P", "-c", PROCESS_CODE, *map(str, descriptors)]
            # Do not pass on the standard input, because a supervisor may use it to request that this worker drains.
            process = subprocess.Popen(arguments, pass_fds=descriptors, stdin=subprocess.DEVNULL)  # noqa: S603  our own program
        worker_end.send(self.setup)
        return StartedProcess(process, worker_end, lifeline)


@define(eq=False)
class ParallelFunction(LambdaFunction):
    """A handler that calls a Lambda function in several processes at once.

    Attributes:
        concurrency: The number of processes, which is also the maximum number of parts of a batch.
    """

    concurrency: int = field(kw_only=True)
    _processes: list[FunctionProcess] = field(init=False, factory=list)
    # Maps each lease whose batch failed to its fencing number and the positions of records that must not be repeated.
    _succeeded_by_lease: dict[str, tuple[int | None, frozenset[PositionKey]]] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        setup = FunctionSetup(self.settings, self.handler_seconds, [*sys.path])
        self._processes = [FunctionProcess(setup) for _ in range(self.concurrency)]

    def __call__(self, delivery: Delivery) -> None:
        """Call the function for each part of the batch. Raises ReportedFailure if any part failed."""
        epoch, succeeded_orders = self._succeeded_by_lease.pop(delivery.lease, (None, frozenset[PositionKey]()))
        if epoch != delivery.epoch:
            succeeded_orders = frozenset()  # another worker had the lease in between, and the lease may have been reset
        records_by_process = dict[FunctionProcess, list[Record]]()
        for record in delivery.records:
            if record.position.order not in succeeded_orders:
                process = self._processes[_slot_for_key(record.partition_key or "", self.concurrency)]
                records_by_process.setdefault(process, []).append(record)
        replies = self._collect_replies(delivery, records_by_process)
        failures = list[tuple[Record, FunctionReply]]()
        for process, records in records_by_process.items():
            reply = replies[process]
            succeeded_orders |= {record.position.order for record in records[: reply.failed]}
            if reply.failed is not None:
                failures.append((records[reply.failed], reply))
        first_failed_record, reply = min(
            failures, key=lambda failure: failure[0].position.order, default=(None, FunctionReply())
        )
        failed_order = delivery.read_to.order if first_failed_record is None else first_failed_record.position.order
        if succeeded_later := frozenset(order for order in succeeded_orders if order > failed_order):
            self._succeeded_by_lease[delivery.lease] = delivery.epoch, succeeded_later
        if first_failed_record is None:
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
                replies[process] = FunctionReply(
                    0, f"no process of its function could be called: {error_summary(error)}"
                )
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


def _slot_for_key(key: str, slot_count: int) -> int:
    # Do not use MD5, because Kinesis chooses shards by it: the MD5 hashes of one shard's keys are all in one range.
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) % slot_count


def serve_function_calls(descriptor: int, lifeline: int) -> None:
    """Call the function for each `FunctionCall` that this process receives, and exit when the connection is closed.

    Args:
        descriptor: The file descriptor of the connection for calls and replies.
        lifeline: The file descriptor of a pipe from the worker. This process ends when the pipe is closed.
    """
    import fcntl  # noqa: PLC0415  not available on Windows

    os.set_inheritable(descriptor, False)
    os.set_inheritable(lifeline, False)
    # When the lifeline is closed, the kernel sends SIGIO, which ends this process. The thread below could not end it
    # while the function holds the interpreter's lock, for example in a regular expression.
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    # Configure logging as the command does, because functions may rely on the handler that Lambda's runtime installs.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    connection, call_queue = Connection(descriptor), SimpleQueue[FunctionCall]()
    setup: FunctionSetup = connection.recv()

    def receive_calls() -> None:
        try:
            while True:
                call_queue.put(connection.recv())
        finally:  # exit without waiting for a running call, because the worker has ended
            os._exit(0)

    spawn("leasehold-receive", receive_calls, lambda _fault: None)
    function: LambdaFunction | None = None
    while True:
        call = call_queue.get()
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
    reason = (
        ""
        if failed_index is None
        else f"its response reports record {call.records[failed_index].sequence_number} as failed"
    )
    return FunctionReply(failed_index, reason)
