"""Aggregated records are written as the KPL writes them, and come back as they went in."""

import pytest
from aggregation_rows import ROWS, Rows, packed
from fuzz_aggregation import differences, monsters, mutated, read
from hypothesis import given, settings
from hypothesis import strategies as st
from kcl_jar import missing
from kpl_samples import SAMPLES

from leasehold.adapters.sources.kinesis.aggregation.decode import Reason, UserRecord, deaggregate
from leasehold.adapters.sources.kinesis.aggregation.encode import Aggregate
from leasehold.adapters.sources.kinesis.hash_keys import hash_of
from leasehold.balancer.model import HASH_KEYS


@pytest.mark.parametrize(("data", "rows"), SAMPLES)
def test_the_kpl_s_own_records_are_read(data: bytes, rows: Rows) -> None:
    """Records that real producers have written would be misread."""
    answer = deaggregate(data, "a", None, HASH_KEYS)
    assert (answer.rows, answer.reason, answer.dropped) == (tuple(rows), Reason.AGGREGATED, 0)


@pytest.mark.parametrize(("data", "rows"), SAMPLES)
def test_aggregates_are_the_kpl_s_own_bytes(data: bytes, rows: Rows) -> None:
    """Readers tried against the KPL alone might not accept ours."""
    aggregate, taken = packed(rows)
    assert (aggregate.sealed(), aggregate.partition_key, taken) == (data, "a", list(rows))


@settings(deadline=None)
@given(ROWS)
def test_a_packed_record_comes_back(rows: Rows) -> None:
    """Records would be changed on the way, or lose their order or keys."""
    aggregate, _ = packed(rows)
    answer = deaggregate(aggregate.sealed(), aggregate.partition_key, rows[0][1], HASH_KEYS)
    assert answer.rows == tuple(rows)
    assert answer.aggregated == (len(rows) > 1)


@settings(deadline=None)
@given(ROWS, st.integers(30, 2000))
def test_the_size_is_known_to_the_byte_and_never_above_the_limit(rows: Rows, limit: int) -> None:
    """The service would refuse a record, or room would be wasted."""
    aggregate, taken = packed(rows, limit)
    if taken:
        size = len(aggregate.sealed()) + len(aggregate.partition_key.encode())
        assert aggregate.size == size <= limit
    assert aggregate.count == len(taken)


@settings(deadline=None)
@given(ROWS, st.integers(30, 2000))
def test_only_what_does_not_fit_is_refused(rows: Rows, limit: int) -> None:
    """Aggregates would be closed early, as other encoders do near the limit."""
    _, taken = packed(rows, limit)
    if len(taken) < len(rows):
        one_more, _ = packed(rows[: len(taken) + 1])
        assert one_more.size > limit


def test_a_refused_record_leaves_no_trace() -> None:
    """A key of a record that was sent elsewhere would travel in the table."""
    aggregate, _ = packed([("a", None, b"1"), ("b", None, b"2")], limit=60)
    before = aggregate.sealed()
    assert not aggregate.add(b"x" * 60, "c", "7")
    assert (aggregate.sealed(), aggregate.size) == (before, len(before) + 1)


def test_an_empty_aggregate_is_not_sent() -> None:
    """A record without user records would be written and read for nothing."""
    with pytest.raises(ValueError, match="without user records"):
        Aggregate(100).sealed()


def test_the_view_names_what_the_rows_hold() -> None:
    """Handlers would see fields mixed up or sub-sequence numbers off by one."""
    aggregate, _ = packed([("a", None, b"1"), ("b", "7", b"2")])
    answer = deaggregate(aggregate.sealed(), "a")
    users = [UserRecord(b"1", "a", None, 0), UserRecord(b"2", "b", "7", 1)]
    assert (list(answer), [answer[0], answer[-1]], len(answer)) == (users, users, 2)


def test_a_record_passed_on_keeps_its_own_keys() -> None:
    """Streams whose service spreads records have none, and must be readable."""
    assert list(deaggregate(b"x", None)) == [UserRecord(b"x", None, None, 0)]
    assert list(deaggregate(b"x", "k", "5")) == [UserRecord(b"x", "k", "5", 0)]


def test_without_a_range_nothing_is_out_of_it() -> None:
    """Whoever switches the filter off would lose records to it all the same."""
    aggregate, _ = packed([("a", "-5", b"1"), ("b", "x", b"2")])
    assert deaggregate(aggregate.sealed()).reason is Reason.AGGREGATED
    assert deaggregate(aggregate.sealed(), hash_range=HASH_KEYS).reason is Reason.BAD_HASH_KEY
    assert deaggregate(aggregate.sealed(), hash_range=HASH_KEYS, misplaced="drop").reason is Reason.OUT_OF_RANGE


def test_mutated_records_are_read_without_a_crash() -> None:
    """One broken record would stop a shard."""
    counts = [len(kept) for _, kept in map(read, mutated(3000, seed=6))]
    assert len(counts) == 3000


def test_no_record_is_too_monstrous() -> None:
    """One hostile record would stop a worker, or its machine."""
    for case in monsters():
        answer = deaggregate(case.data, "outer", None, (case.first, case.last))
        assert (case.name, answer.reason, answer.dropped) == (case.name, case.reason, case.dropped)


@pytest.mark.more
def test_kcl_reads_mutated_records_as_we_do() -> None:
    """Where the crafted cases have a gap, we and a Java worker would part ways."""
    if tools := missing():
        pytest.skip(f"the KCL jar is not run: no {tools}")
    assert differences(tuple(mutated(50_000, seed=7))) == []


def test_hash_of_is_kinesis_s_own() -> None:
    """Records would be predicted onto wrong shards."""
    assert f"{hash_of('abcd'):X}" == "E2FC714C4727EE9395F324CD2E7F331F"
