"""What Spark stores about a batch: exact, stable as text, and never behind what was said before."""

import json
from collections.abc import Mapping
from itertools import pairwise
from random import Random

import pytest
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from adapters.spark.offsets import Held, Offset, Range, advance, decode, encode, owed, resumed, shares
from balancer.model import LATEST, SHARD_END, TRIM_HORIZON, Position, at_timestamp

numbers = st.builds(Position, st.integers(0, 10**56).map(str), st.integers(0, 900), st.text("0123456789:-", max_size=9))
positions = st.one_of(numbers, st.sampled_from([TRIM_HORIZON, SHARD_END, at_timestamp(1_700_000_000_000)]))
keys = st.text("shard-0123456789:/é", min_size=1, max_size=12)
ranges = st.builds(Range, positions, positions, st.integers(0, 10**9))
offsets = st.builds(
    Offset, st.integers(0, 10**6), st.dictionaries(keys, ranges, max_size=6).map(lambda pairs: tuple(pairs.items()))
)


@given(offsets)
def test_an_offset_comes_back_from_its_text(offset: Offset) -> None:
    """Without it a restart would read another range than was planned, or lose an opaque Event Hubs offset."""
    back = decode(json.loads(json.dumps(encode(offset))))
    tokens = [(each.begins.token, each.ends.token) for _, each in offset.ranges]
    assert (back, [(each.begins.token, each.ends.token) for _, each in back.ranges]) == (offset, tokens)


@given(offsets, st.randoms())
def test_equal_offsets_are_equal_texts(offset: Offset, random: Random) -> None:
    """Without it Spark, which compares texts, would plan empty batches for ever."""
    shuffled = list(offset.ranges)
    random.shuffle(shuffled)
    again = evolve(offset, ranges=tuple(shuffled))
    assert json.dumps(encode(again)) == json.dumps(encode(offset))


@pytest.mark.parametrize(
    "stored",
    [{}, {"v": 2, "n": 1, "r": {}}, {"shardId-0": {"iteratorType": "AFTER"}}, {"v": 1, "n": 1, "r": {"s": ["x", 1]}}],
)
def test_an_offset_of_somebody_else_is_refused_in_words(stored: dict[str, object]) -> None:
    """Without it another connector's checkpoint directory would end in a KeyError, or be taken for an empty one."""
    with pytest.raises(ValueError, match=r"offset: .*checkpointLocation"):
        decode(stored)


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
def test_batches_of_one_ownership_touch_each_other_and_an_end_is_final(happenings: list[Step]) -> None:
    """Without it a record between two batches would be in neither, or a finished shard be read again."""
    stands: dict[str, Position] = dict.fromkeys("ab", TRIM_HORIZON)
    epochs = dict.fromkeys("ab", 1)
    offset = Offset()
    seen: dict[tuple[str, int], list[Range]] = {}
    for step in happenings:
        stood = stands[step.key]
        if step.what == "theft":
            epochs[step.key] += 1
        elif step.what == "foreign" and not stood.ended:
            number = 0 if not stood.numbered else int(stood.sequence)
            previous = offset.of(step.key)
            epochs[step.key] += 1
            checkpoint = Position(str(number + step.count))
            stands[step.key] = resumed(checkpoint, previous, delivered=True)
        else:
            end = _end(stood, step)
            held = {key: Held(epochs[key], stands[key]) for key in "ab"}
            ends = {} if stood.ended else {step.key: end}
            offset = advance(offset, held, ends)
            stands |= ends
            for key, each in offset.ranges:
                seen.setdefault((key, epochs[key]), []).append(each)
    for found in seen.values():
        assert all(one.ends == two.begins for one, two in pairwise(found))
        assert all(each.begins.order <= each.ends.order for each in found)
        assert not any(each.ends.ended for each in found[:-1])


def _end(stood: Position, step: Step) -> Position:
    if step.what == "end":
        return SHARD_END
    return Position(str((int(stood.sequence) if stood.numbered else 0) + step.count))


def test_a_flush_changes_the_text_and_nothing_else() -> None:
    """Without it Spark would never commit the last batch before idleness."""
    held = {"a": Held(4, Position("7")), "b": Held(2, SHARD_END)}
    before = Offset(3, (("a", Range(TRIM_HORIZON, Position("7"), 4)), ("b", Range(Position("1"), SHARD_END, 2))))
    flush = advance(before, held, {})
    assert flush == Offset(4, (("a", Range(Position("7"), Position("7"), 4)),))
    assert [owed(before, 2), owed(before, 3), owed(flush, 3), owed(Offset(), -1)] == [True, False, False, False]


def test_released_shards_leave_the_offset() -> None:
    """Without it a later batch would claim to hold what another worker reads."""
    before = Offset(3, (("a", Range(TRIM_HORIZON, Position("7"), 4)), ("b", Range(TRIM_HORIZON, Position("1"), 2))))
    after = advance(before, {"b": Held(2, Position("1"))}, {"b": Position("2")})
    assert after == Offset(4, (("b", Range(Position("1"), Position("2"), 2)),))


def test_what_no_lease_says_yet_stays_in_the_offset() -> None:
    """Without it a second kill, before the shard was taken again, would have its rows done twice."""
    end = Range(SHARD_END, SHARD_END, 4)
    after = advance(Offset(3), {"b": Held(2, Position("1"))}, {"b": Position("2")}, [("a", end), ("b", end)])
    assert after == Offset(4, (("a", end), ("b", Range(Position("1"), Position("2"), 2))))


def test_no_shard_goes_back_and_none_goes_on_behind_its_end() -> None:
    """Without it a mistake in reading ahead would be stored, and replayed for ever."""
    with pytest.raises(ValueError, match="go back from 7 to 6"):
        advance(Offset(), {"a": Held(1, Position("7"))}, {"a": Position("6")})
    with pytest.raises(ValueError, match="have ended before"):
        advance(Offset(), {"a": Held(4, SHARD_END)}, {"a": SHARD_END})


@pytest.mark.parametrize(
    ("checkpoint", "delivered", "begins"),
    [
        (Position("40"), True, Position("50")),  # ours were written, the other worker was slower
        (Position("60"), True, Position("60")),  # the other worker went on behind us
        (Position("40"), False, Position("40")),  # our own could not be repeated
        (TRIM_HORIZON, True, Position("50")),  # the table was made anew since
        (LATEST, False, Position("30")),  # that too, and the last range could not be repeated
    ],
)
def test_a_shard_taken_anew_begins_at_the_latest_of_complete_prefixes(
    checkpoint: Position, delivered: bool, begins: Position
) -> None:
    """Without it a theft and its return would lose records or do a batch twice."""
    assert resumed(checkpoint, Range(Position("30"), Position("50"), 5), delivered=delivered) == begins


@given(st.dictionaries(keys, st.integers(0, 10**6)), st.integers(0, 10**6))
def test_shares_fit_and_starve_nobody(waiting: Mapping[str, int], most: int) -> None:
    """Without it a busy shard could keep the others out of every batch, or a batch exceed its limit."""
    found = shares(waiting, most)
    assert found.keys() == waiting.keys()
    assert sum(found.values()) == min(most, sum(waiting.values()))
    assert all(found[key] <= waiting[key] for key in waiting)
    assert all(found[key] >= min(waiting[key], most // len(waiting)) for key in waiting)
