"""Produces a year of flights while the stream is resharded and requests fail, and then compares the stored records."""

from collections import Counter
from collections.abc import Iterator
from threading import Thread
from time import monotonic, sleep
from uuid import uuid4

from attrs import frozen
from faulty import Faulty
from standins.flight_rows import ROWS, flight_rows
from types_boto3_kinesis import KinesisClient

from leasehold.adapters.sources.kinesis.aggregation.decode import Reason, deaggregate
from leasehold.adapters.sources.kinesis.producer.core import Settings
from leasehold.adapters.sources.kinesis.producer.producer import Producer, RecordFuture
from leasehold.balancer.model import HashRange

_PATIENCE_SECONDS = 60


def flights(count: int = ROWS) -> Iterator[tuple[str, bytes]]:
    """Yield the aircraft and the CSV line of each of the first `count` flights. Each line is unique."""
    for number, row in enumerate(flight_rows(count)):
        yield row["tailnum"], ",".join((str(number), *row.values())).encode()


@frozen
class Stored:
    """One Kinesis record as stored in its shard."""

    shard: str
    hash_range: HashRange
    sequence_number: str
    partition_key: str
    data: bytes


@frozen
class Verdict:
    """The differences between the stored rows and those that were sent.

    lost, extra   rows that were sent but not found, and rows that were found but not sent
    disordered    keys whose rows, by first occurrence, are not in the order in which they were sent
    twice         rows that were found more than once
    unexplained   rows that were found more than once and were never in a request without a response
    misreported   rows that are not where the producer reported them
    dropped       aggregates that a reader leaves out because they landed on a wrong shard
    """

    lost: int
    extra: int
    disordered: tuple[str, ...]
    twice: int
    unexplained: int
    misreported: int
    dropped: int


def produce(
    client: KinesisClient,
    rows: list[tuple[str, bytes]],
    shards: tuple[int, ...],
    rate: float,
    pending: int,
) -> tuple[str, Faulty, list[RecordFuture], Producer]:
    """Send all rows, and change the shard count at even intervals in the meantime."""
    stream = f"flights-{uuid4().hex[:8]}"
    client.create_stream(StreamName=stream, ShardCount=shards[0])
    _active(client, stream)
    faulty_client = Faulty(client, rate)
    futures: list[RecordFuture] = []
    reshape_threads: list[Thread] = []
    producer = Producer(faulty_client, stream, Settings(share=16.0, linger_seconds=0.02), pending_records=pending)  # type: ignore[arg-type]  # it stands in for a client
    with producer:
        for number, (key, data) in enumerate(rows):
            if number and number % (len(rows) // len(shards) + 1) == 0:
                reshape_threads = [*reshape_threads, _reshape(client, stream, shards[len(reshape_threads) + 1])]
            futures.append(producer.put(data, key))
    for change in reshape_threads:
        change.join()
    return stream, faulty_client, futures, producer


def _reshape(client: KinesisClient, stream: str, count: int) -> Thread:
    def change() -> None:
        _active(client, stream)
        client.update_shard_count(StreamName=stream, TargetShardCount=count, ScalingType="UNIFORM_SCALING")

    thread = Thread(target=change)
    thread.start()
    return thread


def _active(client: KinesisClient, stream: str) -> None:
    deadline = monotonic() + _PATIENCE_SECONDS
    while client.describe_stream_summary(StreamName=stream)["StreamDescriptionSummary"]["StreamStatus"] != "ACTIVE":
        assert monotonic() < deadline, f"{stream} does not become active"
        sleep(0.05)


def stored(client: KinesisClient, stream: str) -> Iterator[Stored]:
    """Yield all records of the stream, shard by shard, beginning with the oldest shard."""
    for shard in sorted(client.list_shards(StreamName=stream)["Shards"], key=lambda shard_row: shard_row["ShardId"]):
        name, keys = shard["ShardId"], shard["HashKeyRange"]
        hash_range = int(keys["StartingHashKey"]), int(keys["EndingHashKey"])
        iterator_response = client.get_shard_iterator(StreamName=stream, ShardId=name, ShardIteratorType="TRIM_HORIZON")
        iterator: str | None = iterator_response["ShardIterator"]
        while iterator:
            response = client.get_records(ShardIterator=iterator)
            for row in response["Records"]:
                yield Stored(name, hash_range, row["SequenceNumber"], row["PartitionKey"], row["Data"])
            iterator = (
                response.get("NextShardIterator") if response["Records"] or response["MillisBehindLatest"] else None
            )


def judge(rows: list[tuple[str, bytes]], records: list[Stored], faulty: Faulty, futures: list[RecordFuture]) -> Verdict:
    """Compare the stored records with the rows that were sent."""
    written_rows: list[tuple[str, bytes, tuple[str, str, int]]] = []
    dropped_count = 0
    for stored_record in records:
        user_records = deaggregate(
            stored_record.data, stored_record.partition_key, None, stored_record.hash_range, misplaced="drop"
        )
        dropped_count += user_records.reason is Reason.OUT_OF_RANGE
        written_rows += [
            (
                user_record.partition_key or "",
                user_record.data,
                (stored_record.shard, stored_record.sequence_number, user_record.sub_sequence_number),
            )
            for user_record in user_records
        ]
    copies = Counter(data for _, data, _ in written_rows)
    sent_data = {data for _, data in rows}
    doubtful_data = {doubtful_record.data for row in faulty.doubtful for doubtful_record in deaggregate(row["Data"])}
    repeated_data = [data for data, count in copies.items() if count > 1]
    record_places = {(data, record_place) for _, data, record_place in written_rows}
    results = [(data, writing.result(timeout=0)) for (_, data), writing in zip(rows, futures, strict=True)]
    return Verdict(
        lost=len(sent_data - copies.keys()),
        extra=len(copies.keys() - sent_data),
        disordered=_disordered(rows, list(dict.fromkeys((key, data) for key, data, _ in written_rows))),
        twice=len(repeated_data),
        unexplained=sum(data not in doubtful_data for data in repeated_data),
        misreported=sum(
            (data, (written_record.shard, written_record.sequence_number, written_record.sub_sequence_number))
            not in record_places
            for data, written_record in results
        ),
        dropped=dropped_count,
    )


def _disordered(rows: list[tuple[str, bytes]], written_rows: list[tuple[str, bytes]]) -> tuple[str, ...]:
    orders: tuple[dict[str, list[bytes]], ...] = ({}, {})
    for order, key_data_rows in zip(orders, (rows, written_rows), strict=True):
        for key, data in key_data_rows:
            order.setdefault(key, []).append(data)
    return tuple(sorted(key for key in orders[0] if orders[0][key] != orders[1].get(key)))
