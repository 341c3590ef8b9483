"""The reading of a shard from a stubbed service: where it starts, how often it polls, and how it handles faults."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Never, cast

import boto3
import pytest
from aggregates import keys, record, sealed
from attrs import evolve
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    CredentialRetrievalError,
    NoCredentialsError,
    ReadTimeoutError,
    SSOTokenLoadError,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
from botocore.stub import Stubber

from leasehold.adapters.sources.call_timeouts import Backoff
from leasehold.adapters.sources.kinesis.aggregation import decode
from leasehold.adapters.sources.kinesis.aggregation.decode import Reason, UserRecords
from leasehold.adapters.sources.kinesis.fan_out import FanOut
from leasehold.adapters.sources.kinesis.faults import PollPace, parse_poll_seconds, translate_errors
from leasehold.adapters.sources.kinesis.poller import DropCounter, Poller
from leasehold.adapters.sources.kinesis.source import KinesisSource
from leasehold.adapters.sources.kinesis.streams import KinesisStreams
from leasehold.adapters.sources.protocol import Record, SettledShard
from leasehold.adapters.sources.urls import open_source
from leasehold.balancer.model import HASH_KEYS, LATEST, TRIM_HORIZON, HashRange, Lease, Position, Shard, at_timestamp
from leasehold.errors import SourceError, SourceUnavailable

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

ARRIVED = datetime(2026, 1, 2, tzinfo=UTC)
PLACE = {"StreamName": "orders", "ShardId": "s-0"}


@pytest.fixture
def stub() -> Iterator[Stubber]:
    """Yield a stub of the service that returns scripted responses and checks each request."""
    with Stubber(boto3.client("kinesis", region_name="eu-west-1")) as stubber:
        yield stubber
        stubber.assert_no_pending_responses()


def client(stub: Stubber) -> "KinesisClient":
    return cast("KinesisClient", stub.client)


def source(stub: Stubber, clock: Callable[[], float] = lambda: 0.0) -> KinesisSource:
    return KinesisSource(client(stub), "orders", clock=clock)


def poller(
    stub: Stubber,
    start: Position = TRIM_HORIZON,
    hash_range: HashRange | None = HASH_KEYS,
    *,
    whole_aggregates: bool = False,
) -> Poller:
    """Return a reader of one shard."""
    return Poller(client(stub), "orders", "s-0", start, hash_range, whole_aggregates=whole_aggregates)


def iterator(stub: Stubber, name: str, **place: object) -> None:
    """Expect a request for an iterator at this place, and return the iterator `name`."""
    stub.add_response("get_shard_iterator", {"ShardIterator": name}, {**PLACE, **place})


def row(number: int, data: bytes = b"data", **more: object) -> dict[str, Any]:
    return {
        "SequenceNumber": str(number),
        "Data": data,
        "PartitionKey": "k",
        "ApproximateArrivalTimestamp": ARRIVED,
    } | more


def stub_get_records(
    stub: Stubber,
    iterator_name: str,
    next_iterator: str | None,
    *rows: dict[str, Any],
    behind_ms: int = 0,
    limit: int = 10_000,
    **more: object,
) -> None:
    """Expect a request for at most `limit` records, and respond with these rows."""
    body: dict[str, Any] = {"Records": list(rows), "MillisBehindLatest": behind_ms, **more}
    if next_iterator is not None:
        body["NextShardIterator"] = next_iterator
    stub.add_response("get_records", body, {"ShardIterator": iterator_name, "Limit": limit})


def reject(stub: Stubber, code: str, status: int = 400) -> None:
    """Reject the next request with this error."""
    stub.add_client_error("get_records", service_error_code=code, http_status_code=status)


def aggregate(*texts: bytes) -> bytes:
    """Return an aggregated record of user records with these data and the same key."""
    return sealed(keys("k") + b"".join(record(0, text) for text in texts))


AT_FIVE = {"ShardIteratorType": "AT_SEQUENCE_NUMBER", "StartingSequenceNumber": "5"}


def record_fields(records: Sequence[Record]) -> list[tuple[str, int, bytes]]:
    """Return the sequence number, sub-sequence number and data of each record."""
    return [(record.sequence_number, record.sub_sequence_number, record.data) for record in records]


@pytest.mark.parametrize(
    ("start", "place"),
    [
        (TRIM_HORIZON, {"ShardIteratorType": "TRIM_HORIZON"}),
        (LATEST, {"ShardIteratorType": "LATEST"}),
        (at_timestamp(1_767_312_000_000), {"ShardIteratorType": "AT_TIMESTAMP", "Timestamp": ARRIVED}),
        (Position("7"), {"ShardIteratorType": "AT_SEQUENCE_NUMBER", "StartingSequenceNumber": "7"}),
    ],
)
def test_reader_starts_at_the_requested_position(stub: Stubber, start: Position, place: dict[str, object]) -> None:
    iterator(stub, "i-1", **place)
    stub_get_records(stub, "i-1", "i-2")
    assert poller(stub, start).read().records == ()


def test_records_arrive_whole_and_in_order(stub: Stubber) -> None:
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    stub_get_records(stub, "i-1", "i-2", row(5, b"a"), row(6, b"b"), behind_ms=1500)
    batch = poller(stub).read()
    assert batch.records == (
        Record(b"a", "5", 0, "k", None, ARRIVED.timestamp()),
        Record(b"b", "6", 0, "k", None, ARRIVED.timestamp()),
    )
    assert (batch.read_to, batch.behind_seconds, batch.ended) == (Position("6"), 1.5, False)


def test_reader_resumes_inside_an_aggregate(stub: Stubber) -> None:
    iterator(stub, "i-1", ShardIteratorType="AT_SEQUENCE_NUMBER", StartingSequenceNumber="5")
    stub_get_records(stub, "i-1", "i-2", row(5, aggregate(b"a", b"b", b"c")), row(6, b"d"))
    batch = poller(stub, Position("5", 1)).read()
    assert record_fields(batch.records) == [("5", 2, b"c"), ("6", 0, b"d")]
    assert [record.aggregated for record in batch.records] == [True, False]


@pytest.mark.parametrize(
    ("start", "place", "records"),
    [
        (TRIM_HORIZON, {"ShardIteratorType": "TRIM_HORIZON"}, ["5", "6", "7"]),
        (Position("5", 1), AT_FIVE, ["5", "6", "7"]),
        (Position("5", 2), AT_FIVE, ["6", "7"]),
    ],
)
def test_whole_aggregate_returns_until_its_last_user_record_is_done(
    stub: Stubber, start: Position, place: dict[str, object], records: list[str]
) -> None:
    """If a reader of user records has stopped within an aggregate, the whole aggregate is read again."""
    iterator(stub, "i-1", **place)
    aggregate_data = aggregate(b"a", b"b", b"c")
    stub_get_records(stub, "i-1", "i-2", row(5, aggregate_data), row(6, b"d"), row(7, aggregate(b"e", b"f")))
    batch = poller(stub, start, whole_aggregates=True).read()
    expected = {"5": ("5", 2, aggregate_data), "6": ("6", 0, b"d"), "7": ("7", 1, aggregate(b"e", b"f"))}
    assert record_fields(batch.records) == [expected[number] for number in records]
    assert not any(record.aggregated for record in batch.records)
    assert batch.read_to == Position("7", 1)


def test_dropped_aggregate_counts_as_read(stub: Stubber, caplog: pytest.LogCaptureFixture) -> None:
    """Dropped aggregates at the end of a shard can be checkpointed, so that the shard's backlog can fall to zero."""
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    stub_get_records(stub, "i-1", "i-2", row(5, aggregate(b"a", b"b")))
    batch = poller(stub, hash_range=(0, 1)).read()
    assert (batch.records, batch.read_to, batch.size) == ((), Position("5", 1), len(aggregate(b"a", b"b")))
    assert "2 user records of 5 dropped: out-of-range" in caplog.text


def test_expired_iterator_is_replaced_after_the_last_record(stub: Stubber) -> None:
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    stub_get_records(stub, "i-1", "i-2", row(5, aggregate(b"a", b"b")))
    reject(stub, "ExpiredIteratorException")
    iterator(stub, "i-3", ShardIteratorType="AFTER_SEQUENCE_NUMBER", StartingSequenceNumber="5")
    stub_get_records(stub, "i-3", "i-4", row(6, b"c"))
    reader = poller(stub)
    assert [record_fields(reader.read().records) for _ in range(3)] == [
        [("5", 0, b"a"), ("5", 1, b"b")],
        [],
        [("6", 0, b"c")],
    ]


def test_empty_response_keeps_the_read_position(stub: Stubber) -> None:
    """An iterator that expires on a quiet shard is replaced by one after the last record, and not at the start."""
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    stub_get_records(stub, "i-1", "i-2", row(5, b"a"))
    stub_get_records(stub, "i-2", "i-3")
    reject(stub, "ExpiredIteratorException")
    iterator(stub, "i-4", ShardIteratorType="AFTER_SEQUENCE_NUMBER", StartingSequenceNumber="5")
    stub_get_records(stub, "i-4", "i-5", row(6, b"b"))
    reader = poller(stub)
    assert [record_fields(reader.read().records) for _ in range(4)] == [[("5", 0, b"a")], [], [], [("6", 0, b"b")]]


def test_iterator_that_expires_before_any_read_starts_over(stub: Stubber) -> None:
    """The new iterator starts at the original position, so that no record is skipped."""
    for name in ("i-1", "i-2"):
        iterator(stub, name, ShardIteratorType="AT_SEQUENCE_NUMBER", StartingSequenceNumber="5")
        if name == "i-1":
            reject(stub, "ExpiredIteratorException")
    stub_get_records(stub, "i-2", "i-3", row(5, b"done"), row(6, b"new"))
    reader = poller(stub, Position("5"))
    assert [record_fields(reader.read().records) for _ in range(2)] == [[], [("6", 0, b"new")]]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("ProvisionedThroughputExceededException", 400),
        ("LimitExceededException", 400),
        ("InternalFailure", 500),
        ("AnotherName", 503),
    ],
)
def test_temporary_fault_costs_a_wait_and_no_record(stub: Stubber, code: str, status: int) -> None:
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    reject(stub, code, status)
    stub_get_records(stub, "i-1", "i-2", row(5))
    reader = poller(stub)
    failed_batch, later_batch = reader.read(), reader.read()
    assert (failed_batch.records, failed_batch.read_to, failed_batch.ended) == ((), None, False)
    assert failed_batch.wait_seconds >= 0.4
    assert record_fields(later_batch.records) == [("5", 0, b"data")]


def test_broken_connection_is_retried_with_the_same_iterator(stub: Stubber, monkeypatch: pytest.MonkeyPatch) -> None:
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    stub_get_records(stub, "i-1", "i-2", row(5))
    reader = poller(stub)
    monkeypatch.setattr(stub.client, "get_records", _raising(ConnectionClosedError(endpoint_url="there")))
    assert reader.read().records == ()
    monkeypatch.undo()
    assert record_fields(reader.read().records) == [("5", 0, b"data")]


def test_late_response_shrinks_requests_up_to_the_tip(stub: Stubber, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a timeout, requests become smaller, so that the reader makes progress on a slow connection."""
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    reader = poller(stub)
    monkeypatch.setattr(stub.client, "get_records", _raising(ReadTimeoutError(endpoint_url="there")))
    assert [reader.read().records for _ in range(2)] == [(), ()]
    monkeypatch.undo()
    stub_get_records(stub, "i-1", "i-2", row(5), behind_ms=1000, limit=10_000 // 64)
    stub_get_records(stub, "i-2", "i-3", row(6), limit=10_000 // 64)
    stub_get_records(stub, "i-3", "i-4", row(7), limit=10_000)
    assert [record_fields(reader.read().records) for _ in range(3)] == [
        [(number, 0, b"data")] for number in ("5", "6", "7")
    ]


def test_repeated_timeouts_never_shrink_requests_to_nothing(stub: Stubber, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the tip, requests ask for the reader's own maximum again, which may be lower than the service's limit."""
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    reader = Poller(client(stub), "orders", "s-0", TRIM_HORIZON, HASH_KEYS, max_records=100)
    monkeypatch.setattr(stub.client, "get_records", _raising(ReadTimeoutError(endpoint_url="there")))
    for _ in range(5):
        reader.read()
    monkeypatch.undo()
    stub_get_records(stub, "i-1", "i-2", row(5), behind_ms=1000, limit=1)
    stub_get_records(stub, "i-2", "i-3", row(6), limit=1)
    stub_get_records(stub, "i-3", "i-4", row(7), limit=100)
    assert [len(reader.read().records) for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("code", "status", "answered"),
    [
        ("ProvisionedThroughputExceededException", 400, True),
        ("InternalFailure", 500, False),
        ("ExpiredIteratorException", 400, True),
    ],
)
def test_failed_read_is_no_read_and_shows_whether_the_service_responded(
    stub: Stubber, code: str, status: int, *, answered: bool
) -> None:
    """If the service rejects every worker's requests in the same way, another worker cannot read the shard either."""
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    reject(stub, code, status)
    batch = poller(stub).read()
    assert (bool(batch.fault), batch.answered) == (True, answered)


def test_repeated_throttling_lengthens_the_waits(stub: Stubber) -> None:
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    for _ in range(20):
        reject(stub, "ProvisionedThroughputExceededException")
    stub_get_records(stub, "i-1", "i-2", row(5))
    reader = poller(stub)
    waits = [reader.read().wait_seconds for _ in range(20)]
    assert (min(waits) >= 0.4, max(waits) <= 10.0, sum(waits) > 20 * 0.4) == (True, True, True)
    assert record_fields(reader.read().records) == [("5", 0, b"data")]


def test_response_resets_the_backoff(stub: Stubber, monkeypatch: pytest.MonkeyPatch) -> None:
    backoff_without_jitter = partial(Backoff, uniform=lambda _least, most: round(most, 3))
    monkeypatch.setattr("leasehold.adapters.sources.kinesis.poller.Backoff", backoff_without_jitter)
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    for _ in range(4):
        reject(stub, "InternalFailure", 500)
    stub_get_records(stub, "i-1", "i-2", row(5))
    reject(stub, "InternalFailure", 500)
    reader = poller(stub)
    assert [reader.read().wait_seconds for _ in range(6)] == [1.2, 3.6, 10.0, 10.0, 0.5, 1.2]


def test_trimmed_checkpoint_stops_the_shard_with_advice(stub: Stubber) -> None:
    stub.add_client_error("get_shard_iterator", "InvalidArgumentException", "StartingSequenceNumber is invalid")
    with pytest.raises(SourceError, match=r"shard s-0 .*checkpoint 5 .*reset.*if_trimmed=TRIM_HORIZON") as exc_info:
        poller(stub, Position("5")).read()
    assert not isinstance(exc_info.value, SourceUnavailable)


def test_if_trimmed_option_continues_after_the_trimmed_records(stub: Stubber, caplog: pytest.LogCaptureFixture) -> None:
    stub.add_client_error("get_shard_iterator", "InvalidArgumentException", "StartingSequenceNumber is invalid")
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    stub_get_records(stub, "i-1", "i-2", row(3), row(9))  # The sequence numbers of a recreated stream may be lower.
    reader = Poller(client(stub), "orders", "s-0", Position("5"), HASH_KEYS, rewind=True)
    assert record_fields(reader.read().records) == [("3", 0, b"data"), ("9", 0, b"data")]
    assert "s-0: 5 no longer exists; starting at TRIM_HORIZON" in caplog.text


@pytest.mark.parametrize("rewind", [False, True])
def test_position_rejected_in_mid_shard_is_no_trimmed_checkpoint(stub: Stubber, *, rewind: bool) -> None:
    """Only the first iterator can show that the checkpoint was trimmed. A later rejection never rewinds the shard."""
    iterator(stub, "i-1", ShardIteratorType="AT_SEQUENCE_NUMBER", StartingSequenceNumber="5")
    stub_get_records(stub, "i-1", "i-2", row(6))
    reject(stub, "ExpiredIteratorException")
    stub.add_client_error("get_shard_iterator", "InvalidArgumentException", "StartingSequenceNumber is invalid")
    reader = Poller(client(stub), "orders", "s-0", Position("5"), HASH_KEYS, rewind=rewind)
    assert [record_fields(reader.read().records) for _ in range(2)] == [[("6", 0, b"data")], []]
    with pytest.raises(SourceError, match="rejected a request"):
        reader.read()


def test_other_invalid_argument_is_no_trimmed_checkpoint(stub: Stubber) -> None:
    stub.add_client_error("get_shard_iterator", "InvalidArgumentException", "no such type")
    with pytest.raises(SourceError, match="rejected a request"):
        Poller(client(stub), "orders", "s-0", TRIM_HORIZON, HASH_KEYS, rewind=True).read()


def test_gap_after_the_checkpoint_is_logged(stub: Stubber, caplog: pytest.LogCaptureFixture) -> None:
    """The service continues after trimmed records without an error, so the reader must log the gap."""
    iterator(stub, "i-1", ShardIteratorType="AT_SEQUENCE_NUMBER", StartingSequenceNumber="5")
    stub_get_records(stub, "i-1", "i-2", row(9))
    stub_get_records(stub, "i-2", "i-3", row(12))
    reader = poller(stub, Position("5"))
    assert [record_fields(reader.read().records) for _ in range(2)] == [[("9", 0, b"data")], [("12", 0, b"data")]]
    warning = (
        "shard s-0: the record of its checkpoint, 5, was trimmed; reading continues at 9, and any records in between"
    )
    assert [record.message.startswith(warning) for record in caplog.records] == [True]


@pytest.mark.parametrize(("start", "first", "is_gap"), [("5", 5, False), ("9", 10, True), ("99", 100, True)])
def test_only_a_later_first_record_is_a_gap(
    stub: Stubber, start: str, first: int, caplog: pytest.LogCaptureFixture, *, is_gap: bool
) -> None:
    """Sequence numbers are compared as numbers, although they are strings of different lengths."""
    iterator(stub, "i-1", ShardIteratorType="AT_SEQUENCE_NUMBER", StartingSequenceNumber=start)
    stub_get_records(stub, "i-1", "i-2", row(first))
    poller(stub, Position(start)).read()
    assert ["was trimmed" in message for message in caplog.messages] == [True] * is_gap


def test_aggregate_without_records_counts_as_read(stub: Stubber) -> None:
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    stub_get_records(stub, "i-1", "i-2", row(5, sealed(keys("k"))))
    batch = poller(stub).read()
    assert (batch.records, batch.read_to) == ((), Position("5", 0))


def test_whole_malformed_aggregate_has_the_position_of_its_last_user_record(stub: Stubber) -> None:
    """The records that cannot be read count, too, as they do for a reader of user records."""
    malformed = sealed(keys("k") + record(0, b"a") + record(7, b"b") + record(0, b"c"))
    ends = set[Position | None]()
    for whole_aggregates in (False, True):
        iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
        stub_get_records(stub, "i-1", "i-2", row(5, malformed))
        ends.add(poller(stub, whole_aggregates=whole_aggregates).read().read_to)
    assert ends == {Position("5", 2)}


def _raising(error: Exception) -> Callable[..., object]:
    def call(**_request: object) -> object:
        raise error

    return call


def test_poll_interval_is_short_at_the_tip_and_long_when_idle(stub: Stubber) -> None:
    iterator(stub, "i", ShardIteratorType="TRIM_HORIZON")
    stub_get_records(stub, "i", "i", row(5))
    stub_get_records(stub, "i", "i", behind_ms=10)
    for _ in range(5):
        stub_get_records(stub, "i", "i")
    stub_get_records(stub, "i", "i", row(6))
    reader = poller(stub)
    assert [reader.read().wait_seconds for _ in range(8)] == [0.5, 0.25, 1.0, 2.0, 2.0, 2.0, 2.0, 0.5]


def test_throttled_reader_polls_less_often_for_a_while(stub: Stubber) -> None:
    iterator(stub, "i", ShardIteratorType="TRIM_HORIZON")
    for _ in range(2):
        reject(stub, "ProvisionedThroughputExceededException")
    for _ in range(20):
        stub_get_records(stub, "i", "i", row(5), behind_ms=10)
    reader = poller(stub)
    waits = [reader.read().wait_seconds for _ in range(22)][2:]
    assert (waits[0], waits[-1]) == (1.0, 0.25)
    assert waits == sorted(waits, reverse=True)


def test_poll_interval_option_is_honored() -> None:
    pace = PollPace(1.0)
    assert [pace.next_pause(idle=idle, behind=not idle) for idle in (False, True, True)] == [1.0, 2.0, 2.0]
    assert PollPace(10.0).next_pause(idle=True, behind=False) == 10.0


@pytest.mark.parametrize(("idle", "behind", "pause"), [(False, True, 0.25), (False, False, 0.5), (True, False, 1.0)])
def test_throttling_lengthens_every_pause_at_most_eightfold(idle: bool, behind: bool, pause: float) -> None:
    pace = PollPace()
    for factor in (2, 4, 8, 8):
        pace.slow_down()
        assert copy(pace).next_pause(idle=idle, behind=behind) == factor * pause


@pytest.mark.parametrize("text", ["0.2", "60", "1e1"])
def test_poll_interval_within_the_limits_is_accepted(text: str) -> None:
    """Both bounds are themselves valid."""
    assert parse_poll_seconds(text) == float(text)


@pytest.mark.parametrize("text", ["0.19", "60.1", "-1", "nan", "inf"])
def test_poll_interval_beyond_the_limits_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"option 'poll_seconds' must be 0\.2 to 60"):
        parse_poll_seconds(text)


@pytest.mark.parametrize("rows", [(row(5),), ()], ids=["records", "none"])
def test_closed_shard_ends_with_its_children(stub: Stubber, rows: tuple[dict[str, Any], ...]) -> None:
    """The last batch contains the child shards, so that the worker does not have to list the shards after a reshard."""
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    hash_range = {"StartingHashKey": "0", "EndingHashKey": "9"}
    stub_get_records(
        stub,
        "i-1",
        None,
        *rows,
        ChildShards=[{"ShardId": "c", "ParentShards": ["s-0", "s-1"], "HashKeyRange": hash_range}],
    )
    batch = poller(stub).read()
    assert (batch.ended, batch.children) == (True, (Shard("c", parents=("s-0", "s-1"), hash_range=(0, 9)),))


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("ResourceNotFoundException", "stream 'orders': .*; check its name, account and region"),
        ("UnrecognizedClientException", "credentials for stream 'orders' are not accepted .*renew or replace them"),
        ("ExpiredToken", r"credentials for stream 'orders' are not accepted \(ExpiredToken\): renew or replace them"),
        ("AccessDeniedException", "these credentials cannot read stream 'orders'"),
    ],
)
def test_lasting_fault_is_one_clear_error(stub: Stubber, code: str, says: str) -> None:
    stub.add_client_error("list_shards", service_error_code=code, service_message="")
    with pytest.raises(SourceError, match=says) as exc_info:
        source(stub).shards()
    assert not isinstance(exc_info.value, SourceUnavailable)


@pytest.mark.parametrize(
    ("operation", "says"),
    [
        ("PutRecords", "write to stream 'orders', because they lack kms:GenerateDataKey of the stream's key: no"),
        ("GetRecords", "read stream 'orders', because they lack kms:Decrypt of the stream's key: no"),
    ],
)
def test_missing_key_permission_is_named(operation: str, says: str) -> None:
    rejection = ClientError({"Error": {"Code": "KMSAccessDeniedException", "Message": "no"}}, operation)
    with pytest.raises(SourceError) as exc_info, translate_errors("orders"):
        raise rejection
    assert str(exc_info.value) == f"these credentials cannot {says}"


def test_missing_credentials_are_one_clear_error() -> None:
    with pytest.raises(SourceError, match="no credentials for stream 'orders'"), translate_errors("orders"):
        raise NoCredentialsError


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (SSOTokenLoadError(error_msg="no token"), "Error loading SSO Token: no token; run aws sso login"),
        (
            TokenRetrievalError(provider="sso", error_msg="expired"),
            "Error when retrieving token from sso: expired; run aws sso login",
        ),
        (UnauthorizedSSOTokenError(), "run aws sso login with the corresponding profile"),
        (
            CredentialRetrievalError(provider="custom-process", error_msg=""),
            "Error when retrieving credentials from custom-process; check the profile",
        ),
    ],
)
def test_unobtainable_credentials_are_named_and_retried(fault: Exception, says: str) -> None:
    """The worker continues once the user has logged in. Until then, its error must not blame the network."""
    with pytest.raises(SourceUnavailable) as exc_info, translate_errors("orders"):
        raise fault
    assert str(exc_info.value).startswith("no credentials for stream 'orders': ")
    assert str(exc_info.value).endswith(says)


def describe_listed_shard(name: str, *parents: str, is_closed: bool = False) -> dict[str, Any]:
    """Return the description of a shard as ListShards returns it."""
    sequence = {"StartingSequenceNumber": "1"} | ({"EndingSequenceNumber": "2"} if is_closed else {})
    parent_fields = dict(zip(("ParentShardId", "AdjacentParentShardId"), parents, strict=False))
    hash_range = {"StartingHashKey": "0", "EndingHashKey": str(HASH_KEYS[1])}
    return {"ShardId": name, "HashKeyRange": hash_range, "SequenceNumberRange": sequence} | parent_fields


def page(*rows: dict[str, Any], date: str | None = None, **more: object) -> dict[str, Any]:
    headers = {} if date is None else {"date": date}
    return {"Shards": list(rows), "ResponseMetadata": {"HTTPHeaders": headers}, **more}


def test_every_page_of_shards_is_listed(stub: Stubber) -> None:
    first_page = page(describe_listed_shard("s-0", is_closed=True), NextToken="t")
    stub.add_response("list_shards", first_page, {"StreamName": "orders", "MaxResults": 1000})
    second_page = page(describe_listed_shard("s-1", "s-0"), NextToken="u")
    stub.add_response("list_shards", second_page, {"NextToken": "t", "MaxResults": 1000})
    third_page = page(describe_listed_shard("s-2", "s-0", "s-1"))
    stub.add_response("list_shards", third_page, {"NextToken": "u", "MaxResults": 1000})
    assert source(stub).shards() == (
        Shard("s-0", hash_range=HASH_KEYS, open=False),
        Shard("s-1", parents=("s-0",), hash_range=HASH_KEYS),
        Shard("s-2", parents=("s-0", "s-1"), hash_range=HASH_KEYS),
    )


def test_latest_is_the_services_time_and_never_later(stub: Stubber) -> None:
    stub.add_response("list_shards", page(date="Fri, 02 Jan 2026 00:00:00 GMT"))
    times = iter([5000.0, 5000.25])
    assert source(stub, lambda: next(times)).latest(Lease("s-0")) == at_timestamp(1_767_312_000_250)


def test_latest_follows_the_services_clock(stub: Stubber) -> None:
    """Each listing compares the clocks again, because they drift apart."""
    for second in (0, 7):
        stub.add_response("list_shards", page(date=f"Fri, 02 Jan 2026 00:00:0{second} GMT"))
    stream = source(stub, lambda: 5000.0)
    times = []
    for _ in range(2):
        stream.shards()
        times.append(stream.latest(Lease("s-0")))
    assert times == [at_timestamp(1_767_312_000_000), at_timestamp(1_767_312_007_000)]


def test_latest_is_the_local_time_if_the_service_sends_none(stub: Stubber, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.add_response("list_shards", page())
    local_time = SimpleNamespace(time=lambda: 1_767_312_000.0)
    monkeypatch.setattr("leasehold.adapters.sources.kinesis.source.time", local_time)
    times = iter([5000.0, 5000.25])
    assert source(stub, lambda: next(times)).latest(Lease("s-0")) == at_timestamp(1_767_312_000_250)


def test_time_is_settled_five_seconds_later_by_the_services_clock(stub: Stubber) -> None:
    """A slice ends five seconds late, because its last records need time to arrive."""
    stub.add_response("list_shards", page(date="Fri, 02 Jan 2026 00:00:00 GMT"))
    times = iter([0.0, 4.999, 5.0])
    stream = source(stub, lambda: next(times))
    assert [stream.settled(Lease("s-0"), ARRIVED.timestamp()) for _ in range(2)] == [None, SettledShard()]


def test_shard_is_gone_only_if_its_stream_responds(stub: Stubber) -> None:
    """If the stream was deleted by mistake, its shards do not count as gone, so that their checkpoints are kept."""
    stub.add_client_error("get_shard_iterator", service_error_code="ResourceNotFoundException")
    stub.add_response("list_shards", page(describe_listed_shard("s-1")))
    stub.add_client_error("get_shard_iterator", service_error_code="ResourceNotFoundException")
    stub.add_client_error("list_shards", service_error_code="ResourceNotFoundException")
    stub.add_response("get_shard_iterator", {"ShardIterator": "i-1"})
    assert source(stub).gone("s-0")
    with pytest.raises(SourceError):
        source(stub).gone("s-0")
    assert not source(stub).gone("s-0")


@pytest.mark.parametrize("code", ["AccessDeniedException", "LimitExceededException"])
def test_shard_of_a_rejected_request_is_neither_gone_nor_there(stub: Stubber, code: str) -> None:
    stub.add_client_error("get_shard_iterator", service_error_code=code)
    with pytest.raises(SourceError):
        source(stub).gone("s-0")


def test_listed_shard_is_not_gone(stub: Stubber) -> None:
    """The service may reject a request for a shard that it lists, for example just after a split."""
    stub.add_client_error("get_shard_iterator", service_error_code="ResourceNotFoundException")
    stub.add_response("list_shards", page(describe_listed_shard("s-0")))
    assert not source(stub).gone("s-0")


@pytest.mark.parametrize(("summary", "expected"), [({"RecordDistributionStrategy": "AUTO"}, [b"a"]), ({}, [])])
def test_aggregates_are_kept_if_the_service_distributes_records(
    stub: Stubber, monkeypatch: pytest.MonkeyPatch, summary: dict[str, str], expected: list[bytes]
) -> None:
    """If the service distributes records itself, a user record's hash key may be outside the range of its shard."""
    # The service model of boto3 may not have this field yet, so replace the whole method.
    monkeypatch.setattr(stub.client, "describe_stream_summary", lambda **_: {"StreamDescriptionSummary": summary})
    reader = source(stub).open(Lease("s-0", hash_range=(0, 1)), TRIM_HORIZON)
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    stub_get_records(stub, "i-1", "i-2", row(5, aggregate(b"a")))
    assert [user_record.data for user_record in reader.read().records] == expected


def test_events_contain_the_arn_that_the_service_returns(stub: Stubber, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions may distinguish streams by ARN. Until the service has returned the ARN, its account is unknown."""
    arn = "arn:aws:kinesis:eu-west-1:111122223333:stream/orders"
    summary = {"StreamARN": arn, "StreamCreationTimestamp": ARRIVED}
    monkeypatch.setattr(stub.client, "describe_stream_summary", lambda **_: {"StreamDescriptionSummary": summary})
    stream = source(stub)
    assert stream.arn("orders") == f"arn:aws:kinesis:{stub.client.meta.region_name}::stream/orders"
    identity = stream.identity()
    assert stream.arn("orders") == arn
    streams = KinesisStreams([stream])
    assert streams.reads(Lease("k", stream=identity))
    assert streams.arn(identity) == arn


def test_rejected_stream_description_is_not_repeated_for_each_shard(
    stub: Stubber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service allows an account only 20 of these requests per second."""
    now, calls = [0.0], list[float]()

    def describe(**_: object) -> dict[str, Any]:
        calls.append(now[0])
        if now[0] < 100.0:
            raise ClientError({"Error": {"Code": "LimitExceededException"}}, "DescribeStreamSummary")
        return {"StreamDescriptionSummary": {}}

    monkeypatch.setattr(stub.client, "describe_stream_summary", describe)
    stream = source(stub, clock=lambda: now[0])
    for shard in range(10):
        with pytest.raises(SourceUnavailable):
            stream.open(Lease(f"s-{shard}"), TRIM_HORIZON)
    assert calls == [0.0]
    now[0] = 100.0
    for shard in range(10):
        stream.open(Lease(f"s-{shard}"), TRIM_HORIZON)
    assert calls == [0.0, 100.0]


def test_shards_do_not_wait_after_a_lasting_rejection(stub: Stubber) -> None:
    """Each reader raises the rejection. If it waited instead, it would seem that a retry may help."""
    stream = source(stub, clock=lambda: 0.0)
    for _ in range(2):
        stub.add_client_error("describe_stream_summary", service_error_code="ResourceNotFoundException")
        with pytest.raises(SourceError, match="it does not exist") as exc_info:
            stream.open(Lease("s-0"), TRIM_HORIZON)
        assert not isinstance(exc_info.value, SourceUnavailable)


def test_unreadable_listing_is_a_temporary_fault(stub: Stubber, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub.client, "list_shards", lambda **_: {"Page": "of a proxy"})
    with pytest.raises(SourceUnavailable, match="cannot be read"):
        source(stub).shards()


def test_other_shards_wait_while_one_describes_the_stream_again(stub: Stubber, monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], list[float]()

    def describe(**_: object) -> dict[str, Any]:
        calls.append(now[0])
        if len(calls) == 1:
            raise ClientError({"Error": {"Code": "LimitExceededException"}}, "DescribeStreamSummary")
        if len(calls) == 2:
            with pytest.raises(SourceUnavailable, match="will be called again in a moment"):
                stream.open(Lease("s-1"), TRIM_HORIZON)
        return {"StreamDescriptionSummary": {}}

    monkeypatch.setattr(stub.client, "describe_stream_summary", describe)
    stream = source(stub, clock=lambda: now[0])
    with pytest.raises(SourceUnavailable):
        stream.open(Lease("s-0"), TRIM_HORIZON)
    now[0] = 0.99
    with pytest.raises(SourceUnavailable, match="will be called again in a moment"):
        stream.open(Lease("s-0"), TRIM_HORIZON)
    now[0] = 3.0
    stream.open(Lease("s-0"), TRIM_HORIZON)
    assert calls == [0.0, 3.0]


@pytest.mark.parametrize(("consumer", "reader_type"), [("", Poller), ("&consumer=app", FanOut)])
def test_each_option_of_the_url_reaches_the_readers(consumer: str, reader_type: type[Poller]) -> None:
    options = "if_trimmed=TRIM_HORIZON&misplaced=drop&aggregates=whole&poll_seconds=7&max_records=9"
    stream = open_source(f"kinesis://orders?region=eu-west-1&{options}{consumer}")
    assert isinstance(stream, KinesisSource)
    stream._partitioned_by_key = True  # noqa: SLF001  as if the service had described the stream
    reader = stream.open(Lease("s-0", hash_range=(0, 9)), Position("5"))
    assert type(reader) is reader_type
    names = ("_rewind", "_misplaced", "_whole_aggregates", "_hash_range", "max_records", "_limit")
    assert [vars(reader)[name] for name in names] == [True, "drop", True, (0, 9), 9, 9]
    assert reader._pause(idle=False, behind=True) == 7.0  # noqa: SLF001
    if isinstance(reader, FanOut):
        assert reader._consumer is stream.consumer  # noqa: SLF001
        # The consumer's requests wait as long as other requests about the stream.
        assert reader._consumer._timeouts is stream._timeouts  # noqa: SLF001
    stream.close()


def test_stream_is_read_without_the_permission_to_describe_it(stub: Stubber) -> None:
    stub.add_client_error("describe_stream_summary", service_error_code="AccessDeniedException")
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    stub_get_records(stub, "i-1", "i-2", row(5))
    reader = source(stub).open(Lease("s-0", hash_range=HASH_KEYS), TRIM_HORIZON)
    assert record_fields(reader.read().records) == [("5", 0, b"data")]


def test_each_shard_is_filtered_without_the_permission_to_describe_the_stream(stub: Stubber) -> None:
    """The permission is requested once, not for each shard."""
    stub.add_client_error("describe_stream_summary", service_error_code="AccessDeniedException")
    stream = source(stub)
    for hash_range in ((0, 9), (10, HASH_KEYS[1])):
        assert stream.open(Lease("s-0", hash_range=hash_range), TRIM_HORIZON)._hash_range == hash_range  # noqa: SLF001


def test_located_records_count_as_read(stub: Stubber, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_CAN_LOCATE", True)
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    stub_get_records(stub, "i-1", "i-2", row(5), row(6, aggregate(b"a", b"b", b"c")))
    batch = poller(stub).read()
    assert (len(batch.records), batch.read_to) == (4, Position("6", 2))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("kafka://orders", "unknown scheme 'kafka'; choose one of .*kinesis"),
        ("kinesis://orders?if_trimmed=LATEST", "option 'if_trimmed' must be TRIM_HORIZON"),
        ("kinesis://orders?poll_seconds=0.1", "option 'poll_seconds' must be 0.2 to 60"),
        ("kinesis://orders?poll_seconds=often", "option 'poll_seconds' must be 0.2 to 60"),
        ("kinesis://orders?wire=xml", "option 'wire' must be cbor, json or boto3"),
        ("kinesis://", "it names no stream; write kinesis://NAME"),
        ("kinesis://orders?regoin=x", "unknown option 'regoin'; choose among .*region"),
        ("kinesis://orders?region=", "option 'region' must have one value"),
        ("kinesis://key:secret@orders", "credentials do not belong in it; use the environment"),
    ],
)
def test_wrong_source_url_is_named_without_being_repeated(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as exc_info:
        open_source(url)
    assert "secret" not in str(exc_info.value)


def test_page_that_cannot_be_unpacked_is_requested_again(stub: Stubber, monkeypatch: pytest.MonkeyPatch) -> None:
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    stub_get_records(stub, "i-1", "i-2", row(5, aggregate(b"a")))
    stub_get_records(stub, "i-1", "i-2", row(5, aggregate(b"a")))
    reader = poller(stub)
    with monkeypatch.context() as patch_context:
        patch_context.setattr("leasehold.adapters.sources.kinesis.poller.deaggregate", _raise_memory_error)
        with pytest.raises(MemoryError):
            reader.read()
    assert record_fields(reader.read().records) == [("5", 0, b"a")]


def _raise_memory_error(*_args: object, **_kwargs: object) -> Never:
    raise MemoryError


def test_unreadable_response_is_retried_at_the_same_position(stub: Stubber) -> None:
    iterator(stub, "i-1", ShardIteratorType="TRIM_HORIZON")
    stub_get_records(stub, "i-1", "i-2", row(4), row(5) | {"SequenceNumber": "none"})
    stub_get_records(stub, "i-1", "i-2", row(4), row(5))
    reader = poller(stub)
    failed_batch, next_batch = reader.read(), reader.read()
    assert (failed_batch.records, failed_batch.read_to, failed_batch.ended) == ((), None, False)
    assert failed_batch.fault == (
        "a response of Kinesis for stream 'orders' cannot be read: ValueError: checkpoint: 'none' is neither one of "
        "['AT_TIMESTAMP', 'LATEST', 'SHARD_END', 'TRIM_HORIZON'] nor a decimal sequence number"
    )
    assert [record.sequence_number for record in next_batch.records] == ["4", "5"]


def test_unreadable_response_leaves_the_checkpoint_unchanged(stub: Stubber) -> None:
    """The user records of an aggregate that were already processed must not be dispatched again."""
    invalid_child = {
        "ShardId": "c",
        "ParentShards": ["s-0"],
        "HashKeyRange": {"StartingHashKey": "?", "EndingHashKey": "9"},
    }
    iterator(stub, "i-1", ShardIteratorType="AT_SEQUENCE_NUMBER", StartingSequenceNumber="5")
    stub_get_records(stub, "i-1", None, row(5, aggregate(b"a", b"b", b"c")), ChildShards=[invalid_child])
    stub_get_records(stub, "i-1", "i-2", row(5, aggregate(b"a", b"b", b"c")))
    reader = poller(stub, Position("5", 1))
    assert [record_fields(reader.read().records) for _ in range(2)] == [[], [("5", 2, b"c")]]


def test_response_with_an_unreadable_end_leaves_the_checkpoint_unchanged(stub: Stubber) -> None:
    """The records before the unreadable one are read again, but not those that were already processed."""
    rows = [row(5, aggregate(b"a", b"b", b"c")), row(6)]
    iterator(stub, "i-1", ShardIteratorType="AT_SEQUENCE_NUMBER", StartingSequenceNumber="5")
    stub_get_records(stub, "i-1", "i-2", rows[0], rows[1] | {"SequenceNumber": "none"})
    stub_get_records(stub, "i-1", "i-2", *rows)
    reader = poller(stub, Position("5", 1))
    numbers = [
        [(record.sequence_number, record.sub_sequence_number) for record in reader.read().records] for _ in range(2)
    ]
    assert numbers == [[], [("5", 2), ("6", 0)]]


def test_start_outside_the_calendar_is_an_error(stub: Stubber) -> None:
    """A row may contain a time outside the range of `datetime`, which causes an error that a retry can't fix."""
    with pytest.raises(SourceError, match="leasehold reset"):
        poller(stub, at_timestamp(10**18 - 1)).read()


def test_dropped_records_are_reported_first_and_once_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """The first loss is logged at once. The message at the end counts only losses that were not logged before."""
    complete = UserRecords((), (), (), (), Reason.AGGREGATED)
    two_dropped, three_dropped = (evolve(complete, reason=Reason.OUT_OF_RANGE, dropped=count) for count in (2, 3))
    drop_counter, reason = DropCounter("s-0"), "out-of-range, because their aggregate went to another shard"
    with caplog.at_level("INFO", "leasehold"):
        for number, user_records in enumerate((complete, two_dropped, three_dropped)):
            drop_counter.count_dropped(str(number), user_records)
        drop_counter.count_duplicates(4)
        drop_counter.log_totals()
        drop_counter.log_totals()
    assert caplog.messages == [
        f"shard s-0: 2 user records of 1 dropped: {reason}; more are counted until the reader closes",
        "shard s-0: 4 duplicates from a Spark sink were dropped",
        "shard s-0: 3 more user records dropped: out-of-range",
    ]


def test_losses_after_a_report_are_in_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    loss = UserRecords((), (), (), (), Reason.OUT_OF_RANGE, dropped=2)
    drop_counter = DropCounter("s-0")
    for _ in range(3):
        drop_counter.count_dropped("1", loss)
        drop_counter.log_totals()
    assert caplog.messages[1:] == ["shard s-0: 2 more user records dropped: out-of-range"] * 2
