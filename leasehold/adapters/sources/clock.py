"""The one clock that leases are held by, and the dates that positions name."""

import time
from datetime import UTC, datetime

from leasehold.adapters.sources.protocol import SourceError
from leasehold.balancer.model import Position


def seconds() -> float:
    """Seconds that never go back, and go on while the machine is suspended where the system has such a clock.

    Other workers' clocks go on meanwhile, and they take what expires: after a suspension nothing may be handed over
    before a renewal has shown that it is still ours.
    """
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def datetime_of(position: Position) -> datetime:
    """The time of a position AT_TIMESTAMP. Raises SourceError for one that no calendar has: rows may say any."""
    try:
        return datetime.fromtimestamp(position.sub / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        raise SourceError(
            f"its checkpoint is AT_TIMESTAMP {position.sub} ms, which is no time; set it with `leasehold reset`"
        ) from None
