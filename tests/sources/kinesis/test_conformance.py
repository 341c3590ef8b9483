"""Our deaggregation returns the same results as that of the KCL, case by case."""

import conformance
import kcl_jar
import pytest
from crafted import Case, cases
from fuzz_aggregation import deaggregate_case

from leasehold.adapters.sources.kinesis.aggregation.decode import (
    MALFORMED_REASONS,
    MalformedAggregate,
    Reason,
    deaggregate,
)

TABLE = tuple(conformance.read())


@pytest.mark.parametrize(("case", "kept"), TABLE, ids=[case.name for case, _ in TABLE])
def test_user_records_that_the_kcl_keeps_are_kept(case: Case, kept: tuple[kcl_jar.KclRecord, ...]) -> None:
    """Our workers must process the same records as the Java workers in their group."""
    assert deaggregate_case(case)[1] == kept


@pytest.mark.parametrize("case", [case for case, _ in TABLE], ids=[case.name for case, _ in TABLE])
def test_every_case_has_its_reason_and_count(case: Case) -> None:
    user_records = deaggregate(case.data, "outer", None, (case.first, case.last), misplaced="drop")
    assert (user_records.reason, user_records.dropped) == (case.reason, case.dropped)


@pytest.mark.parametrize("case", [case for case, _ in TABLE], ids=[case.name for case, _ in TABLE])
def test_strict_mode_rejects_only_malformed_aggregates(case: Case) -> None:
    try:
        deaggregate(case.data, "outer", None, (case.first, case.last), misplaced="drop", strict=True)
        is_rejected = False
    except MalformedAggregate as error:
        is_rejected = str(error).startswith(case.reason)
    assert is_rejected == (Reason(case.reason) in MALFORMED_REASONS)


def test_table_holds_every_crafted_case() -> None:
    assert tuple(case for case, _ in TABLE) == tuple(cases())


@pytest.mark.more
def test_table_matches_the_jar() -> None:
    if missing_tools := kcl_jar.missing():
        pytest.skip(f"the KCL jar is not run: no {missing_tools}")
    kcl_results = kcl_jar.kcl_records((case.data, case.first, case.last) for case, _ in TABLE)
    assert kcl_results == [records for _, records in TABLE]
