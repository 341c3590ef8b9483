"""A batch as columns, for handlers that want Arrow."""

import sys
from collections.abc import Sequence

import pytest
from attrs import evolve
from reader_harness import ReaderHarness, data
from virtual_fleet import FaultySource

from leasehold.adapters.consumer.handling import Delivery
from leasehold.adapters.sources.protocol import Batch, Record, import_and_call_rows_of
from leasehold_lab.simulator.world.world import ShardRecords, create_records


def columns_of(rows: Sequence[Record]) -> list[bytes]:
    """Return the records in a columnar form: a list of the data, with the last record first."""
    return [record.data for record in rows][::-1]


def in_columns(batch: Batch) -> Batch:
    """Return the batch as a source that supports columns would return it."""
    return evolve(batch, in_columns=columns_of)


def test_handler_gets_the_columns_of_its_source() -> None:
    received_columns: list[object] = []
    harness = ReaderHarness(
        ShardRecords(create_records(3)),
        source=FaultySource(on_read=in_columns),
        on_batch=lambda batch: received_columns.append(batch.to_arrow()),
    )
    harness.steps(harness.reading(), 2)
    assert received_columns == [data(3)[::-1]]


def test_columns_leave_out_checkpointed_records() -> None:
    received_columns: list[object] = []

    def fail_once(batch: Delivery) -> None:
        received_columns.append(batch.to_arrow())
        if len(received_columns) == 1:
            batch.checkpoint(batch.records[0])
            raise ValueError

    harness = ReaderHarness(
        ShardRecords(create_records(3)), source=FaultySource(on_read=in_columns), on_batch=fail_once
    )
    harness.steps(harness.reading(), 4)
    assert received_columns == [data(3)[::-1], data(2, 1)[::-1]]


def test_source_without_columns_raises_a_clear_error() -> None:
    messages: list[str] = []

    def request_columns(batch: Delivery) -> None:
        with pytest.raises(ValueError, match=r"this source has no columns; take batch\.records") as exc_info:
            batch.to_arrow()
        messages.append(str(exc_info.value))

    harness = ReaderHarness(ShardRecords(create_records(1)), on_batch=request_columns)
    harness.steps(harness.reading(), 2)
    assert len(messages) == 1


def test_missing_arrow_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs pyarrow; install leasehold\[arrow\]"):
        import_and_call_rows_of("pyarrow")
