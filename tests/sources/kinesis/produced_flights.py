"""Produce a year of flights while the stream is resharded and requests fail, then judge the result."""

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
    """Return aircraft and line of the first flights; each line is unique."""
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
    """The result for the rows.

    lost, extra   rows sent and not found, found and not sent
    disordered    keys whose rows, by first occurrence, are not in the order in which they were sent
    twice         rows found more than once
    unexplained   those of them that were never in a request without a response
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
    """Send all rows, changing the shard count at even intervals."""
    stream = f"flights-{uuid4().hex[:8]}"
    client.create_stream(StreamName=stream, ShardCount=shards[0])
    _active(client, stream)
    faulty = Faulty(client, rate)
    writings: list[RecordFuture] = []
    changes: list[Thread] = []
    producer = Producer(faulty, stream, Settings(share=16.0, linger_seconds=0.02), pending_records=pending)  # type: ignore[arg-type]  # it stands in for a client
    with producer:
        for number, (key, data) in enumerate(rows):
            if number and number % (len(rows) // len(shards) + 1) == 0:
                changes = [*changes, _reshape(client, stream, shards[len(changes) + 1])]
            writings.append(producer.put(data, key))
    for change in changes:
        change.join()
    return stream, faulty, writings, producer


def _reshape(client: KinesisClient, stream: str, count: int) -> Thread:
    def change() -> None:
        _active(client, stream)
        client.update_shard_count(StreamName=stream, TargetShardCount=count, ScalingType="UNIFORM_SCALING")

    thread = Thread(target=change)
    thread.start()
    return thread


def _active(client: KinesisClient, stream: str) -> None:
    until = monotonic() + _PATIENCE_SECONDS
    while client.describe_stream_summary(StreamName=stream)["StreamDescriptionSummary"]["StreamStatus"] != "ACTIVE":
        assert monotonic() < until, f"{stream} does not become active"
        sleep(0.05)


def stored(client: KinesisClient, stream: str) -> Iterator[Stored]:
    """Return all records of the stream, shard by shard, older shards first."""
    for shard in sorted(client.list_shards(StreamName=stream)["Shards"], key=lambda each: each["ShardId"]):
        name, keys = shard["ShardId"], shard["HashKeyRange"]
        reach = int(keys["StartingHashKey"]), int(keys["EndingHashKey"])
        place = client.get_shard_iterator(StreamName=stream, ShardId=name, ShardIteratorType="TRIM_HORIZON")
        iterator: str | None = place["ShardIterator"]
        while iterator:
            answer = client.get_records(ShardIterator=iterator)
            for row in answer["Records"]:
                yield Stored(name, reach, row["SequenceNumber"], row["PartitionKey"], row["Data"])
            iterator = answer.get("NextShardIterator") if answer["Records"] or answer["MillisBehindLatest"] else None


def judge(
    rows: list[tuple[str, bytes]], records: list[Stored], faulty: Faulty, writings: list[RecordFuture]
) -> Verdict:
    """Compare the stored records with those that were sent."""
    written: list[tuple[str, bytes, tuple[str, str, int]]] = []
    dropped = 0
    for each in records:
        answer = deaggregate(each.data, each.partition_key, None, each.hash_range, misplaced="drop")
        dropped += answer.reason is Reason.OUT_OF_RANGE
        written += [
            (u.partition_key or "", u.data, (each.shard, each.sequence_number, u.sub_sequence_number)) for u in answer
        ]
    times = Counter(data for _, data, _ in written)
    sent_data = {data for _, data in rows}
    doubtful = {user.data for row in faulty.doubtful for user in deaggregate(row["Data"])}
    twice = [data for data, count in times.items() if count > 1]
    places = {(data, place) for _, data, place in written}
    results = [(data, writing.result(timeout=0)) for (_, data), writing in zip(rows, writings, strict=True)]
    return Verdict(
        lost=len(sent_data - times.keys()),
        extra=len(times.keys() - sent_data),
        disordered=_disordered(rows, list(dict.fromkeys((key, data) for key, data, _ in written))),
        twice=len(twice),
        unexplained=sum(data not in doubtful for data in twice),
        misreported=sum(
            (data, (w.shard, w.sequence_number, w.sub_sequence_number)) not in places for data, w in results
        ),
        dropped=dropped,
    )


def _disordered(rows: list[tuple[str, bytes]], written: list[tuple[str, bytes]]) -> tuple[str, ...]:
    orders: tuple[dict[str, list[bytes]], ...] = ({}, {})
    for order, each in zip(orders, (rows, written), strict=True):
        for key, data in each:
            order.setdefault(key, []).append(data)
    return tuple(sorted(key for key in orders[0] if orders[0][key] != orders[1].get(key)))
