"""Rows that are built directly from Kinesis responses equal the records that every other reader returns."""

import hashlib
from datetime import UTC, datetime
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import cbor2
import pytest
from attrs import define, field, frozen
from botocore.exceptions import ClientError
from standins.in_c import scan

from leasehold.adapters.sources.deduplication import Tag
from leasehold.adapters.sources.kinesis.aggregation import arrow as aggregation_arrow
from leasehold.adapters.sources.kinesis.aggregation.decode import Misplaced
from leasehold.adapters.sources.kinesis.aggregation.encode import Aggregate
from leasehold.adapters.sources.kinesis.poller import Poller
from leasehold.adapters.sources.kinesis.records import RowViews
from leasehold.adapters.spark.kinesis.poller import ArrowPoller
from leasehold.adapters.spark.kinesis.rows import make_columns
from leasehold.adapters.spark.rows import ArrowBatch, make_chunk
from leasehold.balancer.model import HASH_KEYS, TRIM_HORIZON, HashRange, Lease, Position

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

LEASE = Lease("shard-0")


def aggregate(*keys: str) -> bytes:
    """Return an aggregated record with one user record for each key."""
    aggregate_builder = Aggregate(1 << 20)
    for key in keys:
        assert aggregate_builder.add(f"data of {key}".encode(), key)
    return aggregate_builder.encode()


def cut_short(sealed: bytes) -> bytes:
    """Return the aggregate with a second user record whose key is missing from the table, so only the first is kept."""
    body = sealed[4:-16].replace(b"\x08\x01\x1a", b"\x08\x09\x1a")
    return sealed[:4] + body + hashlib.md5(body, usedforsecurity=False).digest()


def kinesis_record(number: int, data: bytes) -> dict[str, Any]:
    """Return a record as the service sends it."""
    arrival_time = datetime(2026, 1, 31, 10, 0, number, 123_000, tzinfo=UTC)
    return {"Data": data, "PartitionKey": f"k{number}", "SequenceNumber": str(number)} | (
        {"ApproximateArrivalTimestamp": arrival_time} if number % 2 else {}
    )


@frozen
class Answers:
    """A client whose shard contains these records and has ended."""

    records: list[dict[str, Any]]

    def get_shard_iterator(self, **_place: object) -> dict[str, str]:
        return {"ShardIterator": "it"}

    def get_records(self, **_request: object) -> dict[str, Any]:
        return {"Records": list(self.records), "MillisBehindLatest": 7, "ChildShards": []}


RECORDS = [
    kinesis_record(10, aggregate("a", "b", "c")),
    kinesis_record(11, b"plain"),
    kinesis_record(12, aggregate("d", "e")),
]
CUT_SHORT = kinesis_record(13, cut_short(aggregate("f", "g")))


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("records", [RECORDS, RECORDS[:1], [], [RECORDS[0], CUT_SHORT], [CUT_SHORT, RECORDS[2]]])
@pytest.mark.parametrize(
    "start", [TRIM_HORIZON, Position("10"), Position("10", 1), Position("10", 2), Position("12", 1)]
)
@pytest.mark.parametrize(
    "filtering",
    [(HASH_KEYS, "keep"), *product([(0, 2**124), (2**126, 2**127 + 2**125)], ["keep", "drop"]), (None, "drop")],
)
def test_rows_match_records(
    records: list[dict[str, Any]],
    start: Position,
    filtering: tuple[HashRange | None, Misplaced],
    measured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aggregation_arrow, "_CAN_USE_SPANS", measured)  # as in compiled code, or not
    client, (hash_range, misplaced) = cast("KinesisClient", Answers(records)), filtering
    plain_batch = Poller(client, "s", "shard-0", start, hash_range, misplaced=misplaced).read()
    arrow_batch = ArrowPoller(client, "s", "shard-0", start, hash_range, misplaced=misplaced).read()
    assert isinstance(arrow_batch, ArrowBatch)
    assert make_chunk(make_columns("s"), LEASE, arrow_batch) == make_chunk(make_columns("s"), LEASE, plain_batch)
    assert arrow_batch.count == plain_batch.count  # metrics show this number
    assert [
        (
            batch.read_to,
            batch.behind_seconds,
            batch.wait_seconds,
            batch.ended,
            batch.children,
            batch.size,
            batch.last_arrival_time,
        )
        for batch in (plain_batch, arrow_batch)
    ] == [
        (
            plain_batch.read_to,
            0.007,
            plain_batch.wait_seconds,
            True,
            (),
            plain_batch.size,
            plain_batch.last_arrival_time,
        )
    ] * 2


def test_tokens_of_rows_within_a_response_match_those_of_records() -> None:
    """A reader that resumes within a response drops no row that it has not read."""
    aggregate_builder = Aggregate(1 << 20)
    for row in range(3):
        assert aggregate_builder.add(b"data", "k", None, Tag("q", 1, 1, "0", "e", row).context, row)
    client = cast("KinesisClient", Answers([kinesis_record(10, aggregate_builder.encode())]))
    records = Poller(client, "s", "shard-0", TRIM_HORIZON, None).read().records
    arrow_batch = ArrowPoller(client, "s", "shard-0", TRIM_HORIZON, None).read()
    assert isinstance(arrow_batch, ArrowBatch)
    assert arrow_batch.trail is not None
    tokens = [arrow_batch.trail.token_for_row(row) for row in range(3)]
    assert (tokens, len(set(tokens))) == ([record.token for record in records], 3)


def test_trimmed_records_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    client = cast("KinesisClient", Answers(RECORDS))
    ArrowPoller(client, "s", "shard-0", Position("9"), HASH_KEYS).read()
    assert "shard-0: the record of its checkpoint, 9, was trimmed; reading continues at 10" in caplog.text
    caplog.clear()
    ArrowPoller(client, "s", "shard-0", Position("10"), HASH_KEYS).read()
    assert not caplog.text


@frozen
class ScannedClient(Answers):
    """A client whose responses are scanned by the C code, as in a wheel."""

    def get_records(self, **_request: object) -> dict[str, Any]:
        """Return all records in each response."""
        body = cbor2.dumps({"Records": self.records})
        views = scan() or pytest.skip("there is no compiler of C")
        response = views.viewed(body)
        assert response is not None
        *columns, has_aggregates, _begin, _end = response
        return super().get_records(**_request) | {
            "Records": RowViews(body, cast("Any", columns), views.columns, has_aggregates=has_aggregates)
        }


def raw_row(number: int, data: bytes) -> dict[str, Any]:
    """Return a row as the service writes it. Its time is in milliseconds or, as from some stand-ins, in seconds."""
    arrival_time = 1_795_363_072_573 if number % 2 else 1_795_363_072
    row = {"Data": data, "PartitionKey": "ü" * number, "SequenceNumber": str(number)}
    return row | {"ApproximateArrivalTimestamp": arrival_time}


PLAIN = [raw_row(10, b""), raw_row(11, b"exactly twelv"), raw_row(12, b"x" * 5000), raw_row(13, b"twelve bytes")]


@pytest.mark.parametrize("records", [PLAIN, [*PLAIN, raw_row(14, aggregate("a", "b"))], []])
@pytest.mark.parametrize("start", [TRIM_HORIZON, Position("11"), Position("14", 0)])
def test_rows_scanned_in_a_response_match_records(records: list[dict[str, Any]], start: Position) -> None:
    """With a wheel, Spark gets the same rows and positions as a plain worker."""
    client = cast("KinesisClient", ScannedClient(records))
    plain_batch = Poller(client, "s", "shard-0", start, None).read()
    arrow_batch = ArrowPoller(client, "s", "shard-0", start, None).read()
    assert make_chunk(make_columns("s"), LEASE, arrow_batch) == make_chunk(make_columns("s"), LEASE, plain_batch)
    assert arrow_batch.last_arrival_time == plain_batch.last_arrival_time  # the annotation on the lease shows this time
    assert [(batch.read_to, batch.count, batch.size, batch.arrival_times) for batch in (plain_batch, arrow_batch)] == [
        (plain_batch.read_to, plain_batch.count, sum(len(row["Data"]) for row in records), plain_batch.arrival_times)
    ] * 2
    assert isinstance(arrow_batch, ArrowBatch) or (start.numbered and records)


@define
class Responses:
    """A client with these responses, in this order. None is an iterator that has expired."""

    responses: list[dict[str, Any] | None]
    start_positions: list[str | None] = field(factory=list)

    def get_shard_iterator(self, **place: str) -> dict[str, str]:
        self.start_positions.append(place.get("StartingSequenceNumber"))
        return {"ShardIterator": "it"}

    def get_records(self, **_request: object) -> dict[str, Any]:
        if (response := self.responses.pop(0)) is None:
            raise ClientError({"Error": {"Code": "ExpiredIteratorException", "Message": ""}}, "GetRecords")
        return {"MillisBehindLatest": 7, "NextShardIterator": "it", **response}


def tagged_aggregate() -> bytes:
    """Return an aggregate of three rows that a Spark sink wrote."""
    aggregate_builder = Aggregate(1 << 20)
    for row in range(3):
        assert aggregate_builder.add(b"data", "k", None, Tag("q", 1, 1, "0", "e", row).context, row)
    return aggregate_builder.encode()


@pytest.mark.parametrize(
    "later_rows", [[raw_row(11, b"x"), raw_row(12, b"y")], [raw_row(11, aggregate("a", "b")), raw_row(12, b"y")]]
)
@pytest.mark.parametrize("start", [TRIM_HORIZON, Position("10", 0)])
def test_rows_of_later_responses_match_records(later_rows: list[dict[str, Any]], start: Position) -> None:
    """Every response leaves a poller of rows in the state in which it leaves a poller of records."""
    outcomes = []
    for poller_type in (Poller, ArrowPoller):
        client = Responses(
            [
                {"Records": [kinesis_record(10, tagged_aggregate())]},
                ScannedClient(later_rows).get_records(),
                None,
                *[{"Records": [], "MillisBehindLatest": behind_ms} for behind_ms in (7, 7, 0, 0)],
            ]
        )
        client.responses[1] = {"Records": cast("dict[str, Any]", client.responses[1])["Records"]}
        poller = poller_type(cast("KinesisClient", client), "s", "shard-0", start, None)
        batches = [poller.read() for _ in range(7)]
        chunks = [make_chunk(make_columns("s"), LEASE, batch) for batch in batches]
        tokens = [
            [chunk.trail.token_for_row(row) for row in range(chunk.count)]
            for chunk in chunks
            if chunk is not None and chunk.trail is not None
        ]
        assert [len(row_tokens) for row_tokens in tokens][:1] == [3 if start == TRIM_HORIZON else 2]
        outcomes.append(
            (tokens, client.start_positions, [(batch.read_to, batch.wait_seconds, batch.token) for batch in batches])
        )
    assert outcomes[0] == outcomes[1]
    assert outcomes[1][1][-1] == later_rows[-1]["SequenceNumber"]
