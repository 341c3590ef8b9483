"""Calls and awaits handlers: in the caller's thread, in a few daemon threads, or on the worker's event loop.

The number of threads is limited. A thread whose handler is slow is replaced by another one, up to a second limit. The
event loop has its own thread, which is started when it is first needed. If the system has no thread or file descriptor
left for the loop, that call fails, and the next one tries again. A handler cannot end the loop; only `close` does.
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

from leasehold.adapters.consumer.handling import NotAwaited, as_fault, fault_in_result
from leasehold.adapters.processes import Origin
from leasehold.adapters.threads import spawn
from leasehold.stores.printable import escaped, said

log = escaped(logging.getLogger("leasehold.handling"))

THREADS_MOST = 64

Work = Callable[[], None]


class HandlerExecutor(Protocol):
    """Calls handlers.

    Attributes:
        stuck: Whether all threads run slow handlers and no more threads may be started, so that no other call begins
            until one returns.
    """

    stuck: bool

    def start(self, work: Work) -> None:
        """Run this work, now or once a thread is free. Raises RuntimeError if no thread can be started."""

    def withdraw(self, work: Work) -> bool:
        """Remove the work, and return False if it has begun."""

    def replace(self, work: Work) -> None:
        """Start another thread for the work that waits, because the given work is slow."""

    def close(self) -> None:
        """Begin no more work."""


class InlineExecutor:
    """Calls handlers immediately in the caller's thread, for programs that call lease readers' steps themselves."""

    stuck = False

    def start(self, work: Work) -> None:
        """Run the work now."""
        work()

    def withdraw(self, work: Work) -> bool:  # noqa: ARG002  no work ever waits
        """Return False, because no work ever waits."""
        return False

    def replace(self, work: Work) -> None:
        """Do nothing, because no other work waits."""

    def close(self) -> None:
        """Do nothing, because there are no threads."""


class ThreadExecutor:
    """Calls handlers in daemon threads, which are started when first needed and do not keep the process alive.

    Args:
        usual: How many threads may run at the same time, not counting threads with slow handlers.
        most: How many threads may exist, including slow ones.
        failed: Called with the exception if a thread ends because its work raised, which it never should.
    """

    def __init__(
        self, usual: int, most: int = THREADS_MOST, failed: Callable[[BaseException], object] | None = None
    ) -> None:
        self._usual, self._most = usual, max(usual, most)
        self._failed = failed or _log_thread_end
        self._changed = Condition()
        self._queue: deque[Work] = deque()
        self._threads = self._idle = 0
        self._busy: set[Work] = set()
        self._slow: set[Work] = set()
        self.stuck = self._closed = False

    def start(self, work: Work) -> None:
        """Run this work once a thread is free. Raises RuntimeError if there is no thread and none can be started."""
        with self._changed:
            self._queue.append(work)
            # Wake an idle thread rather than start another one, so that one shard needs only one thread.
            if len(self._queue) <= self._idle:
                self._changed.notify()
                return
            try:
                self._add_thread()
            except RuntimeError:
                # If at least one thread exists, it will run this work later. If there is none, the work would never
                # begin.
                if not self._threads:
                    self._queue.remove(work)
                    raise

    def withdraw(self, work: Work) -> bool:
        """Remove the work from the queue, and return False if it has begun."""
        with self._changed:
            if work not in self._queue:
                return False
            self._queue.remove(work)
            return True

    def replace(self, work: Work) -> None:
        """Stop counting the thread of this work until the work returns. Start another thread if other work waits."""
        with self._changed, suppress(RuntimeError):  # if no thread can be started, use the existing ones
            if work in self._busy:
                self._slow.add(work)
                self.stuck = len(self._slow) >= self._most
                # If a thread is idle, no other work has to wait for the slow handler, so no new thread is needed.
                if len(self._queue) > self._idle:
                    self._add_thread()

    def close(self) -> None:
        """End the idle threads; busy ones end when their work returns."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _add_thread(self) -> None:
        if self._threads < min(self._most, self._usual + len(self._slow)):
            spawn(f"leasehold-handle-{self._threads}", self._run_queued_work, self._failed)
            self._threads += 1

    def _run_queued_work(self) -> None:
        is_surplus = False
        while not is_surplus:
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
                    self._threads -= 1  # this thread ends and may be replaced
                raise
            with self._changed:
                self._busy.discard(work)
                if work in self._slow:
                    self._slow.discard(work)
                    self.stuck = len(self._slow) >= self._most
                # Another thread may have been started while this one was slow. If there are now too many threads, this
                # one ends.
                is_surplus = self._threads > self._usual + len(self._slow)
                self._threads -= is_surplus
            del work  # otherwise, the batch would stay in memory until the next work begins


def _log_thread_end(fault: BaseException) -> None:
    log.error("a thread that calls handlers has ended: %s", said(fault), exc_info=fault)


CLOSE_SECONDS = 5.0
"""How many seconds `close` waits for the calls that it has cancelled. The loop's thread is a daemon and cannot keep the
process alive."""

OnDone = Callable[[Exception | None], None]


class EventLoop:
    """Awaits any number of awaitables concurrently.

    Args:
        end: Called with a SystemExit or KeyboardInterrupt that a task started by a handler has raised, and with the
            exception that ends the loop's thread.
    """

    def __init__(self, end: Callable[[BaseException], None]) -> None:
        self._end = end
        self._origin = Origin()
        self._lock = Lock()
        self._loop: AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._closing: asyncio.Event

    def spawn(self, awaitable: Awaitable[object], on_done: OnDone) -> Callable[[], None]:
        """Start awaiting this, and return a function that cancels it. `on_done` is later called with the fault or None.

        Raises NotAwaited if no loop can be started now.
        """
        try:
            loop = self._ensure_loop()
        except BaseException as fault:
            if isinstance(awaitable, Coroutine):
                awaitable.close()  # otherwise Python warns that it was never awaited
            raise NotAwaited(f"there is no event loop to await it: {said(fault)}") from fault
        tasks = list[Task[Exception | None]]()

        async def await_fault() -> Exception | None:
            handler_error: BaseException | None = None
            try:
                return fault_in_result(await awaitable)
            except BaseException as error:  # noqa: BLE001  any exception fails the batch but must not end the loop
                handler_error = error
                return as_fault(error)
            finally:
                # If the handler has forked, end the forked process here. Its copy of the event loop must not continue,
                # because the two loops share a pipe, and the copy would consume wake-ups of the original loop.
                self._origin.end_forked_copy(handler_error)

        def begin() -> None:
            task = loop.create_task(await_fault())
            tasks.append(task)
            # A task that was cancelled before it began has no result.
            task.add_done_callback(
                lambda done: on_done(as_fault(CancelledError()) if done.cancelled() else done.result())
            )

        def cancel() -> None:
            with suppress(RuntimeError):  # the loop is closed, which has cancelled its tasks
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])

        # This runs in a handler's thread, from which only `call_soon_threadsafe` may be called.
        loop.call_soon_threadsafe(begin)
        return cancel

    def close(self) -> None:
        """Cancel all tasks and end the loop."""
        with self._lock:
            thread, loop = self._thread, self._loop
        if thread is not None and loop is not None:
            with suppress(RuntimeError):  # already closed
                loop.call_soon_threadsafe(self._closing.set)
            thread.join(CLOSE_SECONDS)

    def _ensure_loop(self) -> AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                # Hold the lock while waiting for the loop to start. Otherwise, two callers could each start a loop.
                startup_result = SimpleQueue[AbstractEventLoop | BaseException]()
                self._thread = spawn("leasehold-loop", lambda: self._run_loop(startup_result.put), self._end)
                loop = startup_result.get()
                if isinstance(loop, BaseException):
                    raise loop
                self._loop = loop
            return self._loop

    def _run_loop(self, report: Callable[[AbstractEventLoop | BaseException], None]) -> None:
        async def wait_for_close() -> None:
            await self._closing.wait()

        with ExitStack() as stack:
            try:
                runner = stack.enter_context(asyncio.Runner(loop_factory=new_event_loop))
                self._closing = asyncio.Event()
                loop = runner.get_loop()
            except BaseException as fault:  # noqa: BLE001  raised in the caller that waits for the loop
                report(fault)
                return
            report(loop)
            while not self._closing.is_set():
                try:
                    runner.run(wait_for_close())
                except (SystemExit, KeyboardInterrupt) as error:
                    # If a task that a handler has started raises one of these, asyncio stops the event loop with that
                    # exception. Run the loop again, because other tasks are not finished.
                    self._end(error)
