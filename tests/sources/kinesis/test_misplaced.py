"""Which user records of an aggregate a reader returns if some of them do not belong to its shard."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast, get_args

import conformance
import pytest
from aggregates import keys, record, sealed
from aggregation_rows import KEYS, ROWS, Rows, packed
from attrs import define, field
from crafted import Case
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_model import Stream

from leasehold.adapters.sources.kinesis.aggregation import arrow, decode
from leasehold.adapters.sources.kinesis.aggregation.decode import (
    Misplaced,
    Reason,
    UserRecord,
    deaggregate,
    locate_records,
)
from leasehold.adapters.sources.kinesis.fan_out import FanOut
from leasehold.adapters.sources.kinesis.hash_keys import hash_partition_key, parse_hash_key
from leasehold.adapters.sources.kinesis.poller import Poller
from leasehold.adapters.sources.kinesis.producer.core import Unit
from leasehold.adapters.sources.kinesis.source import KinesisSource
from leasehold.adapters.sources.urls import open_source
from leasehold.adapters.spark.kinesis.poller import ArrowPoller
from leasehold.balancer.model import HASH_KEYS, TRIM_HORIZON, HashRange, Lease, Position, Shard

if TYPE_CHECKING:
    from types_boto3_kinesis import KinesisClient

    from leasehold.adapters.sources.kinesis.fan_out import StreamConsumer

TABLE = [case for case, _ in conformance.read()]
RANGES = st.tuples(st.integers(0, HASH_KEYS[1]), st.integers(0, HASH_KEYS[1])).map(lambda ends: (min(ends), max(ends)))


def expected_user_records(data: bytes, hash_range: HashRange) -> list[UserRecord]:
    """Return the user records inside the range, but none after the first invalid hash key."""
    unfiltered = deaggregate(data, "outer", None, None)
    if not unfiltered.aggregated:
        return list(unfiltered)
    expected = list[UserRecord]()
    for user_record in unfiltered:
        hash_key = (
            hash_partition_key(user_record.partition_key or "")
            if user_record.explicit_hash_key is None
            else parse_hash_key(user_record.explicit_hash_key)
        )
        if hash_key is None:
            break
        expected += [user_record] if hash_range[0] <= hash_key <= hash_range[1] else []
    return expected


def check(data: bytes, hash_range: HashRange) -> None:
    """Compare the results of both modes with each other and with the expected records."""
    kept_result, dropping_result = (
        deaggregate(data, "outer", None, hash_range, misplaced=mode) for mode in ("keep", "drop")
    )
    assert list(kept_result) == expected_user_records(data, hash_range)
    assert len(kept_result) + kept_result.dropped == len(dropping_result) + dropping_result.dropped
    if dropping_result.reason is Reason.OUT_OF_RANGE:
        assert (list(dropping_result), kept_result.dropped > 0) == ([], True)
    else:
        assert (list(kept_result), kept_result.reason) == (list(dropping_result), dropping_result.reason)


@pytest.mark.parametrize("case", TABLE, ids=[case.name for case in TABLE])
def test_misplaced_aggregate_yields_the_shards_own_records(case: Case) -> None:
    """Each record of a misplaced aggregate is thus returned by the reader of exactly one shard."""
    check(case.data, (case.first, case.last))


@settings(deadline=None)
@given(ROWS, RANGES)
def test_any_aggregate_is_filtered_by_user_record(rows: Rows, hash_range: HashRange) -> None:
    check(packed(rows)[0].encode(), hash_range)


@settings(deadline=None)
@given(st.lists(st.tuples(KEYS, st.none(), st.binary(max_size=30)), min_size=2, max_size=20), RANGES)
def test_misplaced_aggregate_is_not_read_lazily(rows: Rows, hash_range: HashRange) -> None:
    """The compiled code must not return records of other shards, and must not renumber the remaining records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_CAN_LOCATE", True)
        data = packed(rows)[0].encode()
        located = locate_records(data, "7", None, hash_range)
        assert located is None or len(located) == len(deaggregate(data, "outer", None, hash_range)) == len(rows)


@define
class Kpl:
    """A producer with an outdated shard map. A record counts as delivered if it belongs to the shard that stored it.

    The KPL has done so since 0.15.11, in `succeed_if_correct_shard` of its `retrier.cc`.
    """

    stream: Stream
    delivered: set[bytes] = field(factory=set)
    known: list[Shard] = field(factory=list)

    def put(self, rows: list[tuple[str, bytes]]) -> None:
        """Write until all records are delivered. After each misplaced aggregate, get a new shard map."""
        waiting = list(rows)
        while waiting:
            self.known = self.known or list(self.stream.open)
            waiting = [row for shard in self.known for row in self._aggregate(shard, waiting)]
            self.known = [] if waiting else self.known

    def _aggregate(self, shard: Shard, rows: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        """Write the rows that belong to this shard, according to the shard map, as one aggregate.

        Return the rows that must be sent again.
        """
        shard_rows = [row for row in rows if inside(shard, row[0])]
        if not shard_rows:
            return []
        aggregate, packed_rows = packed([(key, None, data) for key, data in shard_rows])
        assert len(packed_rows) == len(shard_rows)
        outcome = self.stream.write(
            Unit(shard.id, (), aggregate.encode(), aggregate.partition_key, hash_partition_key(shard_rows[0][0]))
        )
        target_shard = next(open_shard for open_shard in self.stream.open if open_shard.id == outcome.shard)
        self.delivered |= {data for key, data in shard_rows if inside(target_shard, key)}
        return [row for row in shard_rows if not inside(target_shard, row[0])]


def inside(shard: Shard, key: str) -> bool:
    """Return whether the hash of the key is in the shard's range."""
    first, last = shard.hash_range or HASH_KEYS
    return first <= hash_partition_key(key) <= last


def read(stream: Stream, misplaced: Misplaced) -> Iterator[tuple[str, bytes]]:
    """Yield the shard and the data of each user record as workers read them, parents first."""
    for shard in stream.shards:
        for _, data, key in stream.logs.get(shard.id, []):
            for user_record in deaggregate(data, key, None, shard.hash_range, misplaced=misplaced):
                yield shard.id, user_record.data


STEPS = st.lists(st.tuples(st.sampled_from(["put", "put", "split", "merge"]), st.integers(0, 9)), max_size=20)


@settings(deadline=None)
@given(STEPS)
def test_record_delivered_by_a_kpl_is_read_through_splits_and_merges(
    steps: list[tuple[str, int]],
) -> None:
    """No delivered record is lost if the KPL sends aggregates to shards that have been split or merged."""
    stream = Stream()
    kpl, count = Kpl(stream), 0
    for action, number in [*steps, ("put", 9)]:
        match action:
            case "split":
                stream.split(number)
            case "merge":
                stream.merge(number)
            case _:
                rows = [(f"key-{number}-{index}", b"%d" % (count + index)) for index in range(8)]
                kpl.put(rows)
                count += len(rows)
    assert kpl.delivered == {b"%d" % index for index in range(count)}
    assert {data for _, data in read(stream, "keep")} == kpl.delivered
    assert {data for _, data in read(stream, "drop")} <= kpl.delivered


AGGREGATE = packed([("a", None, b"0"), ("b", None, b"1"), ("c", None, b"2"), ("d", None, b"3")])[0].encode()
LOWER: HashRange = (0, 2**127 - 1)
"""The hash range of the shard to which records a and c belong. Records b and d belong to the other shard."""


@define
class Canned:
    """A client whose shard contains `count` misplaced aggregates."""

    count: int

    def get_shard_iterator(self, **_place: object) -> dict[str, str]:
        return {"ShardIterator": "it"}

    def describe_stream_summary(self, **_request: object) -> dict[str, dict[str, str]]:
        return {"StreamDescriptionSummary": {}}

    def get_records(self, **_request: object) -> dict[str, object]:
        """Return all records in one response, which reaches the tip of the shard."""
        rows = [
            {"Data": AGGREGATE, "PartitionKey": "a", "SequenceNumber": str(number)}
            for number in range(1, self.count + 1)
        ]
        return {"Records": rows, "MillisBehindLatest": 0, "NextShardIterator": "it"}


def poller(count: int, start: Position = TRIM_HORIZON, misplaced: Misplaced = "keep") -> Poller:
    """Return a poller of the lower shard."""
    return Poller(cast("KinesisClient", Canned(count)), "orders", "s-0", start, LOWER, misplaced=misplaced)


@pytest.mark.parametrize(
    ("start", "remaining"),
    [(TRIM_HORIZON, [0, 2]), (Position("1", 0), [2]), (Position("1", 1), [2]), (Position("1", 2), []),
     (Position("1", 3), [])],
)  # fmt: skip
def test_records_keep_their_numbers_within_the_aggregate(start: Position, remaining: list[int]) -> None:
    """The numbers are kept so that a checkpoint inside a misplaced aggregate means the same record to the KCL."""
    batch = poller(1, start).read()
    assert [(record.sub_sequence_number, record.data) for record in batch.records] == [
        (sub, b"%d" % sub) for sub in remaining
    ]
    assert batch.read_to == Position("1", 3)


def test_misplaced_records_are_kept_by_default_and_can_be_dropped() -> None:
    """If misplaced records are kept, none is lost. If they are dropped, workers behave as Java workers do."""
    assert [len(poller(1, misplaced=mode).read().records) for mode in get_args(Misplaced)] == [2, 0]
    assert list(deaggregate(AGGREGATE, "a", None, LOWER)) == [
        UserRecord(b"0", "a", None, 0),
        UserRecord(b"2", "c", None, 2),
    ]
    url = "kinesis://orders?region=eu-west-1"
    for options, expected in (("", "keep"), ("&misplaced=keep", "keep"), ("&misplaced=drop", "drop")):
        assert vars(open_source(url + options))["_misplaced"] == expected
    for options in ("&misplaced=Drop", "&misplaced=yes"):
        with pytest.raises(ValueError, match=r"^source URL: option 'misplaced' must be keep or drop; "):
            open_source(url + options)


class RejectedConsumer:
    """A consumer for which the stream has no room, so that its shards are polled."""

    def find_arn(self) -> None:
        """Return None, which stands for a rejected consumer."""


def subscribed(count: int, start: Position = TRIM_HORIZON, misplaced: Misplaced = "keep") -> FanOut:
    """Return a reader of the lower shard with enhanced fan-out."""
    client, consumer = cast("KinesisClient", Canned(count)), cast("StreamConsumer", RejectedConsumer())
    return FanOut(client, "orders", "s-0", start, LOWER, consumer=consumer, misplaced=misplaced)


def in_columns(count: int, start: Position = TRIM_HORIZON, misplaced: Misplaced = "keep") -> ArrowPoller:
    """Return a reader of the lower shard for Spark."""
    return ArrowPoller(cast("KinesisClient", Canned(count)), "orders", "s-0", start, LOWER, misplaced=misplaced)


@pytest.mark.parametrize("misplaced", get_args(Misplaced))
def test_every_reader_honors_the_misplaced_option(misplaced: Misplaced) -> None:
    source = KinesisSource(cast("KinesisClient", Canned(1)), "orders", misplaced=misplaced)
    for reader in (
        source.open(Lease("s-0", hash_range=LOWER), TRIM_HORIZON),
        subscribed(1, misplaced=misplaced),
        in_columns(1, misplaced=misplaced),
    ):
        assert reader.read().count == (2 if misplaced == "keep" else 0)


def test_malformed_misplaced_aggregate_is_reported_as_malformed() -> None:
    malformed = sealed(keys("b", "a") + record(0, b"0") + record(1, b"1") + record(7, b"2"))
    user_records = deaggregate(malformed, "a", None, LOWER)
    assert (list(user_records), user_records.reason, user_records.dropped) == (
        [UserRecord(b"1", "a", None, 1)],
        Reason.BAD_INDEX,
        2,
    )


@pytest.mark.parametrize("opened", [poller, subscribed, in_columns])
@pytest.mark.parametrize(("misplaced", "dropped"), [("keep", 2), ("drop", 4)])
def test_dropped_record_is_logged_once_and_counted(
    opened: Callable[..., Poller], misplaced: Misplaced, dropped: int, caplog: pytest.LogCaptureFixture
) -> None:
    reader = opened(1000, misplaced=misplaced)
    for _ in range(3):
        reader.read()
    reason = "out-of-range, because their aggregate went to another shard"
    first_message = (
        f"shard s-0: {dropped} user records of 1 dropped: {reason}; more are counted until the reader closes"
    )
    assert caplog.messages == [first_message]
    reader.close()
    reader.close()
    last_message = f"shard s-0: {dropped * 2999} more user records dropped: out-of-range"
    assert caplog.messages == [first_message, last_message]
    caplog.clear()
    reader_of_one = opened(1, misplaced=misplaced)
    reader_of_one.read()
    reader_of_one.close()
    assert caplog.messages == [first_message]


HASH_OF_A = hash_partition_key("a")


@pytest.mark.parametrize("hash_key", [None, str(HASH_OF_A)])
@pytest.mark.parametrize(
    ("hash_range", "is_inside"),
    [
        ((HASH_OF_A, HASH_OF_A), True),
        ((HASH_OF_A, HASH_KEYS[1]), True),
        ((0, HASH_OF_A), True),
        ((HASH_OF_A + 1, HASH_KEYS[1]), False),
        ((0, HASH_OF_A - 1), False),
    ],
)
def test_both_ends_of_a_hash_range_belong_to_it(hash_key: str | None, hash_range: HashRange, is_inside: bool) -> None:
    """Every way to unpack an aggregate agrees about the records at the ends of the range."""
    data = packed([("a", hash_key, b"0"), ("a", hash_key, b"1")])[0].encode()
    expected = [b"0", b"1"] * is_inside
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_CAN_LOCATE", True)
        patch.setattr(arrow, "_CAN_USE_SPANS", True)
        located = locate_records(data, "7", None, hash_range)
        assert (located is not None) == (is_inside and hash_key is None)
        for misplaced in get_args(Misplaced):
            user_records = deaggregate(data, "outer", None, hash_range, misplaced=misplaced)
            rows = arrow.deaggregate_to_arrow([data], ["outer"], hash_range, misplaced=misplaced)
            assert [user_record.data for user_record in user_records] == rows["data"].to_pylist() == expected
