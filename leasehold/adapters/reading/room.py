"""Bytes that the batches of one worker may take, all its shards together: a reading asks for room before it reads.

Rule 1: first come, first served. A reading for which there is no room waits in line and holds nothing, so that no two
can wait for each other. Rule 2: where nothing else is held, the first in line is let in whatever it asks for: a batch
larger than all the room goes alone. Rule 3: a batch that waits for another attempt of its handler is forgotten where
others want its room, the one that would wait longest first; its reading reads it again.
"""

import math
from collections.abc import Callable, Collection, Iterable
from threading import Lock

from leasehold.adapters.sources.protocol import Batch

PAGE_BYTES = 10 * 2**20
"""The largest answer of Kinesis, which a shard's first reading may bring."""

READING_FACTOR = 4
"""An answer takes at most so many times its payload while it is body and records; measured, in CBOR."""

RECORD_BYTES = 300
"""Bytes that a record takes beside its payload, at most; measured for plain and for aggregated records."""

LEAST_BYTES = 2**16


class Room:
    """The memory for the batches of all readings of one worker.

    most_bytes  for batches that are read and not done yet, and for the answers being read; no limit, if left out
    wake        called, from any thread, with the key of a reading for which there is room now
    """

    def __init__(self, most_bytes: float = math.inf, wake: Callable[[str], object] = lambda _key: None) -> None:
        self._most, self._wake = most_bytes, wake
        self._lock = Lock()
        self._used = 0
        self._taken: dict[Slot, int] = {}
        self._waiting: dict[Slot, int] = {}  # in the order in which they asked
        self._spare: dict[Slot, float] = {}  # when their next attempts are due

    @property
    def used_bytes(self) -> int:
        """The bytes that are taken now."""
        return self._used

    @property
    def held(self) -> "Collection[Slot]":
        """The slots that have room now."""
        return tuple(self._taken)

    def slot(self, key: str) -> "Slot":
        """The part of one reading."""
        return Slot(self, key)

    def ask(self, slot: "Slot", size: int) -> bool:
        """Whether the slot has room for so many bytes; if not, it waits in line until it is admitted or leaves."""
        with self._lock:
            if slot not in self._taken:
                self._waiting.setdefault(slot, size)
            admitted = self._admit()
            mine = slot in self._taken
        self._tell(each for each in admitted if each is not slot)
        return mine

    def hold(self, slot: "Slot", size: int) -> None:
        """Set what the slot takes to so many bytes, more or less than it asked for."""
        with self._lock:
            self._take(slot, size)
            admitted = self._admit()
        self._tell(admitted)

    def leave(self, slot: "Slot") -> None:
        """Free what the slot takes, and its place in line."""
        with self._lock:
            self._waiting.pop(slot, None)
            self._free(slot)
            admitted = self._admit()
        self._tell(admitted)

    def spare(self, slot: "Slot", due: float) -> None:
        """Allow the slot's batch, which is not needed before `due`, to be forgotten until `resume`."""
        with self._lock:
            self._spare[slot] = due
            admitted = self._admit()
        self._tell(admitted)

    def resume(self, slot: "Slot") -> None:
        """Keep the slot's batch from now on, if it was not forgotten."""
        with self._lock:
            self._spare.pop(slot, None)

    def _admit(self) -> list["Slot"]:
        admitted: list[Slot] = []
        while self._waiting:
            slot, size = next(iter(self._waiting.items()))
            while self._spare and not self._fits(size):
                self._forget(max(self._spare, key=self._spare.__getitem__))
            if not self._fits(size):
                break
            del self._waiting[slot]
            self._take(slot, size)
            admitted.append(slot)
        return admitted

    def _fits(self, size: int) -> bool:
        return not self._taken or self._used + size <= self._most

    def _take(self, slot: "Slot", size: int) -> None:
        self._used += size - self._taken.get(slot, 0)
        self._taken[slot] = size

    def _free(self, slot: "Slot") -> None:
        self._spare.pop(slot, None)
        self._used -= self._taken.pop(slot, 0)

    def _forget(self, slot: "Slot") -> None:
        slot.forget()
        self._free(slot)

    def _tell(self, admitted: Iterable["Slot"]) -> None:
        # Without our lock: a reading that is woken may ask at once.
        for slot in admitted:
            self._wake(slot.key)


class Slot:
    """The part of the room that one reading has, with at most one batch in it.

    expected_bytes  asked for before a reading; it follows the size of the batches, and falls slowly
    """

    def __init__(self, room: Room, key: str) -> None:
        self.key = key
        self._room = room
        self._batch: Batch | None = None
        self._forgotten = False
        self.expected_bytes = READING_FACTOR * PAGE_BYTES

    def ask(self) -> bool:
        """Whether there is room for the next reading, which may bring as much as those before it did."""
        return self._room.ask(self, self.expected_bytes)

    def fill(self, batch: Batch) -> None:
        """Hold this batch, which was read."""
        self._batch = batch
        held = batch.size + RECORD_BYTES * batch.count
        self.expected_bytes = max(held, READING_FACTOR * batch.size, self.expected_bytes // 2, LEAST_BYTES)
        self._room.hold(self, held)

    def spare(self, due: float) -> None:
        """Allow the batch, if there is one, to be forgotten until it is taken up; it is not needed before `due`."""
        if self._batch is not None:
            self._room.spare(self, due)

    def take_up(self) -> Batch | None:
        """The batch, if there is one, to be worked on now."""
        self._room.resume(self)
        return self._batch

    def was_forgotten(self) -> bool:
        """Whether the batch was forgotten since this was last asked."""
        forgotten, self._forgotten = self._forgotten, False
        return forgotten

    def forget(self) -> None:
        """Forget the batch, because other readings need its room."""
        self._batch, self._forgotten = None, True

    def clear(self) -> None:
        """Free the room: the batch is done, nothing was read, or the reading ends."""
        self._batch = None
        self._room.leave(self)
