"""The throughput of one lease, measured as KCL 3.x does, so that Java and Python workers can compare leases."""

from threading import Lock

from leasehold.balancer.model import WEIGHT_MAX


class Throughput:
    """Bytes a second, as an exponential average with weight 0.5 per interval.

    interval  seconds between two updates of the average; KCL 3.x updates it each time it renews
    average   bytes a second to begin with: the last owner's, or None
    """

    def __init__(self, interval: float, average: int | None = None) -> None:
        self._interval = interval
        self._average: float | None = average
        self._bytes, self._began = 0, 0.0
        self._measuring = False
        self._lock = Lock()

    def add(self, size: int, now: float) -> None:
        """Count so many bytes read, perhaps none; the first call begins the first interval."""
        with self._lock:
            if not self._measuring:
                self._measuring, self._began = True, now
            self._bytes += size

    def rest(self, now: float) -> None:
        """Start the interval anew: reading was held up here, so the bytes read do not measure the shard."""
        with self._lock:
            self._bytes, self._began = 0, now

    def average(self, now: float) -> int | None:
        """Whole bytes a second as of the last update; None before the first if no earlier owner measured."""
        with self._lock:
            elapsed = now - self._began
            if self._measuring and elapsed >= self._interval:
                rate = self._bytes / elapsed
                keep = 0.0 if self._average is None else 0.5 ** (elapsed / self._interval)
                self._average = keep * (self._average or 0.0) + (1 - keep) * rate
                self._bytes, self._began = 0, now
            return None if self._average is None else min(round(self._average), WEIGHT_MAX)
