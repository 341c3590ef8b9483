"""The memory that the batches of one worker may take, all its shards together, and the share of each reading."""

import math
from collections.abc import Callable
from threading import Lock

from leasehold.adapters.sources.protocol import Batch

PAGE_BYTES = 10 * 2**20
"""The largest answer of Kinesis, which a shard's first reading may bring."""

READING_FACTOR = 4
"""An answer takes at most so many times its payload while it is body and records; measured, in CBOR."""

RECORD_BYTES = 300
"""Bytes that a record takes beside its payload, at most; measured for plain and for aggregated records."""

LEAST_BYTES = 2**16


class MemoryBudget:
    """Bytes that the batches of one worker may take, all its shards together: a reading asks before it reads.

    First come, first served. A reading for which there is no memory waits in line and holds nothing, so that no two can
    wait for each other. Where nothing else is held, the first in line is let in whatever it asks for: a batch larger
    than the whole budget goes alone. A batch that waits for another attempt of its handler is dropped where others want
    its memory, the one that would wait longest first; its reading reads it again.

    most_bytes  for batches that are read and not done yet, and for the answers being read; no limit, if left out
    wake        called, from any thread, with the key of a reading that may read now

    All of the following is for the shares alone, under `lock`:
    taken       the bytes of each share that is let in
    used        their sum
    waiting     the bytes that others asked for, in the order in which they asked
    idle        when each batch that may be dropped is needed again
    """

    def __init__(self, most_bytes: float = math.inf, wake: Callable[[str], object] = lambda _key: None) -> None:
        self.most, self.wake, self.lock = most_bytes, wake, Lock()
        self.used = 0
        self.taken: dict[MemoryShare, int] = {}
        self.waiting: dict[MemoryShare, int] = {}
        self.idle: dict[MemoryShare, float] = {}

    def share(self, key: str) -> "MemoryShare":
        """The part of one reading."""
        return MemoryShare(self, key)

    def admit(self, *, but: "MemoryShare | None" = None) -> list[str]:
        """Let in who waits, as far as there is memory; the keys to wake once the lock is free, all but this one."""
        admitted: list[str] = []
        while self.waiting:
            share, size = next(iter(self.waiting.items()))
            while self.idle and self.taken and self.used + size > self.most:
                # The one whose next attempt is furthest off: its reading has the most time to read it again.
                last = max(self.idle, key=self.idle.__getitem__)
                last.drop()
                self.set(last, None)
            if self.taken and self.used + size > self.most:
                break  # nobody behind it is let in before it, or a large one would wait for ever
            del self.waiting[share]
            self.set(share, size)
            if share is not but:
                admitted.append(share.key)
        return admitted

    def set(self, share: "MemoryShare", size: int | None) -> None:
        """Set the bytes of a share; None where it has none any more."""
        self.used += (size or 0) - self.taken.pop(share, 0)
        if size is None:
            self.idle.pop(share, None)
        else:
            self.taken[share] = size


class MemoryShare:
    """The part of the budget that one reading has, with at most one batch in it.

    expected_bytes  asked for before a reading; it follows the size of the batches, and falls slowly
    batch           what is held
    dropped         whether a batch was dropped since the reading last took note of it
    """

    def __init__(self, budget: MemoryBudget, key: str) -> None:
        self.key, self._budget = key, budget
        self.batch: Batch | None = None
        self.dropped = False
        self.expected_bytes = READING_FACTOR * PAGE_BYTES

    def ask(self) -> bool:
        """Whether there is memory for the next reading, which may bring as much as those before it did.

        If not, it waits in line until it is let in, which wakes its reading, or leaves.
        """
        budget, size = self._budget, self.expected_bytes
        with budget.lock:
            if self not in budget.taken:  # behind whoever came before, however little this one wants
                budget.waiting.setdefault(self, size)
            admitted = budget.admit(but=self)
            mine = self in budget.taken
        for key in admitted:  # without the lock: a reading that is woken may ask at once
            budget.wake(key)
        return mine

    def hold(self, batch: Batch) -> None:
        """Hold this batch, which was read."""
        held, budget = batch.size + RECORD_BYTES * batch.count, self._budget
        # It falls by half at most: one small answer between large ones must not let the next large one in unasked.
        self.expected_bytes = max(held, READING_FACTOR * batch.size, self.expected_bytes // 2, LEAST_BYTES)
        self.batch = batch
        with budget.lock:
            # More than it asked for is taken all the same: the bytes are in memory already.
            budget.set(self, held)
            admitted = budget.admit() if budget.waiting else []
        for key in admitted:
            budget.wake(key)

    def idle(self, due: float) -> None:
        """Allow the batch to be dropped until it is taken up; it is not needed before `due`."""
        budget = self._budget
        with budget.lock:
            budget.idle[self] = due
            admitted = budget.admit()
        for key in admitted:
            budget.wake(key)

    def take_up(self) -> Batch | None:
        """The batch, if there is one, to be worked on now: it is not dropped any more."""
        budget = self._budget
        with budget.lock:
            budget.idle.pop(self, None)
        return self.batch

    def drop(self) -> None:
        """Drop the batch, because other readings need its memory: called by the budget."""
        self.dropped = True  # first: whoever finds no batch must know why
        self.batch = None

    def clear(self) -> None:
        """Free the memory: the batch is done, nothing was read, or the reading ends."""
        budget, self.batch = self._budget, None
        with budget.lock:
            budget.waiting.pop(self, None)
            budget.set(self, None)
            admitted = budget.admit() if budget.waiting else []
        for key in admitted:
            budget.wake(key)
