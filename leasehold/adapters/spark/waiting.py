"""When to stop waiting for shards that do not answer, where a call of Spark's may last long.

A query over what is there now waits for all its shards, and a batch that is repeated for its ranges.
"""

import os
import time
from collections.abc import Callable, Mapping

STUCK_SECONDS = 300.0
"""How long not one of the shards that are waited for may answer; longer where leases take longer to expire."""
EXPIRIES = 3.0
SHOWN = 5


class Waiting:
    """Watches a wait, from its first call on.

    lease_seconds  how long a dead worker's leases stand still before they are taken
    clock          monotonic seconds
    doing          what is done meanwhile, as the message begins
    """

    def __init__(
        self, lease_seconds: float, clock: Callable[[], float] = time.monotonic, doing: str = "availableNow"
    ) -> None:
        self._seconds, self._doing = max(STUCK_SECONDS, EXPIRIES * lease_seconds), doing
        self._clock = clock
        self._parent = os.getppid()
        self._seen: tuple[frozenset[str], int] | None = None
        self._since = 0.0

    def go_on(self, left: Mapping[str, str], answers: int) -> None:
        """Wait on for these shards, each with the reason, so many readings having been answered until now.

        Raises TimeoutError once nothing has changed for too long, and ProcessLookupError if the process
        that asked is gone: nobody would learn of a failure, and the leases would be kept for no one.
        """
        if os.getppid() != self._parent:
            raise ProcessLookupError("Spark's own process is gone: nobody waits for these shards any more")
        seen, now = (frozenset(left), answers), self._clock()
        if seen != self._seen:
            self._seen, self._since = seen, now
        elif now - self._since > self._seconds:
            raise TimeoutError(
                f"{self._doing}: nothing was heard for {self._seconds:g} s of {told(left)}; what was read before is "
                "in the sink: see why they cannot be read, and start the query again"
            )


def told(left: Mapping[str, str]) -> str:
    """Some of these shards, each with its reason."""
    shown = [f"{key} ({why})" for key, why in sorted(left.items())[:SHOWN]]
    more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
    return ", ".join(shown) + more
