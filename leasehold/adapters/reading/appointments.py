"""A heap of appointments, kept by a bounded pool of tasks: a thousand shards need no thousand threads.

Rule 1: a step never runs twice at a time. Rule 2: a successor under the same key begins only when its
predecessor is over, so a lease that was lost and taken again has one handler at work.
"""

import heapq
import math
from collections.abc import Callable
from functools import partial
from threading import Lock

from leasehold.adapters.worker.scheduler import Pool, Scheduler, Signal

Step = Callable[[float], float]
"""Does one bounded piece of work at this time; returns when to be called again, infinity for never."""

FAULT_SECONDS = 5.0


class Appointments:
    """A schedule of steps, each called when it is due.

    tasks      how many may run side by side
    scheduler  runs them, and tells the time
    failed     told when no task can be had, or dispatching raised: steps may wait for ever then
    """

    def __init__(self, tasks: int, scheduler: Scheduler, failed: Callable[[BaseException], None]) -> None:
        """Raises RuntimeError if not one task can be had."""
        self._scheduler, self._failed = scheduler, failed
        self._steps: dict[str, Step] = {}
        self._successors: dict[str, Step] = {}
        self._dues: dict[str, float] = {}  # of those that wait
        self._hurried: set[str] = set()  # of those that run
        self._heap: list[tuple[float, str]] = []
        self._lock = Lock()
        self._changed, self._emptied, self._over = Signal(scheduler), Signal(scheduler), Signal(scheduler)
        self._closed = False
        self._pool = Pool(scheduler, tasks, "leasehold-read", failed)
        scheduler.start("leasehold-appointments", self._dispatch, failed)

    def add(self, key: str, step: Step) -> None:
        """Begin this step at once, or as soon as the step under the same key is over."""
        with self._lock:
            if key in self._steps:
                self._successors[key] = step
                self._hurry(key)
            else:
                self._steps[key] = step
                self._wait(key, -math.inf)

    def hurry(self, key: str) -> None:
        """Call the step again at once, or when it has finished running."""
        with self._lock:
            self._hurry(key)

    def drain(self, until: float = math.inf) -> bool:
        """Wait until nothing is left; False if that took too long."""
        while self._steps:
            if not self._emptied.wait(until) and self._steps:
                return False
        return True

    def close(self, until: float = math.inf) -> bool:
        """Begin nothing more; False if what runs is not over by then."""
        self._closed = True
        self._changed.set()
        over = self._over.wait(until)
        return self._pool.close(until) and over  # its tasks are to end even if that is later

    def _hurry(self, key: str) -> None:
        if key in self._dues:
            self._wait(key, -math.inf)
        elif key in self._steps:
            self._hurried.add(key)

    def _wait(self, key: str, due: float) -> None:
        self._dues[key] = due
        heapq.heappush(self._heap, (due, key))
        self._changed.set()

    def _dispatch(self) -> None:
        while not self._closed:
            try:
                self._changed.wait(self._begin_due())
            except BaseException as fault:  # noqa: BLE001  nobody else would call the steps, those that leave included
                self._failed(fault)
                self._changed.wait(self._scheduler.clock() + FAULT_SECONDS)
        self._over.set()

    def _begin_due(self) -> float:
        """Begin what is due; when something else will be."""
        while True:
            with self._lock:
                key = self._next()
                if key is None:
                    return self._heap[0][0] if self._heap else math.inf
                step = self._steps[key]
            self._pool.submit(partial(self._run, key, step))

    def _next(self) -> str | None:
        """Take the first that is due off the heap; entries of appointments since moved are dropped."""
        while self._heap and self._heap[0][0] <= self._scheduler.clock():
            due, key = heapq.heappop(self._heap)
            if self._dues.get(key) == due:
                del self._dues[key]
                return key
        return None

    def _run(self, key: str, step: Step) -> None:
        due = self._call(key, step)
        with self._lock:
            hurried = key in self._hurried
            self._hurried.discard(key)
            if due < math.inf:
                self._wait(key, -math.inf if hurried else due)
                return
            del self._steps[key]
            successor = self._successors.pop(key, None)
            if successor is not None:
                self._steps[key] = successor
                self._wait(key, -math.inf)
            if not self._steps:
                self._emptied.set()

    def _call(self, key: str, step: Step) -> float:
        try:
            return step(self._scheduler.clock())
        except BaseException as fault:  # noqa: BLE001  whatever it is, the shard must not stay unread
            self._scheduler.unforeseen(key, fault)
            return self._scheduler.clock() + FAULT_SECONDS
