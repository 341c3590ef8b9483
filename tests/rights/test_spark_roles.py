"""Tests that a Spark query reads, holds leases and writes with the roles in its options."""

from contextlib import closing
from itertools import count
from uuid import uuid4

import boto3
import pyarrow as pa  # type: ignore[import-untyped]  # it ships no types
import pytest
from standins.iam import REGION, Account, allowed

from leasehold.adapters.sources.deduplication import Tag
from leasehold.adapters.spark.compat import ReadMaxRows
from leasehold.adapters.spark.kinesis.data_source import KinesisLeased
from leasehold.adapters.spark.kinesis.sink import KINESIS_SINK
from leasehold.adapters.spark.leased_source import LeasedReader
from leasehold.adapters.spark.options import OptionReader
from leasehold.errors import SourceError

pytestmark = pytest.mark.services

_numbers = count()


@pytest.fixture
def query_options(aws: Account, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the options of a query on a stream with one record. The default credentials may only assume roles."""
    # A reader sets signal handlers, because Spark normally starts a process for it alone.
    monkeypatch.setattr("leasehold.adapters.spark.leased_source.end_on_signal", lambda _stop: None)
    name = f"queries-{uuid4().hex[:8]}"
    aws.client("kinesis").create_stream(StreamName=name, ShardCount=1)
    aws.client("kinesis").put_record(StreamName=name, Data=b"a book", PartitionKey="k")
    key, secret = aws.user(allowed("sts:AssumeRole"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", aws.service.url)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # boto3 caches a session with other credentials
    return {
        "kinesis.streamName": name,
        "kinesis.region": REGION,
        "kinesis.endpointUrl": aws.service.url,
        "kinesis.wire": "json",
    }


def role(aws: Account, action: str) -> dict[str, str]:
    """Create a role with these permissions, and return its options without their prefix."""
    return {
        "roleArn": aws.role(f"spark-{next(_numbers)}", allowed(action), external_id="x-17"),
        "externalId": "x-17",
    }


def add_prefix(prefix: str, options: dict[str, str]) -> dict[str, str]:
    """Return the options with this prefix, `kinesis` for the stream or `lease` for the table."""
    return {f"{prefix}.{name}": value for name, value in options.items()}


def test_the_stream_and_the_leases_can_have_different_roles(aws: Account, query_options: dict[str, str]) -> None:
    """The stream is read only with its own role, and the lease table is used only with the table's role."""
    role_options = {
        "kinesis.startingPosition": "TRIM_HORIZON",
        "kinesis.dynamodb.endpointUrl": aws.service.url,
        "lease.applicationName": f"leases-{uuid4().hex[:8]}",
        **add_prefix("kinesis", role(aws, "kinesis:*")),
        **add_prefix("lease", role(aws, "dynamodb:*")),
    }
    spec, lease, *_ = KinesisLeased(query_options | role_options).parse_options(query_options | role_options)
    earlier_call_count, reader = len(aws.asked()), LeasedReader(spec, lease)
    try:
        offset, records = reader.initialOffset(), list[bytes]()
        while not records:
            planned_offset = reader.latestOffset(offset, ReadMaxRows(10))
            if planned_offset is offset:
                continue
            for part in reader.partitions(offset, planned_offset):
                records += [row for batch in reader.read(part) for row in batch["data"].to_pylist()]
            reader.commit(planned_offset)
            offset = planned_offset
    finally:
        reader.stop()
    assert records == [b"a book"]
    calls = aws.asked()[earlier_call_count:]
    assert {action.partition(":")[0] for action, _, _ in calls} == {"kinesis", "dynamodb"}
    assert [call for call in calls if not call[2]] == []


def test_a_sink_and_a_batch_use_the_role(aws: Account, query_options: dict[str, str]) -> None:
    """A sink on an executor does not use the credentials of the executor's machine."""
    rows = pa.table({"data": [b"b"], "partitionKey": ["k"], "explicitHashKey": pa.nulls(1, pa.string())})
    tag = Tag("query", 0, 0, "part", "edition", 0)
    with pytest.raises(SourceError):
        KinesisLeased({}).sink_target(OptionReader(query_options, KINESIS_SINK)).open_writer().write(rows, tag)
    role_options = query_options | add_prefix("kinesis", role(aws, "kinesis:*"))
    KinesisLeased({}).sink_target(OptionReader(role_options, KINESIS_SINK)).open_writer().write(rows, tag)
    _, _, location, _ = KinesisLeased(role_options).parse_options(role_options)
    with closing(location.open()) as source:
        assert len(source.shards()) == 1
    client = aws.client("kinesis")
    shard = client.list_shards(StreamName=query_options["kinesis.streamName"])["Shards"][0]["ShardId"]
    iterator = client.get_shard_iterator(
        StreamName=query_options["kinesis.streamName"], ShardId=shard, ShardIteratorType="TRIM_HORIZON"
    )
    assert len(client.get_records(ShardIterator=iterator["ShardIterator"])["Records"]) == 2
