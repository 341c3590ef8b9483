"""Calls of a worker's handlers under way: begun, waited for without holding a reader's thread, or given up.

Rule 1: one call of a lease at a time, a call that was given up included: no shard has two handlers at work here.
Rule 2: whatever a call raises or returns, it ends with a fault or none, and the lease's reading is called again.
Rule 3: an onlooker of a user cannot break reading or leaving; its faults are logged once.

Looks after the handler of one lease while it is at work, and finds it over, slow, or to be given up.

Rule: a look never waits. What it finds is one of a closed union, and the lease's reading acts on it.

Threads that call handlers: a few side by side, and others in place of those that are slow, up to a bound.

The event loop of a worker, in a thread of its own: it awaits what handlers return to be awaited.

Rule 1: the loop starts when it is first needed; where the system refuses it a thread or a descriptor, that call fails,
and the next one tries again. Rule 2: nothing that is awaited can end the loop; only `close` does.
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

from attrs import frozen

from leasehold.adapters.reading.handling import Ending, Handling, NotAwaited, Withdrawn, fault_from, fault_of
from leasehold.adapters.threads import spawn
from leasehold.adapters.worker.holding import Holding
from leasehold.stores.printable import escaped, said

log = escaped(logging.getLogger("leasehold.handling"))

THREADS_MOST = 64

Work = Callable[[], None]


class HandlerExecutor(Protocol):
    """Where handlers are called."""

    @property
    def stuck(self) -> bool:
        """Whether all are slow and there can be no more: nothing begins until one of them returns."""

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
        self._failed = failed or _tell
        self._changed = Condition()
        self._queue: deque[Work] = deque()
        self._threads = self._idle = 0
        self._busy: set[Work] = set()
        self._slow: set[Work] = set()
        self._closed = False

    @property
    def stuck(self) -> bool:
        """Whether every thread there may be is slow."""
        with self._changed:
            return len(self._slow) >= self._most

    def start(self, work: Work) -> None:
        """Do this when there is a thread."""
        with self._changed:
            self._queue.append(work)
            try:
                self._man()
            except RuntimeError:
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
                self._man()

    def close(self) -> None:
        """Have idle threads end; those at work end when they return."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _man(self) -> None:
        if len(self._queue) <= self._idle:
            self._changed.notify()
        elif self._threads < min(self._most, self._usual + len(self._slow)):
            spawn(f"leasehold-handle-{self._threads}", self._serve, self._failed)
            self._threads += 1

    def _serve(self) -> None:
        needed = True
        while needed and (work := self._next()):
            try:
                work()
            except BaseException:
                with self._changed:
                    self._busy.discard(work)
                    self._slow.discard(work)
                    self._threads -= 1  # another takes the place of this one, which ends
                raise
            needed = self._returned(work)
            del work  # or its batch would be in memory until the next one has been read

    def _next(self) -> Work | None:
        """Wait for work; None at the end."""
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._queue or self._closed)
            self._idle -= 1
            if self._closed:
                return None
            work = self._queue.popleft()
            self._busy.add(work)
            return work

    def _returned(self, work: Work) -> bool:
        """Whether the thread that did this is still needed: a slow one may have been replaced."""
        with self._changed:
            self._busy.discard(work)
            self._slow.discard(work)
            surplus = self._threads > self._usual + len(self._slow)
            self._threads -= surplus
            return not surplus


def _tell(fault: BaseException) -> None:
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

        def begin() -> None:
            task = loop.create_task(_fault(awaitable))
            tasks.append(task)
            task.add_done_callback(lambda done: over(_ended(done)))

        def cancel() -> None:
            with suppress(RuntimeError):  # the loop is closed, and whatever it awaited was cancelled
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])

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
                begun = SimpleQueue[AbstractEventLoop | BaseException]()
                self._thread = spawn("leasehold-loop", lambda: self._serve(begun.put), self._end)
                loop = begun.get()
                if isinstance(loop, BaseException):
                    raise loop
                self._loop = loop
            return self._loop

    def _serve(self, tell: Callable[[AbstractEventLoop | BaseException], None]) -> None:
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
                    runner.run(_until(self._closing))
                except (SystemExit, KeyboardInterrupt) as error:
                    # Tasks of a handler's own pass these on to the loop, which would end with all others unfinished.
                    self._end(error)


async def _until(closing: asyncio.Event) -> None:
    await closing.wait()


async def _fault(awaitable: Awaitable[object]) -> Exception | None:
    try:
        return fault_of(await awaitable)
    except BaseException as error:  # noqa: BLE001  whatever is raised, it is the batch that failed and not the loop
        return fault_from(error)


def _ended(task: "Task[Exception | None]") -> Exception | None:
    return fault_from(CancelledError()) if task.cancelled() else task.result()


Call = Callable[[], object]


class Handover:
    """A call, from when it is asked for until it has ended.

    begun  when it began, by the worker's clock; None while it waits for a thread
    over   whether it has ended, with `fault` or without
    said   how long it had been at work when that was last said
    """

    def __init__(self, key: str, call: Call, clock: Callable[[], float]) -> None:
        self.key, self.call, self.clock = key, call, clock
        self.begun: float | None = None
        self.said = 0.0
        self.over = self.given_up = False
        self.fault: Exception | None = None
        self.work: Work = lambda: None
        self.cancel: Callable[[], None] = lambda: None


class Handovers:
    """All calls of one worker's handlers.

    crew   where they are called; at once and in the caller's thread, if left out
    again  called with a lease's key when a call of it has ended
    end    called with the reason why the worker must end
    fatal  what ends a task of the worker's scheduler, and is never taken for a call's fault
    """

    def __init__(
        self,
        crew: HandlerExecutor | None = None,
        *,
        again: Callable[[str], None] = lambda _key: None,
        end: Callable[[BaseException], None] = lambda _reason: None,
        fatal: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._crew: HandlerExecutor = crew or InlineExecutor()
        self._again, self._end, self._fatal = again, end, fatal
        self._loop = EventLoop(self.end)
        self._lock = Lock()
        self._at_work: dict[str, Handover] = {}
        self._said: set[str] = set()

    @property
    def stuck(self) -> bool:
        """Whether no call can begin, since all threads there may be are slow."""
        return self._crew.stuck

    def begin(self, key: str, call: Call, clock: Callable[[], float]) -> Handover | str:
        """Call this; or why it cannot be called."""
        handover = Handover(key, call, clock)
        handover.work = partial(self._work, handover)
        with self._lock:
            if key in self._at_work:
                return "a handler that was given up is still at work on it"
            self._at_work[key] = handover
        try:
            self._crew.start(handover.work)
        except RuntimeError as error:
            self._forget(handover)
            self.end(error)
            return f"no thread could be started: {error}"
        return handover

    def replace(self, handover: Handover) -> None:
        """Give another thread to the calls that wait for the thread of this slow one."""
        self._crew.replace(handover.work)

    def withdraw(self, handover: Handover) -> bool:
        """Do not call it after all; False if it has begun."""
        withdrawn = self._crew.withdraw(handover.work)
        if withdrawn:
            self._forget(handover)
        return withdrawn

    def give_up(self, handover: Handover) -> None:
        """Wait for the call no longer. An awaited call is cancelled; a thread cannot be."""
        handover.given_up = True
        handover.cancel()

    def tell(self, whom: str, call: Call) -> None:
        """Call an onlooker; its faults are logged once."""
        fault: Exception | None = None
        try:
            answer = call()
            if inspect.isawaitable(answer):
                fault = fault_of(answer)
        except self._fatal:
            raise
        except BaseException as error:  # noqa: BLE001  reading goes on, whatever it is
            fault = fault_from(error)
        if isinstance(fault, Ending):
            self.end(fault.__cause__ or fault)
        elif fault is not None and whom not in self._said:
            self._said.add(whom)
            log.error("the %s failed; this is said once, and reading goes on: %s", whom, fault, exc_info=fault)

    def end(self, reason: BaseException) -> None:
        """Have the worker end in good order, saying why."""
        if "end" not in self._said:
            self._said.add("end")
            log.error("the worker ends: %s", said(reason))
        self._end(reason)

    def close(self) -> None:
        """End the event loop and idle threads; nothing is waited for that hangs."""
        self._crew.close()
        self._loop.close()

    def _work(self, handover: Handover) -> None:
        handover.begun = handover.clock()
        try:
            answer = handover.call()
            if inspect.isawaitable(answer):
                handover.cancel = self._loop.spawn(answer, partial(self._over, handover))
                if handover.given_up:  # before there was anything to cancel
                    handover.cancel()
                return
            fault: Exception | None = fault_of(answer)
        except self._fatal:
            raise
        except BaseException as error:  # noqa: BLE001  whatever is raised, it is the batch that failed
            fault = fault_from(error)
        self._over(handover, fault)

    def _over(self, handover: Handover, fault: Exception | None) -> None:
        if isinstance(fault, Ending):
            self.end(fault.__cause__ or fault)
        self._forget(handover)
        handover.fault = fault
        # They hold the batch, and each other: it would stay until the next collection of garbage.
        handover.call = handover.work = _nothing
        handover.over = True
        if handover.given_up:
            log.warning("shard %s: the handler that was given up has ended: %s", handover.key, fault or "it returned")
        self._again(handover.key)

    def _forget(self, handover: Handover) -> None:
        with self._lock:
            del self._at_work[handover.key]


def _nothing() -> None:
    """The call that is over."""


handler_watch_log = escaped(logging.getLogger("leasehold.reading"))


@frozen
class Later:
    """The call is at work; look again at `due`, or when called."""

    due: float


@frozen
class CallEnded:
    """The call has ended, with a fault or without."""

    fault: Exception | None


@frozen
class LeaseLost:
    """The lease is lost, and its handler has not begun or is not waited for any longer."""


@frozen
class GivenUp:
    """The lease must go to another worker, for this reason."""

    why: str


Found = Later | CallEnded | LeaseLost | GivenUp


class LostBefore(Exception):
    """The lease was lost while its batch waited for a thread: it is not handed over."""


class ExpiredBefore(Exception):
    """The lease expired while its batch waited for a thread: not handed over until a renewal tells who owns it."""


class HandlerWatch:
    """The calls of one lease's handler, one at a time."""

    def __init__(self, handovers: Handovers, handling: Handling, holding: Holding, clock: Callable[[], float]) -> None:
        self._handovers, self._handling, self._holding, self._clock = handovers, handling, holding, clock
        self._handover: Handover | None = None
        self._last = False

    @property
    def at_work(self) -> bool:
        """Whether a call is waited for."""
        return self._handover is not None

    def begin(self, call: Call, now: float, *, last: bool = False) -> Found:
        """Begin the call, unless the lease is lost or has expired by the time a thread is free.

        last  whether it is to be made also where the lease is wanted elsewhere
        """
        self._last = last

        def while_held() -> object:
            if self._holding.lost.is_set():
                raise LostBefore
            if self._holding.expired:
                raise ExpiredBefore
            return call()

        begun = self._handovers.begin(self._holding.key, while_held, self._clock)
        if isinstance(begun, str):
            return GivenUp(begun)
        self._handover = begun
        return self._look(begun, now)

    def look(self, now: float) -> Found:
        """Look after the call; `LeaseLost` where none is at work."""
        return self._look(self._handover, now) if self._handover else LeaseLost()

    def _look(self, handover: Handover, now: float) -> Found:
        if handover.over:
            self._handover = None
            return _handler_watch_ended(handover.fault, now)
        if handover.begun is None:
            return self._not_begun(handover, now)
        seconds, slow, most = now - handover.begun, self._handling.slow_seconds, self._handling.handler_seconds
        if seconds >= max(slow, 2 * handover.said):
            self._say_slow(handover, seconds)
        if seconds >= most or (seconds >= slow and self._holding.lost.is_set()):
            return self._give_up(handover, seconds)
        return Later(handover.begun + min(max(slow, 2 * handover.said), most))

    def _not_begun(self, handover: Handover, now: float) -> Found:
        lost = self._holding.lost.is_set()
        if (lost or (self._holding.parting and not self._last)) and self._handovers.withdraw(handover):
            # Whoever calls handlers may come to it late, or never: a consumer that iterates asks when it likes.
            self._handover = None
            return LeaseLost() if lost else CallEnded(Withdrawn("its lease is wanted, and no handler has begun"))
        if not (self._handovers.stuck and self._handovers.withdraw(handover)):
            return Later(now + min(self._handling.slow_seconds, self._handling.handler_seconds))
        self._handover = None
        return GivenUp("no thread is free to hand its records over: as many as there may be hang in handlers")

    def _say_slow(self, handover: Handover, seconds: float) -> None:
        handover.said = seconds
        handler_watch_log.warning(
            "shard %s: its handler has been at work on one batch for %.1f s", self._holding.key, seconds
        )
        self._handovers.replace(handover)
        self._handovers.tell("slow", partial(self._handling.slow, self._holding, seconds))

    def _give_up(self, handover: Handover, seconds: float) -> Found:
        self._handover = None
        self._handovers.give_up(handover)
        if self._holding.lost.is_set():
            return LeaseLost()
        limit = self._handling.handler_seconds
        return GivenUp(f"its handler has been at work for {seconds:.1f} s, and {limit:g} s is the limit")


def _handler_watch_ended(fault: Exception | None, now: float) -> Found:
    match fault:
        case LostBefore():
            return LeaseLost()
        case ExpiredBefore():
            return Later(now)
        case _:
            return CallEnded(fault)
