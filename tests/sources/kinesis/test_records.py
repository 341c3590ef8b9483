"""The records of an answer: columns that look like the objects which nobody has made yet."""

import gc
from typing import TYPE_CHECKING, cast

import pytest
from aggregates import keys, record, sealed

from leasehold.adapters.sources.kinesis.records import KinesisRecords
from leasehold.adapters.sources.kinesis.unpacking import Unpacking
from leasehold.adapters.sources.protocol import Record

if TYPE_CHECKING:
    from types_boto3_kinesis.type_defs import RecordTypeDef

MILLISECONDS = 1_767_312_000_123


def row(number: int, data: bytes) -> dict[str, object]:
    """As the service answers it."""
    told = {"Data": data, "SequenceNumber": str(number), "PartitionKey": f"k{number}"}
    return told | {"ApproximateArrivalTimestamp": MILLISECONDS + number}


def unpacked(*rows: dict[str, object], done: tuple[int, int, int] | None = None) -> KinesisRecords:
    """The records of an answer of these rows."""
    unpacking = Unpacking("s-0", None, done)
    unpacking.take(cast("list[RecordTypeDef]", list(rows)))
    return unpacking.records


def user(number: int, data: bytes, sub: int | None = None) -> Record:
    """What a handler is given; with a place in an aggregate, if there is one."""
    key, hash_key = ("a", None) if sub is not None else (f"k{number}", None)
    arrived = (MILLISECONDS + number) / 1000
    return Record(data, str(number), sub or 0, key, hash_key, arrived, sub is not None, "", None)


AGGREGATE = sealed(keys("a") + record(0, b"x") + record(0, b"y"))
ROWS = (row(1, b"p"), row(2, AGGREGATE), row(3, b"q"), row(4, b"r"), row(5, AGGREGATE))
USERS = (
    user(1, b"p"),
    user(2, b"x", 0),
    user(2, b"y", 1),
    user(3, b"q"),
    user(4, b"r"),
    user(5, b"x", 0),
    user(5, b"y", 1),
)


def test_records_stand_in_their_order_however_they_came() -> None:
    """Without it plain records between aggregates would be handed over before or after their turn."""
    records = unpacked(*ROWS)
    assert tuple(records) == USERS
    assert tuple(records) == USERS  # as often as anybody asks
    assert [type(each) for each in records] == [Record] * 7


def test_they_are_a_sequence_as_a_tuple_is() -> None:
    """Without it a handler that takes the last one, or some of them, would find others, or none."""
    records = unpacked(*ROWS)
    assert (len(records), records[0], records[-1]) == (7, USERS[0], USERS[-1])
    assert records[2:5] == USERS[2:5]
    assert records[::-1] == USERS[::-1]
    assert isinstance(records[2:5], KinesisRecords)
    assert (records == USERS[:6], records == (*USERS[:6], USERS[0]), records == 7) == (False, False, False)
    assert hash(records) == hash(USERS)
    assert repr(records) == f"KinesisRecords({list(USERS)!r})"
    assert (USERS[3] in records, records.index(USERS[3])) == (True, 3)
    with pytest.raises(IndexError):
        _ = records[7]


def test_columns_made_of_records_are_the_same() -> None:
    """Without it a batch whose beginning is done would come as other columns than a whole one."""
    assert KinesisRecords.of(USERS) == USERS
    assert KinesisRecords.of(()) == ()


@pytest.mark.parametrize(
    ("done", "left"),
    [((1, 1, 0), 1), ((1, 2, 0), 2), ((1, 2, 1), 3), ((1, 3, 0), 4), ((1, 5, 0), 6), ((1, 9, 0), 7)],
)
def test_what_is_done_is_left_out(done: tuple[int, int, int], left: int) -> None:
    """Without it records would be handled twice after each restart."""
    assert unpacked(*ROWS, done=done) == USERS[left:]


def test_a_record_without_a_partition_key_is_accepted() -> None:
    """Without it streams that spread records themselves could not be read."""
    keyless: list[dict[str, object]] = [{"Data": data, "SequenceNumber": "5"} for data in (b"plain", AGGREGATE)]
    assert [each.partition_key for each in unpacked(*keyless)] == [None, "a", "a"]


def test_reading_makes_no_object_for_a_record() -> None:
    """Without it half of what reading costs would come back, and nobody would notice."""
    records = unpacked(*ROWS)
    ours = [each for each in gc.get_objects() if isinstance(each, Record) and each.arrived == records.arrived[0]]
    assert all(each is USERS[0] for each in ours)
