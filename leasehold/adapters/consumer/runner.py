"""Runs a worker by calling its renewals, its turns and the steps of its lease readers when they are due.

`Worker.turn` and `Worker.renew` each run on a `Schedule` (`consumer/schedule.py`) with one task, and each have a second
schedule, whose tasks make their writes to the store. The steps of lease readers run on the schedule of `LeaseReaders`
(`consumer/lease_readers.py`).

To stop, a worker drains: it finishes and checkpoints the running batches, and releases its leases. If a task fails or
cannot be started, the worker also drains, and `Runner.run` raises the reason, because leases must not be renewed
while their shards are not read. Within `stopping_on_signals`, the first termination signal (SIGTERM, SIGINT or SIGHUP)
drains the worker. A second one ends the process immediately, and its leases expire. SIGHUP does nothing if it is
ignored, as under nohup.
"""

import logging
import math
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from leasehold.adapters.consumer.executors import HandlerExecutor
from leasehold.adapters.consumer.exporting import Meter
from leasehold.adapters.consumer.handling import Handler, Handling, with_metrics, with_spans
from leasehold.adapters.consumer.lease_readers import LeaseReaders, StepFactory
from leasehold.adapters.consumer.schedule import Schedule
from leasehold.adapters.signals import replace_handler, restore_handler
from leasehold.adapters.worker.renewing import RETRY_SECONDS
from leasehold.adapters.worker.scheduler import Queue
from leasehold.adapters.worker.worker import Worker, wake_nothing
from leasehold.balancer.lookout import start_seconds
from leasehold.errors import SourceError, StoreError, WorkerError
from leasehold.stores.printable import error_summary, join_limited, make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.runner"))

# Together with the few other tasks, the next three numbers allow at most 64 threads. Not counted are the threads that
# call handlers (`executors.py`), and the additional renewers of a worker that holds many leases (`RENEWERS_MAX`).
# Twenty writers claim a thousand leases in 1.5 seconds.
READERS = 30
WRITERS = 20
RENEWERS = 10
RENEWERS_MAX = 3 * WRITERS
"""The maximum number of concurrent renewals if there are `WRITERS` writers. With another number of writers, it changes
in proportion. Further renewals would have to wait for a connection, because the clients of the stores keep only a few
more connections than this."""
IDLE_TASKS = 3
"""How many tasks without work to keep for the next burst of claims, and how many for the next burst of renewals.
Further ones end; new ones are started when needed."""
MEMORY_BYTES = 256 * 2**20
DRAIN_SECONDS = 30.0
CALL_SECONDS = 2.0
"""How many seconds a drain waits for requests to the source that are still running. Their results are not needed."""
EXPLAINED_ERRORS = (WorkerError, StoreError, SourceError)
"""Exceptions that are raised unchanged, because their messages already explain the cause to a user."""


class Runner:
    """Runs one worker until it is stopped.

    Args:
        worker: A worker without a consumer.
        handling: The handler and its policy; a plain function gets the default policy.
        readers: How many shards may be read or handled at the same time.
        writers: How many leases may be claimed at the same time. At most ten leases are renewed at the same time, or up
            to three times `writers` if that many renewals are needed to renew all leases in time.
        meter: The meter for metrics, if OpenTelemetry is installed; by default that of the program's own provider.
        drain_seconds: The time limit for finishing the running batches and releasing the leases. Leases that are not
            released by then expire.
        memory_bytes: The maximum total size, over all shards, of records that are read but not handled yet. A larger
            batch is read only while no other batch is in memory.
        begin: Makes the step for a lease that the worker has taken; by default one that reads the shard.
        executor: Calls the handlers; by default in `readers` threads.
        wall: The clock from which the lag in the rows of the lease table is computed, in seconds since 1970. If None,
            the rows contain no lag.

    Examples:
        >>> from leasehold.adapters import Handling, Runner
        >>> from leasehold.adapters.consumer.runner import stopping_on_signals
        >>> def run_until_signal(worker) -> None:
        ...     runner = Runner(worker, Handling(print))
        ...     with stopping_on_signals(runner):
        ...         runner.run()
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
        begin: StepFactory | None = None,
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
        self._has_failed, self._warned_of_late_renewals = False, False
        self._fault_counts = Counter[str]()
        self._writers = writers
        # Use separate tasks for renewals and claims. A renewal that is queued after a hundred claims would be late, and
        # a renewal that stalls must not delay a claim.
        self._turn_schedule = Schedule(self._scheduler, 1, "leasehold-turn", self._fail)
        self._claim_schedule = Schedule(self._scheduler, writers, "leasehold-act", self._fail, max_idle=IDLE_TASKS)
        self._renew_schedule = Schedule(self._scheduler, 1, "leasehold-renew", self._fail)
        self._renewal_schedule = Schedule(
            self._scheduler, min(writers, RENEWERS), "leasehold-renew", self._fail, max_idle=IDLE_TASKS
        )
        self._lease_readers = LeaseReaders(
            worker,
            self.handling,
            readers=readers,
            memory_bytes=memory_bytes,
            make_step=begin,
            executor=executor,
            wall=wall,
            on_failure=self._fail,
            end_worker=self._end,
        )
        worker.consumer = self._lease_readers
        if worker.wake_runner is wake_nothing:
            worker.wake_runner = partial(self._turn_schedule.wake, "turn")
        for holding in worker.holdings:  # leases that the worker took before it had a consumer
            self._lease_readers.begin(holding)

    def run(self) -> None:
        """Run until `stop` is called. Return when all leases have been released or left to expire.

        If the worker cannot continue, it releases its leases in the same way, and then the error is raised.

        Raises:
            WorkerError: The worker cannot continue.
            StoreError: The lease table cannot be used.
            SourceError: The stream cannot be used.
            SystemExit: A handler has raised it.
            KeyboardInterrupt: A handler has raised it.
        """
        worker, now = self.worker, self._scheduler.clock()
        try:
            self._turn_schedule.start()
            self._renew_schedule.start()
        except RuntimeError as fault:
            # Both are needed, because leases that are taken but not renewed would soon be lost.
            self._fail(fault)
        else:
            self._turn_schedule.add("turn", self._turn, due=now + start_seconds(worker.me, worker.config))  # C15
            self._renew_schedule.add("renew", self._renew)
        (end_reason,) = self._end_reasons.get()
        # All of the following waits have the same deadline, so that their durations don't add up.
        deadline = self._scheduler.clock() + self._drain_seconds
        is_drained = self._drain(deadline)
        # Stop renewing only now, without waiting for a running call. If renewing stopped earlier, leases with slow
        # batches would be lost while the worker drains.
        self._renew_schedule.close(-math.inf)
        unreleased = [holding for holding in self.worker.holdings if not holding.lease.ended]
        for holding in unreleased:
            # Other workers will take the leases that could not be released, so this worker must stop handling their
            # records.
            holding.drop("left to expire")
        if unreleased:
            keys = join_limited([holding.key for holding in unreleased])
            log.error("not released within %g s, left to expire: %s", self._drain_seconds, keys)
        elif not is_drained:
            log.error("not everything ended within %g s", self._drain_seconds)
        schedules = (self._lease_readers.schedule, self._turn_schedule, self._claim_schedule, self._renewal_schedule)
        closed_in_time = [schedule.close(deadline) for schedule in schedules]
        # Close the dispatcher last, because a step that is still running may check how its handler ended.
        self._lease_readers.dispatcher.close()
        if is_drained and not all(closed_in_time):
            log.warning("everything is released; a request of this worker is still waiting for its response")
        if end_reason is not None:
            raise end_reason

    def stop(self) -> None:
        """Make `run` finish and checkpoint the running batches, release the leases, and return."""
        self._end_reasons.put((None,))  # `put` takes no lock, so a signal handler may call this

    def hurry(self, key: str) -> None:
        """Run the next step for this lease immediately."""
        self._lease_readers.schedule.wake(key)

    def _turn(self, now: float) -> float:
        if not self._lease_readers.wants_leases:
            return math.inf
        return self._call_worker("turn", partial(self.worker.turn, now, self._claim_schedule.map))

    def _renew(self, now: float) -> float:
        """Renew the leases that are due, with as many tasks as the number of leases and the store's latency require."""
        worker, limit = self.worker, RENEWERS_MAX * self._writers // WRITERS
        wanted_count = worker.renewers
        # If no renewal stalls, half of the wanted renewers suffice, so warn only above twice the limit.
        if wanted_count > 2 * limit and not self._warned_of_late_renewals:
            self._warned_of_late_renewals = True
            log.warning(
                "%d leases are held, and %d renewals at a time are too few to renew each in %.1f s as slowly as the "
                "store answers: others may take them; start more workers, set max_leases, or give the fleet longer "
                "leases (lease_seconds)",
                len(worker.holdings),
                limit,
                worker.config.renew_seconds,
            )
        self._renewal_schedule.resize(max(min(self._writers, RENEWERS), min(limit, wanted_count)))
        return self._call_worker("renew", partial(worker.renew, now, self._renewal_schedule.map_in_background))

    def _call_worker(self, name: str, call: Callable[[], float]) -> float:
        """Call a method of the worker, and return when to call it again."""
        try:
            due = call()
        except self._scheduler.fatal:
            raise
        except EXPLAINED_ERRORS as fault:
            self._fail(fault)
        except Exception as fault:  # noqa: BLE001  the next call may succeed
            # If turns keep failing, retry without limit, because the held leases are still read and renewed. If
            # renewals keep failing, end the run before the leases expire.
            self._fault_counts[name] += 1
            if name == "renew" and self._fault_counts[name] * RETRY_SECONDS > self.worker.config.lease_seconds / 2:
                self._fail(fault)
            self._scheduler.log_unexpected(f"trying again in {RETRY_SECONDS:g} s", fault)
        except BaseException as fault:  # noqa: BLE001  the run must end, and the leases must be released
            self._fail(fault)
        else:
            self._fault_counts[name] = 0
            return due
        return self._scheduler.clock() + RETRY_SECONDS

    def _end(self, reason: BaseException) -> None:
        """End the run because a handler raised SystemExit or KeyboardInterrupt, or because no handler can be called."""
        if isinstance(reason, SystemExit | KeyboardInterrupt):
            self._end_reasons.put((reason,))
        else:
            self._fail(reason)

    def _fail(self, fault: BaseException) -> None:
        """End the run with this error. Only the first error is reported, because later ones are often consequences."""
        if self._has_failed:
            return
        self._has_failed = True
        if isinstance(fault, EXPLAINED_ERRORS):
            self._end_reasons.put((fault,))
            return
        # Callers catch the documented exceptions, so wrap any other one.
        error = WorkerError(f"the worker cannot continue: {error_summary(fault)}")
        error.__cause__ = fault
        self._end_reasons.put((error,))
        self._scheduler.log_unexpected("the worker ends", fault)

    def _drain(self, deadline: float) -> bool:
        """Finish the running batches and release the leases. Return whether that was done in time."""
        # Prevent further turns, and end the wait for the next turn. Then release all held leases, even while the last
        # turn is still running.
        calls_deadline = min(deadline, self._scheduler.clock() + CALL_SECONDS)
        self._lease_readers.wants_leases = False
        self._turn_schedule.wake("turn")
        self._lease_readers.release_all()
        # `Worker.close` withdraws this worker's requests for leases. It can be called while a turn is waiting for the
        # source, because once the worker is closed, the turn requests no more leases.
        can_close = (
            self._turn_schedule.drain(calls_deadline)
            or self.worker.discovery.is_calling_source
            or self._turn_schedule.drain(deadline)
        )
        # Call it in a separate task, because the store might not respond.
        try:
            is_closed = can_close and self._call_in_task("close", self.worker.close, deadline)
        except RuntimeError:
            # If no task can be started, close the worker in this task, although this delays the end of the run if the
            # store does not respond.
            self.worker.close()
            is_closed = True
        # Release leases a second time, because the last turn may have taken some in the meantime. If the worker is
        # closed, no more can be taken from here on.
        self._lease_readers.release_all()
        schedule = self._lease_readers.schedule
        if not schedule.drain(calls_deadline):
            now, write_all = self._scheduler.clock(), self._claim_schedule.map
            with suppress(RuntimeError):  # if no task can be started, the stuck leases expire
                self._call_in_task("leave", partial(self.worker.leave_stuck, now, 0.0, write_all), deadline)
        return schedule.drain(deadline) and is_closed

    def _call_in_task(self, name: str, call: Callable[[], None], deadline: float) -> bool:
        """Run `call` in a new task, and return whether it has ended by the deadline.

        Raises RuntimeError if the task cannot be started.
        """
        end_queue = self._scheduler.queue()

        def call_and_report() -> None:
            try:
                call()
            finally:
                end_queue.put(True)

        self._scheduler.start(f"leasehold-{name}", call_and_report, self._fail)
        return end_queue.get(deadline) is not None


# A worker in its own process

SIGHUP_OR_NONE = getattr(signal, "SIGHUP", None)
"""The signal SIGHUP, or None on Windows, which does not have it."""
TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGINT, *((SIGHUP_OR_NONE,) if SIGHUP_OR_NONE else ()))


def termination_signals() -> list[signal.Signals]:
    """Return the signals that stop a worker in this process."""
    return [
        number
        for number in TERMINATION_SIGNALS
        if number != SIGHUP_OR_NONE or signal.getsignal(number) != signal.SIG_IGN
    ]


@contextmanager
def stopping_on_signals(runner: Runner) -> Iterator[None]:
    """Within this context, stop the runner at the first termination signal. A second signal ends the process.

    Outside the main thread, this does nothing, because Python allows only the main thread to set signal handlers.
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
