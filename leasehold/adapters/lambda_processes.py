"""Calls a Lambda function for several keys of a batch at once, each call in a process of its own.

`ParallelFunction` splits each batch by partition key, as the parallelization factor of an event source mapping does.
Few functions are thread-safe, because on Lambda each concurrent call has a process of its own, too.

1. A key always goes to the same process. Its records are handled one call after another, in order.
2. Everything before the lowest sequence number that failed in any part is checkpointed, and the batch fails from there.
   The records after it that have succeeded in another part are not repeated while this worker holds the lease.
3. A process that ends during a call fails its part of the batch; the next call starts another process.
4. However a worker ends, its processes end, too, because each process exits as soon as its connection is closed. Until
   then it ignores SIGTERM, SIGINT and SIGHUP, because the worker waits for its call.
"""

import hashlib
import importlib
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from queue import SimpleQueue
from typing import Any

from attrs import define, field, frozen

from leasehold.adapters.consumer.attempts import PositionOrder
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
from leasehold.adapters.lambda_processes import serve
serve(int(sys.argv[1]))
"""

WATCH_SECONDS = 1.0
"""How often to check whether a process has ended, which goes unnoticed if its own child keeps the connection open."""


@frozen
class Setup:
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
class Reply:
    """How a call ended.

    Attributes:
        failed: The index of the first record that failed; None if all succeeded.
        why: Why the call failed, without the message of an exception, which may contain a record.
        trace: The traceback of the exception.
    """

    failed: int | None = None
    why: str = ""
    trace: str = ""


class ProcessTraceback(Exception):
    """The traceback of an exception that was raised in another process."""


@define(eq=False)
class FunctionProcess:
    """A process that calls the function, started when it is first needed and again after it has ended."""

    setup: Setup
    _running: "tuple[subprocess.Popen[bytes], Connection] | None" = None

    @property
    def ended(self) -> bool:
        """Whether there is no process, or it has ended."""
        return self._running is None or self._running[0].poll() is not None

    def begin(self, call: FunctionCall) -> Connection:
        """Begin this call and return the connection on which the reply will be received. Raises OSError."""
        if self._running is None or self.ended:
            self.end()
            self._running = self._start()
        connection = self._running[1]
        connection.send(call)
        return connection

    def reply(self) -> Reply:
        """Return the reply that was received, or a failure if the process has ended."""
        try:
            if self._running is not None and self._running[1].poll():
                reply: Reply = self._running[1].recv()
                return reply
        except (EOFError, OSError):
            pass  # it has ended
        return Reply(0, f"the process of its function has ended with status {self.end()}")

    def end(self) -> int | None:
        """Kill the process, if there is one; return its status."""
        if self._running is None:
            return None
        (process, connection), self._running = self._running, None
        connection.close()
        process.kill()
        return process.wait()

    def _start(self) -> "tuple[subprocess.Popen[bytes], Connection]":
        our_end, their_end = Pipe()
        with their_end:
            arguments = [sys.executable, "-P", "-c", START, str(their_end.fileno())]
            # Do not pass on the standard input, through which a supervisor may request this worker to drain.
            process = subprocess.Popen(arguments, pass_fds=[their_end.fileno()], stdin=subprocess.DEVNULL)  # noqa: S603  our own program
        our_end.send(self.setup)
        return process, our_end


@define(eq=False)
class ParallelFunction(LambdaFunction):
    """A handler that calls a Lambda function in several processes at once.

    Attributes:
        concurrency: The most parts of a batch, and the number of processes.
    """

    concurrency: int = field(kw_only=True)
    _processes: list[FunctionProcess] = field(init=False, factory=list)
    # Contains, for each lease whose batch has failed, its fencing number and the records that are not to be repeated.
    _succeeded: dict[str, tuple[int | None, frozenset[PositionOrder]]] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        setup = Setup(self.settings, self.handler_seconds, [*sys.path])
        self._processes = [FunctionProcess(setup) for _ in range(self.concurrency)]

    def __call__(self, delivery: Delivery) -> None:
        """Call the function for each part. Raises ReportedFailure."""
        epoch, succeeded = self._succeeded.pop(delivery.lease, (None, frozenset[PositionOrder]()))
        if epoch != delivery.epoch:
            succeeded = frozenset()  # another worker had the lease, and it may have been reset
        parts = dict[FunctionProcess, list[Record]]()
        for record in delivery.records:
            if record.position.order not in succeeded:
                process = self._processes[_slot(record.partition_key or "", self.concurrency)]
                parts.setdefault(process, []).append(record)
        replies = self._replies(delivery, parts)
        failures = list[tuple[Record, Reply]]()
        for process, records in parts.items():
            reply = replies[process]
            succeeded |= {record.position.order for record in records[: reply.failed]}
            if reply.failed is not None:
                failures.append((records[reply.failed], reply))
        first, reply = min(failures, key=lambda failure: failure[0].position.order, default=(None, Reply()))
        failed_at = delivery.read_to.order if first is None else first.position.order
        if succeeded_later := frozenset(order for order in succeeded if order > failed_at):
            self._succeeded[delivery.lease] = delivery.epoch, succeeded_later
        if first is None:
            return
        done = [record for record in delivery.records if record.position.order < failed_at]
        if done:
            delivery.checkpoint(done[-1])
        raise ReportedFailure(reply.why) from (ProcessTraceback(f"\n{reply.trace}") if reply.trace else None)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.end()

    def _replies(
        self, delivery: Delivery, parts: Mapping[FunctionProcess, Sequence[Record]]
    ) -> dict[FunctionProcess, Reply]:
        arn, deadline = self.arn(delivery), self.clock() + self.handler_seconds
        running = dict[Any, FunctionProcess]()
        replies = dict[FunctionProcess, Reply]()
        for process, records in parts.items():
            try:
                running[process.begin(FunctionCall(delivery.shard, arn, records))] = process
            except OSError as error:
                process.end()
                replies[process] = Reply(0, f"no process of its function could be called: {said(error)}")
        while running:
            ready = wait(running, max(0.0, min(WATCH_SECONDS, deadline - self.clock())))
            is_late = not ready and self.clock() >= deadline
            for connection, process in tuple(running.items()):
                if is_late:
                    process.end()
                    replies[process] = Reply(0, f"its function took longer than {self.handler_seconds:g} s")
                elif connection in ready or process.ended:
                    replies[process] = process.reply()
                else:
                    continue
                del running[connection]
        return replies


def _slot(key: str, slots: int) -> int:
    # Do not use MD5, by which Kinesis chooses shards. The MD5 hashes of all keys of one shard are in the same range.
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) % slots


def serve(descriptor: int) -> None:
    """Call the function for each `FunctionCall` that this connection receives, and exit when it is closed."""
    os.set_inheritable(descriptor, False)
    # Format log lines as the command does. Lambda's runtime has a handler for log records, too.
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    connection, calls = Connection(descriptor), SimpleQueue[FunctionCall]()
    setup: Setup = connection.recv()

    def receive() -> None:
        try:
            while True:
                calls.put(connection.recv())
        finally:  # the worker has ended and no longer waits for a running call
            os._exit(0)

    spawn("leasehold-receive", receive, lambda _fault: None)
    function: LambdaFunction | None = None
    while True:
        call = calls.get()
        try:
            if function is None:
                function = _load_function(setup)
            connection.send(_call_function(function, call))
        except BaseException as error:  # noqa: BLE001  the worker has to know why the call failed
            connection.send(Reply(0, f"its function raised {type(error).__name__}", traceback.format_exc()))


def _load_function(setup: Setup) -> LambdaFunction:
    sys.path[:] = setup.path
    module, _, name = setup.settings.target.partition(":")
    return LambdaFunction(getattr(importlib.import_module(module), name), setup.settings, setup.handler_seconds)


def _call_function(function: LambdaFunction, call: FunctionCall) -> Reply:
    try:
        failed = function.first_failed(call.shard, call.arn, call.records)
    except ReportedFailure as failure:
        return Reply(0, str(failure))
    finally:
        sys.stdout.flush()  # the process may be killed before its buffer is full
    why = "" if failed is None else f"its response reports record {call.records[failed].sequence_number} as failed"
    return Reply(failed, why)
