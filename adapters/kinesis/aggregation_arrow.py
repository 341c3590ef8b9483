"""User records of many Kinesis records as Arrow columns, mostly without a Python object for each.

Aggregates in the form that producers write are only measured: Arrow copies their data and keys
straight out of the records. Everything else goes the way of `deaggregate`.

Beyond the digests, most of the time goes into moving bytes twice: into one buffer, and out of it. To have a second
thread check half of the digests gained nothing that could be measured, and costs a core that a Spark task has not got.
"""

import hashlib
from collections.abc import Sequence
from itertools import chain

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pyarrow.compute as pc  # type: ignore[import-untyped]  # likewise

from adapters.kinesis.aggregation import MAGIC, deaggregate
from adapters.kinesis.hash_keys import digest_of
from balancer.model import HASH_KEYS, HashRange

try:
    from adapters.kinesis.aggregation_spans import Spans
except ImportError:  # without librt, or with another than it was compiled for
    Spans = None  # type: ignore[assignment,misc]  # then nothing is measured

_DIGEST_BYTES = 16
_LIMIT = 1 << 31

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


def user_record_batch(
    records: Sequence[bytes],
    partition_keys: Sequence[str | None] | None = None,
    hash_range: HashRange | None = None,
) -> pa.RecordBatch:
    """The user records of all these Kinesis records, in order, decided as `deaggregate` decides.

    `partition_keys` are the Kinesis records' own, for those passed on as they came.
    Raises ValueError above 2 GiB of records, which Arrow's offsets cannot tell apart.
    """
    if (size := sum(map(len, records))) >= _LIMIT:
        raise ValueError(f"records: {size} bytes in one batch; at most {_LIMIT - 1} fit")
    measured, others = _measured(records, hash_range)
    if measured is None:
        return _unpacked(records, partition_keys, hash_range, others)
    if not others:
        return measured
    both = pa.concat_batches([measured, _unpacked(records, partition_keys, hash_range, others)])
    return both.take(pa.array(np.argsort(both["record"].to_numpy(), kind="stable")))


def _measured(records: Sequence[bytes], hash_range: HashRange | None) -> tuple[pa.RecordBatch | None, Sequence[int]]:
    """The rows of all aggregates in the common form, and the places of all other records."""
    everything = range(len(records))
    if Spans is None:
        return None, everything
    spans, base = Spans(), 0
    others: list[int] = []
    for place, data in enumerate(records):
        begin, end = len(MAGIC), len(data) - _DIGEST_BYTES
        if not (_sealed(data) and spans.add(data, begin, end, base + begin, place)):
            others.append(place)
        base += len(data)
    if len(others) == len(records):
        return None, everything
    buffer = records[0] if len(records) == 1 else b"".join(records)
    # A key outside the range is rare: then all are taken apart one by one.
    return (_columns(spans, buffer), others) if _inside(spans, buffer, hash_range) else (None, everything)


def _sealed(data: bytes) -> bool:
    if not data.startswith(MAGIC) or len(data) <= len(MAGIC) + _DIGEST_BYTES:
        return False
    body = memoryview(data)[len(MAGIC) : -_DIGEST_BYTES]
    return hashlib.md5(body, usedforsecurity=False).digest() == data[-_DIGEST_BYTES:]


def _inside(spans: "Spans", buffer: bytes, hash_range: HashRange | None) -> bool:
    if hash_range is None or hash_range == HASH_KEYS:
        return True
    first, last = (key.to_bytes(_DIGEST_BYTES) for key in hash_range)
    entries = np.frombuffer(spans.entries.getvalue(), "<i4").tolist()
    keys = zip(entries[::2], entries[1::2], strict=True)
    return all(first <= digest_of(buffer[begin:end]) <= last for begin, end in keys)


def _columns(spans: "Spans", buffer: bytes) -> pa.RecordBatch:
    """The columns of what was measured."""
    rows = len(spans.keys) >> 2
    columns = [
        _numbers(spans.places.getvalue()),
        _numbers(spans.subs.getvalue()),
        _cut(pa.string(), spans.entries.getvalue(), buffer, _numbers(spans.keys.getvalue())),
        pa.nulls(rows, pa.string()),
        _cut(pa.binary(), spans.data.getvalue(), buffer, pa.array(np.arange(0, 2 * rows, 2, dtype=np.int32))),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _numbers(column: bytes) -> pa.Array:
    return pa.Array.from_buffers(pa.int32(), len(column) >> 2, [None, pa.py_buffer(column)])


def _cut(kind: pa.DataType, spans: bytes, buffer: bytes, wanted: pa.Array) -> pa.Array:
    """Some of the spans of the buffer, which is read as spans and gaps in turn."""
    turns = (len(spans) >> 2) - 1
    pieces = pa.Array.from_buffers(kind, turns, [None, pa.py_buffer(spans), pa.py_buffer(buffer)])
    return pc.take(pieces, wanted, boundscheck=False)


def _unpacked(
    records: Sequence[bytes],
    partition_keys: Sequence[str | None] | None,
    hash_range: HashRange | None,
    places: Sequence[int],
) -> pa.RecordBatch:
    """The rows of some of the records, one by one."""
    keys: Sequence[str | None] = partition_keys or [None] * len(records)
    answers = [deaggregate(records[place], keys[place], None, hash_range).rows for place in places]
    counts = [len(rows) for rows in answers]
    rows = list(chain.from_iterable(answers))
    subs = [np.arange(count, dtype=np.int32) for count in counts]
    columns = [
        pa.array(np.repeat(np.array(places, np.int32), counts)),
        pa.array(np.concatenate([np.zeros(0, np.int32), *subs])),
        *(pa.array([row[column] for row in rows], SCHEMA.field(2 + column).type) for column in range(3)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
