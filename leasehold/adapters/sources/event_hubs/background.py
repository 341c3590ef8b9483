"""An event loop in a thread of its own, for all calls of a source to the asynchronous client."""

import asyncio
from asyncio import new_event_loop
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from leasehold.adapters.sources.protocol import SourceError, SourceUnavailable
from leasehold.adapters.threads import spawn
from leasehold.stores.printable import said

with suppress(ModuleNotFoundError):  # there is none for Windows
    # The client takes a turn of the loop for each event, and here a turn costs less.
    from uvloop import new_event_loop

ANSWER_SECONDS = 30.0
CLOSE_SECONDS = 10.0

T = TypeVar("T")


class Background:
    """Runs coroutines away from its callers. Close it, or the thread ends with the process."""

    def __init__(self) -> None:
        self._loop = new_event_loop()
        self._fault: BaseException | None = None
        self._thread = spawn("leasehold-event-hubs", self._run, self._failed)

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin; cancelling the future cancels the work. Raises SourceError if the thread has ended by a fault."""
        if self._fault is not None:
            work.close()
            raise SourceError(f"the thread of the Event Hubs client has ended: {said(self._fault)}")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def ask(self, work: Coroutine[Any, Any, T], seconds: float = ANSWER_SECONDS) -> T:
        """Wait for an answer. Raises SourceUnavailable if none comes in time, else what the work raises."""
        asked = self.start(work)
        try:
            return asked.result(seconds)
        except TimeoutError:
            asked.cancel()
            raise SourceUnavailable(f"Event Hubs did not answer within {seconds:g} s") from None

    def soon(self, call: Callable[[], object]) -> None:
        """Have the loop make this call; nothing if it is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """Cancel what runs, wait a bounded time for it to let go, and end the thread."""
        if self._loop.is_closed():
            return
        self.soon(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)

    def _failed(self, fault: BaseException) -> None:
        self._fault = fault  # raised at each call: shards are released with it, and the run ends

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(_wind_up())
        self._loop.close()


async def _wind_up() -> None:
    """Cancel the client's tasks, which then close their links; those that take too long are left."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CLOSE_SECONDS / 2)
