"""The event loop of a worker, in a thread of its own: it awaits what handlers return to be awaited.

Rule 1: the loop starts when it is first needed. Rule 2: nothing that is awaited can end the loop; only `close` does.
"""

import asyncio
from asyncio import AbstractEventLoop, CancelledError, Task
from collections.abc import Awaitable, Callable
from contextlib import suppress
from threading import Event, Lock, Thread

from leasehold.adapters.reading.handlers.answers import fault_from, fault_of

CLOSE_SECONDS = 5.0
"""The wait for cancelled calls at the end; the thread is a daemon, so none of them keeps the process."""

WhenDone = Callable[[Exception | None], None]


class EventLoop:
    """Awaits any number of things side by side.

    end  called with a SystemExit or KeyboardInterrupt that a task started by a handler has raised
    """

    def __init__(self, end: Callable[[BaseException], None]) -> None:
        self._end = end
        self._lock = Lock()
        self._loop: AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._closing: asyncio.Event

    def spawn(self, awaitable: Awaitable[object], over: WhenDone) -> Callable[[], None]:
        """Await it, then call `over` with its fault, or None, on the loop; answers how to cancel it."""
        loop, tasks = self._started(), list[Task[Exception | None]]()

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
                ready = Event()
                self._thread = Thread(target=self._serve, args=(ready,), name="leasehold-loop", daemon=True)
                self._thread.start()
                ready.wait()
            assert self._loop is not None  # noqa: S101  it was set before `ready`
            return self._loop

    def _serve(self, ready: Event) -> None:
        with asyncio.Runner() as runner:
            self._closing = asyncio.Event()
            self._loop = runner.get_loop()
            ready.set()
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
