"""Reads one shard of Kinesis straight into columns, mostly without a Python object for each user record."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # likewise
from attrs import evolve

from leasehold.adapters.sources.deduplication import Note, Trail
from leasehold.adapters.sources.kinesis.aggregation.arrow import rows_and_others
from leasehold.adapters.sources.kinesis.aggregation.decode import UserRecords
from leasehold.adapters.sources.kinesis.arrow_rows import ARRIVED, SCHEMA
from leasehold.adapters.sources.kinesis.clients import MILLISECONDS
from leasehold.adapters.sources.kinesis.fan_out import FanOut
from leasehold.adapters.sources.kinesis.hash_keys import place_of
from leasehold.adapters.sources.kinesis.poller import Poller, columns_of
from leasehold.adapters.sources.kinesis.records import RowColumns, RowViews, check_shard, children
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.spark.rows import ArrowBatch
from leasehold.balancer.model import Position
from leasehold.stores.printable import escaped

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from types_boto3_kinesis.type_defs import GetRecordsOutputTypeDef, RecordTypeDef

log = escaped(logging.getLogger("leasehold.spark"))

NOTHING = pa.RecordBatch.from_pylist([], schema=SCHEMA)


def viewed_rows(stream: str, shard: str, views: RowViews) -> pa.RecordBatch:
    """Records without aggregates as columns, made without an object for each; Arrow copies them out of the answer."""
    count, body = len(views), pa.py_buffer(views.body)
    arrived = pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(views.arrived)])
    # Answers tell times in seconds or in milliseconds: the size of the number says which.
    in_milliseconds = pc.greater_equal(arrived, MILLISECONDS)
    micros = pc.multiply(arrived, pc.if_else(in_milliseconds, 1000, 1_000_000))
    columns = [
        _shown(views.datas, body, pa.binary()),
        pa.repeat(pa.scalar(stream), count),
        pa.repeat(pa.scalar(shard), count),
        _shown(views.keys, body, pa.string()),
        pa.nulls(count, pa.string()),
        _shown(views.numbers, body, pa.string()),
        pa.repeat(pa.scalar(0, pa.int64()), count),
        micros.cast(SCHEMA.field(ARRIVED).type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _shown(views: bytes, body: pa.Buffer, kind: pa.DataType) -> pa.Array:
    """The values that views show: bytes, or texts that are known to be texts."""
    count = len(views) >> 4
    found = pa.Array.from_buffers(pa.binary_view(), count, [None, pa.py_buffer(views), body]).cast(pa.binary())
    # Not a cast to text, which would look at every byte once more: that these are texts is known.
    return pa.Array.from_buffers(kind, count, found.buffers())


class ArrowPoller(Poller):
    """A reader of one shard; asks as every other, and makes rows of the answers."""

    def _batch(self, answer: "GetRecordsOutputTypeDef") -> Batch:
        told = cast("RowViews | RowColumns | list[RecordTypeDef]", answer["Records"])
        plain = self._done is None and not self._had
        if plain and not isinstance(told, list | RowColumns) and len(told) and not told.sealed:
            # Nothing is left out and nothing taken apart: columns are made of the answer as it lies there.
            made = viewed_rows(self._stream, self._shard, told)
            first, last = (made["sequenceNumber"][at].as_py() for at in (0, -1))
            return self._told(answer, made, Position(last), (first, last), made["data"].buffers()[2].size)
        if not len(told):  # as nearly all answers of a quiet stream: to make columns of nothing costs as much as to ask
            return self._told(answer, NOTHING, None, None, 0)
        rows = columns_of(told)
        if not rows.sealed:
            return super()._batch(cast("GetRecordsOutputTypeDef", {**answer, "Records": rows}))  # columns become rows
        # Counted before user records are taken out: the throughput of a lease is that of the shard.
        size, ends = sum(map(len, rows.datas)), (rows.numbers[0], rows.numbers[-1])
        made, end, trail = self._rows(rows)
        return evolve(self._told(answer, made, end, ends, size), trail=trail)

    def _told(
        self,
        answer: "GetRecordsOutputTypeDef",
        rows: pa.RecordBatch,
        read_to: Position | None,
        ends: tuple[str, str] | None,
        size: int,
    ) -> ArrowBatch:
        """The batch of these rows, made of records with numbers from the first to the last of `ends`."""
        following = children(answer.get("ChildShards", ()))
        check_shard(self._shard, None if ends is None else ends[0], following)
        self._iterator = answer.get("NextShardIterator") or None
        behind = answer.get("MillisBehindLatest") or 0
        if ends is not None:
            self._say_gap(ends[0])
            self._read = ends[1]
        return ArrowBatch(
            records=(),
            read_to=read_to and evolve(read_to, token=self._had.token),
            behind_seconds=behind / 1000,
            wait_seconds=self._wait(idle=ends is None and not behind, behind=behind > 0),
            ended=self._iterator is None,
            children=following,
            size=size,
            rows=rows,
            arrived=ARRIVED,
            token=self._had.token,
            undecided=self._had.undecided(),
        )

    def _rows(self, rows: RowColumns) -> tuple[pa.RecordBatch, Position, Trail | None]:
        """Make columns of records, and tell the position of the last one, be it dropped."""
        users, others = rows_and_others(rows.datas, rows.keys, self._hash_range, self._misplaced)
        last = others.get(len(rows) - 1)
        # Records that were dropped count as seen, or a tail of nothing else could never be checkpointed.
        sub = users["sub_sequence_number"][-1].as_py() if last is None else max(len(last) + last.dropped - 1, 0)
        end = Position(rows.numbers[-1], sub)
        for at, found in others.items():
            self._dropped.add(rows.numbers[at], found)
        users, trail = self._undone(rows.numbers, users), None
        # Rows that a sink of ours has written carry a tag, and only those can come a second time from a task that was
        # tried again.
        if self._had or any(found.tags for found in others.values()):
            users, trail = self._unrepeated(rows.numbers, users, others)
        place = users["record"]
        numbers = pa.array(rows.numbers, pa.string())
        times = pa.array(
            [None if arrived is None else round(arrived * 1e6) for arrived in rows.arrived], pa.timestamp("us", "UTC")
        )
        columns = [
            users["data"],
            pa.repeat(pa.scalar(self._stream), users.num_rows),
            pa.repeat(pa.scalar(self._shard), users.num_rows),
            users["partition_key"],
            users["explicit_hash_key"],
            numbers.take(place),
            users["sub_sequence_number"].cast(pa.int64()),
            times.take(place),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA), end, trail

    def _unrepeated(
        self, numbers: Sequence[str], users: pa.RecordBatch, others: Mapping[int, UserRecords]
    ) -> tuple[pa.RecordBatch, Trail]:
        """Drop rows of a Spark sink that came before; tell what the position of each other row carries along."""
        tags = {at: dict(zip(found.subs, found.tags, strict=True)) for at, found in others.items() if found.tags}
        # Copied: an answer that cannot be read through is asked for again, and must find things as they were.
        before, had = self._had, self._had.copy()
        kept, notes = list[bool](), list[tuple[Note, ...]]()
        names = "record", "sub_sequence_number", "partition_key", "explicit_hash_key"
        for at, sub, key, hash_key in zip(*(users[name].to_pylist() for name in names), strict=True):
            tag = tags[at][sub] if at in tags else None
            place = Position(numbers[at], sub)
            new = tag is None or not had.again(tag, partial(place_of, key, hash_key), place)
            kept.append(new)
            if new:
                notes.append(() if tag is None else ((tag, place),))
        self._had = had
        self._dropped.repeated(len(kept) - len(notes))
        return users.filter(pa.array(kept, pa.bool_())), Trail(before, notes)

    def _undone(self, numbers: Sequence[str], users: pa.RecordBatch) -> pa.RecordBatch:
        """Drop the rows before the start."""
        # Asked for at a record, the service begins with all of it, and it may be an aggregate that is half done.
        if self._done is None or not users.num_rows:
            return users
        places, subs = users["record"].to_pylist(), users["sub_sequence_number"].to_pylist()
        orders = [int(number) for number in numbers]
        first = next(
            (row for row, (at, sub) in enumerate(zip(places, subs, strict=True)) if (1, orders[at], sub) > self._done),
            users.num_rows,
        )
        self._done = None if first < users.num_rows else self._done  # all that follows is later
        return users.slice(first)


class ArrowFanOut(ArrowPoller, FanOut):
    """A reader of one shard by a subscription, which makes rows of the events.

    It is read only where the buffer has room: while that is full its thread holds two events, the connection fills, the
    service waits, and no subscription follows one that ends.
    """


class Probe(Poller):
    """A reader of one record at a time, to see what stands where."""

    most = 1
