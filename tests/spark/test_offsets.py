"""What Spark stores about a batch: exact, stable as text, and never before an earlier offset."""

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
    assert_it_comes_back(offset, least)


@given(st.lists(st.from_regex(r"[0-9]{1,129}", fullmatch=True).map(Position), min_size=1))
def test_numbers_of_any_form_survive_packing(positions: list[Position]) -> None:
    """Leading zeros are kept, so the offset has the same text and its batch is not read again."""
    rows = [(str(place), position, position, 1) for place, position in enumerate(positions)]
    texts = [(key, *pack_range(begins, ends, epoch)) for key, begins, ends, epoch in rows]
    assert list(unpack_rows(json.loads(json.dumps(pack_rows(texts))))) == rows


def test_offset_of_a_thousand_quiet_shards_is_short() -> None:
    """Each batch writes its offset to the checkpointLocation, so it is packed to far less than 150 KB."""
    draw = Random(1)  # noqa: S311  numbers of any kind
    quiet = {
        key: Position(kinesis_number(place, draw))
        for place, key in enumerate(map("shardId-{:012}".format, range(1000)))
    }
    offset = Offset(
        7, tuple((key, Range(position, position, 12)) for key, position in quiet.items()), "kinesis://orders"
    )
    assert len(json.dumps(encode_offset(offset))) < 20_000
    assert decode_offset(encode_offset(offset)) == offset


def kinesis_number(shard: int, draw: Random) -> str:
    """Return a number as Kinesis composes it: version, birth, shard, count, time of the record, shard, version."""
    count, seconds = draw.randrange(1 << 34), 1_760_000_000 - draw.randrange(86_400)
    return str(int(f"2{1_500_000_000:09x}{shard % 16:x}{count:016x}00{seconds:09x}{shard:08x}2", 16))


def assert_it_comes_back(offset: Offset, least: int) -> None:
    """Check that an offset survives encoding, which packs it from `least` ranges on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leasehold.adapters.spark.offsets.PACKED_FROM", max(least, 1))
        stored = json.loads(json.dumps(encode_offset(offset)))
    assert stored["v"] == (2 if len(offset.ranges) >= max(least, 1) else 1)
    back = decode_offset(stored)
    tokens = [(each.begins.token, each.ends.token) for _, each in offset.ranges]
    assert (back, [(each.begins.token, each.ends.token) for _, each in back.ranges]) == (offset, tokens)


@given(offsets, st.randoms())
def test_equal_offsets_have_equal_texts(offset: Offset, random: Random) -> None:
    """Spark compares offsets as texts, and plans empty batches as long as they differ."""
    shuffled = list(offset.ranges)
    random.shuffle(shuffled)
    again = evolve(offset, ranges=tuple(shuffled))
    assert json.dumps(encode_offset(again)) == json.dumps(encode_offset(offset))


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
    """Positions of one stream mean nothing in another."""
    part = ("a", Range(TRIM_HORIZON, Position("7"), 4))
    named, old = (
        Offset(3, (part,), "kinesis://orders"),
        decode_offset({"v": 1, "n": 3, "r": {"a": ["TRIM_HORIZON", "7", 4]}}),
    )
    with pytest.raises(
        ValueError, match=r"^offset: the checkpointLocation is of kinesis://orders, but the query reads kinesis://b;"
    ):
        named.check_stream("kinesis://b")
    assert old.check_stream("kinesis://orders") == named.check_stream("kinesis://orders") == named
    assert advance_offset(named, {"a": RangeStart(4, Position("7"))}, {}).stream == "kinesis://orders"


def test_end_of_a_shard_counts_only_if_the_stream_is_named() -> None:
    """An offset of another stream does not end our shards of the same ids."""
    parts = (("a", Range(Position("5"), SHARD_END, 4)), ("b", Range(Position("5"), Position("7"), 4)))
    assert Offset(3, parts).continue_on_stream("kinesis://orders") == Offset(3, parts[1:], "kinesis://orders")
    named = Offset(3, parts, "kinesis://orders")
    assert named.continue_on_stream("kinesis://orders") == named


@frozen
class Step:
    """One thing that happens to one shard between two batches."""

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
    stands: dict[str, Position] = dict.fromkeys("ab", TRIM_HORIZON)
    epochs = dict.fromkeys("ab", 1)
    offset = Offset()
    ranges_of: dict[tuple[str, int], list[Range]] = {}
    for step in happenings:
        stood = stands[step.key]
        if step.what == "theft":
            epochs[step.key] += 1
        elif step.what == "foreign" and not stood.ended:
            number = 0 if not stood.numbered else int(stood.sequence)
            previous = offset.find_range(step.key)
            epochs[step.key] += 1
            checkpoint = Position(str(number + step.count))
            stands[step.key] = find_resume_position(checkpoint, previous, delivered=True)
        else:
            end = _end(stood, step)
            held = {key: RangeStart(epochs[key], stands[key]) for key in "ab"}
            ends = {} if stood.ended else {step.key: end}
            offset = advance_offset(offset, held, ends)
            stands |= ends
            for key, each in offset.ranges:
                ranges_of.setdefault((key, epochs[key]), []).append(each)
    for ranges in ranges_of.values():
        assert all(one.ends == two.begins for one, two in pairwise(ranges))
        assert all(each.begins.order <= each.ends.order for each in ranges)
        assert not any(each.ends.ended for each in ranges[:-1])


def _end(stood: Position, step: Step) -> Position:
    if step.what == "end":
        return SHARD_END
    return Position(str((int(stood.sequence) if stood.numbered else 0) + step.count))


def test_flush_changes_nothing_but_the_text() -> None:
    """The flush is a batch of its own, so Spark commits the last batch before the idle time."""
    held = {"a": RangeStart(4, Position("7")), "b": RangeStart(2, SHARD_END)}
    before = Offset(3, (("a", Range(TRIM_HORIZON, Position("7"), 4)), ("b", Range(Position("1"), SHARD_END, 2))))
    flush = advance_offset(before, held, {})
    assert flush == Offset(4, (("a", Range(Position("7"), Position("7"), 4)),))
    assert [
        is_uncommitted(before, 2),
        is_uncommitted(before, 3),
        is_uncommitted(flush, 3),
        is_uncommitted(Offset(), -1),
    ] == [
        True,
        False,
        False,
        False,
    ]


def test_quiet_shard_keeps_its_range_and_its_text() -> None:
    """The texts of a large stream are not built again for each batch, but a new epoch changes the range."""
    begins = Position("7")
    first = advance_offset(Offset(), {"a": RangeStart(4, begins)}, {})
    second = advance_offset(first, {"a": RangeStart(4, begins)}, {})
    assert second.find_range("a") is first.find_range("a") is not None
    assert second.find_range("b") is None
    assert advance_offset(second, {"a": RangeStart(5, begins)}, {}).find_range("a") == Range(begins, begins, 5)


def test_range_has_the_shortest_complete_text() -> None:
    """Later versions must find the ranges that this one noted as given up, so the text is fixed."""
    assert format_range(Range(TRIM_HORIZON, Position("7"), 4)) == '["TRIM_HORIZON","7",4]'
    assert format_range(Range(Position("7", 1), Position("9", 0, "88"), 4)) == '["7:1","9:0:88",4]'


def test_small_offset_is_plain_and_may_be_unnamed() -> None:
    """An offset has the same text as in earlier versions."""
    parts = (("a", Range(TRIM_HORIZON, Position("7"), 4)),)
    assert encode_offset(Offset(3, parts)) == {"v": 1, "n": 3, "r": {"a": ["TRIM_HORIZON", "7", 4]}}
    assert encode_offset(Offset(3, (), "kinesis://b")) == {"v": 1, "n": 3, "s": "kinesis://b", "r": {}}


def test_released_shards_leave_the_offset() -> None:
    before = Offset(3, (("a", Range(TRIM_HORIZON, Position("7"), 4)), ("b", Range(TRIM_HORIZON, Position("1"), 2))))
    after = advance_offset(before, {"b": RangeStart(2, Position("1"))}, {"b": Position("2")})
    assert after == Offset(4, (("b", Range(Position("1"), Position("2"), 2)),))


def test_position_missing_from_the_leases_stays_in_the_offset() -> None:
    """If the query is killed before the shard is taken again, its rows are not done twice."""
    end = Range(SHARD_END, SHARD_END, 4)
    after = advance_offset(
        Offset(3), {"b": RangeStart(2, Position("1"))}, {"b": Position("2")}, [("a", end), ("b", end)]
    )
    assert after == Offset(4, (("a", end), ("b", Range(Position("1"), Position("2"), 2))))


def test_no_shard_moves_backward_or_past_its_end() -> None:
    with pytest.raises(ValueError, match=r"^ends: a would go back from 7 to 6"):
        advance_offset(Offset(), {"a": RangeStart(1, Position("7"))}, {"a": Position("6")})
    with pytest.raises(ValueError, match="have ended before"):
        advance_offset(Offset(), {"a": RangeStart(4, SHARD_END)}, {"a": SHARD_END})


@pytest.mark.parametrize(
    ("checkpoint", "delivered", "begins"),
    [
        (Position("40"), True, Position("50")),  # ours were written, the other worker was slower
        (Position("60"), True, Position("60")),  # the other worker went on behind us
        (Position("40"), False, Position("40")),  # our own could not be repeated
        (TRIM_HORIZON, True, Position("50")),  # the table was recreated since
        (LATEST, False, Position("30")),  # that too, and the last range could not be repeated
    ],
)
def test_reclaimed_shard_starts_at_the_latest_complete_prefix(
    checkpoint: Position, delivered: bool, begins: Position
) -> None:
    """A lease that was stolen and comes back loses no records and repeats no batch."""
    assert find_resume_position(checkpoint, Range(Position("30"), Position("50"), 5), delivered=delivered) == begins


@given(st.dictionaries(keys, st.integers(0, 10**6)), st.integers(0, 10**6))
def test_shares_fit_the_limit_and_starve_no_shard(waiting: Mapping[str, int], limit: int) -> None:
    positions = divide_fairly(waiting, limit)
    assert positions.keys() == waiting.keys()
    assert sum(positions.values()) == min(limit, sum(waiting.values()))
    assert all(positions[key] <= waiting[key] for key in waiting)
    assert all(positions[key] >= min(waiting[key], limit // len(waiting)) for key in waiting)


def test_shares_do_not_depend_on_the_order_of_the_shards() -> None:
    """A batch that is planned again after a crash is the same batch."""
    assert divide_fairly({"b": 5, "a": 5}, 5) == divide_fairly({"a": 5, "b": 5}, 5) == {"a": 2, "b": 3}


@pytest.mark.parametrize(
    "stored", [[], None, {"v": 1}, {"v": 1, "n": math.inf, "r": {}}, {"v": 1, "n": 0, "r": {"a": 7}}]
)
def test_malformed_offset_is_named(stored: object) -> None:
    with pytest.raises(ValueError, match=r"^offset: "):
        decode_offset(stored)
