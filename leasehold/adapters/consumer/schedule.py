"""Calls functions when they are due, in a bounded number of tasks.

A schedule calls two kinds of functions. A *step* returns when it is to be called next, so a thousand shards do not need
a thousand threads. *Work* is called once, as soon as a task is free. A worker's turns, renewals and lease readers all
run on schedules.

There is no central task that dispatches steps. Each idle task chooses the step that is due first among those that no
other task has chosen, and sleeps until the step is due. So when a step becomes due, only the task that has chosen it
wakes up.

1. A step never runs twice at the same time.
2. If a step is added under a key that is already in use, its first call begins only after the previous step has
   returned infinity. So if a lease is lost and taken again, two handlers never run for it at the same time.
3. A step that raises an exception is called again after a pause, which grows with each consecutive fault.
4. A task is idle while it runs no step. Idle tasks have always chosen the steps that are due first. To keep this true,
   a step without a task that is added or woken gets a spare task, which is an idle task without a step, or else a new
   task. If no more tasks may be started, the step takes the idle task whose step is due last, but only if that one is
   due later than itself (`_assign_task`). So a step is late only if no task is idle, or if its task pauses after an
   error in the schedule itself (`FAULT_SECONDS`).
5. Steps that are late are called in the order in which they became due or were woken, so that a step which is always
   woken does not keep the others from being called.
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
"""How many seconds a task pauses after an error in the schedule itself."""
STEP_FAULT_WAITS = (1.0, 3.0, 6.0)
"""The pauses, in seconds, after a step has raised an exception once, twice, or more often in a row."""


def _call_nothing(_now: float) -> float:
    return math.inf


@define(eq=False)
class ScheduledStep:
    """A step or work on the schedule.

    Attributes:
        key: The key under which the step was added. None for work.
        step: The step to call.
        replace_after: Called after each fault with the number of consecutive faults. Returns a step that replaces this
            step permanently, or None.
        due: When to call the step.
        task: The task that waits until the step is due, or runs the step. None if no task has chosen the step.
        running: Whether the step is running.
        woken: Whether the step was woken since its last call began.
        faults: The number of consecutive calls that have raised an exception.
        abandoned: Whether a drain need not wait for the current call to end.
        successor: A step that was added under the same key, and begins once this step has returned infinity.
    """

    key: str | None
    step: Step
    due: float
    replace_after: Callable[[int], Step | None] | None = None
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
        wakeups: The queue on which the task waits. An item means that the task's step or the time when it is due may
            have changed, or that the task may have to end.
        step: The step that the task waits for or runs. None if no step needs the task.
    """

    wakeups: Queue
    step: ScheduledStep | None = None

    @property
    def due(self) -> float:
        """When the task's step is due, or infinity if the task has no step."""
        return math.inf if self.step is None else self.step.due


class Schedule:
    """Calls each step when it is due.

    Args:
        scheduler: Runs the tasks and provides the clock.
        task_limit: The maximum number of tasks. Each abandoned call raises it by one until that call ends. Each task is
            started when it is first needed.
        name: The name of the tasks.
        on_failure: Called with the exception if work raises, if a task cannot be started, or if the schedule itself
            raises. In the last two cases, some steps might never be called.
        max_idle: The maximum number of spare tasks to keep, which have no step. Further ones end. The default is
            `task_limit`.
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
        self._push_numbers = count()  # steps with the same due time are called in the order of their pushes
        # Ordered sets, because the order in which tasks are woken must not vary between two runs of the simulator.
        self._tasks: dict[ScheduleTask, None] = {}
        self._idle_tasks: dict[ScheduleTask, None] = {}
        self._abandoned_count = 0
        self._drain_queues: list[Queue] = []
        self._close_queues: list[Queue] = []
        self._closed = False

    def start(self) -> None:
        """Start the first task, so that steps are called even if no other task can be started.

        Raises RuntimeError if the task cannot be started.
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
        """Call this step for the first time at `due`, but not before the previous step under this key has ended.

        If another step already waits for the previous one to end, this step replaces it. The schedule must have been
        started with `start`.
        """
        scheduled_step = ScheduledStep(key, step, max(due, self._scheduler.clock()), replace_after)
        with self._lock:
            previous_step = self._steps.get(key)
            if previous_step is None:
                self._steps[key] = scheduled_step
                self._push(scheduled_step)
            else:
                previous_step.successor = scheduled_step
                self._wake(previous_step)  # the previous step may not be due for hours
            new_task = self._assign_task()
        self._start_or_report(new_task)

    def wake(self, key: str) -> None:
        """Call the step of this key immediately or, if it is running, again as soon as its current call ends.

        Signal handlers must not call this, because the thread that they interrupt may hold the lock.
        """
        with self._lock:
            step = self._steps.get(key)
            if step is None or not self._wake(step):
                return
            new_task = self._assign_task()
        self._start_or_report(new_task)

    def abandon(self, key: str) -> None:
        """Exclude the current call of this step, if any, from drains, and allow one more task until that call ends."""
        with self._lock:
            step = self._steps.get(key)
            if step is None or not step.running or step.abandoned:
                return
            step.abandoned = True
            self._abandoned_count += 1
            self._end_drains_if_done()
            new_task = self._assign_task()
        self._start_or_report(new_task)

    def drain(self, until: float = math.inf) -> bool:
        """Wait until only abandoned steps are left. Return False if any other steps are left at `until`.

        Steps that were added under the keys of abandoned steps are not waited for, either.
        """
        end_queue = self._scheduler.queue()
        with self._lock:
            self._drain_queues.append(end_queue)
            self._end_drains_if_done()
        return end_queue.get(until) is not None

    # Work that is called once

    def submit(self, work: Callable[[], None]) -> None:
        """Call this work, one time only, as soon as a task is free.

        If the schedule is closed, or has no task and cannot start one, call the work now, in the caller's task.
        """

        def run_once(_now: float) -> float:
            try:
                work()
            except self._scheduler.fatal:
                raise
            except BaseException as fault:  # noqa: BLE001  the task must continue to call steps
                self._on_failure(fault)
            return math.inf

        now = self._scheduler.clock()
        with self._lock:
            is_closed, new_task = self._closed, None
            if not is_closed:
                self._push(ScheduledStep(None, run_once, now))
                new_task = self._assign_task()
        if is_closed:
            run_once(now)
        self._start_or_report(new_task)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Apply the function to all items concurrently, and return the results in order.

        If any calls raise exceptions, the first exception is raised again once all calls have ended.
        """
        argument_list = list(items)
        if len(argument_list) <= 1:
            return [function(item) for item in argument_list]
        results: dict[int, R] = {}
        faults: list[BaseException] = []
        end_queue, pending_indices = self._scheduler.queue(), [*range(len(argument_list))]

        def apply(index: int) -> None:
            try:
                results[index] = function(argument_list[index])
            except BaseException as fault:  # noqa: BLE001  raised again in the caller of `map`
                faults.append(fault)
            pending_indices.pop()  # which item is removed does not matter: only the length is used
            if not pending_indices:
                end_queue.put(True)

        for index in range(len(argument_list)):
            self.submit(partial(apply, index))
        end_queue.get()
        if faults:
            raise faults[0]
        return [results[index] for index in range(len(argument_list))]

    def map_in_background(self, function: Callable[[T], object], items: Iterable[T]) -> tuple[()]:
        """Apply the function to each item in the background, and return an empty tuple in place of the results.

        This method does not wait for the calls, because a call may stall for a long time.
        """

        def apply_and_log(item: T) -> None:
            try:
                function(item)
            except BaseException as fault:  # noqa: BLE001  no caller waits for the result
                self._scheduler.log_unexpected(self._name, fault)

        for item in items:
            self.submit(partial(apply_and_log, item))
        return ()

    # The tasks

    def resize(self, task_limit: int) -> None:
        """Change the maximum number of tasks. Surplus tasks end after their current call, or when next woken."""
        with self._lock:
            self._task_limit = task_limit
            new_task = self._assign_task()
        self._start_or_report(new_task)

    def close(self, until: float = math.inf) -> bool:
        """Begin no more calls of steps, and wait for the running calls and for the work that was submitted before.

        That work is still done, because callers of `map` may wait for it. If an abandoned call is still running, this
        method does not wait.
        Return False if any tasks are still running at `until`.
        """
        end_queue = self._scheduler.queue()
        with self._lock:
            self._closed = True
            self._close_queues.append(end_queue)
            for task in self._tasks:
                if task.step is not None and not task.step.running and task.step.key is not None:
                    task.step = None
                task.wakeups.put(True)
            self._due_heap = [entry for entry in self._due_heap if entry[2].key is None]
            heapq.heapify(self._due_heap)
            self._end_closes_if_done()
            if self._abandoned_count:
                until = min(until, self._scheduler.clock())
        return end_queue.get(until) is not None

    def _serve(self, task: ScheduleTask) -> None:
        try:
            while self._call_next_step(task):
                pass
        except self._scheduler.fatal:
            raise  # the run of the simulator is over
        except BaseException:
            self._end_task(task)
            raise
        self._end_task(task)

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
            # Pause. Otherwise, an error that persists would keep a core busy.
            task.wakeups.get(self._scheduler.clock() + FAULT_SECONDS)
            return True
        return step is not None

    def _wait_for_step(self, task: ScheduleTask) -> ScheduledStep | None:
        """Choose a step for this task, and wait until it is due. Return None if the task is to end."""
        while True:
            with self._lock:
                if len(self._tasks) > self._task_limit + self._abandoned_count:
                    self._tasks.pop(task, None)  # at once, so that no other task ends because of the same surplus
                    return None
                self._idle_tasks[task] = None
                if task.step is None:
                    self._choose_step(task)
                step, due = task.step, task.due
                if step is None and (self._closed or self._has_too_many_spare_tasks()):
                    self._tasks.pop(task, None)
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
        """Record that the step has returned, and is due again at `due` or, if that is infinite, never."""
        now = self._scheduler.clock()
        with self._lock:
            if step.task is not None:
                step.task.step = None
            step.task, step.running, step.due = None, False, due
            if step.abandoned:
                step.abandoned = False
                self._abandoned_count -= 1
            if due < math.inf:
                if step.woken:  # the call may have missed why it was woken, so call the step again now
                    step.due = min(due, now)
                self._push(step)
            # A step that returned infinity is not called again, even if it was woken while it ran: its lease is no
            # longer held, or the worker takes no more leases.
            elif step.key is not None:
                step.step = _call_nothing  # an outdated entry of the heap must not keep the old step in memory
                if step.successor is not None:
                    self._steps[step.key] = step.successor
                    self._push(step.successor)
                else:
                    del self._steps[step.key]
                    self._end_drains_if_done()

    def _start_task(self, task: ScheduleTask) -> None:
        try:
            self._scheduler.start(self._name, partial(self._serve, task), self._on_failure)
        except BaseException:
            with self._lock:
                self._tasks.pop(task, None)
                self._end_closes_if_done()
            raise

    def _start_or_report(self, task: ScheduleTask | None) -> None:
        if task is None:
            return
        try:
            self._start_task(task)
        except RuntimeError as error:
            with self._lock:
                self._assign_task(may_start=False)
                # If no task is left, do all of the submitted work here, because no task would do it. This includes the
                # work of other callers, who may have relied on the task that could not be started.
                waiting_steps = [] if self._tasks else self._take_work()
            self._on_failure(error)
            for step in waiting_steps:
                step.step(step.due)  # work ignores its argument

    def _end_task(self, task: ScheduleTask) -> None:
        """Remove the task. Its step may get another task."""
        with self._lock:
            self._tasks.pop(task, None)
            self._idle_tasks.pop(task, None)
            if task.step is not None:
                self._push(task.step)
                task.step = None
            self._end_closes_if_done()
            new_task = self._assign_task()
        self._start_or_report(new_task)

    # The lock must be held when the following methods are called.

    def _add_task(self) -> ScheduleTask:
        task = ScheduleTask(self._scheduler.queue())
        self._tasks[task] = None
        return task

    def _take_work(self) -> list[ScheduledStep]:
        """Remove and return all work that has no task."""
        work = [step for _, _, step in self._due_heap if step.key is None]
        self._due_heap = [entry for entry in self._due_heap if entry[2].key is not None]
        heapq.heapify(self._due_heap)
        return work

    def _wake(self, step: ScheduledStep) -> bool:
        """Make the step due now or, if it is running, when its call ends. Return whether it needs a task."""
        step.woken = True
        if step.running:
            return False
        step.due = min(step.due, self._scheduler.clock())
        if step.task is not None:
            step.task.wakeups.put(True)
            return False
        self._push(step)
        return True

    def _push(self, step: ScheduledStep) -> None:
        """Make the step available to all tasks. If the schedule is closed, do so only for work."""
        step.task = None
        if self._closed and step.key is not None:
            return
        heapq.heappush(self._due_heap, (step.due, next(self._push_numbers), step))

    def _first_step(self) -> ScheduledStep | None:
        """Return the step that is due first among those without a task, or None if there is none."""
        due_heap = self._due_heap
        while due_heap:
            due, _, step = due_heap[0]
            # Drop entries that are out of date because the step was woken or chosen after they were pushed.
            if step.due == due and step.task is None:
                return step
            heapq.heappop(due_heap)
        return None

    def _choose_step(self, task: ScheduleTask) -> None:
        step = self._first_step()
        if step is not None:
            heapq.heappop(self._due_heap)
            task.step, step.task = step, task

    def _assign_task(self, *, may_start: bool = True) -> ScheduleTask | None:
        """Find a task for the first step that has none (rule 4). Return the task if it is new and must be started."""
        step = self._first_step()
        if step is None:
            return None
        task = max(self._idle_tasks, key=lambda idle_task: idle_task.due, default=None)
        no_task_is_spare = task is None or task.step is not None
        if may_start and no_task_is_spare and len(self._tasks) < self._task_limit + self._abandoned_count:
            return self._add_task()
        if task is not None and step.due < task.due:
            given_up_step = task.step
            self._choose_step(task)
            if given_up_step is not None:
                self._push(given_up_step)
            task.wakeups.put(True)
        return None

    def _has_too_many_spare_tasks(self) -> bool:
        max_idle = self._task_limit if self._max_idle is None else self._max_idle
        return sum(idle_task.step is None for idle_task in self._idle_tasks) > max_idle

    def _end_drains_if_done(self) -> None:
        if all(step.abandoned for step in self._steps.values()):
            while self._drain_queues:
                self._drain_queues.pop().put(True)

    def _end_closes_if_done(self) -> None:
        if self._closed and not self._tasks:
            while self._close_queues:
                self._close_queues.pop().put(True)
