"""The columns of a batch contain the same data as the records that other handlers get."""

import subprocess
import sys
from typing import TYPE_CHECKING, Any, cast

import pytest
from aggregates import keys, record, sealed
from attrs import frozen

from leasehold.adapters.sources.kinesis.arrow_rows import SCHEMA
from leasehold.adapters.sources.kinesis.poller import Poller
from leasehold.adapters.sources.protocol import Batch, InColumns
from leasehold.balancer.model import TRIM_HORIZON

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

AGGREGATE = sealed(keys("a") + record(0, b"x") + record(0, b"y"))
ROWS: list[dict[str, Any]] = [
    {"Data": b"p", "PartitionKey": "k", "SequenceNumber": "1", "ApproximateArrivalTimestamp": 1_767_312_000_123},
    {"Data": AGGREGATE, "PartitionKey": "k", "SequenceNumber": "2"},
]


@frozen
class Canned:
    """A client whose GetRecords returns these rows."""

    rows: list[dict[str, Any]]

    def get_shard_iterator(self, **_place: object) -> dict[str, str]:
        return {"ShardIterator": "it"}

    def get_records(self, **_request: object) -> dict[str, Any]:
        return {"Records": [dict(row) for row in self.rows], "NextShardIterator": "it", "MillisBehindLatest": 0}


def read(*rows: dict[str, Any]) -> tuple[Batch, InColumns]:
    """Read these rows with the poller of a worker.

    Return the batch, and the function that converts its records to columns.
    """
    batch = Poller(cast("KinesisClient", Canned(list(rows))), "orders", "shard-0", TRIM_HORIZON, None).read()
    assert batch.in_columns is not None
    return batch, batch.in_columns


def test_columns_match_records() -> None:
    batch, in_columns = read(*ROWS)
    rows = in_columns(batch.records)
    assert rows.schema == SCHEMA
    columns = rows.to_pylist()
    names = ("data", "shardId", "streamName", "partitionKey", "explicitHashKey", "sequenceNumber", "subSequenceNumber")
    assert [tuple(row[name] for name in names) for row in columns] == [
        (row.data, "shard-0", "orders", row.partition_key, None, row.sequence_number, row.sub_sequence_number)
        for row in batch.records
    ]
    times = [row["approximateArrivalTimestamp"] for row in columns]
    assert [row and row.timestamp() for row in times] == [1_767_312_000.123, None, None]


def test_columns_of_some_records_are_theirs_alone() -> None:
    """After a failure, a handler gets only the remaining records, as columns as well."""
    batch, in_columns = read(*ROWS)
    assert in_columns(tuple(batch.records)[1:]) == in_columns(batch.records).slice(1)
    assert in_columns(batch.records[1:]) == in_columns(batch.records).slice(1)


def test_arrival_time_is_rounded_to_microseconds() -> None:
    batch, in_columns = read({**ROWS[0], "ApproximateArrivalTimestamp": 1_767_312_000.1234567})
    (arrival_time,) = in_columns(batch.records)["approximateArrivalTimestamp"].to_pylist()
    assert arrival_time.microsecond == 123_457


def test_empty_batch_has_empty_columns() -> None:
    batch, in_columns = read()
    assert in_columns(batch.records).num_rows == 0


def test_missing_pyarrow_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, in_columns = read(*ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "leasehold.adapters.sources.kinesis.arrow_rows", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"install leasehold\[arrow\]"):
        in_columns(batch.records)


def test_only_the_columns_module_needs_pyarrow() -> None:
    """Workers and producers that were installed with leasehold[aws] or [azure] must start without pyarrow."""
    names = ("kinesis.streams", "kinesis.fan_out", "kinesis.producer", "event_hubs.poller")
    modules = (f"leasehold.adapters.sources.{name}" for name in names)
    code = "import sys; sys.modules['pyarrow'] = None; import " + ", ".join(modules)
    subprocess.run([sys.executable, "-c", code], check=True)
