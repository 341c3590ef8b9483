"""Rows that were read ahead are cut at the limits of a batch, and their sizes always add up."""

import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pytest

from leasehold.adapters.sources.kinesis.arrow_rows import ARRIVED, SCHEMA
from leasehold.adapters.spark.kinesis.rows import make_columns
from leasehold.adapters.spark.row_buffer import ROW_OVERHEAD_BYTES, RowBuffer
from leasehold.adapters.spark.rows import ArrowBatch, RowChunk
from leasehold.balancer.model import Position

ROW_BYTES = ROW_OVERHEAD_BYTES + 10


def make_rows(*places: tuple[int, int]) -> pa.RecordBatch:
    """Return rows of ten bytes at these sequence and sub-sequence numbers."""
    rows = [
        {"data": bytes(10), "sequenceNumber": str(number), "subSequenceNumber": sub, ARRIVED: number * 1_000_000}
        for number, sub in places
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def make_buffer() -> RowBuffer:
    """Return a buffer with an aggregate of three rows, a position without rows, and two further rows."""
    buffer = RowBuffer(make_columns("s"))
    buffer.append_chunk(RowChunk(make_rows((1, 0), (1, 1), (1, 2)), Position("2")))
    buffer.append_chunk(RowChunk(make_rows(), Position("3")))
    buffer.append_chunk(RowChunk(make_rows((4, 0), (5, 0)), Position("5")))
    return buffer


@pytest.mark.parametrize(
    ("max_count", "max_bytes", "count", "end"),
    [
        (1, 1 << 40, 1, Position("1", 0)),
        (2, 1 << 40, 2, Position("1", 1)),
        (3, 1 << 40, 3, Position("3")),
        (4, 1 << 40, 4, Position("4", 0)),
        (5, 1 << 40, 5, Position("5")),
        (9, 2 * ROW_BYTES, 2, Position("1", 1)),
        (9, 3 * ROW_BYTES - 1, 2, Position("1", 1)),
        (9, 3 * ROW_BYTES, 3, Position("3")),
        (9, 4 * ROW_BYTES, 4, Position("4", 0)),
    ],
)
def test_rows_are_taken_up_to_both_limits(max_count: int, max_bytes: int, count: int, end: Position) -> None:
    buffer = make_buffer()
    assert (buffer.count, buffer.bytes) == (5, 5 * ROW_BYTES)
    taken_rows = buffer.take_rows(max_count, max_bytes)
    assert taken_rows is not None
    assert (taken_rows.count, taken_rows.ends) == (count, end)
    assert (buffer.count, buffer.bytes) == (5 - count, (5 - count) * ROW_BYTES)
    remaining_rows = buffer.take_rows(9, 1 << 40)
    assert (0 if remaining_rows is None else remaining_rows.count) == 5 - count
    assert (buffer.count, buffer.bytes, bool(buffer)) == (0, 0, False)


def test_row_that_does_not_fit_remains() -> None:
    buffer = make_buffer()
    assert buffer.take_rows(9, ROW_BYTES - 1) is None
    assert buffer.take_rows(0, 1 << 40) is None
    assert (buffer.count, buffer.bytes) == (5, 5 * ROW_BYTES)


def test_time_range_includes_its_start_and_not_its_end() -> None:
    rows = make_rows((1, 0), (2, 0), (3, 0), (4, 0))
    batch = ArrowBatch((), Position("4"), 0.0, 0.0, rows=rows, arrived=ARRIVED)
    selected = batch.select_arrived_between(2.0, 4.0)
    assert isinstance(selected, ArrowBatch)
    assert selected.rows is not None
    assert selected.rows["sequenceNumber"].to_pylist() == ["2", "3"]
    assert (selected.reached, selected.first_arrival_time, selected.last_arrival_time) == (Position("4"), 2.0, 3.0)
