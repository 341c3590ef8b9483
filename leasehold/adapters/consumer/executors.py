"""Where handlers are called and awaited: in the caller's thread, in a few daemon threads, on the worker's event loop.

Threads: a few side by side, and others in place of those that are slow, up to a bound. The event loop has a thread of
its own, started when it is first needed; where the system refuses it a thread or a descriptor, that call fails, and the
next one tries again. Nothing that is awaited can end the loop; only `close` does.
"""

import asyncio
import logging
from asyncio import AbstractEventLoop, CancelledError, Task, new_event_loop
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from typing import Protocol

from leasehold.adapters.consumer.handling import NotAwaited, fault_from, fault_of
from leasehold.adapters.processes import Origin
from leasehold.adapters.threads import spawn
from leasehold.stores.printable import escaped, said

log = escaped(logging.getLogger("leasehold.handling"))

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
        self._origin = Origin()
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
            raised: BaseException | None = None
            try:
                return fault_of(await awaitable)
            except BaseException as error:  # noqa: BLE001  whatever is raised, the batch failed and not the loop
                raised = error
                return fault_from(error)
            finally:
                # Before the loop goes on: a copy of it would take wake-ups from the pipe that it shares with this one.
                self._origin.end_copy(raised)

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
