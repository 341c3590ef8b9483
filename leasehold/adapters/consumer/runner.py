"""Runs a worker by calling its renewals, its turns and the steps of its lease readers when they are due.

The worker calls `LeaseReaders.begin` with each lease that it has taken. This creates a `LeaseReader` and puts its step
on the `Schedule`. Every step returns when to call it next. A bounded pool of tasks calls those that are due, so a
thousand shards do not need a thousand threads.

1. A step never runs twice at the same time.
2. A successor under the same key begins only when its predecessor is over, so a lease that was lost and taken again has
   only one handler running.
3. A step that raises is called again, after growing pauses. If it has raised a few times in a row, or once while its
   lease is to be released anyway, the lease is released and this worker does not take it again for a while: a lease
   must not be held without being read.

To stop is to drain: the running batches are finished and checkpointed, and their leases are released. If a task ends or
cannot be started, the run also stops and reports the reason, because leases must not be renewed without being read. In
a process of its own (`run`), the first termination signal drains (SIGTERM, SIGINT, and SIGHUP unless it is ignored, as
under nohup). A second one ends the process immediately, and its leases expire.
"""

import heapq
import logging
import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import TypeVar, assert_never

from attrs import define, frozen

from leasehold.adapters.consumer.dispatcher import Dispatcher
from leasehold.adapters.consumer.executors import HandlerExecutor, ThreadExecutor
from leasehold.adapters.consumer.exporting import Meter
from leasehold.adapters.consumer.handling import Handler, Handling, metered, traced
from leasehold.adapters.consumer.lease_reader import LeaseReader
from leasehold.adapters.consumer.memory import MemoryBudget
from leasehold.adapters.signals import replace_handler, restore_handler
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.renewing import RETRY_SECONDS
from leasehold.adapters.worker.scheduler import Queue, Scheduler
from leasehold.adapters.worker.worker import Worker, nobody
from leasehold.balancer.lookout import start_seconds
from leasehold.errors import SourceError, StoreError, WorkerError
from leasehold.stores.printable import escaped, few, said

log = escaped(logging.getLogger("leasehold.runner"))

T = TypeVar("T")
R = TypeVar("R")


class Signal:
    """Ends the current wait, or the next one if no task waits yet."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._queue, self._given = scheduler.queue(), False

    def set(self) -> None:
        """End the wait."""
        if not self._given:
            self._given = True
            self._queue.put(True)

    def wait(self, until: float = math.inf) -> bool:
        """Wait for the signal, at most until this time, and reset it; return whether it was set."""
        was_set = self._queue.get(until) is not None
        # A `set` just before this line adds nothing to the queue. That is safe: the caller checks what changed only
        # after this call.
        self._given = False
        return was_set


class Pool:
    """Runs work in a bounded number of tasks, each of which is started when it is first needed.

    Args:
        scheduler: Starts the tasks.
        size: How many tasks may run at the same time.
        name: The name of the tasks.
        failed: Called with the exception if a task cannot be started or if work raises.
        keep: How many idle tasks may wait for work before further ones end; None: as many as `size`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        size: int,
        name: str,
        failed: Callable[[BaseException], None],
        *,
        keep: int | None = None,
    ) -> None:
        self._scheduler, self._size, self._name, self._failed = scheduler, size, name, failed
        self._keep = keep
        self._work, self._over, self._lock = scheduler.queue(), scheduler.queue(), Lock()
        self._tasks = self._load = 0

    def resize(self, size: int) -> None:
        """Change the number of tasks; surplus tasks end after their current work."""
        with self._lock:
            self._size = size if self._size else 0  # a closed pool stays closed

    def submit(self, work: Callable[[], None]) -> None:
        """Queue this work, or do it in the caller if not even one task can be started."""
        with self._lock:
            self._load += 1
            # Must be counted before the task begins, otherwise two callers would start one too many.
            add_task = self._tasks < min(self._load, self._size)
            self._tasks += add_task
        fault: RuntimeError | None = None
        if add_task:
            try:
                self._scheduler.start(self._name, self._serve, self._failed)
            except RuntimeError as error:
                fault = error
                with self._lock:
                    self._tasks -= 1
        self._work.put(work)
        if not self._tasks:
            self._serve(once=True)
        if fault is not None:
            self._failed(fault)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return the results in the order of the items. Raises the first exception that occurred, once all are done."""
        work = list(items)
        if len(work) <= 1:
            return [function(item) for item in work]
        answers: dict[int, R] = {}
        faults: list[BaseException] = []
        wakeup, pending = Signal(self._scheduler), [*range(len(work))]

        def apply(place: int) -> None:
            try:
                answers[place] = function(work[place])
            except BaseException as fault:  # noqa: BLE001  raised again in the caller of `map`
                faults.append(fault)
            pending.pop()
            if not pending:
                wakeup.set()

        for place in range(len(work)):
            self.submit(partial(apply, place))
        wakeup.wait()
        if faults:
            raise faults[0]
        return [answers[place] for place in range(len(work))]

    def begin(self, function: Callable[[T], object], items: Iterable[T]) -> tuple[()]:
        """Apply the function to each item without waiting: a request may stall for as long as its client waits."""

        def alone(item: T) -> None:
            try:
                function(item)
            except BaseException as fault:  # noqa: BLE001  no caller waits for the result
                self._scheduler.unforeseen(self._name, fault)

        for item in items:
            self.submit(partial(alone, item))
        return ()

    def close(self, until: float) -> bool:
        """End the tasks after their current work; return whether all have ended in time."""
        with self._lock:
            tasks, self._size = self._tasks, 0
        for _ in range(tasks):
            self._work.put(_END)
        return all(self._over.get(until) for _ in range(tasks))

    def _serve(self, *, once: bool = False) -> None:
        counted = True  # whether `close` waits for this task to end
        try:
            while (work := self._work.get()) is not _END:
                try:
                    work()
                except BaseException as fault:  # noqa: BLE001  this task must go on serving the queue
                    self._failed(fault)
                with self._lock:
                    self._load -= 1
                    # End if the remaining tasks suffice for the work there is. Once closed, every task is waited for.
                    keep = self._size if self._keep is None else self._keep
                    counted = once or not self._size or self._tasks <= max(1, keep, min(self._load, self._size))
                    self._tasks -= not counted
                if once or not counted:
                    return
        finally:
            if counted and not once:
                self._over.put(True)


_END = object()
"""Ends one task of a pool."""

Step = Callable[[float], float]
"""Does one bounded piece of work at this time; returns when to be called again, or infinity for never."""

FAULT_SECONDS = 5.0
"""The pause after an error in the schedule's own task."""
STEP_FAULT_WAITS = (1.0, 3.0, 6.0)
"""The pauses after the first, second and later faults of a step. A brief fault costs one second of reading."""


@define(eq=False)
class ScheduledStep:
    """A step on the schedule.

    Attributes:
        step: The step to call.
        instead: Called after each fault with the number of consecutive faults; returns a step that replaces this one
            from now on, or None.
        due: When to call the step.
        running: Whether the step is running.
        woken: Whether it was woken since it was last begun.
        faults: How many times in a row it has raised.
        successor: The step that begins once this one is over.
    """

    step: Step
    instead: Callable[[int], Step | None] | None = None
    due: float = -math.inf
    running: bool = False
    woken: bool = False
    faults: int = 0
    successor: "ScheduledStep | None" = None


@frozen
class StepAdded:
    """Call this step from now on."""

    key: str
    added: ScheduledStep


@frozen
class StepWoken:
    """Call the step of this key immediately, or as soon as its current run ends."""

    key: str


@frozen
class StepReturned:
    """The step of this key has returned and is due again at this time."""

    key: str
    due: float


@frozen
class DrainAsked:
    """A caller waits until no step is left."""

    over: Queue


@frozen
class Closed:
    """Begin no more steps."""


ScheduleMessage = StepAdded | StepWoken | StepReturned | DrainAsked | Closed


class Schedule:
    """Calls each step when it is due.

    One task (`_dispatch`) owns the state, and all others send it messages. No locks are needed, and a wake-up that
    arrives while a step runs is not missed: whether it is queued before or after the step's return, it counts.

    Args:
        tasks: How many steps may run at the same time.
        scheduler: Runs the tasks and provides the clock.
        failed: Called if no task can be started or scheduling raised, because steps might then never be called.
    """

    def __init__(self, tasks: int, scheduler: Scheduler, failed: Callable[[BaseException], None]) -> None:
        """Raises RuntimeError if no task can be started."""
        self._scheduler, self._failed = scheduler, failed
        self._messages, self._over = scheduler.queue(), scheduler.queue()
        self._steps: dict[str, ScheduledStep] = {}
        self._heap: list[tuple[float, str]] = []
        self._drains: list[Queue] = []
        self._closed = False
        self._pool = Pool(scheduler, tasks, "leasehold-read", failed)
        scheduler.start("leasehold-schedule", self._dispatch, failed)

    def add(self, key: str, step: Step, instead: Callable[[int], Step | None] | None = None) -> None:
        """Begin this step immediately, or as soon as the present step under this key is over."""
        self._messages.put(StepAdded(key, ScheduledStep(step, instead)))

    def wake(self, key: str) -> None:
        """Call the step again immediately, or as soon as its current run ends."""
        self._messages.put(StepWoken(key))

    def drain(self, until: float = math.inf) -> bool:
        """Wait until no step is left; return False if that is not the case in time."""
        drained = self._scheduler.queue()
        self._messages.put(DrainAsked(drained))
        return drained.get(until) is not None

    def close(self, until: float = math.inf) -> bool:
        """Begin no more steps; return False if the running ones do not end in time."""
        self._closed = True
        self._messages.put(Closed())
        ended = self._over.get(until) is not None
        return self._pool.close(until) and ended  # its tasks are to end even if that is later

    def _dispatch(self) -> None:
        heap, clock, not_before = self._heap, self._scheduler.clock, -math.inf
        while not self._closed:
            try:
                message = self._messages.get(max(not_before, heap[0][0]) if heap else math.inf)
                if message is not None:
                    self._take(message)
                now = clock()
                while heap and max(heap[0][0], not_before) <= now and not self._closed:
                    due, key = heapq.heappop(heap)
                    step = self._steps.get(key)
                    # A step whose due time changed leaves its former entry in the heap, which is ignored here.
                    if step is not None and step.due == due and not step.running:
                        self._pool.submit(partial(self._run, key, step))
                        # Must come after `submit`: if that raises, the step is not marked as running and can be woken.
                        step.running, step.woken = True, False
            except self._scheduler.fatal:
                raise
            except BaseException as fault:  # noqa: BLE001  no other task would call the steps, not even to release
                # Pause, because an error that persists would fill the log.
                not_before = clock() + FAULT_SECONDS
                self._failed(fault)
        self._over.put(True)

    def _take(self, message: ScheduleMessage) -> None:
        match message:
            case StepReturned(key, due):
                step = self._steps[key]
                step.running = False
                # A step that is over is not called again, even if it was woken meanwhile: its lease is left.
                if due < math.inf:
                    # If it was woken while running, it may have missed the change, so it is called again.
                    step.due = -math.inf if step.woken else due
                    heapq.heappush(self._heap, (step.due, key))
                elif step.successor is not None:
                    self._steps[key] = step.successor
                    heapq.heappush(self._heap, (step.successor.due, key))
                else:
                    del self._steps[key]
            case StepWoken(key) | StepAdded(key):
                present = self._steps.get(key)
                if isinstance(message, StepAdded):
                    if present is None:
                        present = self._steps[key] = message.added
                    else:
                        present.successor = message.added  # the present step, woken below, might wait for hours
                if present is not None:
                    present.woken, present.due = True, -math.inf
                    heapq.heappush(self._heap, (present.due, key))
            case DrainAsked(over):
                self._drains.append(over)
            case Closed():
                pass
            case _ as never:
                assert_never(never)
        if not self._steps:
            # Checked after every message, because any step may be the last one that a drain waits for.
            while self._drains:
                self._drains.pop().put(True)

    def _run(self, key: str, scheduled: ScheduledStep) -> None:
        clock = self._scheduler.clock
        try:
            due, scheduled.faults = scheduled.step(clock()), 0
        except BaseException as fault:  # noqa: BLE001  the shard must not stay unread after any exception
            due = clock() + STEP_FAULT_WAITS[min(scheduled.faults, len(STEP_FAULT_WAITS) - 1)]
            scheduled.faults += 1
            if scheduled.instead is not None and (replacement := scheduled.instead(scheduled.faults)) is not None:
                # Permanently: a step that failed this often is not called for this lease again.
                scheduled.step, scheduled.instead, due = replacement, None, clock()
            self._messages.put(StepReturned(key, due))
            self._scheduler.unforeseen(key, fault)
        else:
            self._messages.put(StepReturned(key, due))


# Lease readers

FAULTS_MOST = len(STEP_FAULT_WAITS) + 1
"""After this many consecutive faults of a step, with ten seconds of pauses in total, its lease is released."""

EXCLUDED_SECONDS = 60.0

OpenReading = Callable[[Worker, Holding, Handling], Step]
"""Makes the step for a lease that this worker has taken."""


class LeaseReaders:
    """Reads all leases that one worker holds, as its `HoldingConsumer`.

    Args:
        worker: The worker.
        handling: The handler and its policy.
        readers: How many shards may be read at the same time.
        memory_bytes: The memory for records that are not handled yet, of all shards together.
        open_reading: Makes the step for a lease; None: a `LeaseReader`.
        executor: Where handlers are called; None: in threads.
        wall: The clock for lag in the table's rows, in seconds since 1970; None: rows contain no lag.
        failed: Called with a fault from which the worker cannot recover.
        end: Called with the reason if the worker must end.

    Attributes:
        taking: Whether the worker wants new leases. While it drains, a new lease is released by its first step.
    """

    def __init__(
        self,
        worker: Worker,
        handling: Handling,
        *,
        readers: int,
        memory_bytes: int,
        open_reading: OpenReading | None,
        executor: HandlerExecutor | None,
        wall: Callable[[], float] | None,
        failed: Callable[[BaseException], None],
        end: Callable[[BaseException], None],
    ) -> None:
        self._worker, self._handling, self._open, self._wall, self._failed = (
            worker,
            handling,
            open_reading,
            wall,
            failed,
        )
        self._scheduler, self.taking = worker.scheduler, True
        self.schedule = Schedule(readers, self._scheduler, failed)
        self.memory = MemoryBudget(memory_bytes, self.schedule.wake)
        limit = handling.most_calls
        self.dispatcher = Dispatcher(
            executor
            or (ThreadExecutor(readers, failed=failed) if limit is None else ThreadExecutor(limit, limit, failed)),
            again=self.schedule.wake,
            end=end,
            fatal=self._scheduler.fatal,
        )

    def begin(self, holding: Holding) -> None:
        """Start reading this lease, which the worker has just taken.

        This runs in the task that wrote the claim, so opening the shard is left to the first step.
        """
        try:
            if not self.taking:
                # A lease reader is still created, which releases the lease.
                holding.ask_release()
            if self._wall is not None and self._worker.store.capabilities.free_notes:
                # If annotations are not free, each would cost a write and look like a renewal to other workers (C14).
                holding.progress.tell(socket.gethostname(), self._wall, self._scheduler.clock())
            if self._open is not None:
                step = self._open(self._worker, holding, self._handling)
            else:
                step = LeaseReader(self._worker, holding, self._handling, self.memory, self.dispatcher).step
            self.schedule.add(holding.key, step, partial(self._instead, holding))
        except BaseException as fault:  # noqa: BLE001  the turn would go on and leave the lease held but unread
            self._failed(fault)

    def release(self, holding: Holding) -> None:
        """Wake the lease reader, because its lease is to be released or is lost."""
        self.schedule.wake(holding.key)

    def release_all(self) -> None:
        """Finish the running batches and release all leases."""
        for holding in self._worker.holdings:
            holding.ask_release()
            self.schedule.wake(holding.key)

    def _instead(self, holding: Holding, faults: int) -> Step | None:
        """Return a step that releases the lease, once its own step has failed too often (rule 3), or None.

        If the lease is to be released anyway or is lost, one fault is enough.
        """
        if faults < FAULTS_MOST and not holding.releasing and not holding.lost.is_set():
            return None

        def let_go(_now: float) -> float:
            if holding.lost.is_set():
                return math.inf
            # Must come before the release, otherwise this worker might take the lease right back and fail again.
            self._worker.exclude(holding.key, EXCLUDED_SECONDS)
            holding.ask_release()
            try:
                released = holding.release()
            except StoreError as fault:
                due = self._scheduler.clock() + RETRY_SECONDS
                log.warning("lease %s cannot be read here and is not released yet: %s", holding.key, fault)
                return due
            # If it was not released, its next owner withdrew its request, and the lease is still to go.
            due = math.inf if released else self._scheduler.clock() + RETRY_SECONDS
            log.error("lease %s cannot be read here and is released", holding.key)
            return due

        return let_go


# The worker's tasks

# Together with the few other tasks these are at most 64 threads, not counting those that call handlers
# (`executors.py`). Twenty writers claim a thousand leases in a second and a half.
READERS = 30
WRITERS = 20
RENEWERS = 10
RENEWERS_MOST = 3 * WRITERS
"""The most concurrent renewals. Clients of stores keep only a few more connections than this."""
ACTORS_KEPT = 4
"""Idle writers that are kept for the next burst of work; the others end and are started again when needed."""
MEMORY_BYTES = 256 * 2**20
DRAIN_SECONDS = 30.0
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
        meter: Where metrics go, if OpenTelemetry is installed; None: to the program's own provider.
        drain_seconds: The time limit for finishing the running batches and releasing. Leases left then expire.
        memory_bytes: The memory for records that are read and not handled yet, of all shards together. A larger batch
            is read while nothing else is held.
        begin: Makes the step for a lease that the worker has taken; None: its shard is read.
        executor: Where handlers are called; None: in threads, as many as `readers`.
        wall: The clock for lag in the table's rows, in seconds since 1970; None: rows contain no lag.

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
        self.handling = metered(worker, traced(worker, handling), meter)
        self._scheduler, self._drain_seconds = worker.scheduler, drain_seconds
        self._ends: Queue = self._scheduler.queue()
        self._turn_sooner, self._renew_sooner = Signal(self._scheduler), Signal(self._scheduler)
        self._renewing, self._failed, self._said_late = True, False, False
        self._writers = writers
        # Two pools: a renewal queued after a hundred claims would be late, and one that stalls must not delay a claim.
        self._renewers = Pool(self._scheduler, min(writers, RENEWERS), "leasehold-renew", self._fail)
        self._actors = Pool(self._scheduler, writers, "leasehold-act", self._fail, keep=ACTORS_KEPT)
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
        if worker.hurried is nobody:
            worker.hurried = self._turn_sooner.set
        for holding in worker.holdings:  # held before the worker had a consumer
            self._lease_readers.begin(holding)

    def run(self) -> None:
        """Run until `stop` is called; return once all leases are released or left to expire.

        If the worker cannot go on, the leases are released in the same way before the reason is raised.

        Raises:
            WorkerError: The worker cannot go on.
            StoreError: The lease table cannot be used.
            SourceError: The stream cannot be used.
            SystemExit: A handler has raised it.
            KeyboardInterrupt: A handler has raised it.
        """
        worker, tasks = self.worker, dict[str, Queue]()
        turn, renew = partial(worker.turn, each=self._actors.map), self._renew
        pause = start_seconds(worker.me, worker.config)  # C15
        works: dict[str, Callable[[], None]] = {
            "turn": lambda: self._keep("turn", turn, self._turn_sooner, lambda: self._lease_readers.taking, pause),
            "renew": lambda: self._keep("renew", renew, self._renew_sooner, lambda: self._renewing),
        }
        for name, work in works.items():
            try:
                tasks[name] = self._task(name, work)
            except RuntimeError as fault:
                # Both tasks are needed: leases that are taken but not renewed would soon be lost.
                self._fail(fault)
                break
        (end,) = self._ends.get()
        # One deadline for everything that follows, so that the waits don't add up.
        until = self._scheduler.clock() + self._drain_seconds
        drained = self._drain(tasks, until)
        # Renewals continue until here, so that a slow batch does not lose its lease while the worker drains.
        self._renewing = False
        # The task may be waiting for its next renewal; wake it so that it ends.
        self._renew_sooner.set()
        unreleased = [holding for holding in self.worker.holdings if not holding.lease.ended]
        for holding in unreleased:
            # Other workers will take the leases that could not be released, so their handling must stop here.
            holding.drop("left to expire")
        if unreleased:
            keys = few([holding.key for holding in unreleased])
            log.error("not released within %g s, left to expire: %s", self._drain_seconds, keys)
        elif not drained:
            log.error("not everything came to its end within %g s", self._drain_seconds)
        closed = [part.close(until) for part in (self._lease_readers.schedule, self._actors, self._renewers)]
        # Must come last: a step that still runs may look up how its handler ended.
        self._lease_readers.dispatcher.close()
        if drained and not all(closed):
            log.warning("everything is released; a request of this worker still waits for its answer")
        if end is not None:
            raise end

    def stop(self) -> None:
        """Finish the running batches, checkpoint and release, so that `run` returns."""
        self._ends.put((None,))  # may run in a signal handler, where a queue is safe and a lock might deadlock

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

        # Without this task leases would be held but not read, so its failure ends the run.
        self._scheduler.start(f"leasehold-{name}", run, self._fail)
        return queue

    def _renew(self, now: float) -> float:
        """Renew the leases that are due, with as many tasks as their number and the store's latency require."""
        worker, limit = self.worker, RENEWERS_MOST * self._writers // WRITERS
        wanted = worker.renewers
        # Half of the wanted renewers suffice if none stalls, so warn only above twice the limit.
        if wanted > 2 * limit and not self._said_late:
            self._said_late = True
            log.warning(
                "%d leases are held, and %d renewals at a time are too few to renew each in %.1f s as slowly as the "
                "store answers: others may take them; start more workers, set max_leases, or give the fleet longer "
                "leases (lease_seconds)",
                len(worker.holdings),
                limit,
                worker.config.renew_seconds,
            )
        self._renewers.resize(max(min(self._writers, RENEWERS), min(limit, wanted)))
        return worker.renew(now, each=self._renewers.begin)

    def _keep(
        self, name: str, work: Callable[[float], float], sooner: Signal, going: Callable[[], bool], pause: float = 0.0
    ) -> None:
        """Call `work` whenever it is due, while `going` returns True."""
        clock, faults = self._scheduler.clock, 0
        sooner.wait(clock() + pause)
        while going():
            try:
                due, faults = work(clock()), 0
            except READABLE as fault:
                due = clock() + RETRY_SECONDS
                self._fail(fault)
            except Exception as fault:  # noqa: BLE001  the next call may succeed
                # A failed turn is repeated forever, because the held leases are still read. Renewals that keep failing
                # end the run, because its leases are about to expire.
                faults += 1
                due = clock() + RETRY_SECONDS
                if name == "renew" and faults * RETRY_SECONDS > self.worker.config.lease_seconds / 2:
                    self._fail(fault)
                self._scheduler.unforeseen(f"trying again in {RETRY_SECONDS:g} s", fault)
            if going():
                sooner.wait(due)

    def _end(self, reason: BaseException) -> None:
        """End the run because a handler raised SystemExit or KeyboardInterrupt, or because none can be called."""
        if isinstance(reason, SystemExit | KeyboardInterrupt):
            self._ends.put((reason,))
        else:
            self._fail(reason)

    def _fail(self, fault: BaseException) -> None:
        """End the run with this reason; only the first of several is reported."""
        # The first failure is the cause; the others often follow from it.
        if self._failed:
            return
        self._failed = True
        if isinstance(fault, READABLE):
            self._ends.put((fault,))
            return
        # Callers catch the documented exceptions, so wrap any other one.
        error = WorkerError(f"the worker cannot go on: {said(fault)}")
        error.__cause__ = fault
        self._ends.put((error,))
        self._scheduler.unforeseen("the worker ends", fault)

    def _drain(self, tasks: dict[str, Queue], until: float) -> bool:
        """Finish the running batches and release the leases; return whether that was done in time."""
        # First stop further turns and wake the task that waits for the next one, then ask for all held leases, which
        # are released while the last turn ends.
        self._lease_readers.taking = False
        self._turn_sooner.set()
        self._lease_readers.release_all()
        turned = "turn" not in tasks or tasks["turn"].get(until) is not None
        # Requests for leases are withdrawn in a separate task, because the store might not respond.
        try:
            closed = turned and self._task("close", self.worker.close).get(until) is not None
        except RuntimeError:
            # No thread is left, so withdraw them here, although a store that does not respond then delays the end.
            self.worker.close()
            closed = True
        # Again, because the last turn may have taken leases meanwhile. Only now can no more be added.
        self._lease_readers.release_all()
        return self._lease_readers.schedule.drain(until) and closed


# In a process of its own

HANGUP = getattr(signal, "SIGHUP", None)
"""None on Windows, which has no such signal."""
ENDING = (signal.SIGTERM, signal.SIGINT, *((HANGUP,) if HANGUP else ()))


def run(
    worker: Worker,
    handling: Handling | Handler,
    *,
    readers: int = READERS,
    writers: int = WRITERS,
    meter: Meter | None = None,
    drain_seconds: float = DRAIN_SECONDS,
    memory_bytes: int = MEMORY_BYTES,
) -> None:
    """Run a worker in this process until a signal ends it.

    Outside the main thread no signals are handled; use a `Runner` and its `stop` there.

    Args:
        worker: A worker without a consumer.
        handling: The handler and its policy; a plain function gets the default policy.
        readers: As for `Runner`, as are the following arguments.
        writers: How many leases may be claimed at the same time.
        meter: Where metrics go.
        drain_seconds: The time limit for draining.
        memory_bytes: The memory for records that are not handled yet.

    Examples:
        >>> from leasehold.adapters import run
        >>> def consume(worker) -> None:
        ...     run(worker, print)  # until a signal ends it
    """
    runner = Runner(
        worker,
        handling,
        readers=readers,
        writers=writers,
        meter=meter,
        drain_seconds=drain_seconds,
        memory_bytes=memory_bytes,
    )
    with stopping_on_signals(runner):
        runner.run()


def endings() -> list[signal.Signals]:
    """Return the signals that end a worker of this process."""
    return [number for number in ENDING if number != HANGUP or signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def stopping_on_signals(runner: Runner) -> Iterator[None]:
    """Stop the runner on a termination signal inside this block; a second signal ends the process.

    Outside the main thread this does nothing.
    """
    ending = endings()

    def stop(_number: int, _frame: object) -> None:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)  # the next one ends the process immediately
        runner.stop()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = {number: replace_handler(number, stop) for number in ending}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            restore_handler(number, handler)
