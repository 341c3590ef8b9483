"""A heap of appointments, kept by a bounded pool of threads: a thousand shards need no thousand threads.

Rule 1: what stands under one key never runs twice at a time. Rule 2: a successor under the same key
begins only when its predecessor is over, so a lease lost and won again has one handler at work.
"""

import heapq
import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Condition, Thread

log = logging.getLogger("leasehold.appointments")

Step = Callable[[float], float]
"""Does one bounded piece of work at this time; answers when to be called again, infinity for never."""

FAULT_SECONDS = 5.0


class Appointments:
    """Steps that are called when they wish to be.

    threads  how many may run side by side
    clock    monotonic seconds
    """

    def __init__(self, threads: int, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._steps: dict[str, Step] = {}
        self._successors: dict[str, Step] = {}
        self._dues: dict[str, float] = {}  # of those that wait
        self._hurried: set[str] = set()  # of those that run
        self._heap: list[tuple[float, str]] = []
        self._changed = Condition()
        self._closed = False
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="leasehold-read")
        self._dispatcher = Thread(target=self._dispatch, name="leasehold-appointments", daemon=True)
        self._dispatcher.start()

    def add(self, key: str, step: Step) -> None:
        """Begin at once, or as soon as what stands under this key is over."""
        with self._changed:
            if key in self._steps:
                self._successors[key] = step
                self._hurry(key)
            else:
                self._steps[key] = step
                self._wait(key, -math.inf)

    def hurry(self, key: str) -> None:
        """Call this one again at once, or when it has finished running."""
        with self._changed:
            self._hurry(key)

    def drain(self, seconds: float | None = None) -> bool:
        """Wait until nothing is left; False if that took too long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._steps, seconds)

    def close(self) -> None:
        """Begin nothing more; what runs is waited for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._dispatcher.join()
        self._pool.shutdown()

    def _hurry(self, key: str) -> None:
        if key in self._dues:
            self._wait(key, -math.inf)
        elif key in self._steps:
            self._hurried.add(key)

    def _wait(self, key: str, due: float) -> None:
        self._dues[key] = due
        heapq.heappush(self._heap, (due, key))
        self._changed.notify_all()

    def _dispatch(self) -> None:
        with self._changed:
            while not self._closed:
                key = self._next()
                if key is None:
                    self._changed.wait(self._pause())
                else:
                    self._pool.submit(self._run, key, self._steps[key])

    def _next(self) -> str | None:
        """Take the first that is due off the heap; entries of appointments since moved are dropped."""
        while self._heap and self._heap[0][0] <= self._clock():
            due, key = heapq.heappop(self._heap)
            if self._dues.get(key) == due:
                del self._dues[key]
                return key
        return None

    def _pause(self) -> float | None:
        return max(0.0, self._heap[0][0] - self._clock()) if self._heap else None

    def _run(self, key: str, step: Step) -> None:
        due = self._call(key, step)
        with self._changed:
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
            self._changed.notify_all()

    def _call(self, key: str, step: Step) -> float:
        try:
            return step(self._clock())
        except Exception:
            log.exception("%s: unexpected fault, trying again in %g s", key, FAULT_SECONDS)
            return self._clock() + FAULT_SECONDS
