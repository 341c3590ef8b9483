"""Decides how long records of one shard wait for further records before they are dispatched (`linger_seconds`).

1. The window opens when the first record is in memory. It closes after `linger_seconds`, or earlier if the batch is
   full, the shard ends, or other shards need the memory.
2. Once a batch has been dispatched, it does not wait for further records before a retry.
3. Waiting records are neither delivered nor acknowledged. If the lease moves or the worker stops, the records are left
   to the next owner, so a hand-off does not wait for the window.
"""

import math
from collections.abc import Callable

from attrs import evolve

from leasehold.adapters.sources.protocol import Batch

FULL_BYTES = 6 * 2**20
"""A batch of this size is full. Event source mappings of AWS Lambda have the same limit."""


class BatchWindow:
    """Decides how long the records of one shard wait for further records.

    Args:
        seconds: How long the first record of a batch waits for further records; 0 for no wait.
        max_records: The number of records in a full batch; None if only the size counts.
    """

    def __init__(self, seconds: float, max_records: int | None) -> None:
        self._seconds, self._full_count = seconds, math.inf if max_records is None else max_records
        self._closes_at: float | None = None

    @property
    def wait_reason(self) -> str:
        """The reason why records wait, as shown in the lease's status."""
        return f"its records wait up to {self._seconds:g} s for more (linger_seconds)"

    def closing_time(self, batch: Batch | None, count_waiting: Callable[[Batch], int], now: float) -> float:
        """Open the window if necessary. Return the time when it closes, or minus infinity if the records must not wait.

        Args:
            batch: The batch in memory, or None.
            count_waiting: Returns how many records of the batch are not done.
            now: The time by the worker's clock.
        """
        if not self._seconds or batch is None or not (waiting_count := count_waiting(batch)):
            return -math.inf
        if self._closes_at is None:
            self._closes_at = now + self._seconds
        is_full = batch.size >= FULL_BYTES or waiting_count >= self._full_count
        return -math.inf if is_full or batch.ended or now >= self._closes_at else self._closes_at

    def close(self) -> None:
        """Close the window, so that the records in memory are dispatched without waiting for more."""
        self._closes_at = -math.inf

    def renew(self) -> None:
        """Forget the current window. The next record opens a new one."""
        self._closes_at = None


def join_batches(earlier: Batch | None, later: Batch) -> Batch:
    """Return one batch with the records and the total size of both. Its other attributes are those of the later one."""
    if earlier is None:
        return later
    records = (*earlier.records, *later.records) if later.records else earlier.records
    return evolve(later, records=records, read_to=later.end or earlier.end, size=earlier.size + later.size)
