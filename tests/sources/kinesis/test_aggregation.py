"""Aggregated records are encoded exactly as the KPL encodes them, and decode to the original records."""

import pytest
from aggregation_rows import ROWS, Rows, packed
from fuzz_aggregation import deaggregate_case, differences, mutated, oversized_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from kcl_jar import missing
from kpl_samples import SAMPLES

from leasehold.adapters.sources.kinesis.aggregation.decode import Reason, UserRecord, deaggregate
from leasehold.adapters.sources.kinesis.aggregation.encode import Aggregate
from leasehold.adapters.sources.kinesis.hash_keys import hash_partition_key
from leasehold.balancer.model import HASH_KEYS


@pytest.mark.parametrize(("data", "rows"), SAMPLES)
def test_kpl_samples_are_decoded(data: bytes, rows: Rows) -> None:
    user_records = deaggregate(data, "a", None, HASH_KEYS)
    assert (user_records.rows, user_records.reason, user_records.dropped) == (tuple(rows), Reason.AGGREGATED, 0)


@pytest.mark.parametrize(("data", "rows"), SAMPLES)
def test_aggregates_match_the_kpls_bytes(data: bytes, rows: Rows) -> None:
    aggregate, packed_rows = packed(rows)
    assert (aggregate.encode(), aggregate.partition_key, packed_rows) == (data, "a", list(rows))


@settings(deadline=None)
@given(ROWS)
def test_packed_record_decodes_unchanged(rows: Rows) -> None:
    aggregate, _ = packed(rows)
    user_records = deaggregate(aggregate.encode(), aggregate.partition_key, rows[0][1], HASH_KEYS)
    assert user_records.rows == tuple(rows)
    assert user_records.aggregated == (len(rows) > 1)


@settings(deadline=None)
@given(ROWS, st.integers(30, 2000))
def test_aggregate_size_is_exact_and_within_the_limit(rows: Rows, limit: int) -> None:
    aggregate, packed_rows = packed(rows, limit)
    if packed_rows:
        size = len(aggregate.encode()) + len(aggregate.partition_key.encode())
        assert aggregate.size == size <= limit
    assert aggregate.count == len(packed_rows)


@settings(deadline=None)
@given(ROWS, st.integers(30, 2000))
def test_only_records_that_do_not_fit_are_rejected(rows: Rows, limit: int) -> None:
    """An aggregate is filled up to its limit, whereas other encoders close it a little earlier."""
    _, packed_rows = packed(rows, limit)
    if len(packed_rows) < len(rows):
        oversized_aggregate, _ = packed(rows[: len(packed_rows) + 1])
        assert oversized_aggregate.size > limit


def test_rejected_record_leaves_no_trace() -> None:
    """If a record did not fit, its key is not in the key table either."""
    aggregate, _ = packed([("a", None, b"1"), ("b", None, b"2")], limit=60)
    encoded_before = aggregate.encode()
    assert not aggregate.add(b"x" * 60, "c", "7")
    assert (aggregate.encode(), aggregate.size) == (encoded_before, len(encoded_before) + 1)


def test_empty_aggregate_is_not_sent() -> None:
    with pytest.raises(ValueError, match="without user records"):
        Aggregate(100).encode()


def test_view_reports_the_encoded_fields() -> None:
    aggregate, _ = packed([("a", None, b"1"), ("b", "7", b"2")])
    user_records = deaggregate(aggregate.encode(), "a")
    expected = [UserRecord(b"1", "a", None, 0), UserRecord(b"2", "b", "7", 1)]
    assert (list(user_records), [user_records[0], user_records[-1]], len(user_records)) == (expected, expected, 2)


def test_forwarded_record_keeps_its_own_keys() -> None:
    """Streams whose service assigns records to shards itself have no partition keys, but can still be read."""
    assert list(deaggregate(b"x", None)) == [UserRecord(b"x", None, None, 0)]
    assert list(deaggregate(b"x", "k", "5")) == [UserRecord(b"x", "k", "5", 0)]


def test_nothing_is_filtered_without_a_range() -> None:
    aggregate, _ = packed([("a", "-5", b"1"), ("b", "x", b"2")])
    assert deaggregate(aggregate.encode()).reason is Reason.AGGREGATED
    assert deaggregate(aggregate.encode(), hash_range=HASH_KEYS).reason is Reason.BAD_HASH_KEY
    assert deaggregate(aggregate.encode(), hash_range=HASH_KEYS, misplaced="drop").reason is Reason.OUT_OF_RANGE


def test_mutated_records_do_not_crash_the_reader() -> None:
    counts = [len(kept_records) for _, kept_records in map(deaggregate_case, mutated(3000, seed=6))]
    assert len(counts) == 3000


def test_hostile_record_is_read_within_limits() -> None:
    for case in oversized_cases():
        user_records = deaggregate(case.data, "outer", None, (case.first, case.last))
        assert (case.name, user_records.reason, user_records.dropped) == (case.name, case.reason, case.dropped)


@pytest.mark.more
def test_kcl_reads_mutated_records_as_we_do() -> None:
    """The mutated records cover gaps between the crafted cases."""
    if tools := missing():
        pytest.skip(f"the KCL jar is not run: no {tools}")
    assert differences(tuple(mutated(50_000, seed=7))) == []


def test_hash_of_matches_kinesis() -> None:
    assert f"{hash_partition_key('abcd'):X}" == "E2FC714C4727EE9395F324CD2E7F331F"
