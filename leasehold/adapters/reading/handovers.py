"""Calls of a worker's handlers: begun in threads or on an event loop, looked after without waiting, ended or given up.

The way of one batch: its reading asks `Handovers.begin`; the executor has `Handovers._work` call the handler in one of
its threads; what the handler returns is awaited on the worker's one event loop where it is to be awaited; at the end
`Handovers._ended` keeps the fault, or None, and has the reading called again, which finds it by `Handovers.look`.

Rule 1: one call of a lease at a time, a call that was given up included: no shard has two handlers at work here.
Rule 2: whatever a call raises or returns, it ends with a fault or none, and the lease's reading is called again.
Rule 3: a look never waits. What it finds is one of a closed union, and the lease's reading acts on it.
Rule 4: an onlooker of a user cannot break reading or leaving; its faults are logged once.

Threads: a few side by side, and others in place of those that are slow, up to a bound. The event loop has a thread of
its own, started when it is first needed; where the system refuses it a thread or a descriptor, that call fails, and the
next one tries again. Nothing that is awaited can end the loop; only `close` does.
"""

import asyncio
import inspect
import logging
from asyncio import AbstractEventLoop, CancelledError, Task, new_event_loop
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack, suppress
from functools import partial
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import Protocol

from attrs import define, frozen

from leasehold.adapters.reading.handling import Ending, Handling, NotAwaited, Withdrawn, fault_from, fault_of
from leasehold.adapters.threads import spawn
from leasehold.adapters.worker.holding import Holding
from leasehold.stores.printable import escaped, said

log = escaped(logging.getLogger("leasehold.handling"))
handler_log = escaped(logging.getLogger("leasehold.reading"))

THREADS_MOST = 64

Work = Callable[[], None]


class HandlerExecutor(Protocol):
    """Where handlers are called.

    stuck  whether all are slow and there can be no more: nothing begins until one of them returns
    """

    stuck: bool

    def start(self, work: Work) -> None:
        """Do this, now or when there is a thread. Raises RuntimeError if no thread can be started."""

    def withdraw(self, work: Work) -> bool:
        """Do not do this after all; False if it has begun."""

    def replace(self, work: Work) -> None:
        """Start another thread for waiting work, since this piece of work is slow."""

    def close(self) -> None:
        """Begin no more work."""


class InlineExecutor:
    """Calls at once, in the thread that asks: for steps that are driven one by one."""

    stuck = False

    def start(self, work: Work) -> None:
        """Do it now."""
        work()

    def withdraw(self, work: Work) -> bool:  # noqa: ARG002  nothing ever waits
        """Return False: no work ever waits."""
        return False

    def replace(self, work: Work) -> None:
        """Do nothing: no other work waits."""

    def close(self) -> None:
        """Do nothing: there are no threads."""


class ThreadExecutor:
    """Daemon threads, started when first needed: one that hangs does not keep the process.

    usual   how many may work side by side, not counting those that are slow
    most    how many there may be, slow ones included
    failed  told what ends a thread; work is to raise nothing
    """

    def __init__(
        self, usual: int, most: int = THREADS_MOST, failed: Callable[[BaseException], object] | None = None
    ) -> None:
        self._usual, self._most = usual, max(usual, most)
        self._failed = failed or _log_end
        self._changed = Condition()
        self._queue: deque[Work] = deque()
        self._threads = self._idle = 0
        self._busy: set[Work] = set()
        self._slow: set[Work] = set()
        self.stuck = self._closed = False

    def start(self, work: Work) -> None:
        """Do this when there is a thread."""
        with self._changed:
            self._queue.append(work)
            # An idle thread is woken before another is started: one shard needs one thread, not all of them.
            if len(self._queue) <= self._idle:
                self._changed.notify()
                return
            try:
                self._add_thread()
            except RuntimeError:
                # With one thread all goes on, if slowly; without any, nothing would ever be begun.
                if not self._threads:
                    self._queue.remove(work)
                    raise

    def withdraw(self, work: Work) -> bool:
        """Take the work off the queue."""
        with self._changed:
            if work not in self._queue:
                return False
            self._queue.remove(work)
            return True

    def replace(self, work: Work) -> None:
        """Count it no longer, until it returns."""
        with self._changed, suppress(RuntimeError):  # no further thread can be started: the present ones go on
            if work in self._busy:
                self._slow.add(work)
                self.stuck = len(self._slow) >= self._most
                # Only for what waits: a slow handler among idle threads is in nobody's way.
                if len(self._queue) > self._idle:
                    self._add_thread()

    def close(self) -> None:
        """Have idle threads end; those at work end when they return."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _add_thread(self) -> None:
        if self._threads < min(self._most, self._usual + len(self._slow)):
            spawn(f"leasehold-handle-{self._threads}", self._serve, self._failed)
            self._threads += 1

    def _serve(self) -> None:
        surplus = False
        while not surplus:
            with self._changed:
                self._idle += 1
                while not (self._queue or self._closed):
                    self._changed.wait()
                self._idle -= 1
                if self._closed:
                    return
                work = self._queue.popleft()
                self._busy.add(work)
            try:
                work()
            except BaseException:
                with self._changed:
                    self._busy.discard(work)
                    self._slow.discard(work)
                    self.stuck = len(self._slow) >= self._most
                    self._threads -= 1  # another takes the place of this one, which ends
                raise
            with self._changed:
                self._busy.discard(work)
                if work in self._slow:
                    self._slow.discard(work)
                    self.stuck = len(self._slow) >= self._most
                # While it was slow another thread may have been started in its place: one of the two is too many now.
                surplus = self._threads > self._usual + len(self._slow)
                self._threads -= surplus
            del work  # or its batch would be in memory until the next one has been read


def _log_end(fault: BaseException) -> None:
    log.error("a thread that calls handlers has ended: %s", said(fault), exc_info=fault)


CLOSE_SECONDS = 5.0
"""The wait for cancelled calls at the end; the thread is a daemon, so none of them keeps the process."""

WhenDone = Callable[[Exception | None], None]


class EventLoop:
    """Awaits any number of things side by side.

    end  called with a SystemExit or KeyboardInterrupt that a task started by a handler has raised, and with what ends
         the loop's thread
    """

    def __init__(self, end: Callable[[BaseException], None]) -> None:
        self._end = end
        self._lock = Lock()
        self._loop: AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._closing: asyncio.Event

    def spawn(self, awaitable: Awaitable[object], over: WhenDone) -> Callable[[], None]:
        """Await it, then call `over` with its fault, or None, on the loop; answers how to cancel it.

        Raises NotAwaited if there can be no loop now.
        """
        try:
            loop = self._started()
        except BaseException as fault:
            if isinstance(awaitable, Coroutine):
                awaitable.close()  # else Python would warn that nobody awaited it
            raise NotAwaited(f"there is no event loop to await it: {said(fault)}") from fault
        tasks = list[Task[Exception | None]]()

        async def fault_awaited() -> Exception | None:
            try:
                return fault_of(await awaitable)
            except BaseException as error:  # noqa: BLE001  whatever is raised, the batch failed and not the loop
                return fault_from(error)

        def begin() -> None:
            task = loop.create_task(fault_awaited())
            tasks.append(task)
            # One that was cancelled before it began has no result.
            task.add_done_callback(
                lambda done: over(fault_from(CancelledError()) if done.cancelled() else done.result())
            )

        def cancel() -> None:
            with suppress(RuntimeError):  # the loop is closed, and whatever it awaited was cancelled
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])

        # From the thread of a handler, while the loop runs in its own: nothing else of a loop may be called so.
        loop.call_soon_threadsafe(begin)
        return cancel

    def close(self) -> None:
        """Cancel what is still awaited, and end the loop."""
        with self._lock:
            thread, loop = self._thread, self._loop
        if thread is not None and loop is not None:
            with suppress(RuntimeError):  # closed before
                loop.call_soon_threadsafe(self._closing.set)
            thread.join(CLOSE_SECONDS)

    def _started(self) -> AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                # Waited for under the lock: two callers would otherwise start a loop each, and one of them be lost.
                begun = SimpleQueue[AbstractEventLoop | BaseException]()
                self._thread = spawn("leasehold-loop", lambda: self._serve(begun.put), self._end)
                loop = begun.get()
                if isinstance(loop, BaseException):
                    raise loop
                self._loop = loop
            return self._loop

    def _serve(self, tell: Callable[[AbstractEventLoop | BaseException], None]) -> None:
        async def until_closing() -> None:
            await self._closing.wait()

        with ExitStack() as stack:
            try:
                runner = stack.enter_context(asyncio.Runner(loop_factory=new_event_loop))
                self._closing = asyncio.Event()
                loop = runner.get_loop()
            except BaseException as fault:  # noqa: BLE001  raised by whoever waits for the loop
                tell(fault)
                return
            tell(loop)
            while not self._closing.is_set():
                try:
                    runner.run(until_closing())
                except (SystemExit, KeyboardInterrupt) as error:
                    # Tasks of a handler's own pass these on to the loop, which would end with all others unfinished.
                    self._end(error)


Call = Callable[[], object]


@frozen
class AtWork:
    """The call waits for a thread, or is at work; look again at `due`, or when called."""

    due: float


@frozen
class CallEnded:
    """The call has ended, with a fault or without."""

    fault: Exception | None


@frozen
class NotBegun:
    """The lease had expired by the time a thread was free: nothing was handed over, and a renewal tells who owns it."""


@frozen
class LeaseLost:
    """The lease is lost, and its handler has not begun or is not waited for any longer."""


@frozen
class GivenUp:
    """The lease must go to another worker, for this reason."""

    why: str


Found = AtWork | CallEnded | NotBegun | LeaseLost | GivenUp


@define(eq=False)
class Handover:
    """A call for one held lease, from when it is asked for until it has ended.

    last      whether it is to be made also where the lease is wanted elsewhere
    begun     when it began, by the worker's clock; None while it waits for a thread
    said      how long it had been at work when that was last said
    found     how it ended; None before
    """

    holding: Holding
    handling: Handling
    clock: Callable[[], float]
    call: Call
    last: bool = False
    begun: float | None = None
    said: float = 0.0
    given_up: bool = False
    found: Found | None = None
    work: Work = lambda: None
    cancel: Callable[[], None] = lambda: None


class Handovers:
    """All calls of one worker's handlers.

    executor  where they are called; at once and in the caller's thread, if left out
    again     called with a lease's key when a call of it has ended
    end       called with the reason why the worker must end
    fatal     what ends a task of the worker's scheduler, and is never taken for a call's fault
    """

    def __init__(
        self,
        executor: HandlerExecutor | None = None,
        *,
        again: Callable[[str], None] = lambda _key: None,
        end: Callable[[BaseException], None] = lambda _reason: None,
        fatal: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._executor: HandlerExecutor = executor or InlineExecutor()
        self._again, self._end, self._fatal = again, end, fatal
        self._loop = EventLoop(self.end)
        self._lock = Lock()
        self._at_work: dict[str, Handover] = {}
        self._logged: set[str] = set()

    def begin(self, handover: Handover) -> GivenUp | None:
        """Make this call when there is a thread; or why it cannot be made."""
        handover.work, key = partial(self._work, handover), handover.holding.key
        with self._lock:
            # A call that was given up keeps its key until it ends: its thread cannot be stopped, and two handlers at
            # work on one shard would handle it out of order (rule 1).
            if key in self._at_work:
                return GivenUp("a handler that was given up is still at work on it")
            self._at_work[key] = handover
        try:
            self._executor.start(handover.work)
        except RuntimeError as error:
            # A worker without a thread for its handlers reads nothing, and must not go on holding leases.
            del self._at_work[key]
            self.end(error)
            return GivenUp(f"no thread could be started: {error}")
        return None

    def _work(self, handover: Handover) -> None:
        holding = handover.holding
        handover.begun = handover.clock()
        # The batch may have waited for this thread for so long that another worker owns the lease, or may own it.
        if holding.lost.is_set():
            self._ended(handover, LeaseLost())
            return
        if holding.expired:
            self._ended(handover, NotBegun())
            return
        try:
            answer = handover.call()
            if inspect.isawaitable(answer):
                handover.cancel = self._loop.spawn(answer, lambda fault: self._ended(handover, CallEnded(fault)))
                if handover.given_up:  # before there was anything to cancel
                    handover.cancel()
                return
            fault = None if answer is None else fault_of(answer)
        except self._fatal:
            raise  # the task itself ends, and with it all that is here
        except BaseException as error:  # noqa: BLE001  whatever is raised, it is the batch that failed
            self._ended(handover, CallEnded(fault_from(error)))
        else:
            self._ended(handover, CallEnded(fault))

    def _ended(self, handover: Handover, found: Found) -> None:
        fault = found.fault if isinstance(found, CallEnded) else None
        if isinstance(fault, Ending):
            self.end(fault.__cause__ or fault)
        key = handover.holding.key
        # The key is free before the reading is called again, or its next batch would be refused.
        del self._at_work[key]
        # The call and the work hold the batch, and each other: it would stay until the next collection of garbage.
        handover.call = handover.work = lambda: None
        handover.found = found
        if handover.given_up:
            log.warning("shard %s: the handler that was given up has ended: %s", key, fault or "it returned")
        self._again(key)

    def look(self, handover: Handover, now: float) -> Found:
        """Look after the call; anything but `AtWork` is found once, and nobody looks again."""
        # Its end counts before anything else: a handler that has finished is not given up for having been slow.
        if handover.found is not None:
            return handover.found
        holding, handling = handover.holding, handover.handling
        slow, most = handling.slow_seconds, handling.handler_seconds
        if handover.begun is None:
            # Whoever calls handlers may come to it late, or never: a consumer that iterates asks when it likes.
            lost = holding.lost.is_set()
            if (lost or (holding.releasing and not handover.last)) and self._withdrawn(handover):
                return LeaseLost() if lost else CallEnded(Withdrawn("its lease is wanted, and no handler has begun"))
            # Another worker may have threads: a batch that waits for a thread that never comes is read by nobody.
            if self._executor.stuck and self._withdrawn(handover):
                return GivenUp("no thread is free to hand its records over: as many as there may be hang in handlers")
            return AtWork(now + min(slow, most))
        seconds = now - handover.begun
        # Each time it has doubled: once would be overlooked, and every look would fill the log.
        if seconds >= max(slow, 2 * handover.said):
            handover.said = seconds
            handler_log.warning("shard %s: its handler has been at work on one batch for %.1f s", holding.key, seconds)
            self._executor.replace(handover.work)  # others wait for its thread
            self.notify("slow", handling.slow, holding, seconds)
        # Of a lost lease the end is waited for a while: it may still move the checkpoint (`late_checkpoints`), and the
        # next holding of this lease can begin only behind it.
        lost = holding.lost.is_set()
        if seconds >= most or (seconds >= slow and lost):
            # It is waited for no longer. An awaited call is cancelled; a thread cannot be.
            handover.given_up = True
            handover.cancel()
            if lost:
                return LeaseLost()
            return GivenUp(f"its handler has been at work for {seconds:.1f} s, and {most:g} s is the limit")
        return AtWork(handover.begun + min(max(slow, 2 * handover.said), most))

    def _withdrawn(self, handover: Handover) -> bool:
        withdrawn = self._executor.withdraw(handover.work)
        if withdrawn:
            del self._at_work[handover.holding.key]
        return withdrawn

    def notify(self, whom: str, onlooker: Callable[..., object], *told: object) -> None:
        """Call an onlooker; its faults are logged once."""
        fault: Exception | None = None
        try:
            answer = onlooker(*told)
            if inspect.isawaitable(answer):
                fault = fault_of(answer)
        except self._fatal:
            raise
        except BaseException as error:  # noqa: BLE001  reading goes on, whatever it is
            fault = fault_from(error)
        if isinstance(fault, Ending):
            self.end(fault.__cause__ or fault)
        elif fault is not None and whom not in self._logged:
            self._logged.add(whom)
            log.error("the %s failed; this is said once, and reading goes on: %s", whom, fault, exc_info=fault)

    def end(self, reason: BaseException) -> None:
        """Have the worker end in good order, saying why."""
        if "end" not in self._logged:
            self._logged.add("end")
            log.error("the worker ends: %s", said(reason))
        self._end(reason)

    def close(self) -> None:
        """End the event loop and idle threads; nothing is waited for that hangs."""
        self._executor.close()
        self._loop.close()
