"""Provides `Pool`, which runs work in a bounded number of tasks, and `Signal`, with which a task can be woken."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from threading import Lock
from typing import TypeVar

from leasehold.adapters.worker.scheduler import Scheduler

T = TypeVar("T")
R = TypeVar("R")


class Signal:
    """Wakes a waiting task. If no task is waiting, the next call of `wait` returns immediately."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._queue, self._is_set = scheduler.queue(), False

    def set(self) -> None:
        """End the wait."""
        if not self._is_set:
            self._is_set = True
            self._queue.put(True)

    def wait(self, until: float = math.inf) -> bool:
        """Wait for the signal, at most until this time, and reset it. Return whether it was set."""
        was_set = self._queue.get(until) is not None
        # If `set` is called just before this line, it adds nothing to the queue. That is safe, because the caller
        # checks what has changed after this method returns.
        self._is_set = False
        return was_set


class Pool:
    """Runs work in a bounded number of tasks, each of which is started when it is first needed.

    Args:
        scheduler: Starts the tasks.
        size: How many tasks may run at the same time.
        name: The name of the tasks.
        on_failure: Called with the exception if a task cannot be started or if work raises.
        max_idle: How many idle tasks to keep. Further idle tasks end. The default is `size`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        size: int,
        name: str,
        on_failure: Callable[[BaseException], None],
        *,
        max_idle: int | None = None,
    ) -> None:
        self._scheduler, self._size, self._name, self._on_failure = scheduler, size, name, on_failure
        self._max_idle = max_idle
        self._work_queue, self._task_ends, self._lock = scheduler.queue(), scheduler.queue(), Lock()
        self._task_count = self._unfinished_count = 0

    def resize(self, size: int) -> None:
        """Change the maximum number of tasks. Surplus tasks end after their current work."""
        with self._lock:
            self._size = size if self._size else 0  # a closed pool stays closed

    def submit(self, work: Callable[[], None]) -> None:
        """Queue this work, or run it in the caller's task if no task can be started."""
        with self._lock:
            self._unfinished_count += 1
            # Count the task before it is started. Otherwise, two callers could start one task too many.
            add_task = self._task_count < min(self._unfinished_count, self._size)
            self._task_count += add_task
        start_error: RuntimeError | None = None
        if add_task:
            try:
                self._scheduler.start(self._name, self._serve, self._on_failure)
            except RuntimeError as error:
                start_error = error
                with self._lock:
                    self._task_count -= 1
        self._work_queue.put(work)
        if not self._task_count:
            self._serve(once=True)
        if start_error is not None:
            self._on_failure(start_error)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Apply the function to all items concurrently, and return the results in order.

        Once all calls have ended, the first error is raised.
        """
        argument_list = list(items)
        if len(argument_list) <= 1:
            return [function(item) for item in argument_list]
        results: dict[int, R] = {}
        faults: list[BaseException] = []
        wakeup, pending = Signal(self._scheduler), [*range(len(argument_list))]

        def apply(index: int) -> None:
            try:
                results[index] = function(argument_list[index])
            except BaseException as fault:  # noqa: BLE001  raised again in the caller of `map`
                faults.append(fault)
            pending.pop()
            if not pending:
                wakeup.set()

        for index in range(len(argument_list)):
            self.submit(partial(apply, index))
        wakeup.wait()
        if faults:
            raise faults[0]
        return [results[index] for index in range(len(argument_list))]

    def map_in_background(self, function: Callable[[T], object], items: Iterable[T]) -> tuple[()]:
        """Apply the function to each item in the background. Do not wait, because a call may stall for long."""

        def apply_and_log(item: T) -> None:
            try:
                function(item)
            except BaseException as fault:  # noqa: BLE001  no caller waits for the result
                self._scheduler.log_unexpected(self._name, fault)

        for item in items:
            self.submit(partial(apply_and_log, item))
        return ()

    def close(self, until: float) -> bool:
        """End all tasks after their current work. Return whether they have ended before `until`."""
        with self._lock:
            tasks, self._size = self._task_count, 0
        for _ in range(tasks):
            self._work_queue.put(_END_TASK)
        return all(self._task_ends.get(until) for _ in range(tasks))

    def _serve(self, *, once: bool = False) -> None:
        is_awaited = True  # whether `close` waits for this task to end
        try:
            while (work := self._work_queue.get()) is not _END_TASK:
                try:
                    work()
                except BaseException as fault:  # noqa: BLE001  this task must continue to serve the queue
                    self._on_failure(fault)
                with self._lock:
                    self._unfinished_count -= 1
                    # End this task if the other tasks suffice for the queued work. After `close`, this task must
                    # continue until it gets `_END_TASK`, because `close` waits for every task.
                    max_idle = self._size if self._max_idle is None else self._max_idle
                    is_awaited = (
                        once
                        or not self._size
                        or self._task_count <= max(1, max_idle, min(self._unfinished_count, self._size))
                    )
                    self._task_count -= not is_awaited
                if once or not is_awaited:
                    return
        finally:
            if is_awaited and not once:
                self._task_ends.put(True)


_END_TASK = object()
"""A task that gets this from the queue ends."""
