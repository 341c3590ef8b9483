"""With enhanced fan-out, live reads subscribe to shards, and repeated reads poll."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from waiters import until

from leasehold.adapters.sources.kinesis.clients import create_reading_client
from leasehold.adapters.sources.kinesis.fan_out import FanOut
from leasehold.adapters.sources.kinesis.source import KinesisSource
from leasehold.adapters.spark.kinesis.data_source import KinesisLeased
from leasehold.adapters.spark.kinesis.poller import ArrowFanOut
from leasehold.adapters.spark.pipeline import start_query

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

ARN = "arn:aws:kinesis:eu-west-1:000000000000:stream/orders/consumer/app:1"
GIVEN = {
    "kinesis.streamName": "orders",
    "kinesis.region": "eu-west-1",
    "kinesis.endpointUrl": "http://127.0.0.1:1",
    "kinesis.consumerType": "SubscribeToShard",
    "kinesis.consumerName": ARN,
    "lease.store": "sqlite:///leases.db",
}


def reader_of(source: object) -> object:
    """Return the class of the reader with which the source opens shards. No request is sent."""
    kinesis_source = cast("KinesisSource", source)
    return getattr(kinesis_source.reader, "func", kinesis_source.reader)


def test_live_reads_subscribe_and_repeated_reads_poll() -> None:
    """A repeated batch does not take the subscription away from the shard's owner."""
    source_spec, *_ = KinesisLeased(GIVEN).parse_options(GIVEN)
    assert source_spec.open_for_replay is not None
    with closing(source_spec.open()) as live_source, closing(source_spec.open_for_replay()) as replay_source:
        assert reader_of(live_source) is ArrowFanOut
        assert not issubclass(cast("type", reader_of(replay_source)), FanOut)


def test_stored_records_are_polled() -> None:
    """A backfill is not slowed down to the pace of a subscription, and takes no subscription away from a query."""
    options = GIVEN | {"kinesis.endingPosition": "LATEST"}
    source_spec, *_ = KinesisLeased(options).parse_options(options)
    with closing(source_spec.open()) as source:
        assert not issubclass(cast("type", reader_of(source)), FanOut)
    assert source_spec.interval_seconds > 0


@pytest.fixture
def client(ferrokinesis_url: str) -> Iterator["KinesisClient"]:
    """Yield a client of a service that supports subscriptions."""
    client = create_reading_client("eu-west-1", ferrokinesis_url)
    yield client
    client.close()


@pytest.mark.more
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(1800)
def test_subscribing_query_gets_each_row_once(
    spark: SparkSession, client: "KinesisClient", ferrokinesis_url: str, tmp_path: Path
) -> None:
    name = f"subscribed-{uuid4().hex[:8]}"
    client.create_stream(StreamName=name, ShardCount=2)
    summary = client.describe_stream_summary
    until(lambda: summary(StreamName=name)["StreamDescriptionSummary"]["StreamStatus"] == "ACTIVE", "it is ACTIVE")
    options = GIVEN | {
        "kinesis.streamName": name,
        "kinesis.endpointUrl": ferrokinesis_url,
        "kinesis.consumerName": "app",
        "kinesis.startingPosition": "TRIM_HORIZON",
        "lease.store": f"sqlite:///{tmp_path}/leases.db",
        "maxRowsPerTrigger": "70",
    }
    out, progress = tmp_path / "out", tmp_path / "progress"

    def start() -> StreamingQuery:
        writer = spark.readStream.format("kinesis-leased").options(**options).load().writeStream.format("parquet")
        writer = writer.option("path", str(out)).option("checkpointLocation", str(progress)).queryName("subscribed")
        return writer.start()

    def rows() -> list[int]:
        if not (out / "_spark_metadata").exists():
            return []
        return sorted(int(row[0]) for row in spark.read.schema("data binary").parquet(str(out)).collect())

    def put(numbers: range) -> None:
        records: Any = [{"Data": str(number).encode(), "PartitionKey": str(number)} for number in numbers]
        client.put_records(StreamName=name, Records=records)

    def wait_for_rows(count: int) -> None:
        until(lambda: len(rows()) >= count, f"{count} rows", 60)

    put(range(300))
    for run in (1, 2):
        query = start_query(start)
        try:
            wait_for_rows(300 * run)
            put(range(300 * run, 300 * run + 300))
            wait_for_rows(300 * run + 300)
        finally:
            query.stop()
        last_commit = max((progress / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
        if run == 1:
            last_commit.unlink()  # so that the next run repeats this batch
            (last_commit.parent / f".{last_commit.name}.crc").unlink(missing_ok=True)
    assert rows() == [*range(900)]
    arn = summary(StreamName=name)["StreamDescriptionSummary"]["StreamARN"]
    assert [consumer["ConsumerName"] for consumer in client.list_stream_consumers(StreamARN=arn)["Consumers"]] == [
        "app"
    ]
