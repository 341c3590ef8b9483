"""Marks that name a record's producer and its number there, so that a reader can recognise a second copy.

A request without an answer may have been carried out, and must be sent again. A producer with an
epoch (a number of its own, new at each start) puts 20 bytes before every record; a reader takes
them off and asks `Seen`. Nothing of this is on by default.
"""

from collections import OrderedDict
from struct import Struct

from attrs import frozen

_MAGIC = b"lh\x00\x01"
_FORM = Struct(">4sQQ")

MARK_BYTES = _FORM.size
"""The bytes that a mark adds to a record."""

EPOCHS = 1 << 64
"""Epochs are below this."""


@frozen
class Mark:
    """The `counter`-th record of the producer that had this epoch."""

    epoch: int
    counter: int


def marked(data: bytes, mark: Mark) -> bytes:
    """The record with its mark."""
    return _FORM.pack(_MAGIC, mark.epoch, mark.counter) + data


def unmarked(data: bytes) -> tuple[Mark | None, bytes]:
    """The mark, or None if there is none, and the record as the producer's caller gave it."""
    if len(data) < MARK_BYTES or not data.startswith(_MAGIC):
        return None, data
    _, epoch, counter = _FORM.unpack_from(data)
    return Mark(epoch, counter), data[MARK_BYTES:]


class Seen:
    """The marks that a reader met lately."""

    def __init__(self, most: int = 1_000_000) -> None:
        """Remember this many; the copies of one record are seldom far apart."""
        self._most, self._marks = most, OrderedDict[Mark, None]()

    def again(self, mark: Mark) -> bool:
        """Whether this mark was met before; it is remembered from now on."""
        if mark in self._marks:
            return True
        self._marks[mark] = None
        if len(self._marks) > self._most:
            self._marks.popitem(last=False)
        return False
