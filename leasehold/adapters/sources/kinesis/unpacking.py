"""User records made of the rows of an answer, aggregates taken apart."""

import logging
from bisect import bisect
from collections import Counter
from itertools import groupby
from operator import itemgetter
from types import NoneType
from typing import TYPE_CHECKING

from leasehold.adapters.sources.kinesis.aggregation.decode import (
    MAGIC,
    Misplaced,
    Reason,
    UserRecords,
    deaggregate,
    kept_whole,
)
from leasehold.adapters.sources.kinesis.clients import MILLISECONDS, seconds_of
from leasehold.adapters.sources.kinesis.records import KinesisRecords, RecordColumns, RecordsPart
from leasehold.adapters.sources.kinesis.wire.columns import RowColumns
from leasehold.balancer.model import HashRange
from leasehold.stores.printable import escaped

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from types_boto3_kinesis.type_defs import RecordTypeDef

    from leasehold.adapters.sources.kinesis.wire.views import RowViews  # it wants librt

log = escaped(logging.getLogger("leasehold.kinesis"))

_DATA, _NUMBER = itemgetter("Data"), itemgetter("SequenceNumber")


class Dropped:
    """The user records of one shard that were left out: each cause is said at the first, and counted until the end."""

    def __init__(self, shard: str) -> None:
        self._shard = shard
        self._counts, self._said = Counter[Reason](), Counter[Reason]()

    def add(self, number: str, users: UserRecords) -> None:
        """Count those of this Kinesis record."""
        if not users.dropped:
            return
        self._counts[users.reason] += users.dropped
        if users.reason not in self._said:
            self._said[users.reason] = users.dropped
            text = "shard %s: %d user records of %s dropped: %s%s; more are counted until its reading ends"
            log.warning(text, self._shard, users.dropped, number, users.reason, _WHY.get(users.reason, ""))

    def close(self) -> None:
        """Say how many there were, where not all were said."""
        for reason, count in (self._counts - self._said).items():
            log.warning("shard %s: %d more user records dropped: %s", self._shard, count, reason)
        self._said = self._counts.copy()


_WHY = {Reason.OUT_OF_RANGE: ", their aggregate came to another shard than theirs"}


class Unpacking:
    """The user records of an answer.

    misplaced  what becomes of aggregates with records outside the hash range
    dropped    counts what is left out
    done     the order of a position: records up to it are left out; None: from here on all of them come later
    records  all others, in order
    size     payload bytes of the rows
    subs     user records of the last row, those left out included
    """

    def __init__(
        self,
        hash_range: HashRange | None,
        done: tuple[int, int, int] | None,
        *,
        misplaced: Misplaced,
        dropped: Dropped,
    ) -> None:
        self._hash_range, self._misplaced, self._dropped = hash_range, misplaced, dropped
        self.done = done
        self._parts: list[RecordsPart] = []
        self.size = self.subs = 0

    @property
    def records(self) -> KinesisRecords:
        """All others."""
        return KinesisRecords(self._parts)

    def take(self, told: "RowViews | RowColumns | list[RecordTypeDef]") -> None:
        """Unpack all rows, which are gone afterwards."""
        rows = columns_of(told)
        self.size += sum(map(len, rows.datas))
        if self.done is None and not rows.sealed:
            self._take_plain(rows, 0, len(rows))
            return
        for aggregates, run in groupby(range(len(rows)), lambda at: rows.datas[at].startswith(MAGIC)):
            if aggregates or self.done is not None:
                for at in run:
                    self._take_apart(rows, at)
            else:
                places = [*run]
                self._take_plain(rows, places[0], places[-1] + 1)

    def _take_plain(self, rows: RowColumns, begin: int, end: int) -> None:
        records, count = self._columns(), end - begin
        records.datas += rows.datas[begin:end]
        records.numbers += rows.numbers[begin:end]
        records.subs += [0] * count
        records.keys += rows.keys[begin:end]
        records.hash_keys += [None] * count
        records.arrived += [
            told / 1000 if type(told) is int and told >= MILLISECONDS else seconds_of(told)
            for told in rows.arrived[begin:end]
        ]
        records.aggregated += [False] * count
        self.subs = min(count, 1)

    def _take_apart(self, rows: RowColumns, at: int) -> None:
        data, number, arrived = rows.datas[at], rows.numbers[at], seconds_of(rows.arrived[at])
        rows.datas[at] = b""
        whole = kept_whole(data, number, arrived, self._hash_range) if self.done is None else None
        if whole is not None:
            self._parts.append(whole)
            self.subs = len(whole)
            return
        users = deaggregate(data, rows.keys[at], None, self._hash_range, misplaced=self._misplaced)
        self._dropped.add(number, users)
        self._add(number, arrived, users, self._first(number, users))
        self.subs = len(users) + users.dropped

    def _add(self, number: str, arrived: float | None, users: UserRecords, first: int) -> None:
        records, count = self._columns(), len(users) - first
        records.datas += users.datas[first:] if first else users.datas
        records.numbers += [number] * count
        records.subs += users.subs[first:]
        records.keys += users.keys[first:] if first else users.keys
        records.hash_keys += users.hash_keys[first:] if first else users.hash_keys
        records.arrived += [arrived] * count
        records.aggregated += [users.aggregated] * count

    def _columns(self) -> RecordColumns:
        """The last part, if it is columns, or a new one."""
        if not self._parts or not isinstance(last := self._parts[-1], RecordColumns):
            self._parts.append(last := RecordColumns())
        return last

    def _first(self, sequence: str, users: UserRecords) -> int:
        """The first user record that is not done; once there is one, all that follows is later still."""
        if self.done is None:
            return 0
        number = int(sequence)
        first = bisect(users.subs, self.done, key=lambda sub: (1, number, sub))
        self.done = None if first < len(users) else self.done
        return first


def columns_of(rows: "RowViews | RowColumns | list[RecordTypeDef]") -> RowColumns:
    """The rows of an answer as columns; what they were is gone.

    Raises TypeError if a sequence number or a partition key is no text; what else a number is, is asked of the last.
    """
    if isinstance(rows, RowColumns):
        return rows
    if not isinstance(rows, list):
        made = rows.columns()
        rows.clear()
        return made
    told = RowColumns()
    told.datas += map(_DATA, rows)
    told.numbers += map(_NUMBER, rows)
    "".join(told.numbers)  # the quickest way to ask
    told.keys += [row.get("PartitionKey") for row in rows]
    if not {str, NoneType}.issuperset(map(type, told.keys)):
        raise TypeError("a record has a partition key that is no text")
    told.arrived += [row.get("ApproximateArrivalTimestamp") for row in rows]
    told.sealed = any(data.startswith(MAGIC) for data in told.datas)
    rows.clear()
    return told
