"""Calls functions when they are due, in a bounded number of tasks. All tasks of a worker belong to a schedule.

A schedule calls two kinds of functions. A *step* returns when to call it next, so a thousand shards do not need a
thousand threads. *Work* is called once, as soon as a task is free.

No task passes steps to the others. An idle task chooses the step that is due first, among those that no other task has
chosen, and sleeps until then. So a step that nobody wakes costs its task one wake-up per call.

1. A step never runs twice at the same time.
2. If a step is added under the key of another one, its first call begins only after the previous step has ended. If a
   lease is lost and taken again, no two handlers therefore run for it.
3. A step that raises an exception is called again after a pause, which grows with each consecutive fault.
4. The steps that idle tasks have chosen are due no later than any other step. If a step becomes due earlier, because it
   is added or woken, it gets a new task, or the idle task whose step is due last (`_assign_task`). So a step is late
   only if all tasks are running.
"""

import heapq
import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from threading import Lock
from typing import TypeVar

from attrs import define

from leasehold.adapters.worker.scheduler import Queue, Scheduler

T = TypeVar("T")
R = TypeVar("R")

Step = Callable[[float], float]
"""A function that does one bounded piece of work. It is called with the current time, and returns when to call it
again, or infinity for never."""

FAULT_SECONDS = 5.0
"""The pause of a task after an error in the schedule itself."""
STEP_FAULT_WAITS = (1.0, 3.0, 6.0)
"""The pauses, in seconds, after the first, second and later faults of a step."""


@define(eq=False)
class ScheduledStep:
    """A step on the schedule.

    Attributes:
        key: The key under which the step was added; None for work that is called once.
        step: The step to call.
        replace_after: Called after each fault with the number of consecutive faults. Returns a step that replaces this
            step permanently, or None.
        due: When to call the step.
        task: The task that is waiting until the step is due, or is running it.
        running: Whether the step is running.
        woken: Whether the step was woken since its last call began.
        faults: How many times in a row the step has raised an exception.
        abandoned: Whether a drain need not wait for the current call to end.
        successor: The step that begins when this step never has to be called again.
    """

    key: str | None
    step: Step
    replace_after: Callable[[int], Step | None] | None = None
    due: float = -math.inf
    task: "ScheduleTask | None" = None
    running: bool = False
    woken: bool = False
    faults: int = 0
    abandoned: bool = False
    successor: "ScheduledStep | None" = None


@define(eq=False)
class ScheduleTask:
    """A task of the schedule.

    Attributes:
        wakeups: Where the task waits. An item means that its step may have changed, or that the task is to end.
        step: The step that the task waits for or runs; None if all steps have tasks.
    """

    wakeups: Queue
    step: ScheduledStep | None = None

    @property
    def due(self) -> float:
        """When the task has something to do."""
        return math.inf if self.step is None else self.step.due


class Schedule:
    """Calls each step when it is due.

    Args:
        scheduler: Runs the tasks and provides the clock.
        task_limit: How many tasks there may be. Each is started when it is first needed.
        name: The name of the tasks.
        on_failure: Called with the exception if a task cannot be started, if work raises, or if scheduling itself
            raises. Steps might then never be called.
        max_idle: How many tasks to keep that have nothing to wait for. Others end. The default is `task_limit`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        task_limit: int,
        name: str,
        on_failure: Callable[[BaseException], None],
        *,
        max_idle: int | None = None,
    ) -> None:
        self._scheduler, self._task_limit, self._name, self._on_failure = scheduler, task_limit, name, on_failure
        self._max_idle = max_idle
        # The lock protects everything below. It is never held while a task starts or waits.
        self._lock = Lock()
        self._steps: dict[str, ScheduledStep] = {}
        self._due_heap: list[tuple[float, int, ScheduledStep]] = []
        self._push_numbers = count()  # steps that are due at the same time are called in the order of their wake-ups
        self._tasks: set[ScheduleTask] = set()
        self._idle_tasks: dict[ScheduleTask, None] = {}
        self._abandoned_count = 0
        self._drain_queues: list[Queue] = []
        self._close_queues: list[Queue] = []
        self._closed = False

    def start(self) -> None:
        """Start the first task, so that steps are called even if no other task can be started.

        Raises RuntimeError if no task can be started.
        """
        with self._lock:
            task = self._add_task()
        self._start_task(task)

    # Steps

    def add(
        self,
        key: str,
        step: Step,
        replace_after: Callable[[int], Step | None] | None = None,
        *,
        due: float = -math.inf,
    ) -> None:
        """Call this step from the time `due` on, or once the step that was added under this key before has ended.

        Call `start` first.
        """
        added = ScheduledStep(key, step, replace_after, due)
        with self._lock:
            previous = self._steps.get(key)
            if previous is None:
                self._steps[key] = added
                self._push(added)
            else:
                previous.successor = added
                self._wake(previous)  # it may not be due for hours
            new_task = self._assign_task()
        self._start_or_report(new_task)

    def wake(self, key: str) -> None:
        """Call the step immediately, or once more as soon as its current call ends."""
        with self._lock:
            step = self._steps.get(key)
            if step is None or not self._wake(step):
                return
            new_task = self._assign_task()
        self._start_or_report(new_task)

    def abandon(self, key: str) -> None:
        """Stop waiting for the current call of this step, if any, and allow another task."""
        with self._lock:
            step = self._steps.get(key)
            if step is None or not step.running or step.abandoned:
                return
            step.abandoned = True
            self._abandoned_count += 1
            self._end_drains()
            new_task = self._assign_task()
        self._start_or_report(new_task)

    def drain(self, until: float = math.inf) -> bool:
        """Wait until only abandoned steps are left. Return False if others are left at the time `until`."""
        drain_ended = self._scheduler.queue()
        with self._lock:
            self._drain_queues.append(drain_ended)
            self._end_drains()
        return drain_ended.get(until) is not None

    # Work that is called once

    def submit(self, work: Callable[[], None]) -> None:
        """Call this once a task is free, or now in the caller's task if there is none and none can be started."""

        def run_once(_now: float) -> float:
            try:
                work()
            except self._scheduler.fatal:
                raise
            except BaseException as fault:  # noqa: BLE001  the task must continue to call steps
                self._on_failure(fault)
            return math.inf

        added = ScheduledStep(None, run_once)
        with self._lock:
            if not self._closed:
                self._push(added)
            new_task = self._assign_task()
        self._start_or_report(new_task)
        with self._lock:
            is_left_over = added.due < math.inf and added.task is None and (self._closed or not self._tasks)
            if is_left_over:
                added.due = math.inf  # this makes its entry in the heap void
        if is_left_over:
            run_once(added.due)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Apply the function to all items concurrently, and return the results in order.

        Once all calls have ended, the first error is raised.
        """
        argument_list = list(items)
        if len(argument_list) <= 1:
            return [function(item) for item in argument_list]
        results: dict[int, R] = {}
        faults: list[BaseException] = []
        all_ended, pending = self._scheduler.queue(), [*range(len(argument_list))]

        def apply(index: int) -> None:
            try:
                results[index] = function(argument_list[index])
            except BaseException as fault:  # noqa: BLE001  raised again in the caller of `map`
                faults.append(fault)
            pending.pop()
            if not pending:
                all_ended.put(True)

        for index in range(len(argument_list)):
            self.submit(partial(apply, index))
        all_ended.get()
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

    def resize(self, task_limit: int) -> None:
        """Change the maximum number of tasks. Surplus tasks end after their current work."""
        with self._lock:
            self._task_limit = task_limit
            new_task = self._assign_task()
        self._start_or_report(new_task)

    def close(self, until: float = math.inf) -> bool:
        """Begin no more steps and no more work. Return False if some are still running at the time `until`."""
        all_ended = self._scheduler.queue()
        with self._lock:
            self._closed = True
            self._close_queues.append(all_ended)
            for task in self._idle_tasks:
                task.wakeups.put(True)
            self._end_closes()
            if self._abandoned_count:
                until = min(until, self._scheduler.clock())
        return all_ended.get(until) is not None

    # The tasks

    def _serve(self, task: ScheduleTask) -> None:
        while self._call_next_step(task):
            pass
        with self._lock:
            new_task = self._end_task(task)
        self._start_or_report(new_task)

    def _call_next_step(self, task: ScheduleTask) -> bool:
        """Call the next step when it is due. Return False if the task is to end."""
        try:
            step = self._wait_for_step(task)
            if step is not None:
                self._run(step)
        except self._scheduler.fatal:
            raise
        except BaseException as fault:  # noqa: BLE001  the steps must still be called, if only to release leases
            self._on_failure(fault)
            # An error that persists would otherwise keep a core busy.
            task.wakeups.get(self._scheduler.clock() + FAULT_SECONDS)
            return True
        return step is not None

    def _wait_for_step(self, task: ScheduleTask) -> ScheduledStep | None:
        """Choose a step for this task, and wait until it is due. Return None if the task is to end."""
        while True:
            with self._lock:
                if self._closed or len(self._tasks) > self._task_limit + self._abandoned_count:
                    self._tasks.discard(task)  # so that no other task ends for the same reason
                    return None
                self._idle_tasks[task] = None
                if task.step is None:
                    self._choose_step(task)
                step, due = task.step, task.due
                if step is None and self._has_too_many_idle_tasks():
                    self._tasks.discard(task)
                    return None
                if step is not None and due <= self._scheduler.clock():
                    del self._idle_tasks[task]
                    step.running, step.woken = True, False
                    return step
            task.wakeups.get(due)

    def _run(self, scheduled_step: ScheduledStep) -> None:
        clock = self._scheduler.clock
        try:
            due, scheduled_step.faults = scheduled_step.step(clock()), 0
        except self._scheduler.fatal:
            raise
        except BaseException as fault:  # noqa: BLE001  the shard must not stay unread after any exception
            due = clock() + STEP_FAULT_WAITS[min(scheduled_step.faults, len(STEP_FAULT_WAITS) - 1)]
            scheduled_step.faults += 1
            if (
                scheduled_step.replace_after is not None
                and (replacement := scheduled_step.replace_after(scheduled_step.faults)) is not None
            ):
                # Replace the step permanently, because a step that has failed this often must not be called again for
                # this lease.
                scheduled_step.step, scheduled_step.replace_after, due = replacement, None, clock()
            self._end_call(scheduled_step, due)
            self._scheduler.log_unexpected(scheduled_step.key or self._name, fault)
        else:
            self._end_call(scheduled_step, due)

    def _end_call(self, step: ScheduledStep, due: float) -> None:
        """Note that the step has returned, and is due again at this time."""
        with self._lock:
            if step.task is not None:
                step.task.step = None
            step.task, step.running, step.due = None, False, due
            if step.abandoned:
                step.abandoned = False
                self._abandoned_count -= 1
            if due < math.inf:
                if step.woken:  # it may have missed the reason, so call it again immediately
                    step.due = -math.inf
                self._push(step)
            # A step that returned infinity is not called again, even if it was woken while it ran, because its lease is
            # no longer held.
            elif step.key is not None:
                if step.successor is not None:
                    self._steps[step.key] = step.successor
                    self._push(step.successor)
                else:
                    del self._steps[step.key]
                    self._end_drains()

    def _start_task(self, task: ScheduleTask) -> None:
        try:
            self._scheduler.start(self._name, partial(self._serve, task), self._on_failure)
        except BaseException:
            with self._lock:
                self._tasks.discard(task)
                self._end_closes()
            raise

    def _start_or_report(self, task: ScheduleTask | None) -> None:
        if task is not None:
            try:
                self._start_task(task)
            except RuntimeError as error:
                self._on_failure(error)

    # The following methods are called with the lock.

    def _add_task(self) -> ScheduleTask:
        task = ScheduleTask(self._scheduler.queue())
        self._tasks.add(task)
        return task

    def _end_task(self, task: ScheduleTask) -> ScheduleTask | None:
        """Remove the task. Its step may need another task; return it if it must be started."""
        self._tasks.discard(task)
        self._idle_tasks.pop(task, None)
        if task.step is not None:
            self._push(task.step)
            task.step = None
        self._end_closes()
        return self._assign_task()

    def _wake(self, step: ScheduledStep) -> bool:
        """Make the step due now. Return whether it needs a task."""
        step.woken = True
        if step.running:
            return False
        step.due = -math.inf
        if step.task is not None:
            step.task.wakeups.put(True)
            return False
        self._push(step)
        return True

    def _push(self, step: ScheduledStep) -> None:
        """Make the step available to all tasks."""
        step.task = None
        heapq.heappush(self._due_heap, (step.due, next(self._push_numbers), step))

    def _first_step(self) -> ScheduledStep | None:
        """Return the step that is due first among those without a task."""
        due_heap = self._due_heap
        while due_heap:
            due, _, step = due_heap[0]
            # If a step was woken since, or has a task, its previous entry is still in the heap. Ignore it.
            if step.due == due and step.task is None and not step.running:
                return step
            heapq.heappop(due_heap)
        return None

    def _choose_step(self, task: ScheduleTask) -> None:
        step = self._first_step()
        if step is not None:
            heapq.heappop(self._due_heap)
            task.step, step.task = step, task

    def _assign_task(self) -> ScheduleTask | None:
        """If the first step without a task needs one, give it an idle task (rule 4), or return a task to be started."""
        step = self._first_step()
        if step is None or self._closed:
            return None
        task = max(self._idle_tasks, key=lambda idle_task: idle_task.due, default=None)
        if (task is None or task.step is not None) and len(self._tasks) < self._task_limit + self._abandoned_count:
            return self._add_task()
        if task is not None and step.due < task.due:
            given_up_step = task.step
            self._choose_step(task)
            if given_up_step is not None:
                self._push(given_up_step)
            task.wakeups.put(True)
        return None

    def _has_too_many_idle_tasks(self) -> bool:
        max_idle = self._task_limit if self._max_idle is None else self._max_idle
        return sum(idle_task.step is None for idle_task in self._idle_tasks) > max_idle

    def _end_drains(self) -> None:
        if all(step.abandoned for step in self._steps.values()):
            while self._drain_queues:
                self._drain_queues.pop().put(True)

    def _end_closes(self) -> None:
        if self._closed and not self._tasks:
            while self._close_queues:
                self._close_queues.pop().put(True)
