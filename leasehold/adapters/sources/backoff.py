"""The wait after a fault: decorrelated jitter; the caller does the waiting.

Nothing here sleeps: a shard that must wait gives its thread back. The libraries' retry loops wait
inside the call, where a few poisoned shards would hold every thread of the pool.
"""

import random
from collections.abc import Callable


class Backoff:
    """Waits that grow and do not keep step with anybody else's.

    least, most  seconds
    uniform      draws a number between two others
    """

    def __init__(self, least: float, most: float, uniform: Callable[[float, float], float] = random.uniform) -> None:
        self._least, self._most, self._uniform = least, most, uniform
        self._last = least
        self.faults = 0

    def next(self) -> float:
        """Seconds to wait after one more fault."""
        self.faults += 1
        self._last = min(self._most, self._uniform(self._least, 3 * self._last))
        return self._last

    def reset(self) -> None:
        """Start from the shortest wait again, after a success."""
        self._last, self.faults = self._least, 0
