"""The offset that Spark stores for a batch is exact, has a stable text, and never moves back."""

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from random import Random

import pytest
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from leasehold.adapters.spark.offsets import (
    Offset,
    Range,
    RangeStart,
    advance_offset,
    decode_offset,
    divide_fairly,
    encode_offset,
    find_resume_position,
    format_range,
    is_uncommitted,
    pack_range,
    pack_rows,
    unpack_rows,
)
from leasehold.balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Position, at_timestamp

numbers = st.builds(Position, st.integers(0, 10**56).map(str), st.integers(0, 900), st.text("0123456789:-", max_size=9))
positions = st.one_of(numbers, st.sampled_from([TRIM_HORIZON, SHARD_END, at_timestamp(1_700_000_000_000)]))
keys = st.text("shard-0123456789:/é", min_size=1, max_size=12)
ranges = st.builds(Range, positions, positions, st.integers(0, 10**9))
offsets = st.builds(
    Offset,
    st.integers(0, 10**6),
    st.dictionaries(keys, ranges, max_size=6).map(lambda pairs: tuple(pairs.items())),
    st.sampled_from(["", "kinesis://orders", "eventhubs://ns/hub"]),
    st.integers(0, 9),
    st.sampled_from(["", "000000000000:orders:1790000000"]),
)


PACKING = pytest.mark.parametrize("least", [0, 2, 64], ids=["packed", "packed from two on", "as it is"])


@PACKING
@given(offset=offsets)
def test_offset_survives_serialization(least: int, offset: Offset) -> None:
    assert_survives_encoding(offset, least)


@given(st.lists(st.from_regex(r"[0-9]{1,129}", fullmatch=True).map(Position), min_size=1))
def test_numbers_of_any_form_survive_packing(positions: list[Position]) -> None:
    """Leading zeros are kept, so the offset has the same text and the batch is not read again."""
    rows = [(str(index), position, position, 1) for index, position in enumerate(positions)]
    texts = [(key, *pack_range(start, end, epoch)) for key, start, end, epoch in rows]
    assert list(unpack_rows(json.loads(json.dumps(pack_rows(texts))))) == rows


def test_offset_of_a_thousand_quiet_shards_is_short() -> None:
    """Each batch writes its offset to the checkpointLocation, so the offset is packed to far less than 150 KB."""
    rng = Random(1)  # noqa: S311  numbers of any kind
    positions_by_shard = {
        key: Position(kinesis_number(index, rng)) for index, key in enumerate(map("shardId-{:012}".format, range(1000)))
    }
    offset = Offset(
        7,
        tuple((key, Range(position, position, 12)) for key, position in positions_by_shard.items()),
        "kinesis://orders",
    )
    assert len(json.dumps(encode_offset(offset))) < 20_000
    assert decode_offset(encode_offset(offset)) == offset


def kinesis_number(shard: int, rng: Random) -> str:
    """Return a sequence number with the parts that Kinesis uses.

    These are the version, the stream's creation time, the shard, a count, the time of the record, the shard, and the
    version.
    """
    count, seconds = rng.randrange(1 << 34), 1_760_000_000 - rng.randrange(86_400)
    return str(int(f"2{1_500_000_000:09x}{shard % 16:x}{count:016x}00{seconds:09x}{shard:08x}2", 16))


def assert_survives_encoding(offset: Offset, packed_from: int) -> None:
    """Assert that an offset is unchanged by encoding, which packs it if it has at least `packed_from` ranges."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leasehold.adapters.spark.offsets.PACKED_RANGES_MIN", max(packed_from, 1))
        encoded_offset = json.loads(json.dumps(encode_offset(offset)))
    assert encoded_offset["v"] == (2 if len(offset.ranges) >= max(packed_from, 1) else 1)
    decoded_offset = decode_offset(encoded_offset)
    tokens = [(shard_range.begins.token, shard_range.ends.token) for _, shard_range in offset.ranges]
    assert (
        decoded_offset,
        [(shard_range.begins.token, shard_range.ends.token) for _, shard_range in decoded_offset.ranges],
    ) == (offset, tokens)


@given(offsets, st.randoms())
def test_equal_offsets_have_equal_texts(offset: Offset, random: Random) -> None:
    """Spark compares offsets as texts, and plans empty batches while they differ."""
    shuffled = list(offset.ranges)
    random.shuffle(shuffled)
    shuffled_offset = evolve(offset, ranges=tuple(shuffled))
    assert json.dumps(encode_offset(shuffled_offset)) == json.dumps(encode_offset(offset))


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"v": 3, "n": 1, "r": {}},
        {"v": 2, "n": 1, "r": {}},
        {"v": 2, "n": 1, "p": []},
        {"v": 2, "n": 1, "p": [1, 1, 1, 0, 0, 0, 0, 0, 1, "eJw="]},
        {
            "v": 2,
            "n": 1,
            "p": [2, 1, 1, 0, 0, 0, 0, 0, 1, pack_rows([("a", *pack_range(TRIM_HORIZON, TRIM_HORIZON, 1))])[-1]],
        },
        {"shardId-0": {"iteratorType": "AFTER"}},
        {"v": 1, "n": 1, "r": {"s": ["x", 1]}},
    ],
)
def test_offset_of_another_connector_is_rejected_with_an_explanation(stored: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"offset: .*checkpointLocation"):
        decode_offset(stored)


def test_offset_of_another_stream_is_rejected_unless_unnamed() -> None:
    """The positions of one stream have no meaning in another stream."""
    part = ("a", Range(TRIM_HORIZON, Position("7"), 4))
    named_offset, unnamed_offset = (
        Offset(3, (part,), "kinesis://orders"),
        decode_offset({"v": 1, "n": 3, "r": {"a": ["TRIM_HORIZON", "7", 4]}}),
    )
    with pytest.raises(
        ValueError, match=r"^offset: the checkpointLocation is of kinesis://orders, but the query reads kinesis://b;"
    ):
        named_offset.check_stream("kinesis://b")
    assert (
        unnamed_offset.check_stream("kinesis://orders") == named_offset.check_stream("kinesis://orders") == named_offset
    )
    assert advance_offset(named_offset, {"a": RangeStart(4, Position("7"))}, {}).stream == "kinesis://orders"


def test_end_of_a_shard_counts_only_if_the_stream_is_named() -> None:
    """An offset of another stream does not end our shards that have the same ids."""
    parts = (("a", Range(Position("5"), SHARD_END, 4)), ("b", Range(Position("5"), Position("7"), 4)))
    assert Offset(3, parts).continue_on_stream("kinesis://orders") == Offset(3, parts[1:], "kinesis://orders")
    named_offset = Offset(3, parts, "kinesis://orders")
    assert named_offset.continue_on_stream("kinesis://orders") == named_offset


@frozen
class Step:
    """One event that affects one shard between two batches."""

    key: str
    what: str
    count: int


steps = st.lists(
    st.builds(
        Step, st.sampled_from("ab"), st.sampled_from(["read", "read", "theft", "end", "foreign"]), st.integers(0, 9)
    ),
    max_size=40,
)


@given(steps)
def test_batches_of_one_owner_are_contiguous_and_an_end_is_final(happenings: list[Step]) -> None:
    """Each record is in exactly one batch, and a finished shard is not read again."""
    shard_positions: dict[str, Position] = dict.fromkeys("ab", TRIM_HORIZON)
    epochs = dict.fromkeys("ab", 1)
    offset = Offset()
    ranges_of: dict[tuple[str, int], list[Range]] = {}
    for step in happenings:
        position = shard_positions[step.key]
        if step.what == "theft":
            epochs[step.key] += 1
        elif step.what == "foreign" and not position.ended:
            number = 0 if not position.numbered else int(position.sequence)
            previous = offset.find_range(step.key)
            epochs[step.key] += 1
            checkpoint = Position(str(number + step.count))
            shard_positions[step.key] = find_resume_position(checkpoint, previous, delivered=True)
        else:
            end = _end(position, step)
            held_ranges = {key: RangeStart(epochs[key], shard_positions[key]) for key in "ab"}
            end_positions = {} if position.ended else {step.key: end}
            offset = advance_offset(offset, held_ranges, end_positions)
            shard_positions |= end_positions
            for key, shard_range in offset.ranges:
                ranges_of.setdefault((key, epochs[key]), []).append(shard_range)
    for ranges in ranges_of.values():
        assert all(former.ends == later.begins for former, later in pairwise(ranges))
        assert all(shard_range.begins.order <= shard_range.ends.order for shard_range in ranges)
        assert not any(shard_range.ends.ended for shard_range in ranges[:-1])


def _end(position: Position, step: Step) -> Position:
    if step.what == "end":
        return SHARD_END
    return Position(str((int(position.sequence) if position.numbered else 0) + step.count))


def test_flush_changes_nothing_but_the_text() -> None:
    """A flush is a separate batch, so that Spark commits the previous batch before it becomes idle."""
    held_ranges = {"a": RangeStart(4, Position("7")), "b": RangeStart(2, SHARD_END)}
    offset = Offset(3, (("a", Range(TRIM_HORIZON, Position("7"), 4)), ("b", Range(Position("1"), SHARD_END, 2))))
    flush = advance_offset(offset, held_ranges, {})
    assert flush == Offset(4, (("a", Range(Position("7"), Position("7"), 4)),))
    assert [
        is_uncommitted(offset, 2),
        is_uncommitted(offset, 3),
        is_uncommitted(flush, 3),
        is_uncommitted(Offset(), -1),
    ] == [
        True,
        False,
        False,
        False,
    ]


def test_range_within_one_aggregated_record_is_not_empty() -> None:
    """Its rows are repeated after a crash and checkpointed after a commit, as all others are."""
    assert is_uncommitted(Offset(3, (("a", Range(Position("7", 1), Position("7", 3), 4)),)), 2)
    assert not is_uncommitted(Offset(3, (("a", Range(Position("7", 3), Position("7", 3), 4)),)), 2)


def test_quiet_shard_keeps_its_range_and_its_text() -> None:
    """The texts of a large stream are not built again for each batch. A new epoch changes the range."""
    position = Position("7")
    first_offset = advance_offset(Offset(), {"a": RangeStart(4, position)}, {})
    second_offset = advance_offset(first_offset, {"a": RangeStart(4, position)}, {})
    assert second_offset.find_range("a") is first_offset.find_range("a") is not None
    assert second_offset.find_range("b") is None
    assert advance_offset(second_offset, {"a": RangeStart(5, position)}, {}).find_range("a") == Range(
        position, position, 5
    )


def test_range_has_the_shortest_complete_text() -> None:
    """The text that marks a range as given up must never change, because later versions must recognize it."""
    assert format_range(Range(TRIM_HORIZON, Position("7"), 4)) == '["TRIM_HORIZON","7",4]'
    assert format_range(Range(Position("7", 1), Position("9", 0, "88"), 4)) == '["7:1","9:0:88",4]'


def test_small_offset_is_plain_and_may_be_unnamed() -> None:
    """A small offset has the same text as in earlier versions."""
    parts = (("a", Range(TRIM_HORIZON, Position("7"), 4)),)
    assert encode_offset(Offset(3, parts)) == {"v": 1, "n": 3, "r": {"a": ["TRIM_HORIZON", "7", 4]}}
    assert encode_offset(Offset(3, (), "kinesis://b")) == {"v": 1, "n": 3, "s": "kinesis://b", "r": {}}


def test_released_shards_leave_the_offset() -> None:
    offset = Offset(3, (("a", Range(TRIM_HORIZON, Position("7"), 4)), ("b", Range(TRIM_HORIZON, Position("1"), 2))))
    next_offset = advance_offset(offset, {"b": RangeStart(2, Position("1"))}, {"b": Position("2")})
    assert next_offset == Offset(4, (("b", Range(Position("1"), Position("2"), 2)),))


def test_position_missing_from_the_leases_stays_in_the_offset() -> None:
    """If the query is killed before it takes the shard again, the shard's rows are not delivered twice."""
    ended_range = Range(SHARD_END, SHARD_END, 4)
    next_offset = advance_offset(
        Offset(3), {"b": RangeStart(2, Position("1"))}, {"b": Position("2")}, [("a", ended_range), ("b", ended_range)]
    )
    assert next_offset == Offset(4, (("a", ended_range), ("b", Range(Position("1"), Position("2"), 2))))


def test_no_shard_moves_backward_or_past_its_end() -> None:
    with pytest.raises(ValueError, match=r"^ends: a would go back from 7 to 6"):
        advance_offset(Offset(), {"a": RangeStart(1, Position("7"))}, {"a": Position("6")})
    with pytest.raises(ValueError, match="have ended before"):
        advance_offset(Offset(), {"a": RangeStart(4, SHARD_END)}, {"a": SHARD_END})


@pytest.mark.parametrize(
    ("checkpoint", "delivered", "begins"),
    [
        (Position("40"), True, Position("50")),  # our rows were written, and the other worker was slower
        (Position("60"), True, Position("60")),  # the other worker continued after us
        (Position("40"), False, Position("40")),  # our rows could not be repeated
        (TRIM_HORIZON, True, Position("50")),  # the table was recreated in the meantime
        (LATEST, False, Position("30")),  # as above, and the last range could not be repeated
    ],
)
def test_reclaimed_shard_starts_at_the_latest_complete_prefix(
    checkpoint: Position, delivered: bool, begins: Position
) -> None:
    """If a lease was stolen and comes back, no records are lost and no batch is repeated."""
    assert find_resume_position(checkpoint, Range(Position("30"), Position("50"), 5), delivered=delivered) == begins


@given(st.dictionaries(keys, st.integers(0, 10**6)), st.integers(0, 10**6))
def test_shares_fit_the_limit_and_starve_no_shard(waiting: Mapping[str, int], limit: int) -> None:
    positions = divide_fairly(waiting, limit)
    assert positions.keys() == waiting.keys()
    assert sum(positions.values()) == min(limit, sum(waiting.values()))
    assert all(positions[key] <= waiting[key] for key in waiting)
    assert all(positions[key] >= min(waiting[key], limit // len(waiting)) for key in waiting)


def test_shares_do_not_depend_on_the_order_of_the_shards() -> None:
    """If a batch is planned again after a crash, it is divided in the same way."""
    assert divide_fairly({"b": 5, "a": 5}, 5) == divide_fairly({"a": 5, "b": 5}, 5) == {"a": 2, "b": 3}


@pytest.mark.parametrize(
    "stored", [[], None, {"v": 1}, {"v": 1, "n": math.inf, "r": {}}, {"v": 1, "n": 0, "r": {"a": 7}}]
)
def test_malformed_offset_is_named(stored: object) -> None:
    with pytest.raises(ValueError, match=r"^offset: "):
        decode_offset(stored)
