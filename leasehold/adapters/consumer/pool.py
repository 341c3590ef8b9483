"""Runs work in a bounded number of tasks, and lets a task wait for a signal or a time."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from threading import Lock
from typing import TypeVar

from leasehold.adapters.worker.scheduler import Scheduler

T = TypeVar("T")
R = TypeVar("R")


class Signal:
    """A signal that ends the wait of a task. If no task is waiting, the next wait ends immediately."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._queue, self._is_set = scheduler.queue(), False

    def set(self) -> None:
        """End the wait."""
        if not self._is_set:
            self._is_set = True
            self._queue.put(True)

    def wait(self, until: float = math.inf) -> bool:
        """Wait for the signal, at most until this time, and reset it. Return whether the signal was set."""
        was_set = self._queue.get(until) is not None
        # A `set` just before this line adds nothing to the queue. That is safe, because the caller checks what has
        # changed only after this call.
        self._is_set = False
        return was_set


class Pool:
    """Runs work in a bounded number of tasks, each of which is started when it is first needed.

    Args:
        scheduler: Starts the tasks.
        size: How many tasks may run at the same time.
        name: The name of the tasks.
        failed: Called with the exception if a task cannot be started or if work raises.
        keep: How many idle tasks to keep; any further idle tasks end. The default is `size`.
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
        self._max_idle = keep
        self._work, self._task_ends, self._lock = scheduler.queue(), scheduler.queue(), Lock()
        self._tasks = self._load = 0

    def resize(self, size: int) -> None:
        """Change the number of tasks; surplus tasks end after their current work."""
        with self._lock:
            self._size = size if self._size else 0  # a closed pool stays closed

    def submit(self, work: Callable[[], None]) -> None:
        """Queue this work, or run it in the caller's task if no task can be started."""
        with self._lock:
            self._load += 1
            # Count the task before it begins. Otherwise, two callers could start one task too many.
            add_task = self._tasks < min(self._load, self._size)
            self._tasks += add_task
        fault: RuntimeError | None = None
        if add_task:
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
        """Apply the function to all items concurrently, and return the results in order.

        Once all calls have ended, the first error is raised.
        """
        arguments = list(items)
        if len(arguments) <= 1:
            return [function(item) for item in arguments]
        results: dict[int, R] = {}
        faults: list[BaseException] = []
        wakeup, pending = Signal(self._scheduler), [*range(len(arguments))]

        def apply(index: int) -> None:
            try:
                results[index] = function(arguments[index])
            except BaseException as fault:  # noqa: BLE001  raised again in the caller of `map`
                faults.append(fault)
            pending.pop()
            if not pending:
                wakeup.set()

        for index in range(len(arguments)):
            self.submit(partial(apply, index))
        wakeup.wait()
        if faults:
            raise faults[0]
        return [results[index] for index in range(len(arguments))]

    def begin(self, function: Callable[[T], object], items: Iterable[T]) -> tuple[()]:
        """Begin to apply the function to each item, but do not wait, because a request may stall until its timeout."""

        def apply_and_log(item: T) -> None:
            try:
                function(item)
            except BaseException as fault:  # noqa: BLE001  no caller waits for the result
                self._scheduler.log_unexpected(self._name, fault)

        for item in items:
            self.submit(partial(apply_and_log, item))
        return ()

    def close(self, until: float) -> bool:
        """Have all tasks end after their current work. Return whether they have ended in time."""
        with self._lock:
            tasks, self._size = self._tasks, 0
        for _ in range(tasks):
            self._work.put(_END)
        return all(self._task_ends.get(until) for _ in range(tasks))

    def _serve(self, *, once: bool = False) -> None:
        is_awaited = True  # whether `close` waits for this task to end
        try:
            while (work := self._work.get()) is not _END:
                try:
                    work()
                except BaseException as fault:  # noqa: BLE001  this task must continue to serve the queue
                    self._failed(fault)
                with self._lock:
                    self._load -= 1
                    # End this task if the other tasks suffice for the queued work. After `close`, this task must
                    # continue until it gets `_END`, because `close` waits for every task.
                    keep = self._size if self._max_idle is None else self._max_idle
                    is_awaited = once or not self._size or self._tasks <= max(1, keep, min(self._load, self._size))
                    self._tasks -= not is_awaited
                if once or not is_awaited:
                    return
        finally:
            if is_awaited and not once:
                self._task_ends.put(True)


_END = object()
"""Ends one task of a pool."""
