"""Runs a worker: calls its renewals, its turns and the steps of its readings when they are due.

From a lease to its reader is one step: a worker calls `LeaseReaders.begin` with each lease that has become ours, which
makes its `LeaseReader` and puts the reading's step on the `Schedule`. Every step answers when it wishes to be called
next; a bounded pool of tasks calls those that are due, so that a thousand shards need no thousand threads.

Rule 1: a step never runs twice at a time. Rule 2: a successor under the same key begins only when its predecessor is
over, so a lease that was lost and taken again has one handler at work. Rule 3: a step that raises is called again,
after pauses that grow; when it has raised a few times in a row, or while its lease is to be left, its lease is released
and not taken again by this worker for a while, since a lease must not be held and not read.

To stop is to drain: the running batches are finished, checkpointed, and their leases released. A task that ends or
cannot be started stops the run too, with its reason: leases must not be renewed and read by nobody. In a process of
its own (`run`) a signal to end (SIGTERM, SIGINT, and SIGHUP unless it is ignored, as under nohup) drains; a second one
ends the process at once, and its leases wait for expiry.
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
    """Ends a wait, or the next one if nobody waits yet."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._queue, self._given = scheduler.queue(), False

    def set(self) -> None:
        """Give the signal."""
        if not self._given:
            self._given = True
            self._queue.put(True)

    def wait(self, until: float = math.inf) -> bool:
        """Wait for it, at most until then, and take it back; whether it was given."""
        given = self._queue.get(until) is not None
        # What changed before a `set` that comes in between is seen by the caller, who looks only after this.
        self._given = False
        return given


class Pool:
    """Work done side by side by a bounded number of tasks, each of which is started when it is first needed.

    keep    how many tasks may wait for work; one beyond them ends where there is none. None: as many as may work
    failed  told when a task cannot be started, or when work raises what nobody waits for
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
        """Let so many tasks work side by side from now on; a task too many ends after its work."""
        with self._lock:
            self._size = size if self._size else 0  # once closed it stays closed

    def submit(self, work: Callable[[], None]) -> None:
        """Have this done; by the caller itself if there is not one task for it."""
        with self._lock:
            self._load += 1
            # Counted here, before the task has begun: two callers would otherwise start one too many.
            more = self._tasks < min(self._load, self._size)
            self._tasks += more
        fault: RuntimeError | None = None
        if more:
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
        """The answers, in the order of the items. Raises what the first of them raised, once all are over."""
        work = list(items)
        if len(work) <= 1:
            return [function(item) for item in work]
        answers: dict[int, R] = {}
        faults: list[BaseException] = []
        over, left = Signal(self._scheduler), [*range(len(work))]

        def apply(place: int) -> None:
            try:
                answers[place] = function(work[place])
            except BaseException as fault:  # noqa: BLE001  raised again where it is waited for
                faults.append(fault)
            left.pop()
            if not left:
                over.set()

        for place in range(len(work)):
            self.submit(partial(apply, place))
        over.wait()
        if faults:
            raise faults[0]
        return [answers[place] for place in range(len(work))]

    def begin(self, function: Callable[[T], object], items: Iterable[T]) -> tuple[()]:
        """Apply it to each, and wait for none: a request may stall for as long as its client library waits."""

        def alone(item: T) -> None:
            try:
                function(item)
            except BaseException as fault:  # noqa: BLE001  nobody waits for it
                self._scheduler.unforeseen(self._name, fault)

        for item in items:
            self.submit(partial(alone, item))
        return ()

    def close(self, until: float) -> bool:
        """End the tasks after their running work; return whether they are over in time."""
        with self._lock:
            tasks, self._size = self._tasks, 0
        for _ in range(tasks):
            self._work.put(_END)
        return all(self._over.get(until) for _ in range(tasks))

    def _serve(self, *, once: bool = False) -> None:
        counted = True  # among the tasks whose end `close` waits for
        try:
            while (work := self._work.get()) is not _END:
                try:
                    work()
                except BaseException as fault:  # noqa: BLE001  a task that ends would leave its work to nobody
                    self._failed(fault)
                with self._lock:
                    self._load -= 1
                    # Those that stay are enough for all work there is. Once closed, each is waited for.
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
"""Does one bounded piece of work at this time; returns when to be called again, infinity for never."""

FAULT_SECONDS = 5.0
"""The pause after a fault of the dispatcher."""
STEP_FAULT_WAITS = (1.0, 3.0, 6.0)
"""The pauses after the first, second and later faults of a step: one that passes at once costs a second of reading."""


@define(eq=False)
class ScheduledStep:
    """A step on the schedule.

    instead    given, after each fault, how many came in a row: what to call from now on in place of the step, if any
    due        when it wishes to be called
    woken      wanted again while it runs
    successor  begins once this one is over
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
    """Call the step of this key at once, or as soon as it has finished running."""

    key: str


@frozen
class StepReturned:
    """The step of this key has run, and wishes to be called then."""

    key: str
    due: float


@frozen
class DrainAsked:
    """Somebody waits until no step is left."""

    over: Queue


@frozen
class Closed:
    """Begin nothing more."""


ScheduleMessage = StepAdded | StepWoken | StepReturned | DrainAsked | Closed


class Schedule:
    """Steps, each called when it is due.

    One task, the dispatcher, owns the state; everybody else leaves it a message. So nothing is locked, and a wake-up
    that comes while a step runs is not missed: it lies in the queue before or behind the step's own end, and counts
    in both places.

    tasks      how many steps may run side by side
    scheduler  runs them, and has the clock
    failed     told when no task can be had, or dispatching raised: steps may wait for ever then
    """

    def __init__(self, tasks: int, scheduler: Scheduler, failed: Callable[[BaseException], None]) -> None:
        """Raises RuntimeError if not one task can be had."""
        self._scheduler, self._failed = scheduler, failed
        self._messages, self._over = scheduler.queue(), scheduler.queue()
        self._steps: dict[str, ScheduledStep] = {}
        self._heap: list[tuple[float, str]] = []
        self._drains: list[Queue] = []
        self._closed = False
        self._pool = Pool(scheduler, tasks, "leasehold-read", failed)
        scheduler.start("leasehold-schedule", self._dispatch, failed)

    def add(self, key: str, step: Step, instead: Callable[[int], Step | None] | None = None) -> None:
        """Begin this step at once, or as soon as the step under the same key is over."""
        self._messages.put(StepAdded(key, ScheduledStep(step, instead)))

    def wake(self, key: str) -> None:
        """Call the step again at once, or when it has finished running."""
        self._messages.put(StepWoken(key))

    def drain(self, until: float = math.inf) -> bool:
        """Wait until nothing is left; False if that took too long."""
        over = self._scheduler.queue()
        self._messages.put(DrainAsked(over))
        return over.get(until) is not None

    def close(self, until: float = math.inf) -> bool:
        """Begin nothing more; False if what runs is not over in time."""
        self._closed = True
        self._messages.put(Closed())
        over = self._over.get(until) is not None
        return self._pool.close(until) and over  # its tasks are to end even if that is later

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
                    # What has moved since leaves its former entry behind.
                    if step is not None and step.due == due and not step.running:
                        self._pool.submit(partial(self._run, key, step))
                        # Behind it: what could not be begun is begun once it is woken, and no drain waits for it.
                        step.running, step.woken = True, False
            except self._scheduler.fatal:
                raise
            except BaseException as fault:  # noqa: BLE001  nobody else would call the steps, those that leave included
                # Not at once: what made dispatching fail is still there, and would fill the log.
                not_before = clock() + FAULT_SECONDS
                self._failed(fault)
        self._over.put(True)

    def _take(self, message: ScheduleMessage) -> None:
        match message:
            case StepReturned(key, due):
                step = self._steps[key]
                step.running = False
                # One that is over is not called again, though it was woken meanwhile: its lease is left.
                if due < math.inf:
                    # What woke it may have come behind the place where it looked.
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
                        present.successor = message.added  # and the present one is woken: it may wait for hours
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
            # Asked after every message: whichever step returns last, somebody may wait for just that.
            while self._drains:
                self._drains.pop().put(True)

    def _run(self, key: str, scheduled: ScheduledStep) -> None:
        clock = self._scheduler.clock
        try:
            due, scheduled.faults = scheduled.step(clock()), 0
        except BaseException as fault:  # noqa: BLE001  whatever it is, the shard must not stay unread
            due = clock() + STEP_FAULT_WAITS[min(scheduled.faults, len(STEP_FAULT_WAITS) - 1)]
            scheduled.faults += 1
            if scheduled.instead is not None and (other := scheduled.instead(scheduled.faults)) is not None:
                # For good: a step that has failed so often is not trusted with the lease again.
                scheduled.step, scheduled.instead, due = other, None, clock()
            self._messages.put(StepReturned(key, due))
            self._scheduler.unforeseen(key, fault)
        else:
            self._messages.put(StepReturned(key, due))


# Readings

FAULTS_MOST = len(STEP_FAULT_WAITS) + 1
"""When a step has raised this often in a row, its lease is released: after ten seconds of pauses."""

EXCLUDED_SECONDS = 60.0

OpenReading = Callable[[Worker, Holding, Handling], Step]
"""Makes the step that is called for a lease that has become ours."""


class LeaseReaders:
    """Reads what one worker holds: its `HoldingConsumer`.

    taking  whether new leases are wanted; while it drains, one that comes is released as soon as it has begun
    open_reading  makes the step for a lease: its shard is read, if left out
    wall    seconds since 1970, for what rows tell of lag; None: they tell nothing of it
    failed  told what nobody can go on from
    end     called with the reason why the worker must end
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
        most = handling.most_calls
        self.dispatcher = Dispatcher(
            executor
            or (ThreadExecutor(readers, failed=failed) if most is None else ThreadExecutor(most, most, failed)),
            again=self.schedule.wake,
            end=end,
            fatal=self._scheduler.fatal,
        )

    def begin(self, holding: Holding) -> None:
        """Read this lease, which has become ours, from now on.

        Called in the task that has written the claim: it opens nothing, which is left to the first step.
        """
        try:
            if not self.taking:
                # It gets a reading all the same, which releases it: who holds a lease answers for it.
                holding.ask_release()
            if self._wall is not None and self._worker.store.capabilities.free_notes:
                # Where notes are not free each would be a write of its own, and look like a renewal to others (C14).
                holding.progress.tell(socket.gethostname(), self._wall, self._scheduler.clock())
            if self._open is not None:
                step = self._open(self._worker, holding, self._handling)
            else:
                step = LeaseReader(self._worker, holding, self._handling, self.memory, self.dispatcher).step
            self.schedule.add(holding.key, step, partial(self._instead, holding))
        except BaseException as fault:  # noqa: BLE001  what was won must be read or let go, and a turn would go on
            self._failed(fault)

    def release(self, holding: Holding) -> None:
        """Have the reading see at once that its lease is to go, or is lost."""
        self.schedule.wake(holding.key)

    def release_all(self) -> None:
        """Finish the running batches, and release everything."""
        for holding in self._worker.holdings:
            holding.ask_release()
            self.schedule.wake(holding.key)

    def _instead(self, holding: Holding, faults: int) -> Step | None:
        """Leave the lease in place of a step that cannot go on; at once where it is to be left anyhow (rule 3)."""
        if faults < FAULTS_MOST and not holding.releasing and not holding.lost.is_set():
            return None

        def let_go(_now: float) -> float:
            if holding.lost.is_set():
                return math.inf
            # Before the release, or this worker might take it again at once and fail again.
            self._worker.exclude(holding.key, EXCLUDED_SECONDS)
            holding.ask_release()
            try:
                released = holding.release()
            except StoreError as fault:
                due = self._scheduler.clock() + RETRY_SECONDS
                log.warning("lease %s cannot be read here and is not released yet: %s", holding.key, fault)
                return due
            # Not released: an heir took its request back, and the lease still is to go.
            due = math.inf if released else self._scheduler.clock() + RETRY_SECONDS
            log.error("lease %s cannot be read here and is released", holding.key)
            return due

        return let_go


# The worker's tasks

# With the few others at most 64 threads, beside those that call handlers (`dispatcher.py`);
# twenty writers claim a thousand leases in a second and a half.
READERS = 30
WRITERS = 20
RENEWERS = 10
RENEWERS_MOST = 3 * WRITERS
"""The most renewals at a time; no client of a store keeps more connections than these and a few."""
ACTORS_KEPT = 4
"""Writers that wait for work between two bursts of it; the others end, and others start."""
MEMORY_BYTES = 256 * 2**20
DRAIN_SECONDS = 30.0
READABLE = (WorkerError, StoreError, SourceError)
"""Faults whose text names the cause to a user."""


class Runner:
    """Runs one worker until it is stopped.

    worker         made without a consumer of its own
    handling       the handler and its policy; a plain function gets the default policy
    readers        how many shards may be read or handled side by side
    writers        how many leases may be claimed side by side. Renewed are ten; up to three times as many as this
                   where the worker holds more than so many can renew in time, as the store answers
    meter          where metrics go, if OpenTelemetry is installed; to the program's own provider, if left out
    drain_seconds  most time for finishing the running batches and releasing; leases left then expire by themselves
    memory_bytes   for records read and not handled yet, of all shards together; a larger batch goes alone
    begin          makes the step for a lease that has become ours: its shard is read, if left out
    executor           where handlers are called: in threads of their own, as many as readers, if left out
    wall           seconds since 1970, for what rows tell of lag; None: they tell nothing of it

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
        """Raises RuntimeError if the system can start no thread, and ValueError for a worker that has a consumer."""
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
        # Two pools: a renewal behind a hundred claims would come too late, and one that stalls must not hold up a
        # claim.
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
        for holding in worker.holdings:  # held before there was anybody to read them
            self._lease_readers.begin(holding)

    def run(self) -> None:
        """Work until `stop` is called; returns once everything is released, or left to expire.

        Raises WorkerError, StoreError or SourceError if the worker cannot go on, after having released; SystemExit or
        KeyboardInterrupt if a handler has raised it.
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
                # Leases that are taken and not renewed are soon another's: without both tasks there is no run.
                self._fail(fault)
                break
        (end,) = self._ends.get()
        # One end for all that follows, so that steps which each take their time do not add up.
        until = self._scheduler.clock() + self._drain_seconds
        drained = self._drain(tasks, until)
        # Renewals go on until here: a batch that takes its time while all drains must not lose its lease meanwhile.
        self._renewing = False
        # It may be waiting for the next renewal, and is to see at once that there is none.
        self._renew_sooner.set()
        left = [holding for holding in self.worker.holdings if not holding.lease.ended]
        for holding in left:
            # Others will take what could not be released, so no more may be done for it here.
            holding.drop("left to expire")
        if left:
            keys = few([holding.key for holding in left])
            log.error("not released within %g s, left to expire: %s", self._drain_seconds, keys)
        elif not drained:
            log.error("not everything came to its end within %g s", self._drain_seconds)
        closed = [each.close(until) for each in (self._lease_readers.schedule, self._actors, self._renewers)]
        # Last: while a step may still run, it may want to know how its handler ended.
        self._lease_readers.dispatcher.close()
        if drained and not all(closed):
            log.warning("everything is released; a request of this worker still waits for its answer")
        if end is not None:
            raise end

    def stop(self) -> None:
        """Finish the running batches, checkpoint, release, and let `run` return."""
        self._ends.put((None,))  # a signal's handler may be here: a queue takes that, a lock might hang

    def hurry(self, key: str) -> None:
        """Begin the next step for this lease at once."""
        self._lease_readers.schedule.wake(key)

    def _task(self, name: str, work: Callable[[], None]) -> Queue:
        over = self._scheduler.queue()

        def run() -> None:
            try:
                work()
            finally:
                over.put(name)

        # Without this task leases would be held and not read: the run ends with its reason.
        self._scheduler.start(f"leasehold-{name}", run, self._fail)
        return over

    def _renew(self, now: float) -> float:
        """Renew what is due, by as many tasks as the held leases and the answers of the store ask for."""
        worker, most = self.worker, RENEWERS_MOST * self._writers // WRITERS
        wanted = worker.renewers
        # Half of them are enough where nothing stalls.
        if wanted > 2 * most and not self._said_late:
            self._said_late = True
            log.warning(
                "%d leases are held, and %d renewals at a time are too few to renew each in %.1f s as slowly as the "
                "store answers: others may take them; start more workers, set max_leases, or give the fleet longer "
                "leases (lease_seconds)",
                len(worker.holdings),
                most,
                worker.config.renew_seconds,
            )
        self._renewers.resize(max(min(self._writers, RENEWERS), min(most, wanted)))
        return worker.renew(now, each=self._renewers.begin)

    def _keep(
        self, name: str, work: Callable[[float], float], sooner: Signal, going: Callable[[], bool], pause: float = 0.0
    ) -> None:
        """Call this when it is due, for as long as it is going."""
        clock, faults = self._scheduler.clock, 0
        sooner.wait(clock() + pause)
        while going():
            try:
                due, faults = work(clock()), 0
            except READABLE as fault:
                due = clock() + RETRY_SECONDS
                self._fail(fault)
            except Exception as fault:  # noqa: BLE001  the next time may go well
                # A failed turn is repeated for ever, as held leases are read meanwhile. Renewals that keep failing
                # end the run: what it holds is about to be another's.
                faults += 1
                due = clock() + RETRY_SECONDS
                if name == "renew" and faults * RETRY_SECONDS > self.worker.config.lease_seconds / 2:
                    self._fail(fault)
                self._scheduler.unforeseen(f"trying again in {RETRY_SECONDS:g} s", fault)
            if going():
                sooner.wait(due)

    def _end(self, reason: BaseException) -> None:
        """End the run as a handler has asked for, or for want of what is needed to call one."""
        if isinstance(reason, SystemExit | KeyboardInterrupt):
            self._ends.put((reason,))
        else:
            self._fail(reason)

    def _fail(self, fault: BaseException) -> None:
        """End the run with this reason; the first of several is the one to tell."""
        # What fails first is the cause; the rest often fails because of it.
        if self._failed:
            return
        self._failed = True
        if isinstance(fault, READABLE):
            self._ends.put((fault,))
            return
        # Callers catch what is documented, and would pass by a fault of another kind.
        error = WorkerError(f"the worker cannot go on: {said(fault)}")
        error.__cause__ = fault
        self._ends.put((error,))
        self._scheduler.unforeseen("the worker ends", fault)

    def _drain(self, tasks: dict[str, Queue], until: float) -> bool:
        """Finish the running batches and release the leases; return whether all was done in time."""
        # In this order: no turn begins any more, the one that runs is hurried, and what is held is asked for already.
        self._lease_readers.taking = False
        self._turn_sooner.set()
        self._lease_readers.release_all()
        turned = "turn" not in tasks or tasks["turn"].get(until) is not None
        # Requests are withdrawn in a task of its own, since the store may not answer.
        try:
            closed = turned and self._task("close", self.worker.close).get(until) is not None
        except RuntimeError:
            # The system has no thread left: withdrawn here, where a store that does not answer holds up the end.
            self.worker.close()
            closed = True
        # The last turn may have taken leases in between: only now is there none to come.
        self._lease_readers.release_all()
        return self._lease_readers.schedule.drain(until) and closed


# In a process of its own

HANGUP = getattr(signal, "SIGHUP", None)
"""There is none on Windows."""
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

    In a thread other than the main one no signal is listened to: use a `Runner` and its `stop`.

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
    """The signals that end a worker of this process."""
    return [each for each in ENDING if each != HANGUP or signal.getsignal(each) != signal.SIG_IGN]


@contextmanager
def stopping_on_signals(runner: Runner) -> Iterator[None]:
    """In the main thread: while this lasts, a signal to end stops the runner, and a second one ends the process."""
    ending = endings()

    def stop(_number: int, _frame: object) -> None:
        for each in ending:
            signal.signal(each, signal.SIG_DFL)  # the next one ends the process at once
        runner.stop()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: replace_handler(each, stop) for each in ending}
    try:
        yield
    finally:
        for each, handler in before.items():
            restore_handler(each, handler)
