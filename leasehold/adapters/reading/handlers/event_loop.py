"""The event loop of a worker, in a thread of its own: it awaits what handlers return to be awaited.

Rule 1: the loop starts when it is first needed; where the system refuses it a thread or a descriptor, that call fails,
and the next one tries again. Rule 2: nothing that is awaited can end the loop; only `close` does.
"""

import asyncio
from asyncio import AbstractEventLoop, CancelledError, Task, new_event_loop
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from threading import Lock, Thread

from leasehold.adapters.reading.handlers.answers import NotAwaited, fault_from, fault_of
from leasehold.adapters.threads import spawn
from leasehold.stores.printable import said

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
