"""The sinks of the formats work in a real session: readers get each row once and in order, despite rewrites."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, product
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no types
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery
from types_boto3_kinesis import KinesisClient
from waiters import AT_ONCE, WAIT, until

from leasehold.adapters.sources.deduplication import Tag
from leasehold.adapters.sources.kinesis.aggregation.decode import deaggregate
from leasehold.adapters.sources.kinesis.source import KinesisSource
from leasehold.adapters.sources.protocol import Record
from leasehold.adapters.spark.kinesis.sink import COLUMNS
from leasehold.adapters.spark.pipeline import start_query
from leasehold.adapters.spark.sink import compute_edition, split_into_sections
from leasehold.balancer.model import TRIM_HORIZON, Lease

_names = count()


@pytest.fixture
def stream(kinesis_client: KinesisClient) -> Iterator[str]:
    """Yield a stream of two shards."""
    name = f"written-{next(_names)}"
    kinesis_client.create_stream(StreamName=name, ShardCount=2)
    kinesis_client.get_waiter("stream_exists").wait(StreamName=name, WaiterConfig=AT_ONCE)
    yield name
    kinesis_client.delete_stream(StreamName=name)


@pytest.fixture
def sink_options(stream: str, kinesis_url: str) -> dict[str, str]:
    """Return the sink's options."""
    return {"kinesis.streamName": stream, "kinesis.endpointUrl": kinesis_url, "kinesis.region": "eu-west-1"}


def read_rows(client: KinesisClient, stream: str) -> list[Record]:
    """Return the records that one of our readers gets, shard after shard."""
    source, records = KinesisSource(client, stream), list[Record]()
    for shard in source.shards():
        reader = source.open(Lease(shard.id, hash_range=shard.hash_range), TRIM_HORIZON)
        while (batch := reader.read()).records or batch.read_to is not None or batch.behind_seconds:
            records += batch.records
    return records


def stored_rows(client: KinesisClient, stream: str) -> list[bytes]:
    """Return the data of all user records in the stream, including repeated ones, as other readers get them."""
    records = list[bytes]()
    for shard in client.list_shards(StreamName=stream)["Shards"]:
        iterator_request: Any = {"StreamName": stream, "ShardId": shard["ShardId"], "ShardIteratorType": "TRIM_HORIZON"}
        response = client.get_records(ShardIterator=client.get_shard_iterator(**iterator_request)["ShardIterator"])
        records += [
            user_record.data
            for row in response["Records"]
            for user_record in deaggregate(row["Data"], row["PartitionKey"])
        ]
    return records


def tags(client: KinesisClient, stream: str) -> list[Tag]:
    """Return the tags of all rows in the stream."""
    found_tags = list[Tag | None]()
    for shard in client.list_shards(StreamName=stream)["Shards"]:
        iterator_request: Any = {"StreamName": stream, "ShardId": shard["ShardId"], "ShardIteratorType": "TRIM_HORIZON"}
        response = client.get_records(ShardIterator=client.get_shard_iterator(**iterator_request)["ShardIterator"])
        for row in response["Records"]:
            found_tags += deaggregate(row["Data"], row["PartitionKey"]).tags
    return [tag for tag in found_tags if tag is not None]


def numbered(frame: DataFrame, number: str) -> DataFrame:
    key = (f.col(number) % 7).cast("string")
    return frame.select(f.col(number).cast("string").alias("data"), key.alias("partitionKey"))


def query(spark: SparkSession, sink_options: dict[str, str], folder: Path) -> StreamingQuery:
    """Start a query whose batches are the same in every run."""

    def start() -> StreamingQuery:
        source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 50).option("numPartitions", 2)
        writer = numbered(source.load(), "value").writeStream.format("kinesis-leased").options(**sink_options)
        return writer.option("checkpointLocation", str(folder)).queryName("writes").start()

    return start_query(start)


def run_until_batch(running: StreamingQuery, batch: int) -> None:
    """Wait until this batch is done, then stop the query."""

    def is_done() -> bool:
        if (fault := running.exception()) is not None:
            raise fault
        progress = running.lastProgress
        return progress is not None and bool(progress["batchId"] >= batch)

    until(is_done, "batch", 4 * WAIT)
    running.stop()


@pytest.mark.spark
@pytest.mark.services
@pytest.mark.xdist_group("spark")
class TestSpark:
    """The tests that share one session."""

    def test_rewritten_batch_is_read_once(
        self,
        spark: SparkSession,
        kinesis_client: KinesisClient,
        stream: str,
        sink_options: dict[str, str],
        tmp_path: Path,
    ) -> None:
        run_until_batch(query(spark, sink_options, tmp_path), 1)
        last_batch = max(int(path.name) for path in (tmp_path / "commits").glob("[0-9]*"))
        # Make it look as if the query was killed before it logged that this batch is done, and before it planned a
        # later one.
        for log, first_deleted in (("commits", last_batch), ("offsets", last_batch + 1)):
            for path in (tmp_path / log).iterdir():  # files of batches and of their checksums
                number = path.name.strip(".").removesuffix(".crc")
                if number.isdigit() and int(number) >= first_deleted:
                    path.unlink()
        runs_before = {tag.run for tag in tags(kinesis_client, stream)}
        run_until_batch(query(spark, sink_options, tmp_path), last_batch + 1)
        runs = {tag.run for tag in tags(kinesis_client, stream)}
        assert (len(runs_before), len(runs)) == (1, 2)
        rows, records = stored_rows(kinesis_client, stream), read_rows(kinesis_client, stream)
        assert len(rows) == len(set(rows)) + 50  # the stream contains one batch twice
        assert sorted(record.data for record in records) == sorted(set(rows))
        # Even and odd numbers are in separate partitions. The tasks of these run in parallel, and each keeps its own
        # order.
        for key, part in product(map(str, range(7)), range(2)):
            numbers_of_key = [int(record.data) for record in records if record.partition_key == key]
            numbers = [number for number in numbers_of_key if number % 2 == part]
            assert numbers == sorted(numbers)

    def test_concurrent_jobs_of_one_name_are_read_whole(
        self, spark: SparkSession, kinesis_client: KinesisClient, stream: str, sink_options: dict[str, str]
    ) -> None:
        """Each batch of one `writer.name` is a separate job, in whatever order the rows of the batches arrive."""

        def write(batch: int) -> None:
            spark.createDataFrame([(0,)], "n int")  # before this call, the thread has no active session and no formats
            frame = numbered(spark.range(batch * 500, batch * 500 + 500, 1, 2), "id").write.format("kinesis-leased")
            frame.options(**sink_options, **{"writer.name": "orders", "writer.batch": str(batch)}).mode("append").save()

        with ThreadPoolExecutor() as pool:
            assert [*pool.map(write, (2, 1, 0))] == [None] * 3
        write(1)
        assert sorted(int(record.data) for record in read_rows(kinesis_client, stream)) == [*range(1500)]
        assert len(stored_rows(kinesis_client, stream)) == 2000

    def test_frame_is_written_by_key_in_order(
        self, spark: SparkSession, kinesis_client: KinesisClient, stream: str, sink_options: dict[str, str]
    ) -> None:
        """`df.write` loses no row, writes none twice, and keeps the order of each key."""
        numbered(spark.range(0, 500, 1, 2), "id").write.format("kinesis-leased").options(**sink_options).mode(
            "append"
        ).save()
        records = read_rows(kinesis_client, stream)
        assert sorted(int(record.data) for record in records) == [*range(500)]
        for key in map(str, range(7)):
            numbers = [int(record.data) for record in records if record.partition_key == key]
            halves = [[n for n in numbers if n < 250], [n for n in numbers if n >= 250]]  # one half for each partition
            assert halves == [sorted(half) for half in halves]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda frame: frame.drop("partitionKey"), "column partitionKey: is missing"),
            (lambda frame: frame.withColumn("more", f.lit(1)), "column more: unknown"),
            (lambda frame: frame.withColumn("data", f.lit(1)), "column data: is int"),
            (lambda frame: frame.withColumn("data", f.lit(None).cast("string")), "column data: a row has null there"),
            (lambda frame: frame.withColumn("partitionKey", f.lit("")), "column partition_key: 0 characters"),
        ],
    )
    def test_unwritable_frame_is_rejected_in_one_sentence(
        self, spark: SparkSession, sink_options: dict[str, str], change: Callable[[DataFrame], DataFrame], message: str
    ) -> None:
        frame = change(numbered(spark.range(3), "id"))
        with pytest.raises(Exception, match=message):
            frame.write.format("kinesis-leased").options(**sink_options).mode("append").save()


def test_sections_do_not_depend_on_the_order_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """If other readers repeat a batch, it has the same sections, so that its rows are recognized as duplicates."""
    monkeypatch.setattr("leasehold.adapters.spark.sink.SECTION_BYTES", 2000)
    rows = [(b"%d" % number, str(number % 3)) for number in range(100)]

    def sections_of(order: list[tuple[bytes, str]], size: int) -> list[tuple[str, list[bytes]]]:
        pieces = [order[index : index + size] for index in range(0, len(order), size)]
        batches = [
            pa.RecordBatch.from_pydict(
                {"data": [data for data, _ in row_group], "PARTITIONKEY": [key for _, key in row_group]}
            )
            for row_group in pieces
        ]
        return [
            (compute_edition(row_group), row_group["data"].to_pylist())
            for row_group in split_into_sections(COLUMNS, batches)
        ]

    expected_sections = sections_of(rows, 100)
    assert sections_of(rows, 7) == expected_sections
    assert len({edition for edition, _ in expected_sections}) == len(expected_sections) > 1
    changed_sections = sections_of([*rows[:-1], (b"99", "9")], 100)
    assert changed_sections[:-1] == expected_sections[:-1]
    assert changed_sections[-1] != expected_sections[-1]
    monkeypatch.setattr("leasehold.adapters.spark.sink.SECTION_BYTES", 1 << 20)
    assert sections_of([row for key in "201" for row in rows if row[1] == key], 100) == sections_of(rows, 100)
