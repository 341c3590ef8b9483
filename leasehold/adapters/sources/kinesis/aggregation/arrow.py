"""Converts the user records of many Kinesis records into Arrow columns, mostly without creating an object for each.

If an aggregate has the form that producers usually write, we only locate its user records, and Arrow copies their data
directly from the Kinesis record. All other records go through `deaggregate`.

Apart from checking digests, most of the time is spent on copying bytes, so each byte is copied only once. Checking half
of the digests in a second thread had no measurable benefit, and a Spark task has no spare core.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain
from struct import iter_unpack

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # it ships no types

from leasehold.adapters.sources.kinesis.aggregation.decode import MAGIC, Misplaced, UserRecords, deaggregate
from leasehold.adapters.sources.kinesis.aggregation.wire import COMPILED
from leasehold.adapters.sources.kinesis.hash_keys import digest_partition_key
from leasehold.balancer.model import HASH_KEYS, HashRange

try:
    from leasehold.adapters.sources.kinesis.aggregation.spans import Spans
except ImportError:  # librt is missing, or is not the version used at compile time
    Spans = None  # type: ignore[assignment,misc]  # then everything goes through `deaggregate`

_DIGEST_BYTES = 16
_FRAME_BYTES = len(MAGIC) + _DIGEST_BYTES
_MESSAGE_SLICE = slice(len(MAGIC), -_DIGEST_BYTES)
_MAX_BYTES = 1 << 31
_CAN_USE_SPANS = COMPILED and Spans is not None  # if it is not compiled, `Spans` is half as fast as creating objects

SCHEMA = pa.schema(
    [
        pa.field("record", pa.int32(), nullable=False),
        pa.field("sub_sequence_number", pa.int32(), nullable=False),
        pa.field("partition_key", pa.string()),
        pa.field("explicit_hash_key", pa.string()),
        pa.field("data", pa.binary(), nullable=False),
    ]
)
"""The columns of the user records. `record` is the index of the Kinesis record that contains the user record."""

_CAST_FUNCTION = pc.get_function("cast")
_NULL_STRINGS = pa.nulls(1 << 16, pa.string())  # enough rows for most batches, created once
_TO_BINARY = pc.CastOptions.safe(pa.binary())


def deaggregate_to_arrow(
    records: Sequence[bytes],
    partition_keys: Sequence[str | None] | None = None,
    hash_range: HashRange | None = None,
    *,
    misplaced: Misplaced = "keep",
) -> pa.RecordBatch:
    """Return the user records of all these Kinesis records, in order, with the same results as `deaggregate`.

    Args:
        records: The data of the Kinesis records.
        partition_keys: The partition keys of the Kinesis records. They are used for records that are returned
            unchanged.
        hash_range: The hash range of the shard; None to keep all user records.
        misplaced: What to do with aggregates that have records outside the hash range.

    Raises:
        ValueError: If the records or their keys have 2 GiB or more in total, which exceeds Arrow's offsets.
    """
    return split_rows_and_deaggregated(records, partition_keys, hash_range, misplaced)[0]


def split_rows_and_deaggregated(
    records: Sequence[bytes],
    partition_keys: Sequence[str | None] | None,
    hash_range: HashRange | None,
    misplaced: Misplaced,
) -> tuple[pa.RecordBatch, Mapping[int, UserRecords]]:
    """Return the rows, and the UserRecords of those Kinesis records that went through `deaggregate`, by index.

    User records can be dropped only from Kinesis records that went through `deaggregate`.
    """
    if (size := sum(map(len, records))) >= _MAX_BYTES:
        raise ValueError(f"records: {size} bytes in one batch; at most {_MAX_BYTES - 1} fit")
    located, indexes = _locate_rows(records, hash_range)
    keys: Sequence[str | None] = partition_keys or [None] * len(records)
    deaggregated = {
        index: deaggregate(records[index], keys[index], None, hash_range, misplaced=misplaced) for index in indexes
    }
    if located is None:
        return _rows_from_deaggregated(deaggregated), deaggregated
    if not deaggregated:
        return located, deaggregated
    batch = pa.concat_batches([located, _rows_from_deaggregated(deaggregated)])
    return batch.take(pa.array(np.argsort(batch["record"].to_numpy(), kind="stable"))), deaggregated


def _locate_rows(records: Sequence[bytes], hash_range: HashRange | None) -> tuple[pa.RecordBatch | None, Sequence[int]]:
    """Return the rows of all aggregates in the common form, and the indexes of all other records."""
    all_indexes = range(len(records))
    if not _CAN_USE_SPANS:
        return None, all_indexes
    # Check all digests first. Alternating between digests and spans would make both slower, because of cache misses.
    have_right_digest = [
        data.startswith(MAGIC)
        and len(data) > _FRAME_BYTES
        and data.endswith(hashlib.md5(memoryview(data)[_MESSAGE_SLICE], usedforsecurity=False).digest())
        for data in records
    ]
    spans = Spans()
    other_indexes = [
        index
        for index, data in enumerate(records)
        if not (have_right_digest[index] and spans.add(data, len(MAGIC), len(data) - _DIGEST_BYTES, index))
    ]
    # Keys outside the range are rare. If there is one, all records go through `deaggregate`.
    if len(other_indexes) == len(records) or not _are_all_keys_inside(spans, records, hash_range):
        return None, all_indexes
    if (size := len(spans.keys)) >= _MAX_BYTES:
        raise ValueError(f"records: {size} bytes of partition keys in one batch; at most {_MAX_BYTES - 1} fit")
    row_count = len(spans.record_indexes) >> 2
    key_ends, keys = pa.py_buffer(spans.key_ends.getvalue()), pa.py_buffer(spans.keys.getvalue())
    views = [pa.py_buffer(spans.data.getvalue()), *map(pa.py_buffer, records)]
    columns = [
        _make_column(pa.int32(), row_count, pa.py_buffer(spans.record_indexes.getvalue())),
        _make_column(pa.int32(), row_count, pa.py_buffer(spans.subs.getvalue())),
        _make_column(pa.string(), row_count, key_ends, keys),
        _NULL_STRINGS.slice(0, row_count) if row_count <= len(_NULL_STRINGS) else pa.nulls(row_count, pa.string()),
        _CAST_FUNCTION.call([_make_column(pa.binary_view(), row_count, *views)], _TO_BINARY),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA), other_indexes


def _are_all_keys_inside(spans: "Spans", records: Sequence[bytes], hash_range: HashRange | None) -> bool:
    if hash_range is None or hash_range == HASH_KEYS:
        return True
    first, last = (key.to_bytes(_DIGEST_BYTES) for key in hash_range)
    return all(
        first <= digest_partition_key(records[index][begin:end]) <= last
        for index, table in spans.tables.items()
        for begin, end in iter_unpack("<ii", table)
    )


def _make_column(data_type: pa.DataType, row_count: int, *buffers: pa.Buffer) -> pa.Array:
    return pa.Array.from_buffers(data_type, row_count, [None, *buffers])


def _rows_from_deaggregated(deaggregated: Mapping[int, UserRecords]) -> pa.RecordBatch:
    """Return the rows of the records that went through `deaggregate`."""
    all_user_records = deaggregated.values()
    rows = list(chain.from_iterable(user_records.rows for user_records in all_user_records))
    subs = [np.asarray(user_records.subs, np.int32) for user_records in all_user_records]
    columns = [
        pa.array(np.repeat(np.array([*deaggregated], np.int32), [*map(len, all_user_records)])),
        pa.array(np.concatenate([np.zeros(0, np.int32), *subs])),
        *(pa.array([row[column] for row in rows], SCHEMA.field(2 + column).type) for column in range(3)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
