"""How fast one lease is read: KCL 3.x's own measure in its own unit, so that Java and we may compare leases by it."""

from threading import Lock

KB = 1024


class Throughput:
    """Bytes a second, averaged: what was half of the average an interval ago is a quarter of it now.

    interval  seconds between two foldings; KCL 3.x folds, with weight 0.5, each time it renews
    average   KB/s (1,024 bytes) to begin with: the last owner's, or None
    """

    def __init__(self, interval: float, average: float | None = None) -> None:
        self._interval, self._average = interval, average
        self._bytes, self._began = 0, 0.0
        self._measuring = False
        self._lock = Lock()

    def add(self, size: int, now: float) -> None:
        """So many bytes were read, perhaps none; the first call begins the first interval."""
        with self._lock:
            if not self._measuring:
                self._measuring, self._began = True, now
            self._bytes += size

    def rest(self, now: float) -> None:
        """Nothing may be read at present, which says nothing of how much there is: this interval does not count."""
        with self._lock:
            self._bytes, self._began = 0, now

    def average(self, now: float) -> float | None:
        """KB/s as of the last folding; None before the first, where nobody measured earlier."""
        with self._lock:
            elapsed = now - self._began
            if self._measuring and elapsed >= self._interval:
                rate = self._bytes / KB / elapsed
                keep = 0.0 if self._average is None else 0.5 ** (elapsed / self._interval)
                self._average = keep * (self._average or 0.0) + (1 - keep) * rate
                self._bytes, self._began = 0, now
            return self._average
