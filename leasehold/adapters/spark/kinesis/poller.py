"""Reads one Kinesis shard directly into Arrow columns, mostly without creating a Python object per user record."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # likewise
from attrs import evolve

from leasehold.adapters.sources.deduplication import NewRow, Trail
from leasehold.adapters.sources.kinesis.aggregation.arrow import split_rows_and_deaggregated
from leasehold.adapters.sources.kinesis.aggregation.decode import UserRecords
from leasehold.adapters.sources.kinesis.arrow_rows import ARRIVED, SCHEMA
from leasehold.adapters.sources.kinesis.clients import MILLISECONDS_FROM
from leasehold.adapters.sources.kinesis.fan_out import FanOut
from leasehold.adapters.sources.kinesis.hash_keys import find_hash_key
from leasehold.adapters.sources.kinesis.poller import Poller, convert_to_columns
from leasehold.adapters.sources.kinesis.records import RowColumns, RowViews, check_shard_is_ours, convert_child_shards
from leasehold.adapters.sources.protocol import Batch
from leasehold.adapters.spark.rows import ArrowBatch
from leasehold.balancer.model import Position
from leasehold.stores.printable import make_safe_logger

if TYPE_CHECKING:  # the stubs are not installed with the package
    from types_boto3_kinesis.type_defs import GetRecordsOutputTypeDef, RecordTypeDef

log = make_safe_logger(logging.getLogger("leasehold.spark"))

EMPTY_ROWS = pa.RecordBatch.from_pylist([], schema=SCHEMA)


def make_rows_from_views(stream: str, shard: str, views: RowViews) -> pa.RecordBatch:
    """Return the rows of records without aggregates. Arrow copies the values out of the response."""
    count, body = len(views), pa.py_buffer(views.body)
    arrival_times = pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(views.arrived)])
    # The times in a response are in seconds or in milliseconds. The magnitude of the number shows which unit is used.
    are_milliseconds = pc.greater_equal(arrival_times, MILLISECONDS_FROM)
    arrival_micros = pc.multiply(arrival_times, pc.if_else(are_milliseconds, 1000, 1_000_000))
    columns = [
        _make_binary_array(views.payloads, body, pa.binary()),
        pa.repeat(pa.scalar(stream), count),
        pa.repeat(pa.scalar(shard), count),
        _make_binary_array(views.keys, body, pa.string()),
        pa.nulls(count, pa.string()),
        _make_binary_array(views.numbers, body, pa.string()),
        pa.repeat(pa.scalar(0, pa.int64()), count),
        arrival_micros.cast(SCHEMA.field(ARRIVED).type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _make_binary_array(views: bytes, body: pa.Buffer, arrow_type: pa.DataType) -> pa.Array:
    """Return an array of the values to which the views point.

    The values are bytes, or strings that are known to be valid UTF-8.
    """
    count = len(views) >> 4
    binary_array = pa.Array.from_buffers(pa.binary_view(), count, [None, pa.py_buffer(views), body]).cast(pa.binary())
    # Do not cast to strings, because a cast would check every byte again, although the strings are known to be valid.
    return pa.Array.from_buffers(arrow_type, count, binary_array.buffers())


class ArrowPoller(Poller):
    """Reads one shard, and converts the responses to Arrow rows."""

    def _make_batch(self, response: "GetRecordsOutputTypeDef") -> Batch:
        records = cast("RowViews | RowColumns | list[RecordTypeDef]", response["Records"])
        is_unfiltered = self._skip_through is None and not self._seen
        if is_unfiltered and not isinstance(records, list | RowColumns) and len(records) and not records.has_aggregates:
            # No record has to be dropped or de-aggregated, so convert the response directly.
            batch = make_rows_from_views(self._stream, self._shard, records)
            first_number, last_number = (batch["sequenceNumber"][index].as_py() for index in (0, -1))
            return self._arrow_batch(
                response, batch, Position(last_number), (first_number, last_number), batch["data"].buffers()[2].size
            )
        # Handle empty responses separately, because a quiet stream returns many, and creating empty columns is
        # expensive.
        if not len(records):
            return self._arrow_batch(response, EMPTY_ROWS, None, None, 0)
        rows = convert_to_columns(records)
        if not rows.has_aggregates:
            return super()._make_batch(
                cast("GetRecordsOutputTypeDef", {**response, "Records": rows})
            )  # the inherited method converts the columns to rows
        # Measure the size before de-aggregation, because the throughput of a lease is the throughput of its shard.
        byte_count, first_and_last_number = sum(map(len, rows.payloads)), (rows.numbers[0], rows.numbers[-1])
        batch, end_position, trail = self._make_rows(rows)
        return evolve(self._arrow_batch(response, batch, end_position, first_and_last_number, byte_count), trail=trail)

    def _arrow_batch(
        self,
        response: "GetRecordsOutputTypeDef",
        rows: pa.RecordBatch,
        read_to: Position | None,
        first_and_last_number: tuple[str, str] | None,
        byte_count: int,
    ) -> ArrowBatch:
        """Return a batch of these rows.

        `first_and_last_number` contains the sequence numbers of the first and the last record.
        """
        child_shards = convert_child_shards(response.get("ChildShards", ()))
        check_shard_is_ours(
            self._shard, None if first_and_last_number is None else first_and_last_number[0], child_shards
        )
        self._iterator = response.get("NextShardIterator") or None
        behind_ms = response.get("MillisBehindLatest") or 0
        if first_and_last_number is not None:
            self._log_gap(first_and_last_number[0])
            self._last_read = first_and_last_number[1]
        return ArrowBatch(
            records=(),
            read_to=read_to and evolve(read_to, token=self._seen.token),
            behind_seconds=behind_ms / 1000,
            wait_seconds=self._pause(idle=first_and_last_number is None and not behind_ms, behind=behind_ms > 0),
            ended=self._iterator is None,
            children=child_shards,
            size=byte_count,
            rows=rows,
            arrived=ARRIVED,
            token=self._seen.token,
            possible_duplicates=self._seen.take_possible_duplicates(),
        )

    def _make_rows(self, rows: RowColumns) -> tuple[pa.RecordBatch, Position, Trail | None]:
        """Return the columns of records, and the position of the last record, even if that record was dropped."""
        user_rows, user_records_by_index = split_rows_and_deaggregated(
            rows.payloads, rows.keys, self._hash_range, self._misplaced
        )
        last_aggregate = user_records_by_index.get(len(rows) - 1)
        # Include dropped records in the position. Otherwise, the checkpoint could never pass dropped records at the end
        # of a response.
        last_sub = (
            user_rows["sub_sequence_number"][-1].as_py()
            if last_aggregate is None
            else max(len(last_aggregate) + last_aggregate.dropped - 1, 0)
        )
        end_position = Position(rows.numbers[-1], last_sub)
        for index, records in user_records_by_index.items():
            self._dropped.count_dropped(rows.numbers[index], records)
        user_rows, trail = self._drop_before_start(rows.numbers, user_rows), None
        # Rows from our Spark sink have tags, and may be duplicates, because Spark may run a task again.
        if self._seen or any(records.tags for records in user_records_by_index.values()):
            user_rows, trail = self._drop_duplicates(rows.numbers, user_rows, user_records_by_index)
        record_indices = user_rows["record"]
        sequence_numbers = pa.array(rows.numbers, pa.string())
        arrival_times = pa.array(
            [None if arrival_time is None else round(arrival_time * 1e6) for arrival_time in rows.arrived],
            pa.timestamp("us", "UTC"),
        )
        columns = [
            user_rows["data"],
            pa.repeat(pa.scalar(self._stream), user_rows.num_rows),
            pa.repeat(pa.scalar(self._shard), user_rows.num_rows),
            user_rows["partition_key"],
            user_rows["explicit_hash_key"],
            sequence_numbers.take(record_indices),
            user_rows["sub_sequence_number"].cast(pa.int64()),
            arrival_times.take(record_indices),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA), end_position, trail

    def _drop_duplicates(
        self,
        sequence_numbers: Sequence[str],
        user_rows: pa.RecordBatch,
        user_records_by_index: Mapping[int, UserRecords],
    ) -> tuple[pa.RecordBatch, Trail]:
        """Drop rows that a Spark sink wrote twice.

        Return the rows that are not duplicates, and the deduplication state at the position of each row.
        """
        tags = {
            index: dict(zip(records.subs, records.tags, strict=True))
            for index, records in user_records_by_index.items()
            if records.tags
        }
        # Copy the deduplication state. If a response cannot be decoded, it is requested again and must be checked
        # against the unchanged state.
        previous_state, deduplication = self._seen, self._seen.copy()
        is_new_by_row, new_rows = list[bool](), list[tuple[NewRow, ...]]()
        column_names = "record", "sub_sequence_number", "partition_key", "explicit_hash_key"
        for index, sub, key, hash_key in zip(*(user_rows[name].to_pylist() for name in column_names), strict=True):
            tag = tags[index][sub] if index in tags else None
            position = Position(sequence_numbers[index], sub)
            is_new_row = tag is None or not deduplication.check_duplicate(
                tag, partial(find_hash_key, key, hash_key), position
            )
            is_new_by_row.append(is_new_row)
            if is_new_row:
                new_rows.append(() if tag is None else ((tag, position),))
        self._seen = deduplication
        self._dropped.count_duplicates(len(is_new_by_row) - len(new_rows))
        return user_rows.filter(pa.array(is_new_by_row, pa.bool_())), Trail(previous_state, new_rows)

    def _drop_before_start(self, sequence_numbers: Sequence[str], user_rows: pa.RecordBatch) -> pa.RecordBatch:
        """Drop the rows before the start position."""
        # The service returns only whole records, so the first record may be an aggregate whose first user records have
        # already been processed.
        if self._skip_through is None or not user_rows.num_rows:
            return user_rows
        indices, subs = user_rows["record"].to_pylist(), user_rows["sub_sequence_number"].to_pylist()
        sequence_values = [int(number) for number in sequence_numbers]
        first_row = next(
            (
                row
                for row, (index, sub) in enumerate(zip(indices, subs, strict=True))
                if (1, sequence_values[index], sub) > self._skip_through
            ),
            user_rows.num_rows,
        )
        if first_row < user_rows.num_rows:
            self._skip_through = None  # no later row lies before the start
        return user_rows.slice(first_row)


class ArrowFanOut(ArrowPoller, FanOut):
    """Subscribes to one shard, and converts the events that the service pushes to Arrow rows.

    The subscription is read only while the buffer has room. While the buffer is full, the reader's thread holds at most
    two events and stops reading from the connection, so the service waits. A subscription that ends while the buffer is
    full is not renewed.
    """


class SingleRecordPoller(Poller):
    """Polls one record at a time, to look up positions."""

    most = 1
