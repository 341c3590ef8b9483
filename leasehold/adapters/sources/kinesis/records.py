"""The user records of an answer, kept as columns: an object for each is made when somebody takes it.

An answer may hold hundreds of thousands. Made all at once they would be most of what reading costs: in time, in
memory, and in work for the collector of garbage, which counts what is made and not freed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from operator import eq
from typing import Self, cast, overload

from leasehold.adapters.sources.protocol import Record

_made = cast("Callable[[type[Record], Iterable[object]], Record]", tuple.__new__)
"""A record of all its fields: `Record` itself takes twice as long, by its names and defaults."""


class KinesisRecords(Sequence[Record]):
    """User records in order, as columns of the same length; the names are those of `Record`.

    It equals any sequence of the same records. A slice of it is one of these again.
    """

    __slots__ = ("aggregated", "arrived", "datas", "hash_keys", "keys", "numbers", "subs")

    def __init__(self) -> None:
        """Begin empty."""
        self.datas: list[bytes] = []
        self.numbers: list[str] = []
        self.subs: list[int] = []
        self.keys: list[str | None] = []
        self.hash_keys: list[str | None] = []
        self.arrived: list[float | None] = []
        self.aggregated: list[bool] = []

    @classmethod
    def of(cls, records: Iterable[Record]) -> Self:
        """The same records as columns."""
        made = cls()
        rows = tuple(records)
        for column, values in zip(made._columns(), zip(*rows, strict=True), strict=False):
            column.extend(values)
        return made

    def __len__(self) -> int:
        return len(self.datas)

    @overload
    def __getitem__(self, at: int) -> Record: ...

    @overload
    def __getitem__(self, at: slice) -> Self: ...

    def __getitem__(self, at: int | slice) -> Record | Self:
        if isinstance(at, slice):
            part = type(self)()
            for name in self.__slots__:
                setattr(part, name, getattr(self, name)[at])
            return part
        return _made(Record, (*(column[at] for column in self._columns()), "", None))

    def __iter__(self) -> Iterator[Record]:
        # Nothing of it is a step of Python's own.
        return map(_made, repeat(Record), zip(*self._columns(), repeat(""), repeat(None)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"KinesisRecords({list(self)!r})"

    def _columns(self) -> tuple[list[object], ...]:
        columns = self.datas, self.numbers, self.subs, self.keys, self.hash_keys, self.arrived, self.aggregated
        return cast("tuple[list[object], ...]", columns)
