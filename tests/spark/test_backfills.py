"""Batch queries over real streams use many tasks and no leases, and return each record of the time range once."""

import json
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest
from attrs import define, field
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from types_boto3_kinesis import KinesisClient
from waiters import WAIT, until

from leasehold.adapters.spark.pipeline import start_query
from leasehold_lab.standins.hubs.event_hubs import event_hubs

pytestmark = [pytest.mark.spark, pytest.mark.services, pytest.mark.xdist_group("spark")]


@define
class Kinesis:
    """A stream with two shards, and the data of its records."""

    client: KinesisClient
    url: str
    name: str
    sent: list[str] = field(factory=list)

    @classmethod
    def create(cls, client: KinesisClient, url: str) -> "Kinesis":
        stream = cls(client, url, f"backfill-{uuid4().hex[:8]}")
        client.create_stream(StreamName=stream.name, ShardCount=2)
        stream.settle()
        return stream

    def put(self, count: int) -> None:
        rows = [f"{len(self.sent) + offset:05}" for offset in range(count)]
        page = [{"Data": row.encode(), "PartitionKey": row} for row in rows]
        assert self.client.put_records(StreamName=self.name, Records=page)["FailedRecordCount"] == 0  # type: ignore[arg-type]
        self.sent += rows

    def split(self) -> None:
        shard = self.client.list_shards(StreamName=self.name)["Shards"][0]
        middle = str(int(shard["HashKeyRange"]["EndingHashKey"]) // 2)
        self.client.split_shard(StreamName=self.name, ShardToSplit=shard["ShardId"], NewStartingHashKey=middle)
        self.settle()

    def settle(self) -> None:
        """Wait until the stream is active again."""
        summary = self.client.describe_stream_summary
        active = "StreamDescriptionSummary"
        until(lambda: summary(StreamName=self.name)[active]["StreamStatus"] == "ACTIVE", "active")  # type: ignore[literal-required]

    def arrivals(self) -> dict[str, int]:
        """Return the arrival time of each record in milliseconds, by its data."""
        times: dict[str, int] = {}
        for shard in self.client.list_shards(StreamName=self.name)["Shards"]:
            iterator_response = self.client.get_shard_iterator(
                StreamName=self.name, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
            )
            for row in self.client.get_records(ShardIterator=iterator_response["ShardIterator"])["Records"]:
                times[row["Data"].decode()] = round(row["ApproximateArrivalTimestamp"].timestamp() * 1000)
        return times


def data(rows: DataFrame, column: str = "data") -> list[str]:
    """Return the data of the rows, sorted and including duplicates."""
    return sorted(bytes(row[column]).decode() for row in rows.select(column).collect())


@pytest.mark.more
def test_kinesis_batch_is_cut_by_time_across_a_reshard(
    spark: SparkSession, kinesis_client: KinesisClient, kinesis_url: str
) -> None:
    stream = Kinesis.create(kinesis_client, kinesis_url)
    stream.put(100)
    stream.split()
    for _ in range(3):
        stream.put(100)
    rows = (
        spark.read.format("kinesis-leased")
        .option("kinesis.streamName", stream.name)
        .option("kinesis.endpointUrl", kinesis_url)
    )
    whole_stream = rows.option("minPartitions", 8).load()
    assert whole_stream.rdd.getNumPartitions() >= 4
    assert data(whole_stream) == stream.sent
    arrival_times = stream.arrivals()
    since, end = sorted(arrival_times.values())[20], sorted(arrival_times.values())[-20]
    time_slice = rows.option("kinesis.startingPosition", f"AT_TIMESTAMP {since}").option(
        "kinesis.endingPosition", json.dumps({"at_timestamp": end})
    )
    assert data(time_slice.load()) == sorted(row for row, arrival in arrival_times.items() if since <= arrival < end)


@pytest.mark.more
def test_queries_share_a_slice_under_leases_and_end_by_themselves(
    spark: SparkSession, kinesis_client: KinesisClient, kinesis_url: str, tmp_path: Path
) -> None:
    stream = Kinesis.create(kinesis_client, kinesis_url)
    stream.put(100)
    stream.split()
    stream.put(100)
    arrival_times = stream.arrivals()
    end = sorted(arrival_times.values())[-20]
    rows = spark.readStream.format("kinesis-leased").options(
        **{
            "kinesis.streamName": stream.name,
            "kinesis.endpointUrl": kinesis_url,
            "kinesis.endingPosition": json.dumps({"at_timestamp": end}),
            "lease.store": f"sqlite://{tmp_path}/leases.db",
            "maxRowsPerTrigger": "30",
        }
    )
    received_rows: list[str] = []

    def collect_batch(batch: DataFrame, _number: int) -> None:
        received_rows.extend(data(batch))

    def start(name: str) -> StreamingQuery:
        writer = rows.load().writeStream.foreachBatch(collect_batch).option("checkpointLocation", str(tmp_path / name))
        return writer.trigger(availableNow=True).start()

    queries = [start_query(partial(start, name)) for name in ("one", "two")]
    assert [query.awaitTermination(WAIT) for query in queries] == [True, True]
    assert sorted(received_rows) == sorted(row for row, arrival in arrival_times.items() if arrival < end)


@pytest.mark.more
@pytest.mark.usefixtures("amqp_engine")
def test_event_hub_batch_is_cut_by_time_and_shows_no_secret(spark: SparkSession, tmp_path: Path) -> None:
    with event_hubs({"flights": 2}) as hubs:
        secret = tmp_path / "hub.secret"
        secret.write_text(hubs.connection_string("flights"))
        sent_bodies = [f"a{number:02}" for number in range(60)]
        for first in range(0, 60, 20):
            hubs.put("flights", "0", sent_bodies[first : first + 20])
        rows = spark.read.format("eventhubs-leased").option("eventhubs.connectionStringFile", str(secret))
        whole_hub = rows.option("minPartitions", 4).load()
        assert data(whole_hub, "body") == sent_bodies
        shown_plan = whole_hub._jdf.queryExecution().toString()  # noqa: SLF001  the plan as Spark shows it
        assert hubs.key not in shown_plan
        times = sorted(row.ms for row in whole_hub.selectExpr("unix_millis(enqueuedTime) AS ms").collect())
        middle_time = json.dumps({"enqueuedTime": f"{datetime.fromtimestamp(times[30] / 1000, UTC).isoformat()}"})
        rows_before = rows.option("eventhubs.endingPosition", middle_time).load()
        rows_after = (
            rows.option("eventhubs.startingPosition", middle_time).option("eventhubs.endingPosition", "@latest").load()
        )
        assert sorted(data(rows_before, "body") + data(rows_after, "body")) == sent_bodies
        assert len(data(rows_after, "body")) == sum(number >= times[30] for number in times)
