"""Runs a worker by calling its renewals, its turns and the steps of its lease readers when they are due.

A worker's `renew` and `turn` each have a task of their own, with a pool for the writes that they make. The steps of
lease readers are called by the `Schedule` (`consumer/schedule.py`) of `LeaseReaders` (`consumer/lease_readers.py`).

To stop, a worker drains: it finishes and checkpoints the running batches and releases their leases. If a task ends or
cannot be started, the run also stops and reports the reason, because leases must not be renewed without being read. In
a process of its own (`run`), the first termination signal drains (SIGTERM, SIGINT, and SIGHUP unless it is ignored, as
under nohup). A second one ends the process immediately, and its leases expire.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from leasehold.adapters.consumer.executors import HandlerExecutor
from leasehold.adapters.consumer.exporting import Meter
from leasehold.adapters.consumer.handling import Handler, Handling, with_metrics, with_spans
from leasehold.adapters.consumer.lease_readers import LeaseReaders, OpenReading
from leasehold.adapters.consumer.pool import Pool, Signal
from leasehold.adapters.signals import replace_handler, restore_handler
from leasehold.adapters.worker.renewing import RETRY_SECONDS
from leasehold.adapters.worker.scheduler import Queue
from leasehold.adapters.worker.worker import Worker, wake_nothing
from leasehold.balancer.lookout import start_seconds
from leasehold.errors import SourceError, StoreError, WorkerError
from leasehold.stores.printable import escaped, few, said

log = escaped(logging.getLogger("leasehold.runner"))

# Together with the few other tasks, these numbers allow at most 64 threads, not counting the threads that call handlers
# (`executors.py`). Twenty writers claim a thousand leases in 1.5 seconds.
READERS = 30
WRITERS = 20
RENEWERS = 10
RENEWERS_MOST = 3 * WRITERS
"""The maximum number of renewals at the same time. Further renewals would have to wait for a connection, because the
stores' clients keep only a few more connections than this.
"""
IDLE_WRITERS = 4
"""How many idle writer tasks to keep for the next burst of work. Further idle tasks end; new ones are started when
needed."""
MEMORY_BYTES = 256 * 2**20
DRAIN_SECONDS = 30.0
CALL_SECONDS = 2.0
"""How many seconds a drain waits for running requests to the source. Their results are no longer needed."""
READABLE = (WorkerError, StoreError, SourceError)
"""Faults whose message explains the cause to a user."""


class Runner:
    """Runs one worker until it is stopped.

    Args:
        worker: A worker without a consumer.
        handling: The handler and its policy; a plain function gets the default policy.
        readers: How many shards may be read or handled at the same time.
        writers: How many leases may be claimed at the same time. Ten may be renewed at the same time, or up to three
            times `writers` if the worker holds more leases than it could otherwise renew in time.
        meter: The meter for metrics, if OpenTelemetry is installed; by default that of the program's own provider.
        drain_seconds: The time limit for finishing the running batches and releasing the leases. Leases that are not
            released by then expire.
        memory_bytes: The memory for records that are read and not handled yet, of all shards together. A batch larger
            than this is read only while no other batch is held.
        begin: Makes the step for a lease that the worker has taken; by default one that reads the shard.
        executor: Calls the handlers; by default in `readers` threads.
        wall: The clock for lag in the table's rows, in seconds since 1970. If None, rows contain no lag.

    Examples:
        >>> from leasehold.adapters import Handling, Runner
        >>> def until(worker, stop) -> None:
        ...     runner = Runner(worker, Handling(print))
        ...     stop.on(runner.stop)
        ...     runner.run()
    """

    def __init__(
        self,
        worker: Worker,
        handling: Handling | Handler,
        *,
        readers: int = READERS,
        writers: int = WRITERS,
        meter: Meter | None = None,
        drain_seconds: float = DRAIN_SECONDS,
        memory_bytes: int = MEMORY_BYTES,
        begin: OpenReading | None = None,
        executor: HandlerExecutor | None = None,
        wall: Callable[[], float] | None = time.time,
    ) -> None:
        """Raises RuntimeError if no thread can be started, and ValueError if the worker has a consumer already."""
        if worker.consumer is not None:
            raise ValueError("worker: it has a consumer of its own")
        self.worker = worker
        handling = handling if isinstance(handling, Handling) else Handling(handling)
        self.handling = with_metrics(worker, with_spans(worker, handling), meter)
        self._scheduler, self._drain_seconds = worker.scheduler, drain_seconds
        self._end_reasons: Queue = self._scheduler.queue()
        self._turn_sooner, self._renew_sooner = Signal(self._scheduler), Signal(self._scheduler)
        self._renewing, self._failed, self._warned_late = True, False, False
        self._writers = writers
        # Use separate pools for renewals and claims. A renewal that is queued after a hundred claims would be late, and
        # a renewal that stalls must not delay a claim.
        self._renewers = Pool(self._scheduler, min(writers, RENEWERS), "leasehold-renew", self._fail)
        self._actors = Pool(self._scheduler, writers, "leasehold-act", self._fail, keep=IDLE_WRITERS)
        self._lease_readers = LeaseReaders(
            worker,
            self.handling,
            readers=readers,
            memory_bytes=memory_bytes,
            open_reading=begin,
            executor=executor,
            wall=wall,
            failed=self._fail,
            end=self._end,
        )
        worker.consumer = self._lease_readers
        if worker.wake_runner is wake_nothing:
            worker.wake_runner = self._turn_sooner.set
        for holding in worker.holdings:  # held before the worker had a consumer
            self._lease_readers.begin(holding)

    def run(self) -> None:
        """Run until `stop` is called. Return when all leases have been released or left to expire.

        If the worker cannot continue, the leases are released in the same way before the error is raised.

        Raises:
            WorkerError: The worker cannot continue.
            StoreError: The lease table cannot be used.
            SourceError: The stream cannot be used.
            SystemExit: A handler has raised it.
            KeyboardInterrupt: A handler has raised it.
        """
        worker, tasks = self.worker, dict[str, Queue]()
        turn, renew = partial(worker.turn, each=self._actors.map), self._renew
        pause = start_seconds(worker.me, worker.config)  # C15
        functions: dict[str, Callable[[], None]] = {
            "turn": lambda: self._run_when_due(
                "turn", turn, self._turn_sooner, lambda: self._lease_readers.taking, pause
            ),
            "renew": lambda: self._run_when_due("renew", renew, self._renew_sooner, lambda: self._renewing),
        }
        for name, work in functions.items():
            try:
                tasks[name] = self._task(name, work)
            except RuntimeError as fault:
                # Both tasks are needed, because leases that are taken but not renewed would soon be lost.
                self._fail(fault)
                break
        (end,) = self._end_reasons.get()
        # Use one deadline for all of the following waits, so that their durations don't add up.
        deadline = self._scheduler.clock() + self._drain_seconds
        is_drained = self._drain(tasks, deadline)
        # Stop renewing only now, because leases with slow batches would otherwise be lost while the worker drains.
        self._renewing = False
        # The renewing task may be waiting for its next renewal, so wake it to let it end.
        self._renew_sooner.set()
        unreleased = [holding for holding in self.worker.holdings if not holding.lease.ended]
        for holding in unreleased:
            # Other workers will take the leases that could not be released, so this worker must stop handling their
            # records.
            holding.drop("left to expire")
        if unreleased:
            keys = few([holding.key for holding in unreleased])
            log.error("not released within %g s, left to expire: %s", self._drain_seconds, keys)
        elif not is_drained:
            log.error("not everything ended within %g s", self._drain_seconds)
        closed_in_time = [part.close(deadline) for part in (self._lease_readers.schedule, self._actors, self._renewers)]
        # Close the dispatcher last, because a step that is still running may check how its handler ended.
        self._lease_readers.dispatcher.close()
        if is_drained and not all(closed_in_time):
            log.warning("everything is released; a request of this worker is still waiting for its response")
        if end is not None:
            raise end

    def stop(self) -> None:
        """Have `run` finish the running batches, checkpoint and release the leases, and return."""
        self._end_reasons.put((None,))  # may run in a signal handler, where a lock could deadlock

    def hurry(self, key: str) -> None:
        """Run the next step for this lease immediately."""
        self._lease_readers.schedule.wake(key)

    def _task(self, name: str, work: Callable[[], None]) -> Queue:
        queue = self._scheduler.queue()

        def run() -> None:
            try:
                work()
            finally:
                queue.put(name)

        # If this task fails, end the run, because leases must not be held without being read and renewed.
        self._scheduler.start(f"leasehold-{name}", run, self._fail)
        return queue

    def _renew(self, now: float) -> float:
        """Renew the leases that are due, with as many tasks as the number of leases and the store's latency require."""
        worker, limit = self.worker, RENEWERS_MOST * self._writers // WRITERS
        wanted_count = worker.renewers
        # Half of the wanted renewers suffice if none stalls, so warn only above twice the limit.
        if wanted_count > 2 * limit and not self._warned_late:
            self._warned_late = True
            log.warning(
                "%d leases are held, and %d renewals at a time are too few to renew each in %.1f s as slowly as the "
                "store answers: others may take them; start more workers, set max_leases, or give the fleet longer "
                "leases (lease_seconds)",
                len(worker.holdings),
                limit,
                worker.config.renew_seconds,
            )
        self._renewers.resize(max(min(self._writers, RENEWERS), min(limit, wanted_count)))
        return worker.renew(now, each=self._renewers.begin)

    def _run_when_due(
        self,
        name: str,
        work: Callable[[float], float],
        wake_up: Signal,
        should_continue: Callable[[], bool],
        pause: float = 0.0,
    ) -> None:
        """Call `work` whenever it is due, while `should_continue` returns True."""
        clock, faults = self._scheduler.clock, 0
        wake_up.wait(clock() + pause)
        while should_continue():
            try:
                due, faults = work(clock()), 0
            except READABLE as fault:
                due = clock() + RETRY_SECONDS
                self._fail(fault)
            except Exception as fault:  # noqa: BLE001  the next call may succeed
                # If a turn fails, repeat it without limit, because the held leases are still read and renewed. If
                # renewals keep failing, end the run, because the leases are about to expire.
                faults += 1
                due = clock() + RETRY_SECONDS
                if name == "renew" and faults * RETRY_SECONDS > self.worker.config.lease_seconds / 2:
                    self._fail(fault)
                self._scheduler.log_unexpected(f"trying again in {RETRY_SECONDS:g} s", fault)
            if should_continue():
                wake_up.wait(due)

    def _end(self, reason: BaseException) -> None:
        """End the run because a handler raised SystemExit or KeyboardInterrupt, or because no handler can be called."""
        if isinstance(reason, SystemExit | KeyboardInterrupt):
            self._end_reasons.put((reason,))
        else:
            self._fail(reason)

    def _fail(self, fault: BaseException) -> None:
        """End the run with this reason; only the first of several is reported."""
        # Report only the first failure, because later ones are often its consequences.
        if self._failed:
            return
        self._failed = True
        if isinstance(fault, READABLE):
            self._end_reasons.put((fault,))
            return
        # Callers catch the documented exceptions, so wrap any other one.
        error = WorkerError(f"the worker cannot continue: {said(fault)}")
        error.__cause__ = fault
        self._end_reasons.put((error,))
        self._scheduler.log_unexpected("the worker ends", fault)

    def _drain(self, tasks: dict[str, Queue], deadline: float) -> bool:
        """Finish the running batches and release the leases. Return whether that was done in time."""
        # First prevent further turns, by waking the task that waits for the next turn. Then release all held leases
        # while the last turn ends.
        calls_deadline = min(deadline, self._scheduler.clock() + CALL_SECONDS)
        self._lease_readers.taking = False
        self._turn_sooner.set()
        self._lease_readers.release_all()
        turn_ended = "turn" not in tasks or tasks["turn"].get(calls_deadline) is not None
        if not turn_ended and not self.worker.discovery.is_calling_source:
            turn_ended = tasks["turn"].get(deadline) is not None
        # `close` withdraws this worker's requests for leases. Call it in a separate task, because the store might not
        # respond. It need not wait for a turn that is waiting for the stream, because such a turn requests no leases
        # now, nor after the worker was closed.
        try:
            is_closed = (turn_ended or self.worker.discovery.is_calling_source) and self._task(
                "close", self.worker.close
            ).get(deadline) is not None
        except RuntimeError:
            # If no thread is left, close the worker in this task, although a store that does not respond then delays
            # the end of the run.
            self.worker.close()
            is_closed = True
        # Release leases a second time, because the last turn may have taken some in the meantime. From here on, no more
        # leases can be taken.
        self._lease_readers.release_all()
        schedule = self._lease_readers.schedule
        if not schedule.drain(calls_deadline):
            leave_stuck_leases = partial(self.worker.leave_stuck, self._scheduler.clock(), 0.0, self._actors.map)
            with suppress(RuntimeError):  # no thread is left; those leases expire
                self._task("leave", leave_stuck_leases).get(deadline)
        return schedule.drain(deadline) and is_closed


# In a process of its own

HANGUP = getattr(signal, "SIGHUP", None)
"""None on Windows, which has no such signal."""
TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, *((HANGUP,) if HANGUP else ()))


def termination_signals() -> list[signal.Signals]:
    """Return the signals that end a worker of this process."""
    return [number for number in TERMINATION_SIGNALS if number != HANGUP or signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def stopping_on_signals(runner: Runner) -> Iterator[None]:
    """Stop the runner on a termination signal inside this block; a second signal ends the process.

    Outside the main thread this does nothing.
    """
    signals = termination_signals()

    def stop(_number: int, _frame: object) -> None:
        for number in signals:
            signal.signal(number, signal.SIG_DFL)  # the next one ends the process immediately
        runner.stop()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = {number: replace_handler(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            restore_handler(number, handler)
