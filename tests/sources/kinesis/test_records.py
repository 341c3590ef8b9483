"""`KinesisRecords` stores a response as columns, and creates a `Record` only when it is accessed."""

import gc
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import pytest
from aggregates import hash_keys, keys, record, sealed
from aggregation_rows import KEYS, packed
from crafted import cases
from fuzz_aggregation import mutated
from hypothesis import given, settings
from hypothesis import strategies as st

from leasehold.adapters.sources.kinesis.aggregation import decode
from leasehold.adapters.sources.kinesis.aggregation.decode import deaggregate, locate_records
from leasehold.adapters.sources.kinesis.poller import DropCounter, Unpacker, convert_to_columns
from leasehold.adapters.sources.kinesis.records import (
    MARK_BYTES,
    KinesisRecords,
    Mark,
    RowColumns,
    RowViews,
    SeenMarks,
    prepend_mark,
    split_mark,
)
from leasehold.adapters.sources.protocol import Record
from leasehold.balancer.model import HASH_KEYS, HashRange

if TYPE_CHECKING:
    from types_boto3_kinesis.type_defs import RecordTypeDef

MILLISECONDS = 1_767_312_000_123


@pytest.fixture(autouse=True, params=[False, True], ids=["at once", "where they lie"])
def placing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test with eager unpacking of aggregates and with lazy reading, which usually only compiled code does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_CAN_LOCATE", request.param)
        yield


def row(number: int, data: bytes) -> dict[str, object]:
    """Return the row of a record as the service sends it."""
    fields = {"Data": data, "SequenceNumber": str(number), "PartitionKey": f"k{number}"}
    return fields | {"ApproximateArrivalTimestamp": MILLISECONDS + number}


def unpacked(*rows: dict[str, object], skip_through: tuple[int, int, int] | None = None) -> KinesisRecords:
    """Return the unpacked records of a response that consists of these rows."""
    unpacker = Unpacker(None, skip_through, misplaced="keep", drop_counter=DropCounter("s-0"))
    unpacker.unpack_rows(cast("list[RecordTypeDef]", list(rows)))
    return unpacker.records


def record_for_handler(number: int, data: bytes, sub: int | None = None) -> Record:
    """Return a record as a handler receives it. `sub` is its index in its aggregate, or None if it is not in one."""
    key, hash_key = ("a", None) if sub is not None else (f"k{number}", None)
    arrival_time = (MILLISECONDS + number) / 1000
    return Record(data, str(number), sub or 0, key, hash_key, arrival_time, sub is not None, "", None)


AGGREGATE = sealed(keys("a") + record(0, b"x") + record(0, b"y"))
ROWS = (row(1, b"p"), row(2, AGGREGATE), row(3, b"q"), row(4, b"r"), row(5, AGGREGATE))
USERS = (
    record_for_handler(1, b"p"),
    record_for_handler(2, b"x", 0),
    record_for_handler(2, b"y", 1),
    record_for_handler(3, b"q"),
    record_for_handler(4, b"r"),
    record_for_handler(5, b"x", 0),
    record_for_handler(5, b"y", 1),
)


def test_records_keep_their_order_around_aggregates() -> None:
    records = unpacked(*ROWS)
    assert tuple(records) == USERS
    assert tuple(records) == USERS  # The records can be iterated again.
    assert [type(record) for record in records] == [Record] * 7


def test_records_are_a_sequence_like_a_tuple() -> None:
    records = unpacked(*ROWS)
    assert (len(records), records[0], records[-1]) == (7, USERS[0], USERS[-1])
    assert records[2:5] == USERS[2:5]
    assert records[::-1] == USERS[::-1]
    assert isinstance(records[2:5], KinesisRecords)
    assert (records == USERS[:6], records == (*USERS[:6], USERS[0]), records == 7) == (False, False, False)
    assert hash(records) == hash(USERS)
    assert repr(records) == f"KinesisRecords({list(USERS)!r})"
    assert (USERS[3] in records, records.index(USERS[3])) == (True, 3)
    assert [records[begin:end] == USERS[begin:end] for begin in range(9) for end in range(9)] == [True] * 81
    assert (records[6:][-1], records[2:][1:][0]) == (USERS[6], USERS[3])
    assert [*records[4:4], *unpacked()[0:0]] == []
    with pytest.raises(IndexError):
        _ = records[7]


def test_records_can_be_pickled() -> None:
    records = unpacked(*ROWS)
    assert pickle.loads(pickle.dumps(records[1:])) == USERS[1:]  # noqa: S301  our own


def test_columns_made_of_records_are_the_same() -> None:
    """A batch without its first records has the same columns as a batch of the remaining records."""
    assert KinesisRecords.of(USERS) == USERS
    assert KinesisRecords.of(()) == ()
    columns = unpacked(*ROWS).to_record_columns()
    assert (tuple(columns), tuple(unpacked(*ROWS)[2:].to_record_columns())) == (USERS, USERS[2:])
    assert (columns.numbers, columns.subs) == (list("1223455"), [0, 0, 1, 0, 0, 0, 1])


def test_unpacked_response_is_freed() -> None:
    """Unpacking frees the response, so that its data is not in memory twice."""
    response_rows = list(ROWS)
    columns = convert_to_columns(cast("list[RecordTypeDef]", response_rows))
    unpacker = Unpacker(None, None, misplaced="keep", drop_counter=DropCounter("s-0"))
    unpacker.unpack_rows(columns)
    assert unpacker.records == USERS
    assert (response_rows, columns.payloads) == ([], [b"p", b"", b"q", b"r", b""])


@pytest.mark.parametrize(
    ("done", "expected"),
    [((1, 1, 0), 1), ((1, 2, 0), 2), ((1, 2, 1), 3), ((1, 3, 0), 4), ((1, 5, 0), 6), ((1, 9, 0), 7)],
)
def test_processed_record_is_left_out(done: tuple[int, int, int], expected: int) -> None:
    assert unpacked(*ROWS, skip_through=done) == USERS[expected:]


@pytest.mark.parametrize(("done", "expected"), [(None, ["5", None, "7"]), ((1, 2, 0), [None, "7"])])
def test_explicit_hash_keys_are_kept_with_their_records(
    done: tuple[int, int, int] | None, expected: list[str | None]
) -> None:
    rows = record(0, b"x", 0) + record(0, b"y") + record(0, b"z", 1)
    records = unpacked(row(2, sealed(keys("a") + hash_keys("5", "7") + rows)), skip_through=done)
    assert [user_record.explicit_hash_key for user_record in records] == expected


def test_record_without_a_partition_key_is_accepted() -> None:
    """The records of a stream that distributes them itself have no partition keys."""
    keyless: list[dict[str, object]] = [{"Data": data, "SequenceNumber": "5"} for data in (b"plain", AGGREGATE)]
    assert [user_record.partition_key for user_record in unpacked(*keyless)] == [None, "a", "a"]


def test_reading_creates_no_record_objects() -> None:
    """Creating the `Record` objects would double the cost of reading."""
    records = unpacked(*ROWS)
    live_records = [
        found_record
        for found_record in gc.get_objects()
        if isinstance(found_record, Record) and found_record.arrived == USERS[0].arrived
    ]
    assert all(found_record is USERS[0] for found_record in live_records)
    assert records == USERS


def decoded_whole(data: bytes, hash_range: HashRange | None) -> tuple[Record, ...] | None:
    """Return the records of an aggregate, or None if `deaggregate` does not return all of them in both modes."""
    kept_result, dropping_result = (
        deaggregate(data, "outer", None, hash_range, misplaced=mode) for mode in ("keep", "drop")
    )
    assert (kept_result == dropping_result) or kept_result.reason != "aggregated"
    if kept_result.reason != "aggregated":
        return None
    user_records = enumerate(zip(kept_result.keys, kept_result.hash_keys, kept_result.payloads, strict=True))
    return tuple(Record(mode, "7", sub, key, hash_key, 1.5, True) for sub, (key, hash_key, mode) in user_records)


def read_lazily(data: bytes, hash_range: HashRange | None) -> tuple[Record, ...] | None:
    """Return the records of an aggregate by lazy reading, or None if lazy reading does not apply."""
    records = locate_records(data, "7", 1.5, hash_range)
    return None if records is None else cast("tuple[Record, ...]", tuple(records))


def test_lazily_read_record_matches_deaggregate() -> None:
    """Lazy reading returns the same records as `deaggregate`, and no record that the KCL drops."""
    for case in (*cases(), *mutated(3000, seed=11)):
        for hash_range in (None, HASH_KEYS, (case.first, case.last)):
            assert read_lazily(case.data, hash_range) in {None, decoded_whole(case.data, hash_range)}, case.name


def test_numbers_of_three_bytes_are_not_mistaken_for_shorter_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_CAN_LOCATE", True)
    size = sealed(keys("a") + b"\x1a\x85\x80\x08\x00\x1a\x80\x80" + bytes(1 << 14))
    key = sealed(keys("") * ((1 << 14) + 1) + b"\x1a\x06\x08\x80\x80\x1a\x01x")
    for data in (size, key):
        assert (read_lazily(data, None), decoded_whole(data, None)) == (None, None)


@settings(deadline=None)
@given(
    st.lists(st.tuples(KEYS, st.none(), st.binary(max_size=300)), min_size=2, max_size=40),
    st.none() | st.just(HASH_KEYS) | st.tuples(st.integers(0, 2**126), st.integers(2**127, HASH_KEYS[1])),
)
def test_common_aggregates_are_read_lazily(rows: list[tuple[str, None, bytes]], hash_range: HashRange | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_CAN_LOCATE", True)
        data = packed(list(rows))[0].encode()
        assert read_lazily(data, hash_range) == decoded_whole(data, hash_range)
        assert read_lazily(data[:-1] + bytes([data[-1] ^ 1]), hash_range) is None


def test_response_is_freed_once_it_is_columns() -> None:
    rows = cast("list[RecordTypeDef]", [row(number, b"x") for number in range(3)])
    assert convert_to_columns(rows).numbers == ["0", "1", "2"]
    assert rows == []


@pytest.mark.parametrize(
    ("name", "says"), [("SequenceNumber", "expected str"), ("PartitionKey", "that is not a string")]
)
def test_response_with_fields_of_the_wrong_type_is_rejected(name: str, says: str) -> None:
    """A sequence number that is not a string must not become a position, because no service would accept it."""
    rows = cast("list[RecordTypeDef]", [row(0, b"x"), row(1, b"x") | {name: 7}])
    with pytest.raises(TypeError, match=says):
        convert_to_columns(rows)
    assert len(rows) == 2


@pytest.mark.parametrize("data", [b"", b"x", b"y" * (MARK_BYTES + 1), prepend_mark(b"", Mark(1, 2))[:-1]])
def test_record_without_a_mark_is_returned_unchanged(data: bytes) -> None:
    """The data of records from other producers must not be cut."""
    assert split_mark(data) == (None, data)
    assert split_mark(prepend_mark(data, Mark(7, 9))) == (Mark(7, 9), data)


def test_mark_is_recognized_while_it_is_remembered() -> None:
    """The number of remembered marks is limited, so that long streams do not need more and more memory."""
    seen_marks, marks = SeenMarks(2), [Mark(1, counter) for counter in range(3)]
    assert [seen_marks.is_duplicate(marks[index]) for index in (0, 0, 1, 0, 2, 1, 0)] == [
        False,
        True,
        False,
        True,
        False,
        True,
        False,
    ]


def test_response_rows_are_freed_once_they_are_columns() -> None:
    rows = [row(1, b"a"), row(2, b"b")]
    expected = convert_to_columns(cast("list[RecordTypeDef]", [*rows]))

    def make_columns(body: bytes, *_views: bytes) -> tuple[list[bytes], list[str], list[Any], list[Any]]:
        assert body == b"body"
        return _values(expected)

    views = RowViews(b"body", (b"d", b"n", b"k", bytes(16)), make_columns, has_aggregates=True)
    assert views[1] == expected[1]
    for bad_index in (-1, 2):
        with pytest.raises(IndexError):
            views[bad_index]
    columns = convert_to_columns(views)
    assert (_values(columns), columns.has_aggregates) == (_values(expected), True)
    assert (views.body, len(views)) == (b"", 0)
    convert_to_columns(cast("list[RecordTypeDef]", rows))
    assert rows == []


def _values(rows: RowColumns) -> tuple[list[bytes], list[str], list[Any], list[Any]]:
    return rows.payloads, rows.numbers, rows.keys, rows.arrived
