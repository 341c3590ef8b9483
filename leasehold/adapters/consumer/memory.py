"""Limits the memory for the batches of one worker, over all its shards."""

import math
from collections.abc import Callable
from threading import Lock

from leasehold.adapters.sources.protocol import Batch

PAGE_BYTES = 10 * 2**20
"""The size of the largest response that Kinesis returns. The first read of a shard may be that large."""

PARSING_FACTOR = 4
"""The maximum memory for a response while it is parsed, as a multiple of its payload. The value was measured with
CBOR."""

RECORD_BYTES = 300
"""The maximum memory for a record in addition to its payload, in bytes. The value was measured for plain and aggregated
records."""

MIN_BYTES = 2**16


class MemoryBudget:
    """Limits the memory for the batches of one worker, over all its shards. Readers request memory before they read.

    Requests are served in order. A lease reader that waits for memory holds none, so two of them cannot wait for each
    other. If no memory is in use, the first request is granted whatever its size, so a batch that is larger than the
    whole budget can be held alone. If other readers need memory, batches that wait for another attempt of their handler
    are dropped, beginning with the batch whose attempt is due last. Dropped batches are read again by their lease
    readers.

    Args:
        most_bytes: The limit, in bytes, for batches that are not done yet together with responses that are being read.
        wake: Called, in any thread, with the key of a lease reader that may read now.

    Attributes:
        granted_bytes: The bytes of each share whose request was granted. Only `MemoryShare` may use this attribute
            and the following ones, and only while holding `lock`.
        used_bytes: The sum of `granted_bytes`.
        requested_bytes: The bytes that each waiting share has requested, in the order of the requests.
        droppable: The shares whose batch may be dropped, each with the time at which its batch is needed again.
    """

    def __init__(self, most_bytes: float = math.inf, wake: Callable[[str], object] = lambda _key: None) -> None:
        self.most_bytes, self.wake, self.lock = most_bytes, wake, Lock()
        self.used_bytes = 0
        self.granted_bytes: dict[MemoryShare, int] = {}
        self.requested_bytes: dict[MemoryShare, int] = {}
        self.droppable: dict[MemoryShare, float] = {}

    def share(self, key: str) -> "MemoryShare":
        """Return the share of the lease reader with this key."""
        return MemoryShare(self, key)

    def admit(self, *, excluded: "MemoryShare | None" = None) -> list[str]:
        """Grant the waiting requests, in order, for as long as there is memory.

        Returns the keys of the lease readers to wake once the lock is released, except that of `excluded`.
        """
        keys_to_wake: list[str] = []
        while self.requested_bytes:
            share, size = next(iter(self.requested_bytes.items()))
            while self.droppable and self.granted_bytes and self.used_bytes + size > self.most_bytes:
                # Drop the batch whose next attempt is due last, because that leaves the most time to read it again.
                latest_share = max(self.droppable, key=self.droppable.__getitem__)
                latest_share.drop()
                self.set(latest_share, None)
            if self.granted_bytes and self.used_bytes + size > self.most_bytes:
                break  # serve requests in order. Otherwise, a large one might wait forever.
            del self.requested_bytes[share]
            self.set(share, size)
            if share is not excluded:
                keys_to_wake.append(share.key)
        return keys_to_wake

    def set(self, share: "MemoryShare", size: int | None) -> None:
        """Set the bytes of a share. If `size` is None, free them."""
        self.used_bytes += (size or 0) - self.granted_bytes.pop(share, 0)
        if size is None:
            self.droppable.pop(share, None)
        else:
            self.granted_bytes[share] = size


class MemoryShare:
    """One lease reader's share of the budget, which holds at most one batch.

    Attributes:
        expected_bytes: The bytes to request before a read. The number depends on the sizes of previous batches, and
            decreases slowly.
        batch: The held batch, or None.
        dropped: Whether a batch was dropped. The lease reader resets this flag.
    """

    def __init__(self, budget: MemoryBudget, key: str) -> None:
        self.key, self._memory_budget = key, budget
        self.batch: Batch | None = None
        self.dropped = False
        self.expected_bytes = PARSING_FACTOR * PAGE_BYTES

    def request(self) -> bool:
        """Request memory for the next read, and return whether it is granted. Previous reads determine the amount.

        If the memory is not granted yet, the share waits in line, and its lease reader is woken once it is.
        """
        budget, size = self._memory_budget, self.expected_bytes
        with budget.lock:
            if self not in budget.granted_bytes:  # queue even a small request after earlier ones
                budget.requested_bytes.setdefault(self, size)
            keys_to_wake = budget.admit(excluded=self)
            is_granted = self in budget.granted_bytes
        for key in keys_to_wake:  # must not hold the lock, because a woken reader may call `request`
            budget.wake(key)
        return is_granted

    def request_more(self) -> bool:
        """Request memory for another read in addition to the held batch, and return whether it is granted.

        The request never waits, so two lease readers cannot wait for each other's batches.
        """
        budget = self._memory_budget
        with budget.lock:
            is_granted = not budget.requested_bytes and budget.used_bytes + self.expected_bytes <= budget.most_bytes
            if is_granted:
                budget.set(self, budget.granted_bytes[self] + self.expected_bytes)
        return is_granted

    def hold(self, batch: Batch) -> None:
        """Hold a batch that has just been read."""
        size, budget = batch.size + RECORD_BYTES * batch.count, self._memory_budget
        # Decrease the next request by at most half. Otherwise, it would be too small after one small response between
        # large ones.
        self.expected_bytes = max(size, PARSING_FACTOR * batch.size, self.expected_bytes // 2, MIN_BYTES)
        self.batch = batch
        with budget.lock:
            # Count the whole batch even if it is larger than requested, because it is already in memory.
            budget.set(self, size)
            keys_to_wake = budget.admit() if budget.requested_bytes else []
        for key in keys_to_wake:
            budget.wake(key)

    def allow_drop(self, due: float) -> None:
        """Allow the batch to be dropped until `protect` is called. The batch is not needed before `due`."""
        budget = self._memory_budget
        with budget.lock:
            budget.droppable[self] = due
            keys_to_wake = budget.admit()
        for key in keys_to_wake:
            budget.wake(key)

    def protect(self) -> Batch | None:
        """Return the batch, or None, and protect it from being dropped."""
        budget = self._memory_budget
        with budget.lock:
            budget.droppable.pop(self, None)
        return self.batch

    def drop(self) -> None:
        """Drop the batch, because other lease readers need its memory. Called by the budget."""
        self.dropped = True  # set this first, because a reader that finds no batch checks it
        self.batch = None

    def clear(self) -> None:
        """Free the memory after the batch was handled, after a read returned nothing, or when reading ends."""
        budget, self.batch = self._memory_budget, None
        with budget.lock:
            budget.requested_bytes.pop(self, None)
            budget.set(self, None)
            keys_to_wake = budget.admit() if budget.requested_bytes else []
        for key in keys_to_wake:
            budget.wake(key)
