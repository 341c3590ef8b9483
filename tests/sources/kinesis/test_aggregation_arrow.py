"""Arrow columns contain the same data as the records, whichever implementation builds them."""

from collections.abc import Iterator
from itertools import pairwise
from typing import get_args

import pytest
from aggregation_rows import KEYS, Rows, packed
from crafted import Case, cases
from fuzz_aggregation import mutated
from hypothesis import given, settings
from hypothesis import strategies as st

from leasehold.adapters.sources.kinesis.aggregation import arrow as aggregation_arrow
from leasehold.adapters.sources.kinesis.aggregation.arrow import deaggregate_to_arrow
from leasehold.adapters.sources.kinesis.aggregation.decode import Misplaced, deaggregate
from leasehold.balancer.model import HASH_KEYS, HashRange

COMMON = st.lists(st.tuples(KEYS, st.none(), st.binary(max_size=300)), min_size=1, max_size=40)
RANGES = st.none() | st.just(HASH_KEYS) | st.tuples(st.integers(0, 2**126), st.integers(2**127, HASH_KEYS[1]))
SETTINGS = st.sampled_from(get_args(Misplaced))
Row = tuple[int, int, str | None, str | None, bytes]


@pytest.fixture(autouse=True, scope="module")
def measuring() -> Iterator[None]:
    """Use the implementation that measures aggregates first, which is otherwise used only if it is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aggregation_arrow, "_CAN_USE_SPANS", True)
        yield


def one_by_one(
    records: list[bytes], keys: list[str], hash_range: HashRange | None, misplaced: Misplaced = "keep"
) -> list[Row]:
    """Return the rows that `deaggregate` returns for each record."""
    return [
        (
            index,
            user_record.sub_sequence_number,
            user_record.partition_key,
            user_record.explicit_hash_key,
            user_record.data,
        )
        for index, (data, key) in enumerate(zip(records, keys, strict=True))
        for user_record in deaggregate(data, key, None, hash_range, misplaced=misplaced)
    ]


def together(
    records: list[bytes], keys: list[str], hash_range: HashRange | None, misplaced: Misplaced = "keep"
) -> list[Row]:
    """Return the rows of one Arrow batch that contains all records."""
    batch = deaggregate_to_arrow(records, keys, hash_range, misplaced=misplaced)
    batch.validate(full=True)
    return [tuple(row.values()) for row in batch.to_pylist()]


@settings(deadline=None)
@given(st.lists(COMMON, max_size=4), RANGES, SETTINGS)
def test_columns_hold_the_same_rows(
    aggregates: list[list[tuple[str, None, bytes]]], hash_range: HashRange | None, misplaced: Misplaced
) -> None:
    records = [packed(list(rows))[0].encode() for rows in aggregates]
    keys = [f"outer-{index}" for index in range(len(records))]
    assert together(records, keys, hash_range, misplaced) == one_by_one(records, keys, hash_range, misplaced)


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("misplaced", ["keep", "drop"])
def test_odd_records_do_not_change_the_rest_of_their_batch(
    measured: bool, misplaced: Misplaced, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregation_arrow, "_CAN_USE_SPANS", measured)
    common_record = packed([("k", None, b"1"), ("l", None, b"2" * 200)])[0].encode()
    odd_cases = [case for case in cases() if len(case.data) < 10_000]
    for case in odd_cases:
        records, keys, hash_range = [common_record, case.data, common_record], ["a", "b", "c"], (case.first, case.last)
        assert together(records, keys, hash_range, misplaced) == one_by_one(records, keys, hash_range, misplaced), (
            case.name
        )
    records = [case.data for case in odd_cases]
    assert together(records, records_keys := [case.name for case in odd_cases], None) == one_by_one(
        records, records_keys, None
    )


def test_mutated_records_decode_alike() -> None:
    mutated_cases: list[Case] = list(mutated(2000, seed=8))
    for first_case, second_case in pairwise(mutated_cases):
        records = [first_case.data, second_case.data]
        assert together(records, ["a", "b"], None) == one_by_one(records, ["a", "b"], None)


def test_every_small_size_decodes_alike() -> None:
    """Small sizes matter because several bytes are copied at once, and Arrow stores short values inline."""
    rows: Rows = [("k" * size + "é", None, bytes(range(1, size))) for size in range(1, 42)]
    record = packed(rows)[0].encode()
    assert together([record, record], ["a", "b"], None) == one_by_one([record, record], ["a", "b"], None)


def test_batch_beyond_arrows_offsets_is_rejected() -> None:
    """The limit exists because Arrow's offsets have 32 bits."""
    with pytest.raises(ValueError, match="records: 2147483648 bytes in one batch; at most 2147483647 fit"):
        deaggregate_to_arrow([bytes(1 << 20)] * 2048)


def test_keys_beyond_arrows_offsets_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """If many small user records share one long key, their keys need more bytes than the records."""
    record = packed([("k" * 100, None, b"")] * 50)[0].encode()
    monkeypatch.setattr(aggregation_arrow, "_MAX_BYTES", 5000)
    with pytest.raises(ValueError, match="records: 5000 bytes of partition keys in one batch; at most 4999 fit"):
        deaggregate_to_arrow([record])


def test_batch_of_any_length_has_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The column of explicit hash keys, which is usually a part of a constant, is as long as the others."""
    two_nulls = aggregation_arrow._NULL_STRINGS.slice(0, 2)  # noqa: SLF001
    monkeypatch.setattr(aggregation_arrow, "_NULL_STRINGS", two_nulls)
    for count in (1, 2, 3):
        rows: Rows = [("k", None, bytes([number])) for number in range(count + 1)]
        records = [packed(rows)[0].encode()]
        assert together(records, ["a"], None) == one_by_one(records, ["a"], None)
