"""The producer on a stream whose shards are split and merged while requests fail in various ways."""

from typing import Any, cast

import kcl_jar
import pytest
from attrs import evolve
from faulty import Faulty
from produced_flights import Verdict, flights, judge, produce, stored
from types_boto3_kinesis import KinesisClient
from waiters import AT_ONCE

from leasehold.adapters.sources.kinesis.aggregation.decode import deaggregate
from leasehold.adapters.sources.kinesis.producer.core import Settings
from leasehold.adapters.sources.kinesis.producer.producer import Producer, Written
from leasehold.adapters.sources.kinesis.records import Mark, SeenMarks, split_mark
from leasehold.errors import ProducerError, RecordLate, SourceError

pytestmark = pytest.mark.services

FINE = Verdict(lost=0, extra=0, disordered=(), twice=0, unexplained=0, misreported=0, dropped=0)


class Altered:
    """A client some of whose methods are replaced."""

    def __init__(self, client: KinesisClient, **methods: Any) -> None:  # noqa: ANN401  any method
        self._client = client
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  any attribute
        return getattr(self._client, name)


def patch_client(client: KinesisClient, **methods: Any) -> Any:  # noqa: ANN401  it replaces a client
    """Return the client with some of its methods replaced."""
    return Altered(client, **methods)


def summary(**fields: object) -> Any:  # noqa: ANN401  a client's method
    """Return a function that replaces DescribeStreamSummary and responds with these fields."""
    return lambda **_: {"StreamDescriptionSummary": fields}


def rejecting_put_records(code: str) -> Any:  # noqa: ANN401  a client's method
    """Return a function that replaces PutRecords and rejects every record."""
    return lambda **request: {"Records": [{"ErrorCode": code, "ErrorMessage": ""}] * len(request["Records"])}


def test_flights_keep_their_order_through_splits_merges_and_faults(client: KinesisClient) -> None:
    rows = list(flights(8000))
    name, faulty_client, futures, producer = produce(client, rows, (2, 4, 2), rate=0.3, pending=800)
    records = list(stored(client, name))
    verdict = judge(rows, records, faulty_client, futures)
    assert evolve(verdict, twice=0, dropped=0) == FINE
    assert producer.metrics["UserRecordsPut"] == len(rows)
    assert set(faulty_client.happened) == {"none", "throttled", "partly refused", "lost", "lost but written"}
    assert len({record.shard for record in records}) == 2 + 4 + 2


@pytest.mark.more
def test_flights_of_a_year_are_stored_correctly(client: KinesisClient) -> None:
    rows = list(flights())
    name, faulty_client, futures, producer = produce(client, rows, (8, 16, 8), rate=0.2, pending=5000)
    records = list(stored(client, name))
    verdict = judge(rows, records, faulty_client, futures)
    print(verdict, dict(faulty_client.happened), producer.metrics)  # noqa: T201  figures to read
    assert evolve(verdict, twice=0, dropped=0) == FINE
    if tools := kcl_jar.missing():
        pytest.skip(f"the rows are in order, but the KCL jar is not run: no {tools}")
    kcl_rows = kcl_jar.kcl_records((record.data, *record.hash_range) for record in records)
    own_rows = [
        deaggregate(record.data, record.partition_key, None, record.hash_range, misplaced="drop").rows
        for record in records
    ]
    assert [[row[2] for row in rows] for rows in kcl_rows] == [[row[2] for row in rows] for rows in own_rows]


def test_each_write_returns_where_its_record_is(client: KinesisClient, stream: str) -> None:
    with Producer(client, stream, Settings(linger_seconds=60)) as producer:
        futures = [producer.put(b"%d" % index, f"k{index % 5}", None if index % 2 else "7") for index in range(40)]
        assert not any(future.done for future in futures)
        assert producer.flush(timeout=30)
        payloads = {future.result(): b"%d" % index for index, future in enumerate(futures)}
    locations = {
        Written(record.shard, record.sequence_number, user_record.sub_sequence_number): user_record.data
        for record in stored(client, stream)
        for user_record in deaggregate(record.data, record.partition_key, None, record.hash_range)
    }
    assert payloads == locations


def test_stream_that_distributes_its_records_is_rejected(client: KinesisClient, stream: str) -> None:
    """Consumers of a stream that distributes its records would silently drop nearly every aggregate."""
    distributing_client = patch_client(client, describe_stream_summary=summary(RecordDistributionStrategy="AUTO"))
    with pytest.raises(SourceError, match="distributes its records itself"):
        Producer(distributing_client, stream)


def test_record_limit_is_the_streams_own(client: KinesisClient, stream: str) -> None:
    client_with_larger_limit = patch_client(client, describe_stream_summary=summary(MaxRecordSizeInKiB=2048))
    with Producer(client, stream) as default_producer, Producer(client_with_larger_limit, stream) as larger_producer:
        with pytest.raises(ValueError, match="data: 1048577 bytes with its key; the stream accepts 1048576"):
            default_producer.put(bytes((1 << 20) - 1), "ab")
        with pytest.raises(ValueError, match="the stream accepts 2097152"):
            larger_producer.put(bytes(2 << 20), "a")
        assert default_producer.put(bytes((1 << 20) - 1), "a").result(30).sub_sequence_number == 0


@pytest.mark.parametrize(
    ("key", "hash_key", "message"),
    [
        ("", None, "partition_key: 0 characters"),
        ("k" * 257, None, "partition_key: 257 characters"),
        ("k", "-1", "explicit_hash_key: '-1'"),
        ("k", str(2**128), "explicit_hash_key: "),
    ],
)
def test_record_that_the_service_would_reject_is_rejected_at_once(
    client: KinesisClient, stream: str, key: str, hash_key: str | None, message: str
) -> None:
    """An invalid record must not get into a request, because the whole request would fail."""
    with Producer(client, stream) as producer, pytest.raises(ValueError, match=message):
        producer.put(b"x", key, hash_key)


def test_late_record_times_out_if_the_caller_allows_it(client: KinesisClient, stream: str) -> None:
    refusing_client = patch_client(client, put_records=rejecting_put_records("ProvisionedThroughputExceededException"))
    settings = Settings(time_to_live_seconds=0.2, on_late="fail", linger_seconds=0)
    with Producer(refusing_client, stream, settings) as producer, pytest.raises(RecordLate, match="it was not written"):
        producer.put(b"x", "k").result(30)
    assert producer.metrics["UserRecordExpired"] == 1


def test_full_producer_blocks_its_caller(client: KinesisClient, stream: str) -> None:
    request_sizes: list[int] = []

    def count_and_put(**request: Any) -> Any:  # noqa: ANN401  a client's method
        request_sizes.append(sum(len(deaggregate(row["Data"])) for row in request["Records"]))
        return client.put_records(**request)

    settings = Settings(linger_seconds=0)
    with Producer(patch_client(client, put_records=count_and_put), stream, settings, pending_records=10) as producer:
        for number in range(200):
            producer.put(b"%d" % number, f"k{number}")
    assert sum(request_sizes) == 200
    assert max(request_sizes) <= 10


def test_lasting_fault_stops_the_producer(client: KinesisClient, stream: str) -> None:
    producer = Producer(client, stream, Settings(linger_seconds=0))
    client.delete_stream(StreamName=stream)
    client.get_waiter("stream_not_exists").wait(StreamName=stream, WaiterConfig=AT_ONCE)
    future = producer.put(b"x", "k")
    with pytest.raises(ProducerError, match=stream):
        future.result(30)
    with pytest.raises(ProducerError, match=stream):
        producer.close()


def test_marks_identify_a_duplicate(client: KinesisClient, stream: str) -> None:
    """If a record was sent again because a response was lost, a reader can recognize and drop the second copy."""
    faulty = Faulty(client, rate=0.5, seed=3)
    producer = Producer(cast("KinesisClient", faulty), stream, Settings(linger_seconds=0, epoch=7), pending_records=20)
    with producer:
        for number in range(300):
            producer.put(b"%d" % number, "k")
    seen_marks, unmarked_records = SeenMarks(), []
    for record in stored(client, stream):
        for user_record in deaggregate(record.data, record.partition_key, None, record.hash_range):
            mark, data = split_mark(user_record.data)
            assert mark is not None
            unmarked_records.append((mark.counter, data, seen_marks.is_duplicate(mark)))
    assert [data for _, data, is_duplicate in unmarked_records if not is_duplicate] == [
        b"%d" % number for number in range(300)
    ]
    assert any(is_duplicate for *_, is_duplicate in unmarked_records)
    assert all(data == b"%d" % counter for counter, data, _ in unmarked_records)


def test_record_without_a_mark_is_left_unchanged() -> None:
    for data in (b"", b"lh\x00\x01short", b"x" * 40):
        assert split_mark(data) == (None, data)


def test_reader_forgets_the_oldest_marks() -> None:
    seen_marks = SeenMarks(capacity=2)
    assert [seen_marks.is_duplicate(Mark(1, counter)) for counter in (1, 2, 2, 3, 1)] == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_closed_producer_accepts_nothing(client: KinesisClient, stream: str) -> None:
    with Producer(client, stream) as producer:
        pass
    with pytest.raises(ProducerError, match="closed"):
        producer.put(b"x", "k")
