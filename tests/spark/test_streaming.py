"""Streaming queries keep every record through restarts, steals, shard ends and stops, over a real stream."""

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from attrs import define, field
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from streaming_jobs import Job, new_job
from types_boto3_kinesis import KinesisClient
from waiters import AT_ONCE, WAIT, until

from leasehold.stores.protocol import Done
from leasehold.stores.writes import ClaimLease
from leasehold_lab.standins.hubs.event_hubs import event_hubs

pytestmark = [pytest.mark.spark, pytest.mark.services, pytest.mark.xdist_group("spark")]


@define
class Stream:
    """A Kinesis stream, and the data that was put into it."""

    client: KinesisClient
    name: str
    sent: list[str] = field(factory=list)

    def put(self, count: int) -> None:
        rows = [f"{len(self.sent) + offset:05}" for offset in range(count)]
        for index in range(0, count, 250):
            page = [{"Data": row.encode(), "PartitionKey": row} for row in rows[index : index + 250]]
            assert self.client.put_records(StreamName=self.name, Records=page)["FailedRecordCount"] == 0  # type: ignore[arg-type]
        self.sent += rows

    def split(self) -> str:
        """Split the first shard, and return its id."""
        shard = self.client.list_shards(StreamName=self.name)["Shards"][0]
        hash_range = shard["HashKeyRange"]
        middle = (int(hash_range["StartingHashKey"]) + int(hash_range["EndingHashKey"])) // 2
        self.client.split_shard(StreamName=self.name, ShardToSplit=shard["ShardId"], NewStartingHashKey=str(middle))
        self._settle()
        return shard["ShardId"]

    def merge(self) -> set[str]:
        """Merge the first two shards, and return their ids."""
        first, second = (shard["ShardId"] for shard in self.client.list_shards(StreamName=self.name)["Shards"][:2])
        self.client.merge_shards(StreamName=self.name, ShardToMerge=first, AdjacentShardToMerge=second)
        self._settle()
        return {first, second}

    def _settle(self) -> None:
        summary = self.client.describe_stream_summary
        until(lambda: summary(StreamName=self.name)["StreamDescriptionSummary"]["StreamStatus"] == "ACTIVE", "active")


@pytest.fixture
def stream(kinesis_client: KinesisClient) -> Stream:
    name = f"spark-{uuid4().hex[:8]}"
    kinesis_client.create_stream(StreamName=name, ShardCount=4)
    kinesis_client.get_waiter("stream_exists").wait(StreamName=name, WaiterConfig=AT_ONCE)
    return Stream(kinesis_client, name)


@pytest.fixture
def job(spark: SparkSession, tmp_path: Path, kinesis_url: str, stream: Stream) -> Iterator[Job]:
    """Yield a job of queries that read the stream from its beginning."""
    options = {
        "kinesis.streamName": stream.name,
        "kinesis.endpointUrl": kinesis_url,
        "kinesis.startingPosition": "TRIM_HORIZON",
    }
    with new_job(spark, tmp_path, "kinesis-leased", options) as job:
        yield job


@pytest.mark.more
def test_scheduled_queries_read_everything_across_a_split_and_hold_nothing(job: Job, stream: Stream) -> None:
    stream.put(500)
    job.parquet("out", now=True)
    parent = stream.split()
    stream.put(500)
    query = job.parquet("out", now=True)
    assert job.written("out") == stream.sent
    assert '"behindMs"' in query.recentProgress[-1]["sources"][0]["latestOffset"]
    # The reader process releases the leases, and Spark does not wait for this. No other process would release them.
    until(lambda: job.owners() == ["", "", "", "", ""], "nothing held")
    parent_checkpoint = {
        parent: "SHARD_END"
    }  # the parent's row may already be deleted, because its children are being read (L8)
    assert parent_checkpoint | job.checkpoints() == job.tips("out") | parent_checkpoint


@pytest.mark.more
def test_scheduled_query_reads_merged_shards_and_their_child(job: Job, stream: Stream) -> None:
    stream.put(400)
    parents = stream.merge()
    stream.put(50)
    job.parquet("out", now=True)
    assert job.written("out") == stream.sent
    until(lambda: job.owners() == ["", "", ""], "nothing held")
    assert {key for key, checkpoint in job.checkpoints().items() if checkpoint == "SHARD_END"} <= parents


@pytest.mark.more
def test_recreated_stream_is_rejected_or_read_whole(job: Job, stream: Stream) -> None:
    stream.put(300)
    job.parquet("out", now=True)
    client, former_records = stream.client, stream.sent
    client.delete_stream(StreamName=stream.name)
    client.get_waiter("stream_not_exists").wait(StreamName=stream.name, WaiterConfig=AT_ONCE)
    client.create_stream(StreamName=stream.name, ShardCount=2)
    client.get_waiter("stream_exists").wait(StreamName=stream.name, WaiterConfig=AT_ONCE)
    stream.put(400)
    with pytest.raises(
        StreamingQueryException, match=r"was deleted and made anew, and is .*; option lease\.ifRecreated"
    ):
        job.parquet("out", now=True)
    assert job.written("out") == former_records[:300]
    job.options["lease.ifRecreated"] = "TRIM_HORIZON"
    job.parquet("out", now=True)
    assert job.written("out") == stream.sent
    until(lambda: job.owners() == ["", ""], "the leases of the former stream are gone, and nothing is held")


@pytest.mark.more
def test_failed_batch_is_repeated_exactly_although_a_lease_was_stolen(job: Job, stream: Stream) -> None:
    batches: dict[int, list[list[str]]] = {}

    def sink(rows: DataFrame, number: int) -> None:
        batch = [f"{row.shardId} {row.sequenceNumber} {bytes(row.data).decode()}" for row in rows.collect()]
        batches.setdefault(number, []).append(sorted(batch))
        if number == 1 and len(batches[number]) == 1:
            raise OSError("the sink had it all, and fails")

    stream.put(300)
    query = job.each("each", sink)
    until(lambda: batches, "the first batch")
    stream.put(300)
    with pytest.raises(StreamingQueryException, match="the sink had it all"):
        query.awaitTermination(WAIT)
    until(lambda: job.owners() == [""] * 4, "the failed query released its leases")
    key = job.store.list().leases[0].key
    outcome = job.store.write(ClaimLease(job.store.get([key])[0], "thief"))
    assert isinstance(outcome, Done)
    stream.put(300)
    restarted_query = job.each("each", sink)
    until(lambda: len(batches.get(1, [])) > 1, "the batch comes again")
    assert batches[1][0] == batches[1][1]
    # The new owner never renews, so its lease expires and is taken back. No record of that shard is missing.

    def latest_data() -> list[str]:
        return sorted({row.split()[2] for attempts in batches.values() for row in attempts[-1]})

    until(lambda: latest_data() == stream.sent, "every record")
    restarted_query.stop()
    until(lambda: "thief" not in job.owners() and set(job.owners()) == {""}, "all is released")
    rows = [row for runs in batches.values() for row in runs[-1]]
    assert len(rows) == len(set(rows))


def test_two_queries_share_shards_and_lose_nothing_when_one_stops(job: Job, stream: Stream) -> None:
    stream.put(200)
    first_query = job.parquet("one")
    until(lambda: len(set(job.owners())) == 1 and "" not in job.owners(), "the first holds all")
    second_query = job.parquet("two")
    until(lambda: sorted(map(job.owners().count, set(job.owners()))) == [2, 2], "each holds two")
    stream.put(200)
    until(lambda: set(job.written("one", "two")) == set(stream.sent), "all is written")
    first_query.stop()
    stream.put(200)
    until(lambda: set(job.written("one", "two")) == set(stream.sent), "the other goes on alone")
    second_query.stop()
    until(lambda: job.owners() == [""] * 4, "all is released")
    # A requested lease is committed before it is handed off, so moves between living workers repeat no rows.
    assert len(job.written("one", "two")) - len(stream.sent) <= 200


@pytest.mark.usefixtures("amqp_engine")
def test_event_hub_batches_are_repeated_exactly(spark: SparkSession, tmp_path: Path) -> None:
    batches: dict[int, list[list[tuple[str, int, str]]]] = {}

    def sink(rows: DataFrame, number: int) -> None:
        batch = [(row.partition, row.sequenceNumber, bytes(row.body).decode()) for row in rows.collect()]
        batches.setdefault(number, []).append(sorted(batch))
        if number == 1 and len(batches[number]) == 1:
            raise OSError("the sink had it all, and fails")

    with event_hubs({"flights": 2}) as hubs:
        secret = tmp_path.with_suffix(".secret")
        secret.write_text(hubs.connection_string("flights"))
        options = {
            "eventhubs.connectionStringFile": str(secret),
            "eventhubs.startingPosition": json.dumps({"offset": "-1"}),
        }
        hubs.put("flights", "0", [f"a{event_number}" for event_number in range(50)])
        with new_job(spark, tmp_path, "eventhubs-leased", options) as job:
            query = job.each("hub", sink)
            until(lambda: batches, "the first batch")
            hubs.put("flights", "1", [f"b{event_number}" for event_number in range(50)])
            with pytest.raises(StreamingQueryException, match="the sink had it all"):
                query.awaitTermination(WAIT)
            hubs.put("flights", "1", [f"c{event_number}" for event_number in range(50)])
            job.each("hub", sink)
            until(lambda: len({row for runs in batches.values() for row in runs[-1]}) == 150, "every event")
            assert batches[1][0] == batches[1][1]
            plan = job.rows()._jdf.queryExecution().toString()  # noqa: SLF001  the plan as Spark shows it
            progress = (tmp_path / "hub-progress" / "offsets" / "0").read_text()
            assert [hubs.key in text for text in (plan, progress)] == [False, False]


def test_misspelt_option_is_named(spark: SparkSession) -> None:
    rows = (
        spark.readStream.format("kinesis-leased").option("kinesis.streamName", "s").option("lease.stor", "sqlite://x")
    )
    with pytest.raises(Exception, match=r"option lease\.stor: unknown"):
        rows.load()
