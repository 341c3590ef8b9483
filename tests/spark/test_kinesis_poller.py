"""Rows that are built directly from Kinesis responses equal the records that every other reader makes."""

import hashlib
from datetime import UTC, datetime
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import cbor2
import pytest
from attrs import frozen
from standins.in_c import scan

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
    """Return an aggregated record of this many user records."""
    builder = Aggregate(1 << 20)
    for key in keys:
        assert builder.add(f"data of {key}".encode(), key)
    return builder.encode()


def cut_short(sealed: bytes) -> bytes:
    """Return the same, with a second user record whose key is missing from the table: only the first one is kept."""
    body = sealed[4:-16].replace(b"\x08\x01\x1a", b"\x08\x09\x1a")
    return sealed[:4] + body + hashlib.md5(body, usedforsecurity=False).digest()


def kinesis_record(number: int, data: bytes) -> dict[str, Any]:
    """Return the record as the service sends it."""
    arrived = datetime(2026, 1, 31, 10, 0, number, 123_000, tzinfo=UTC)
    return {"Data": data, "PartitionKey": f"k{number}", "SequenceNumber": str(number)} | (
        {"ApproximateArrivalTimestamp": arrived} if number % 2 else {}
    )


@frozen
class Answers:
    """A client whose shard holds these records and has ended."""

    records: list[dict[str, Any]]

    def get_shard_iterator(self, **_place: object) -> dict[str, str]:
        return {"ShardIterator": "it"}

    def get_records(self, **_asked: object) -> dict[str, Any]:
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
    monkeypatch.setattr(aggregation_arrow, "_USE_SPANS", measured)  # as compiled, or not
    client, (hash_range, misplaced) = cast("KinesisClient", Answers(records)), filtering
    plain = Poller(client, "s", "shard-0", start, hash_range, misplaced=misplaced).read()
    arrow = ArrowPoller(client, "s", "shard-0", start, hash_range, misplaced=misplaced).read()
    assert isinstance(arrow, ArrowBatch)
    assert make_chunk(make_columns("s"), LEASE, arrow) == make_chunk(make_columns("s"), LEASE, plain)
    assert arrow.count == plain.count  # as metrics show it
    assert [
        (
            each.read_to,
            each.behind_seconds,
            each.wait_seconds,
            each.ended,
            each.children,
            each.size,
            each.last_arrival_time,
        )
        for each in (plain, arrow)
    ] == [(plain.read_to, 0.007, plain.wait_seconds, True, (), plain.size, plain.last_arrival_time)] * 2


def test_trimmed_records_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    client = cast("KinesisClient", Answers(RECORDS))
    ArrowPoller(client, "s", "shard-0", Position("9"), HASH_KEYS).read()
    assert "shard-0: the record of its checkpoint, 9, was trimmed; reading continues at 10" in caplog.text
    caplog.clear()
    ArrowPoller(client, "s", "shard-0", Position("10"), HASH_KEYS).read()
    assert not caplog.text


@frozen
class ViewedAnswers(Answers):
    """A client whose responses are read as a wheel reads them."""

    def get_records(self, **_request: object) -> dict[str, Any]:
        """Return all records at once, each time again."""
        body = cbor2.dumps({"Records": self.records})
        views = scan() or pytest.skip("there is no compiler of C")
        response = views.viewed(body)
        assert response is not None
        *shown, sealed, _begin, _end = response
        return super().get_records(**_request) | {
            "Records": RowViews(body, cast("Any", shown), views.columns, has_aggregates=sealed)
        }


def told_row(number: int, data: bytes) -> dict[str, Any]:
    """Return a row as the service writes it: a time is in milliseconds or, from some stand-ins, in seconds."""
    arrived = 1_795_363_072_573 if number % 2 else 1_795_363_072
    row = {"Data": data, "PartitionKey": "ü" * number, "SequenceNumber": str(number)}
    return row | {"ApproximateArrivalTimestamp": arrived}


PLAIN = [told_row(10, b""), told_row(11, b"exactly twelv"), told_row(12, b"x" * 5000), told_row(13, b"twelve bytes")]


@pytest.mark.parametrize("records", [PLAIN, [*PLAIN, told_row(14, aggregate("a", "b"))], []])
@pytest.mark.parametrize("start", [TRIM_HORIZON, Position("11"), Position("14", 0)])
def test_rows_scanned_in_a_response_match_records(records: list[dict[str, Any]], start: Position) -> None:
    """A wheel brings Spark the same rows and positions as a plain worker has."""
    client = cast("KinesisClient", ViewedAnswers(records))
    plain = Poller(client, "s", "shard-0", start, None).read()
    arrow = ArrowPoller(client, "s", "shard-0", start, None).read()
    assert make_chunk(make_columns("s"), LEASE, arrow) == make_chunk(make_columns("s"), LEASE, plain)
    assert arrow.last_arrival_time == plain.last_arrival_time  # what the annotation on the lease shows
    assert [(each.read_to, each.count, each.size, each.arrival_times) for each in (plain, arrow)] == [
        (plain.read_to, plain.count, sum(len(row["Data"]) for row in records), plain.arrival_times)
    ] * 2
    assert isinstance(arrow, ArrowBatch) or (start.numbered and records)
