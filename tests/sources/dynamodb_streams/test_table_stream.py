"""The stream of a table is read through boto3 from a stand-in that has the limits of the service."""

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from leasehold.adapters.sources.changes import Change
from leasehold.adapters.sources.dynamodb_streams import EMPTY_RESPONSES_AT_TIP, ChangePoller, TableStream
from leasehold.adapters.sources.protocol import Batch, Record
from leasehold.adapters.sources.urls import open_source
from leasehold.balancer.model import TRIM_HORIZON, Lease, Position, Shard, at_timestamp
from leasehold.errors import SourceError, Trimmed
from leasehold_lab.standins.tables import FIRST_NUMBER, TableStreams, run_table_server

pytestmark = pytest.mark.slow


class Clock:
    """A clock that stands still until a test moves it."""

    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> TableStreams:
    """Return a table whose stream has one open shard."""
    return TableStreams(open_shard_count=1, clock=clock)


@pytest.fixture
def url(table: TableStreams, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the URL of the table's stream, and set credentials that are only for tests."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "demo")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "demo")
    with run_table_server(table) as endpoint:
        yield f"dynamodb-streams://orders?region=eu-west-1&endpoint={endpoint}"


def open_table_stream(url: str) -> TableStream:
    source = open_source(url)
    assert isinstance(source, TableStream)
    return source


def only_shard(table: TableStreams) -> str:
    """Return the id of the only shard of the table's stream."""
    (shard,) = table.shards
    return shard


def reader(source: TableStream, shard: str, start: Position = TRIM_HORIZON) -> ChangePoller:
    """Return a reader of this shard."""
    return source.open(Lease(shard), start)


def keys(batch: Batch) -> list[str]:
    """Return the ids of the changed items of a batch, in order."""
    return [record.change.keys["id"] for record in batch.records]


def read_all(poller: ChangePoller) -> list[Record]:
    """Return all records of a closed shard, up to its end."""
    records: list[Record] = []
    while True:
        batch = poller.read()
        records += batch.records
        if batch.ended:
            return records


def test_change_decodes_whole_to_python_values(table: TableStreams, url: str) -> None:
    table.put("a", {"n": {"N": "1.5"}, "b": {"B": "AP8="}, "m": {"M": {"x": {"BS": ["cQ=="]}}}})
    table.put("a", None)
    first_record, last_record = reader(open_table_stream(url), only_shard(table)).read().records
    item = {"id": "a", "n": Decimal("1.5"), "b": b"\x00\xff", "m": {"x": {b"q"}}}
    created_at = datetime.fromtimestamp(Clock.now, UTC)
    number = str(FIRST_NUMBER + 8)
    assert first_record.change == Change("INSERT", {"id": "a"}, item, None, number, created_at)
    assert (last_record.change.event, last_record.change.new, last_record.change.old) == ("REMOVE", None, item)
    assert first_record.partition_key == last_record.partition_key == '{"id":{"S":"a"}}'
    assert (first_record.sequence_number, first_record.arrived, first_record.position) == (
        number,
        Clock.now,
        Position(number),
    )
    assert b'"NewImage":{"b":{"B":"AP8="},"id":{"S":"a"}' in first_record.data


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"dynamodb":{"Keys":{"id":{"X":"a"}}},"eventName":"x"}'])
def test_data_that_is_no_change_is_rejected(data: bytes) -> None:
    """The error names the record and the cause. The errors of boto3 or `json` would not."""
    with pytest.raises(ValueError, match="is not a change of a DynamoDB item"):
        _ = Record(data, "1").change


def test_change_from_kinesis_data_streams_also_decodes() -> None:
    """In Kinesis, a change has its time in milliseconds, no sequence number, and another key in `userIdentity`."""
    change = {"Keys": {"id": {"S": "a"}}, "ApproximateCreationDateTime": 1_800_000_000_500}
    identity = {"principalId": "dynamodb.amazonaws.com"}
    data = json.dumps({"eventName": "REMOVE", "userIdentity": identity, "dynamodb": change}).encode()
    created_at = datetime.fromtimestamp(1_800_000_000.5, UTC)
    assert Record(data, "1").change == Change(
        "REMOVE", {"id": "a"}, None, None, "", created_at, "dynamodb.amazonaws.com"
    )


def test_every_page_of_shards_is_listed_with_parents(table: TableStreams, url: str) -> None:
    for _ in range(250):
        table.end_open_shards()
    ids = sorted(table.shards, key=lambda shard: table.shards[shard].first)
    shards = open_table_stream(url).shards()
    assert shards == tuple(
        Shard(shard, parents=tuple(ids[index - 1 : index]) if index else (), open=index == 250)
        for index, shard in enumerate(ids)
    )
    assert table.asked["DescribeStream"] == 3


def test_shard_with_a_child_is_closed_although_its_page_is_stale(table: TableStreams, url: str) -> None:
    """If the listing contradicted itself, no leases would be created or deleted (L2)."""
    table.stale_seconds = 60.0
    table.end_open_shards()
    assert [shard.open for shard in open_table_stream(url).shards()] == [False, True]


def test_shard_is_gone_only_if_the_stream_no_longer_has_it(table: TableStreams, url: str) -> None:
    """A closed shard is not gone while the stream has it, so its lease must not be deleted (L10)."""
    first_shard = only_shard(table)
    table.end_open_shards()
    source = open_table_stream(url)
    assert not source.gone(first_shard)
    table.remove_shards(first_shard)
    assert source.gone(first_shard)
    (remaining,) = source.shards()
    assert remaining.parents == (first_shard,)


def test_shard_is_read_to_its_end(table: TableStreams, url: str) -> None:
    table.empty_every = 3
    for number in range(2500):
        table.put(str(number), {})
    shard = only_shard(table)
    table.end_open_shards()
    assert [record.change.keys["id"] for record in read_all(reader(open_table_stream(url), shard))] == [
        str(n) for n in range(2500)
    ]


def test_reader_starts_after_its_checkpoint(table: TableStreams, url: str) -> None:
    for key in "abc":
        table.put(key, {})
    source, shard = open_table_stream(url), only_shard(table)
    first_record = reader(source, shard).read().records[0]
    assert keys(reader(source, shard, first_record.position).read()) == ["b", "c"]


def test_latest_includes_the_current_second(
    table: TableStreams, url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times of records are truncated to seconds, so LATEST includes all records of the second of its resolution."""
    table.put("old", {})
    clock.now += 10.7
    table.put("same second", {})
    table.put("new", {})
    source = open_table_stream(url)
    # The Date header of the stand-in contains the machine's time without milliseconds, so set the time here.
    monkeypatch.setattr(TableStream.__base__, "latest", lambda _self, _lease: at_timestamp(1_800_000_010_700))
    start = source.latest(Lease(only_shard(table)))
    assert start == at_timestamp(1_800_000_010_000)
    assert keys(reader(source, only_shard(table), start).read()) == ["same second", "new"]


def test_start_time_is_kept_if_the_service_has_no_iterator_for_it(table: TableStreams, url: str, clock: Clock) -> None:
    """Workers can also start at LATEST with older services and DynamoDB Local, which have no iterators for a time."""
    clock.now += 7
    table.put("old", {})
    clock.now += 7
    table.put("new", {})
    poller = reader(open_table_stream(url), only_shard(table), at_timestamp(int(clock.now * 1000)))
    table.refuse.append("ValidationException")
    assert keys(poller.read()) == ["new"]


def test_changes_before_the_start_time_are_dropped_from_every_response(
    table: TableStreams, url: str, clock: Clock
) -> None:
    for key in ("oldest", "old", "new"):
        clock.now += 7
        table.put(key, {})
    poller = reader(open_table_stream(f"{url}&max_records=1"), only_shard(table), at_timestamp(int(clock.now * 1000)))
    table.refuse.append("ValidationException")
    assert [keys(poller.read()) for _ in range(3)] == [[], [], ["new"]]


def test_start_within_the_minute_of_a_change_includes_it(table: TableStreams, url: str, clock: Clock) -> None:
    """The service may truncate the time of a change to the minute."""
    clock.now -= clock.now % 60
    table.put("same minute", {})
    poller = reader(open_table_stream(url), only_shard(table), at_timestamp(int((clock.now + 59) * 1000)))
    table.refuse.append("ValidationException")
    assert keys(poller.read()) == ["same minute"]


def test_expired_iterator_is_replaced_at_the_same_position(table: TableStreams, url: str, clock: Clock) -> None:
    """An iterator is valid for 15 minutes, and a handler may take longer than that."""
    table.put("a", {})
    poller = reader(open_table_stream(url), only_shard(table))
    assert keys(poller.read()) == ["a"]
    clock.now += 901
    table.put("b", {})
    assert keys(poller.read()) == []
    assert keys(poller.read()) == ["b"]


@pytest.mark.parametrize("asked_at", ["iterator", "records"])
def test_trimmed_checkpoint_error_says_what_to_do(table: TableStreams, url: str, asked_at: str) -> None:
    """With the option `if_trimmed`, the reader continues with the oldest record."""
    for key in "abcd":
        table.put(key, {})
    source, shard = open_table_stream(url), only_shard(table)
    first_record = reader(source, shard).read().records[0]
    continuing_source = open_table_stream(f"{url}&if_trimmed=TRIM_HORIZON")
    table.shards[shard].trimmed = 2 if asked_at == "iterator" else 0
    failing_reader, continuing_reader = (
        reader(poller, shard, first_record.position) for poller in (source, continuing_source)
    )
    if asked_at == "records":
        for poller in (failing_reader, continuing_reader):
            poller._limit = 1  # noqa: SLF001  so that it stops before the end
            poller.read()
        table.shards[shard].trimmed = 3
    with pytest.raises(Trimmed, match=r"its checkpoint \d+ no longer exists: .*if_trimmed=TRIM_HORIZON"):
        failing_reader.read()
    batches = [continuing_reader.read() for _ in range(2)]
    assert [key for batch in batches for key in keys(batch)] == (["c", "d"] if asked_at == "iterator" else ["d"])


def test_reader_that_has_read_nothing_survives_trimming(table: TableStreams, url: str) -> None:
    """If the oldest record expires before the first read, a reader that starts there gets no error."""
    table.put("a", {})
    table.put("b", {})
    poller = reader(open_table_stream(url), only_shard(table))
    poller._iterator = f"{only_shard(table)}|0|{Clock.now}"  # noqa: SLF001  requested before the horizon moved
    table.shards[only_shard(table)].trimmed = 1
    assert keys(poller.read()) == []
    assert keys(poller.read()) == ["b"]


@pytest.mark.parametrize("number", ["7", "1" * 41, "9" * 129])
def test_impossible_sequence_number_is_a_lasting_fault(table: TableStreams, url: str, number: str) -> None:
    """boto3 rejects an impossible number before it sends a request, so a retry can't help."""
    with pytest.raises(Trimmed, match=f"its checkpoint {number} no longer exists"):
        reader(open_table_stream(url), only_shard(table), Position(number)).read()


def test_throttling_is_retried_and_a_denial_is_an_error(table: TableStreams, url: str) -> None:
    """If the service is busy, the read is retried later.

    If a permission is missing, the error names DynamoDB, not Kinesis.
    """
    table.put("a", {})
    poller = reader(open_table_stream(url), only_shard(table))
    # Each fault is repeated because boto3 itself retries once.
    table.refuse += ["LimitExceededException"] * 2 + ["InternalServerError"] * 2 + ["AccessDeniedException"]
    throttled_batch, failed_batch = poller.read(), poller.read()
    assert throttled_batch.fault.startswith("DynamoDB Streams throttled a request for stream 'arn:aws:dynamodb:")
    assert failed_batch.fault.startswith("DynamoDB Streams failed on stream")
    with pytest.raises(SourceError, match=r"cannot read stream .*, because they lack dynamodb:GetShardIterator: "):
        poller.read()
    assert keys(poller.read()) == ["a"]


@pytest.mark.parametrize("denied", ["DescribeTable", "DescribeStream", "GetShardIterator", "GetRecords"])
def test_missing_permission_is_named(table: TableStreams, url: str, denied: str) -> None:
    table.denied.add(denied)
    source = open_table_stream(url)
    with pytest.raises(SourceError, match=f"cannot read stream .*, because they lack dynamodb:{denied}: "):
        reader(source, source.shards()[0].id).read()


def test_response_without_the_required_fields_is_rejected(table: TableStreams, url: str) -> None:
    """A record without a valid sequence number could never be checkpointed."""
    table.put("a", {})
    row: dict[str, Any] = table.shards[only_shard(table)].rows[0]["dynamodb"]
    number, row["SequenceNumber"] = row["SequenceNumber"], "\u0661" * 21  # digits that are not ASCII
    poller = reader(open_table_stream(url), only_shard(table))
    assert "cannot be read" in poller.read().fault
    row["SequenceNumber"] = number
    assert keys(poller.read()) == ["a"]


def test_tip_is_reached_only_after_several_empty_responses(table: TableStreams, url: str) -> None:
    """A single empty response does not show the tip, because more records may follow."""
    poller = reader(open_table_stream(url), only_shard(table))
    assert [poller.read().behind_seconds for _ in range(EMPTY_RESPONSES_AT_TIP)] == [
        *[None] * (EMPTY_RESPONSES_AT_TIP - 1),
        0.0,
    ]


def test_recreated_stream_is_another_stream(
    table: TableStreams, url: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The new stream has a new incarnation, so that the leases of the old one are kept (L14)."""
    source = open_table_stream(url)
    former_incarnation = source.incarnation()
    assert former_incarnation == "123456789012:orders:1800000000"
    clock.now += 100
    table.disable_stream()
    table.enable_stream()
    caplog.set_level(logging.WARNING)
    assert [shard.id for shard in source.shards()] == list(table.shards)
    assert source.incarnation() == "123456789012:orders:1800000100"
    assert "has a new stream" in caplog.text


def test_disabled_stream_is_read_by_its_arn(table: TableStreams, url: str) -> None:
    table.put("a", {})
    source = open_table_stream(url.replace("//orders?region=eu-west-1&", f"//{table.arn}?"))
    assert keys(reader(source, source.shards()[0].id).read()) == ["a"]
    assert source.arn("") == table.arn
    assert table.asked["DescribeTable"] == 0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("dynamodb-stream://orders", "unknown scheme 'dynamodb-stream'.*did you mean 'dynamodb-streams'"),
        ("dynamodb-streams://a/b", "must name one table"),
        ("dynamodb-streams://arn:aws:dynamodb:eu-west-1:123456789012:table/orders", "this is not the ARN of a stream"),
        ("dynamodb-streams://arn:aws:kinesis:eu-west-1:1:table/orders/stream/x", "this is not the ARN of a stream"),
        ("dynamodb-streams://orders?consumer=x", "unknown option 'consumer'"),
        ("dynamodb-streams://orders?if_trimmed=LATEST", "'if_trimmed' must be TRIM_HORIZON"),
        ("dynamodb-streams://orders?poll_seconds=0", "'poll_seconds' must be"),
    ],
)
def test_wrong_url_is_one_clear_error(wrong: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        open_source(wrong)


def test_missing_table_or_stream_is_an_error(table: TableStreams, url: str) -> None:
    source_of_missing_table = open_table_stream(url.replace("//orders?", "//other?"))
    with pytest.raises(SourceError, match="Table not found; check its name, account and region"):
        source_of_missing_table.shards()
    table.status = ""
    with pytest.raises(SourceError, match="table 'orders' has no stream: enable one"):
        open_table_stream(url).shards()


def test_latest_without_a_listing_requests_one(url: str) -> None:
    assert open_table_stream(url).latest(Lease("x")).sequence == "AT_TIMESTAMP"
