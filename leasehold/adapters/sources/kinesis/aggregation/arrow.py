"""User records of many Kinesis records as Arrow columns, mostly without a Python object for each.

Aggregates in the form that producers write are only measured: Arrow copies their data straight out of
the records. Everything else goes the way of `deaggregate`.

Beyond the digests most of the time goes into moving bytes, so each is moved once. To have a second thread check half
of the digests gained nothing that could be measured, and costs a core that a Spark task has not got.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import chain
from struct import iter_unpack

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # likewise

from leasehold.adapters.sources.kinesis.aggregation.decode import MAGIC, Misplaced, UserRecords, deaggregate
from leasehold.adapters.sources.kinesis.aggregation.wire import COMPILED
from leasehold.adapters.sources.kinesis.hash_keys import digest_of
from leasehold.balancer.model import HASH_KEYS, HashRange

try:
    from leasehold.adapters.sources.kinesis.aggregation.spans import Spans
except ImportError:  # without librt, or with another than it was compiled for
    Spans = None  # type: ignore[assignment,misc]  # then nothing is measured

_DIGEST_BYTES = 16
_FRAME = len(MAGIC) + _DIGEST_BYTES
_BODY = slice(len(MAGIC), -_DIGEST_BYTES)
_LIMIT = 1 << 31
_MEASURING = COMPILED and Spans is not None  # uncompiled it takes twice as long as objects do

SCHEMA = pa.schema(
    [
        pa.field("record", pa.int32(), nullable=False),
        pa.field("sub_sequence_number", pa.int32(), nullable=False),
        pa.field("partition_key", pa.string()),
        pa.field("explicit_hash_key", pa.string()),
        pa.field("data", pa.binary(), nullable=False),
    ]
)
"""`record` is the place of the Kinesis record among those given."""

_FLAT = pc.get_function("cast")
_NULLS = pa.nulls(1 << 16, pa.string())  # as many rows as a batch mostly has, made once
_TO_BINARY = pc.CastOptions.safe(pa.binary())


def user_record_batch(
    records: Sequence[bytes],
    partition_keys: Sequence[str | None] | None = None,
    hash_range: HashRange | None = None,
    *,
    misplaced: Misplaced = "keep",
) -> pa.RecordBatch:
    """The user records of all these Kinesis records, in order, decided as `deaggregate` decides.

    `partition_keys` are the Kinesis records' own, for those passed on as they came.
    Raises ValueError above 2 GiB of records or of their keys, which Arrow's offsets cannot tell apart.
    """
    return rows_and_others(records, partition_keys, hash_range, misplaced)[0]


def rows_and_others(
    records: Sequence[bytes],
    partition_keys: Sequence[str | None] | None,
    hash_range: HashRange | None,
    misplaced: Misplaced,
) -> tuple[pa.RecordBatch, Mapping[int, UserRecords]]:
    """The rows, and by place the user records of what may be cut short: of all others each user record is a row."""
    if (size := sum(map(len, records))) >= _LIMIT:
        raise ValueError(f"records: {size} bytes in one batch; at most {_LIMIT - 1} fit")
    measured, places = _measured(records, hash_range)
    keys: Sequence[str | None] = partition_keys or [None] * len(records)
    others = {at: deaggregate(records[at], keys[at], None, hash_range, misplaced=misplaced) for at in places}
    if measured is None:
        return _rows(others), others
    if not others:
        return measured, others
    both = pa.concat_batches([measured, _rows(others)])
    return both.take(pa.array(np.argsort(both["record"].to_numpy(), kind="stable"))), others


def _measured(records: Sequence[bytes], hash_range: HashRange | None) -> tuple[pa.RecordBatch | None, Sequence[int]]:
    """The rows of all aggregates in the common form, and the places of all other records."""
    everything = range(len(records))
    if not _MEASURING:
        return None, everything
    # All digests first: in turns with them the measuring would begin each time with cold caches.
    sealed = [
        data.startswith(MAGIC)
        and len(data) > _FRAME
        and data.endswith(hashlib.md5(memoryview(data)[_BODY], usedforsecurity=False).digest())
        for data in records
    ]
    spans = Spans()
    others = [
        place
        for place, data in enumerate(records)
        if not (sealed[place] and spans.add(data, len(MAGIC), len(data) - _DIGEST_BYTES, place))
    ]
    # A key outside the range is rare: then all are taken apart one by one.
    if len(others) == len(records) or not _inside(spans, records, hash_range):
        return None, everything
    if (size := len(spans.keys)) >= _LIMIT:
        raise ValueError(f"records: {size} bytes of partition keys in one batch; at most {_LIMIT - 1} fit")
    rows = len(spans.places) >> 2
    key_ends, keys = pa.py_buffer(spans.key_ends.getvalue()), pa.py_buffer(spans.keys.getvalue())
    views = [pa.py_buffer(spans.data.getvalue()), *map(pa.py_buffer, records)]
    columns = [
        _column(pa.int32(), rows, pa.py_buffer(spans.places.getvalue())),
        _column(pa.int32(), rows, pa.py_buffer(spans.subs.getvalue())),
        _column(pa.string(), rows, key_ends, keys),
        _NULLS.slice(0, rows) if rows <= len(_NULLS) else pa.nulls(rows, pa.string()),
        _FLAT.call([_column(pa.binary_view(), rows, *views)], _TO_BINARY),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA), others


def _inside(spans: "Spans", records: Sequence[bytes], hash_range: HashRange | None) -> bool:
    if hash_range is None or hash_range == HASH_KEYS:
        return True
    first, last = (key.to_bytes(_DIGEST_BYTES) for key in hash_range)
    return all(
        first <= digest_of(records[place][begin:end]) <= last
        for place, table in spans.tables.items()
        for begin, end in iter_unpack("<ii", table)
    )


def _column(kind: pa.DataType, rows: int, *buffers: pa.Buffer) -> pa.Array:
    return pa.Array.from_buffers(kind, rows, [None, *buffers])


def _rows(taken_apart: Mapping[int, UserRecords]) -> pa.RecordBatch:
    """The rows of some of the records, one by one."""
    answers = taken_apart.values()
    rows = list(chain.from_iterable(users.rows for users in answers))
    subs = [np.asarray(users.subs, np.int32) for users in answers]
    columns = [
        pa.array(np.repeat(np.array([*taken_apart], np.int32), [*map(len, answers)])),
        pa.array(np.concatenate([np.zeros(0, np.int32), *subs])),
        *(pa.array([row[column] for row in rows], SCHEMA.field(2 + column).type) for column in range(3)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
