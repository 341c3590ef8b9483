"""Calls and awaits handlers: in the caller's thread, in a few daemon threads, or on the worker's event loop.

The number of threads is limited. While a handler is slow, its thread does not count, but all threads together have a
second limit. The event loop has its own thread, which is started when it is first needed. If the system has no thread
or file descriptor left for the loop, the handler's call fails, and the next call tries to start the loop again. No
handler can end the loop. Only `close` ends it.
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

from leasehold.adapters.consumer.handling import NotAwaited, as_exception, fault_in_result
from leasehold.adapters.processes import Origin
from leasehold.adapters.threads import spawn
from leasehold.stores.printable import error_summary, make_safe_logger

log = make_safe_logger(logging.getLogger("leasehold.handling"))

THREADS_MAX = 64

Work = Callable[[], None]


class HandlerExecutor(Protocol):
    """Calls handlers.

    Attributes:
        stuck: Whether all threads run slow handlers and no more threads may be started. No other call then begins until
            a handler returns.
    """

    stuck: bool

    def start(self, work: Work) -> None:
        """Run this work, now or once a thread is free. Raises RuntimeError if no thread can be started."""

    def withdraw(self, work: Work) -> bool:
        """Remove the work before it begins. Return False if it has already begun."""

    def replace_slow_thread(self, work: Work) -> None:
        """Allow another thread for the work that waits, because the thread of this work is busy with a slow handler."""

    def close(self) -> None:
        """Begin no more work."""


class InlineExecutor:
    """Calls handlers immediately in the caller's thread, for programs that call readers' steps themselves."""

    stuck = False

    def start(self, work: Work) -> None:
        """Run the work now."""
        work()

    def withdraw(self, work: Work) -> bool:  # noqa: ARG002  no work ever waits
        """Return False, because no work ever waits."""
        return False

    def replace_slow_thread(self, work: Work) -> None:
        """Do nothing, because no other work waits."""

    def close(self) -> None:
        """Do nothing, because there are no threads."""


class ThreadExecutor:
    """Calls handlers in daemon threads, which are started when first needed and do not keep the process alive.

    Args:
        thread_limit: How many threads may run at the same time, not counting threads with slow handlers.
        total_limit: How many threads may exist, including slow ones.
        on_failure: Called with the exception if work raises one, which ends the thread and should never happen.
    """

    def __init__(
        self,
        thread_limit: int,
        total_limit: int = THREADS_MAX,
        on_failure: Callable[[BaseException], object] | None = None,
    ) -> None:
        self._thread_limit, self._total_limit = thread_limit, max(thread_limit, total_limit)
        self._on_failure = on_failure or _log_thread_end
        self._condition = Condition()
        self._queue: deque[Work] = deque()
        self._thread_count = self._idle_count = 0
        self._running_work: set[Work] = set()
        self._slow_work: set[Work] = set()
        self.stuck = self._closed = False

    def start(self, work: Work) -> None:
        """Run this work once a thread is free. Raises RuntimeError if there is no thread and none can be started."""
        with self._condition:
            self._queue.append(work)
            # Wake an idle thread instead of starting another one, so that one shard needs only one thread.
            if len(self._queue) <= self._idle_count:
                self._condition.notify()
                return
            try:
                self._add_thread()
            except RuntimeError:
                # If at least one thread exists, it will run this work later. If there is none, the work would never
                # begin.
                if not self._thread_count:
                    self._queue.remove(work)
                    raise

    def withdraw(self, work: Work) -> bool:
        """Remove the work from the queue. Return False if it has already begun."""
        with self._condition:
            if work not in self._queue:
                return False
            self._queue.remove(work)
            return True

    def replace_slow_thread(self, work: Work) -> None:
        """Don't count the thread of this work toward `thread_limit` until the work returns.

        If other work waits and no thread is idle, start another thread.
        """
        with self._condition, suppress(RuntimeError):  # no thread can be started, so the existing ones must suffice
            if work in self._running_work:
                self._slow_work.add(work)
                self.stuck = len(self._slow_work) >= self._total_limit
                # If a thread is idle, no other work has to wait for the slow handler, so no new thread is needed.
                if len(self._queue) > self._idle_count:
                    self._add_thread()

    def close(self) -> None:
        """End the idle threads. The other threads end when their work returns."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _add_thread(self) -> None:
        if self._thread_count < min(self._total_limit, self._thread_limit + len(self._slow_work)):
            spawn(f"leasehold-handle-{self._thread_count}", self._run_queued_work, self._on_failure)
            self._thread_count += 1

    def _run_queued_work(self) -> None:
        is_surplus = False
        while not is_surplus:
            with self._condition:
                self._idle_count += 1
                while not (self._queue or self._closed):
                    self._condition.wait()
                self._idle_count -= 1
                if self._closed:
                    return
                work = self._queue.popleft()
                self._running_work.add(work)
            try:
                work()
            except BaseException:
                with self._condition:
                    self._running_work.discard(work)
                    self._slow_work.discard(work)
                    self.stuck = len(self._slow_work) >= self._total_limit
                    self._thread_count -= 1  # this thread ends, so another one may be started
                raise
            with self._condition:
                self._running_work.discard(work)
                if work in self._slow_work:
                    self._slow_work.discard(work)
                    self.stuck = len(self._slow_work) >= self._total_limit
                # While this thread was slow, another one may have been started. End this thread if there are now too
                # many.
                is_surplus = self._thread_count > self._thread_limit + len(self._slow_work)
                self._thread_count -= is_surplus
            del work  # otherwise, the batch would stay in memory until the next work begins


def _log_thread_end(fault: BaseException) -> None:
    log.error("a thread that calls handlers has ended: %s", error_summary(fault), exc_info=fault)


CLOSE_SECONDS = 5.0
"""How many seconds `close` waits for the calls that it has cancelled. The loop's thread is a daemon and cannot keep the
process alive."""

OnDone = Callable[[Exception | None], None]


class EventLoop:
    """Awaits any number of awaitables concurrently.

    Args:
        end_worker: Called with the exception if a task that a handler has started raises SystemExit or
            KeyboardInterrupt, or if an exception ends the loop's thread.
    """

    def __init__(self, end_worker: Callable[[BaseException], None]) -> None:
        self._end_worker = end_worker
        self._origin = Origin()
        self._lock = Lock()
        self._loop: AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._closing: asyncio.Event

    def spawn(self, awaitable: Awaitable[object], on_done: OnDone) -> Callable[[], None]:
        """Start awaiting `awaitable`, and return a function that cancels it.

        When the awaitable is done, `on_done` is called with its error, or with None if it succeeded.

        Raises NotAwaited if no loop can be started now.
        """
        try:
            loop = self._ensure_loop()
        except BaseException as fault:
            if isinstance(awaitable, Coroutine):
                awaitable.close()  # otherwise Python warns that it was never awaited
            raise NotAwaited(f"there is no event loop to await it: {error_summary(fault)}") from fault
        tasks = list[Task[Exception | None]]()

        async def await_fault() -> Exception | None:
            handler_error: BaseException | None = None
            try:
                return fault_in_result(await awaitable)
            except BaseException as error:  # noqa: BLE001  any exception fails the batch but must not end the loop
                handler_error = error
                return as_exception(error)
            finally:
                # If the handler has forked, end the forked process here. Its copy of the event loop shares a pipe with
                # the original loop, and would consume the original's wake-ups.
                self._origin.end_forked_copy(handler_error)

        def create_task() -> None:
            task = loop.create_task(await_fault())
            tasks.append(task)
            # A task that was cancelled before it began has no result.
            task.add_done_callback(
                lambda done: on_done(as_exception(CancelledError()) if done.cancelled() else done.result())
            )

        def cancel_tasks() -> None:
            with suppress(RuntimeError):  # closing the loop has already cancelled its tasks
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])

        # `spawn` runs in a handler's thread, in which `call_soon_threadsafe` is the only method of the loop that may be
        # called.
        loop.call_soon_threadsafe(create_task)
        return cancel_tasks

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
                self._thread = spawn("leasehold-loop", lambda: self._run_loop(startup_result.put), self._end_worker)
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
                    self._end_worker(error)
