"""Reads one shard of Kinesis straight into columns, mostly without a Python object for each user record."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types

from adapters.kinesis.aggregation import deaggregate
from adapters.kinesis.aggregation_arrow import user_record_batch
from adapters.kinesis.poller import Poller
from adapters.kinesis.shards import children
from adapters.source import Batch
from adapters.spark.chunks import ArrowBatch
from adapters.spark.kinesis_rows import SCHEMA
from balancer.model import Position

if TYPE_CHECKING:  # the stubs are no dependency of a user
    from types_boto3_kinesis.type_defs import GetRecordsOutputTypeDef, RecordTypeDef

log = logging.getLogger("leasehold.spark")


class ArrowPoller(Poller):
    """A reader of one shard; asks as every other, and makes rows of the answers."""

    def _batch(self, answer: "GetRecordsOutputTypeDef") -> Batch:
        records = answer["Records"]
        self._iterator = answer.get("NextShardIterator") or None
        behind = answer.get("MillisBehindLatest") or 0
        if records:
            self._read = records[-1]["SequenceNumber"]
        return ArrowBatch(
            records=(),
            read_to=self._end(records[-1]) if records else None,
            behind_seconds=behind / 1000,
            wait_seconds=self._wait(idle=not records and not behind),
            ended=self._iterator is None,
            children=children(answer.get("ChildShards", ())),
            size=sum(len(record["Data"]) for record in records),
            rows=self._rows(records),
        )

    def _end(self, last: "RecordTypeDef") -> Position:
        # Records that were dropped count as seen, or a tail of nothing else could never be checkpointed.
        users = deaggregate(last["Data"], None, None, self._hash_range)
        return Position(last["SequenceNumber"], max(len(users) + users.dropped - 1, 0))

    def _rows(self, records: Sequence["RecordTypeDef"]) -> pa.RecordBatch:
        keys = [record.get("PartitionKey") for record in records]
        users = user_record_batch([record["Data"] for record in records], keys, self._hash_range)
        self._say_what_was_dropped(records, users)
        users = self._undone(records, users)
        place = users["record"]
        numbers = pa.array([record["SequenceNumber"] for record in records], pa.string())
        times = pa.array([_microseconds(record) for record in records], pa.timestamp("us", "UTC"))
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
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)

    def _undone(self, records: Sequence["RecordTypeDef"], users: pa.RecordBatch) -> pa.RecordBatch:
        """Without what lies before the start: the first record may be an aggregate that is half done."""
        if self._done is None or not users.num_rows:
            return users
        places, subs = users["record"].to_pylist(), users["sub_sequence_number"].to_pylist()
        orders = [int(record["SequenceNumber"]) for record in records]
        first = next(
            (row for row, (at, sub) in enumerate(zip(places, subs, strict=True)) if (1, orders[at], sub) > self._done),
            users.num_rows,
        )
        self._done = None if first < users.num_rows else self._done  # all that follows is later still
        return users.slice(first)

    def _say_what_was_dropped(self, records: Sequence["RecordTypeDef"], users: pa.RecordBatch) -> None:
        kept = np.zeros(len(records), bool)
        kept[np.asarray(users["record"])] = True
        for at in np.flatnonzero(~kept).tolist():
            found = deaggregate(records[at]["Data"], None, None, self._hash_range)
            log.warning(
                "shard %s: %d user records of %s dropped: %s",
                self._shard,
                found.dropped,
                records[at]["SequenceNumber"],
                found.reason,
            )


def _microseconds(record: "RecordTypeDef") -> int | None:
    arrived = record.get("ApproximateArrivalTimestamp")
    return None if arrived is None else round(arrived.timestamp() * 1e6)
