"""Calls the step of each lease reader when it is due, in a bounded pool of tasks.

Every step returns when to call it next, so a thousand shards do not need a thousand threads.

1. A step never runs twice at the same time.
2. If a lease is lost and taken again, the new reader's first step begins only after the previous reader has ended, so
   that no two handlers run for one lease.
3. A step that raises an exception is called again after a pause, which grows with each consecutive fault.
"""

import heapq
import math
from collections.abc import Callable
from functools import partial
from typing import assert_never

from attrs import define, frozen

from leasehold.adapters.consumer.pool import Pool
from leasehold.adapters.worker.scheduler import Queue, Scheduler

Step = Callable[[float], float]
"""A function that does one bounded piece of work. It is called with the current time, and returns when to call it
again, or infinity for never."""

FAULT_SECONDS = 5.0
"""The pause after an error in the schedule's own task."""
STEP_FAULT_WAITS = (1.0, 3.0, 6.0)
"""The pauses, in seconds, after the first, second and later faults of a step."""


@define(eq=False)
class ScheduledStep:
    """A step on the schedule.

    Attributes:
        step: The step to call.
        replace_after: Called after each fault with the number of consecutive faults. Returns a step that replaces this
            step permanently, or None.
        due: When to call the step.
        running: Whether the step is running.
        woken: Whether the step was woken since its last call began.
        faults: How many times in a row the step has raised an exception.
        abandoned: Whether a drain need not wait for the current call to end.
        successor: The step that begins when this step never has to be called again.
    """

    step: Step
    replace_after: Callable[[int], Step | None] | None = None
    due: float = -math.inf
    running: bool = False
    woken: bool = False
    faults: int = 0
    abandoned: bool = False
    successor: "ScheduledStep | None" = None


@frozen
class StepAdded:
    """Call this step from now on."""

    key: str
    added: ScheduledStep


@frozen
class StepWoken:
    """Call the step of this key immediately, or as soon as its current call ends."""

    key: str


@frozen
class StepReturned:
    """The step of this key has returned and is due again at this time."""

    key: str
    due: float


@frozen
class StepAbandoned:
    """The step of this key waits for a call that may never return. A drain does not wait for it."""

    key: str


@frozen
class DrainRequested:
    """A caller waits for a message in the queue `drain_ended`, which is sent when no step is left."""

    drain_ended: Queue


@frozen
class Closed:
    """Begin no more steps."""


ScheduleMessage = StepAdded | StepWoken | StepReturned | StepAbandoned | DrainRequested | Closed


class Schedule:
    """Calls each step when it is due.

    One task (`_dispatch`) owns the state, and all others send it messages, so no locks are needed. If a step is woken
    while it runs, it is called again, whether the message arrives before or after the step's return.

    Args:
        task_count: How many steps may run at the same time.
        scheduler: Runs the tasks and provides the clock.
        on_failure: Called if no task can be started or if scheduling raises, because steps might then never be called.
    """

    def __init__(self, task_count: int, scheduler: Scheduler, on_failure: Callable[[BaseException], None]) -> None:
        """Raises RuntimeError if no task can be started."""
        self._scheduler, self._on_failure = scheduler, on_failure
        self._messages, self._dispatch_ended = scheduler.queue(), scheduler.queue()
        self._steps: dict[str, ScheduledStep] = {}
        self._due_heap: list[tuple[float, str]] = []
        self._drain_queues: list[Queue] = []
        self._closed = False
        self._task_count, self._abandoned_count = task_count, 0
        self._pool = Pool(scheduler, task_count, "leasehold-read", on_failure)
        scheduler.start("leasehold-schedule", self._dispatch, on_failure)

    def add(self, key: str, step: Step, replace_after: Callable[[int], Step | None] | None = None) -> None:
        """Begin this step immediately. If another step is registered under this key, begin once that step is over."""
        self._messages.put(StepAdded(key, ScheduledStep(step, replace_after)))

    def wake(self, key: str) -> None:
        """Call the step again immediately, or as soon as its current call ends."""
        self._messages.put(StepWoken(key))

    def abandon(self, key: str) -> None:
        """Stop waiting for the current call of this step, if any, and start a task to replace the blocked one."""
        self._messages.put(StepAbandoned(key))

    def drain(self, until: float = math.inf) -> bool:
        """Wait until only abandoned steps are left. Return False if others are left at the time `until`."""
        drain_ended = self._scheduler.queue()
        self._messages.put(DrainRequested(drain_ended))
        return drain_ended.get(until) is not None

    def close(self, until: float = math.inf) -> bool:
        """Stop calling steps. Return False if the running steps have not ended by `until`."""
        self._closed = True
        self._messages.put(Closed())
        dispatch_ended = self._dispatch_ended.get(until) is not None
        if self._abandoned_count:
            until = min(until, self._scheduler.clock())
        return self._pool.close(until) and dispatch_ended  # close the pool in any case

    def _dispatch(self) -> None:
        due_heap, clock, pause_until = self._due_heap, self._scheduler.clock, -math.inf
        while not self._closed:
            try:
                message = self._messages.get(max(pause_until, due_heap[0][0]) if due_heap else math.inf)
                if message is not None:
                    self._process_message(message)
                now = clock()
                while due_heap and max(due_heap[0][0], pause_until) <= now and not self._closed:
                    due, key = heapq.heappop(due_heap)
                    step = self._steps.get(key)
                    # If the due time of a step has changed, its previous entry is still in the heap. Ignore it.
                    if step is not None and step.due == due and not step.running:
                        self._pool.submit(partial(self._run, key, step))
                        # Mark the step as running only after `submit`. If `submit` raises, the step can be woken again.
                        step.running, step.woken = True, False
            except self._scheduler.fatal:
                raise
            except BaseException as fault:  # noqa: BLE001  no other task would call the steps, not even to release
                # Pause, because an error that persists would fill the log.
                pause_until = clock() + FAULT_SECONDS
                self._on_failure(fault)
        self._dispatch_ended.put(True)

    def _process_message(self, message: ScheduleMessage) -> None:
        match message:
            case StepReturned(key, due):
                step = self._steps[key]
                step.running = False
                if step.abandoned:
                    step.abandoned = False
                    self._add_tasks(-1)
                # A step that returned infinity is not called again, even if it was woken while it ran, because its
                # lease is no longer held.
                if due < math.inf:
                    # If the step was woken while it ran, it may have missed the reason, so call it again immediately.
                    step.due = -math.inf if step.woken else due
                    heapq.heappush(self._due_heap, (step.due, key))
                elif step.successor is not None:
                    self._steps[key] = step.successor
                    heapq.heappush(self._due_heap, (step.successor.due, key))
                else:
                    del self._steps[key]
            case StepWoken(key) | StepAdded(key):
                scheduled_step = self._steps.get(key)
                if isinstance(message, StepAdded):
                    if scheduled_step is None:
                        scheduled_step = self._steps[key] = message.added
                    else:
                        scheduled_step.successor = (
                            message.added
                        )  # the previous step may not be due for hours, so wake it
                if scheduled_step is not None:
                    scheduled_step.woken, scheduled_step.due = True, -math.inf
                    heapq.heappush(self._due_heap, (scheduled_step.due, key))
            case StepAbandoned(key):
                running_step = self._steps.get(key)
                if running_step is not None and running_step.running and not running_step.abandoned:
                    running_step.abandoned = True
                    self._add_tasks(1)
            case DrainRequested(drain_ended):
                self._drain_queues.append(drain_ended)
            case Closed():
                pass
            case _ as never:
                assert_never(never)
        if all(step.abandoned for step in self._steps.values()):
            # After every message, check whether a drain is complete, because the message may concern the last step that
            # a drain waits for.
            while self._drain_queues:
                self._drain_queues.pop().put(True)

    def _add_tasks(self, count: int) -> None:
        self._abandoned_count += count
        self._pool.resize(self._task_count + self._abandoned_count)

    def _run(self, key: str, scheduled_step: ScheduledStep) -> None:
        clock = self._scheduler.clock
        try:
            due, scheduled_step.faults = scheduled_step.step(clock()), 0
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
            self._messages.put(StepReturned(key, due))
            self._scheduler.log_unexpected(key, fault)
        else:
            self._messages.put(StepReturned(key, due))
