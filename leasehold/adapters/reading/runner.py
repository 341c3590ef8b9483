"""Runs a worker: calls its renewals, turns and readings when they are due; by threads, or in virtual time.

To stop is to drain: the running batches are finished, checkpointed, and their leases released. A task that ends or
cannot be started stops the run too, with its reason: leases must not be renewed and read by nobody.

A heap of appointments, kept by a bounded pool of tasks: a thousand shards need no thousand threads.

Rule 1: a step never runs twice at a time. Rule 2: a successor under the same key begins only when its
predecessor is over, so a lease that was lost and taken again has one handler at work.

Releases a lease whose reading raises an unforeseen fault: a lease must not be held and not read.

A step that raises is called again. When it has raised a few times in a row, or while its lease is to be left,
its lease is released, and not taken again by this worker for a while.
"""

import heapq
import logging
import math
import socket
import time
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import assert_never

from leasehold.adapters.reading.exporting import Meter
from leasehold.adapters.reading.handling import Handler, Handling, metered, traced
from leasehold.adapters.reading.handovers import HandlerExecutor, Handovers, ThreadExecutor
from leasehold.adapters.reading.reading import Room, ShardReading
from leasehold.adapters.sources.protocol import SourceError
from leasehold.adapters.worker.holding import Holding
from leasehold.adapters.worker.holdings import RETRY_SECONDS, WorkerError
from leasehold.adapters.worker.scheduler import Pool, Queue, Scheduler, Signal
from leasehold.adapters.worker.tidings import LeaseBegun, LeaseLeaving, Outbox, Tiding, TurnHurried
from leasehold.adapters.worker.worker import Worker
from leasehold.balancer.lookout import start_seconds
from leasehold.stores.printable import escaped, said
from leasehold.stores.protocol import StoreError

Step = Callable[[float], float]
"""Does one bounded piece of work at this time; returns when to be called again, infinity for never."""

FAULT_SECONDS = 5.0


class Appointments:
    """A schedule of steps, each called when it is due.

    tasks      how many may run side by side
    scheduler  runs them, and tells the time
    failed     told when no task can be had, or dispatching raised: steps may wait for ever then
    """

    def __init__(self, tasks: int, scheduler: Scheduler, failed: Callable[[BaseException], None]) -> None:
        """Raises RuntimeError if not one task can be had."""
        self._scheduler, self._failed = scheduler, failed
        self._steps: dict[str, Step] = {}
        self._successors: dict[str, Step] = {}
        self._dues: dict[str, float] = {}  # of those that wait
        self._hurried: set[str] = set()  # of those that run
        self._heap: list[tuple[float, str]] = []
        self._lock = Lock()
        self._changed, self._emptied, self._over = Signal(scheduler), Signal(scheduler), Signal(scheduler)
        self._closed = False
        self._pool = Pool(scheduler, tasks, "leasehold-read", failed)
        scheduler.start("leasehold-appointments", self._dispatch, failed)

    def add(self, key: str, step: Step) -> None:
        """Begin this step at once, or as soon as the step under the same key is over."""
        with self._lock:
            if key in self._steps:
                self._successors[key] = step
                self._hurry(key)
            else:
                self._steps[key] = step
                self._wait(key, -math.inf)

    def hurry(self, key: str) -> None:
        """Call the step again at once, or when it has finished running."""
        with self._lock:
            self._hurry(key)

    def drain(self, until: float = math.inf) -> bool:
        """Wait until nothing is left; False if that took too long."""
        while self._steps:
            if not self._emptied.wait(until) and self._steps:
                return False
        return True

    def close(self, until: float = math.inf) -> bool:
        """Begin nothing more; False if what runs is not over by then."""
        self._closed = True
        self._changed.set()
        over = self._over.wait(until)
        return self._pool.close(until) and over  # its tasks are to end even if that is later

    def _hurry(self, key: str) -> None:
        if key in self._dues:
            self._wait(key, -math.inf)
        elif key in self._steps:
            self._hurried.add(key)

    def _wait(self, key: str, due: float) -> None:
        self._dues[key] = due
        heapq.heappush(self._heap, (due, key))
        self._changed.set()

    def _dispatch(self) -> None:
        while not self._closed:
            try:
                self._changed.wait(self._begin_due())
            except BaseException as fault:  # noqa: BLE001  nobody else would call the steps, those that leave included
                self._failed(fault)
                self._changed.wait(self._scheduler.clock() + FAULT_SECONDS)
        self._over.set()

    def _begin_due(self) -> float:
        """Begin what is due; when something else will be."""
        while True:
            with self._lock:
                key = self._next()
                if key is None:
                    return self._heap[0][0] if self._heap else math.inf
                step = self._steps[key]
            self._pool.submit(partial(self._run, key, step))

    def _next(self) -> str | None:
        """Take the first that is due off the heap; entries of appointments since moved are dropped."""
        while self._heap and self._heap[0][0] <= self._scheduler.clock():
            due, key = heapq.heappop(self._heap)
            if self._dues.get(key) == due:
                del self._dues[key]
                return key
        return None

    def _run(self, key: str, step: Step) -> None:
        due = self._call(key, step)
        with self._lock:
            hurried = key in self._hurried
            self._hurried.discard(key)
            if due < math.inf:
                self._wait(key, -math.inf if hurried else due)
                return
            del self._steps[key]
            successor = self._successors.pop(key, None)
            if successor is not None:
                self._steps[key] = successor
                self._wait(key, -math.inf)
            if not self._steps:
                self._emptied.set()

    def _call(self, key: str, step: Step) -> float:
        try:
            return step(self._scheduler.clock())
        except BaseException as fault:  # noqa: BLE001  whatever it is, the shard must not stay unread
            self._scheduler.unforeseen(key, fault)
            return self._scheduler.clock() + FAULT_SECONDS


log = escaped(logging.getLogger("leasehold.runner"))

FAULTS_MOST = 3
"""A step may raise so often in a row: with the waits in between its lease is released within 15 seconds."""

EXCLUDED_SECONDS = 60.0


class Guarded:
    """A step that releases its lease when it cannot go on.

    step       the step itself
    exclude    keeps this worker from taking a lease for so many seconds
    scheduler  is told of every fault
    """

    def __init__(
        self, step: Step, holding: Holding, exclude: Callable[[str, float], None], scheduler: Scheduler
    ) -> None:
        self._step, self._holding, self._exclude, self._scheduler = step, holding, exclude, scheduler
        self._faults = 0

    def __call__(self, now: float) -> float:
        """Do one step."""
        if self._faults >= FAULTS_MOST:
            return self._let_go()
        try:
            due = self._step(now)
        except BaseException as fault:  # noqa: BLE001  whatever it is, the lease must not stay unread
            return self._failed(fault)
        self._faults = 0
        return due

    def _failed(self, fault: BaseException) -> float:
        self._scheduler.unforeseen(self._holding.key, fault)
        self._faults = FAULTS_MOST if self._holding.parting else self._faults + 1
        if self._faults < FAULTS_MOST and not self._holding.lost.is_set():
            return self._scheduler.clock() + FAULT_SECONDS
        return self._let_go()

    def _let_go(self) -> float:
        if self._holding.lost.is_set():
            return math.inf
        self._exclude(self._holding.key, EXCLUDED_SECONDS)
        self._holding.ask_release()
        try:
            released = self._holding.part()
        except StoreError as fault:
            log.warning("lease %s cannot be read here and is not released yet: %s", self._holding.key, fault)
            return self._scheduler.clock() + RETRY_SECONDS
        log.error("lease %s cannot be read here and is released", self._holding.key)
        return math.inf if released else self._scheduler.clock() + RETRY_SECONDS


# With the few others at most 64 threads, beside those that call handlers (`handlers/executors.py`);
# twenty writers claim a thousand leases in a second and a half.
READERS = 30
WRITERS = 20
RENEWERS = 10
MEMORY_BYTES = 256 * 2**20
DRAIN_SECONDS = 30.0
READABLE = (WorkerError, StoreError, SourceError)
"""Faults whose text tells a user the cause."""

OpenReading = Callable[[Worker, Holding, Handling], Step]
"""Makes the step that is called for a lease that has become ours."""


class Runner:
    """Runs one worker until it is stopped.

    worker         made without a consumer of its own
    handling       the handler and its policy; a plain function gets the default policy
    readers        how many shards may be read or handled side by side
    writers        how many leases may be claimed side by side, and at most ten renewed
    meter          where metrics go, if OpenTelemetry is installed; to the program's own provider, if left out
    drain_seconds  most time for finishing the running batches and releasing; leases left then expire by themselves
    memory_bytes   for records read and not handled yet, of all shards together; a larger batch goes alone
    begin          makes the step for a lease that has become ours: its shard is read, if left out
    crew           where handlers are called: in threads of their own, as many as readers, if left out
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
        crew: HandlerExecutor | None = None,
        wall: Callable[[], float] | None = time.time,
    ) -> None:
        """Raises RuntimeError if the system can start no thread, and ValueError for a worker that has a consumer."""
        if not isinstance(worker.consumer, Outbox):
            raise ValueError("worker: it has a consumer of its own")  # noqa: TRY004  the value is what is wrong
        self.worker = worker
        handling = handling if isinstance(handling, Handling) else Handling(handling)
        self.handling = metered(worker, traced(worker, handling), meter)
        self._scheduler, self._drain_seconds, self._begin = worker.scheduler, drain_seconds, begin or self._read
        self._ends: Queue = self._scheduler.queue()
        self._turn_sooner, self._renew_sooner = Signal(self._scheduler), Signal(self._scheduler)
        self._taking = self._renewing = True
        self._failed, self._wall = False, wall
        self._renewers = Pool(self._scheduler, min(writers, RENEWERS), "leasehold-renew", self._fail)
        self._actors = Pool(self._scheduler, writers, "leasehold-act", self._fail)
        self._readings = Appointments(readers, self._scheduler, self._fail)
        self._room = Room(memory_bytes, self._readings.hurry)
        self._handovers = Handovers(
            crew or ThreadExecutor(readers, failed=self._fail),
            again=self._readings.hurry,
            end=self._end,
            fatal=self._scheduler.fatal,
        )

    def run(self) -> None:
        """Work until `stop` is called; returns once everything is released, or left to expire.

        Raises WorkerError, StoreError or SourceError if the worker cannot go on, after having released; SystemExit or
        KeyboardInterrupt if a handler has raised it.
        """
        tasks = self._begun()
        (end,) = self._ends.get()
        until = self._scheduler.clock() + self._drain_seconds
        drained = self._drain(tasks, until)
        self._renewing = False
        self._renew_sooner.set()
        self._abandon(drained=drained)
        closed = [self._readings.close(until), self._actors.close(until), self._renewers.close(until)]
        self._handovers.close()
        if drained and not all(closed):
            log.warning("everything is released; a request of this worker still waits for its answer")
        if end is not None:
            raise end

    def stop(self) -> None:
        """Finish the running batches, checkpoint, release, and let `run` return."""
        self._ends.put((None,))

    def hurry(self, key: str) -> None:
        """Begin the next step for this lease at once."""
        self._readings.hurry(key)

    def _read(self, worker: Worker, holding: Holding, handling: Handling) -> Step:
        return ShardReading(worker, holding, handling, self._room, self._handovers).step

    # Tasks

    def _begun(self) -> dict[str, Queue]:
        """Every task, with the queue that tells when it is over."""
        pause = start_seconds(self.worker.me, self.worker.config)  # C15
        turn, renew = (
            partial(self.worker.turn, each=self._actors.map),
            partial(self.worker.renew, each=self._renewers.begin),
        )
        works: dict[str, Callable[[], None]] = {
            "hear": self._hear,
            "turn": lambda: self._keep("turn", turn, self._turn_sooner, lambda: self._taking, pause),
            "renew": lambda: self._keep("renew", renew, self._renew_sooner, lambda: self._renewing),
        }
        begun: dict[str, Queue] = {}
        for name, work in works.items():
            try:
                begun[name] = self._task(name, work)
            except RuntimeError as fault:
                self._fail(fault)
                break
        return begun

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

    def _end(self, reason: BaseException) -> None:
        """End the run as a handler has asked for, or for want of what is needed to call one."""
        if isinstance(reason, SystemExit | KeyboardInterrupt):
            self._ends.put((reason,))
        else:
            self._fail(reason)

    def _fail(self, fault: BaseException) -> None:
        """End the run with this reason; the first of several is the one to tell."""
        if self._failed:
            return
        self._failed = True
        if not isinstance(fault, READABLE):
            self._scheduler.unforeseen("the worker ends", fault)
            error = WorkerError(f"the worker cannot go on: {said(fault)}")
            error.__cause__ = fault
            fault = error
        self._ends.put((fault,))

    def _keep(
        self, name: str, work: Callable[[float], float], sooner: Signal, going: Callable[[], bool], pause: float = 0.0
    ) -> None:
        clock, faults = self._scheduler.clock, 0
        sooner.wait(clock() + pause)
        while going():
            sooner.clear()
            try:
                due, faults = work(clock()), 0
            except READABLE as fault:
                self._fail(fault)
                due = clock() + RETRY_SECONDS
            except Exception as fault:  # noqa: BLE001  the next time may go well
                faults += 1
                due = self._again(name, fault, faults)
            if going():
                sooner.wait(due)

    def _again(self, name: str, fault: Exception, faults: int) -> float:
        """Repeat a failed turn for ever, as held leases are read meanwhile; stop the run if renewals keep failing."""
        if name == "renew" and faults * RETRY_SECONDS > self.worker.config.lease_seconds / 2:
            self._fail(fault)
        self._scheduler.unforeseen(f"trying again in {RETRY_SECONDS:g} s", fault)
        return self._scheduler.clock() + RETRY_SECONDS

    def _hear(self) -> None:
        while (tiding := self.worker.tidings.get()) is not END:
            try:
                self._heed(tiding)
            except BaseException as fault:  # noqa: BLE001  what was won must be read or let go
                self._fail(fault)

    def _heed(self, tiding: Tiding) -> None:
        match tiding:
            case LeaseBegun(holding):
                if not self._taking:
                    holding.ask_release()
                if self._wall is not None and self.worker.store.promises.free_notes:
                    holding.reach.tell(socket.gethostname(), self._wall, self._scheduler.clock())
                step = self._begin(self.worker, holding, self.handling)
                self._readings.add(holding.key, Guarded(step, holding, self.worker.exclude, self._scheduler))
            case LeaseLeaving(holding):
                self._readings.hurry(holding.key)
            case TurnHurried():
                self._turn_sooner.set()
            case _:
                assert_never(tiding)

    # Leaving

    def _drain(self, tasks: dict[str, Queue], until: float) -> bool:
        """Finish the running batches and release the leases; return whether all was done by then."""
        self._taking = False
        self._turn_sooner.set()
        self._part_with_all()
        over = self._over(tasks, "turn", until) and self._closed(until)
        self.worker.tidings.put(END)
        over = self._over(tasks, "hear", until) and over
        # The last turn may have taken leases in between; their release was asked for when they began.
        self._part_with_all()
        return self._readings.drain(until) and over

    def _closed(self, until: float) -> bool:
        """Withdraw the open requests, in a task of its own, since the store may not answer."""
        try:
            closing = self._task("close", self.worker.close)
        except RuntimeError:
            self.worker.close()
            return True
        return closing.get(until) is not None

    @staticmethod
    def _over(tasks: dict[str, Queue], name: str, until: float) -> bool:
        return name not in tasks or tasks[name].get(until) is not None

    def _part_with_all(self) -> None:
        for holding in self.worker.holdings:
            holding.ask_release()
            self._readings.hurry(holding.key)

    def _abandon(self, *, drained: bool) -> None:
        """Drop the leases that could not be released: others will take them, so no more may be done for them here."""
        left = [holding for holding in self.worker.holdings if not holding.lease.ended]
        for holding in left:
            holding.drop("left to expire")
        if left:
            keys = ", ".join(holding.key for holding in left)
            log.error("not released within %g s, left to expire: %s", self._drain_seconds, keys)
        elif not drained:
            log.error("not everything came to its end within %g s", self._drain_seconds)


END = object()
"""Ends the tidings of a worker."""
