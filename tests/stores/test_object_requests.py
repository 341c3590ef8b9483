"""Tests how object stores interpret a service's ETags and clock, and compute the ages of objects."""

import pytest

from leasehold.stores.requests import SkewWarning, object_age_seconds, unquote_etag


def test_an_age_allows_for_times_in_whole_seconds() -> None:
    """A lease that was written at the end of a second does not expire a second too early."""
    assert [
        object_age_seconds(1000.0, 990.0),
        object_age_seconds(1000.0, 1000.0),
        object_age_seconds(1000.0, 1003.0),
    ] == [9.0, 0.0, 0.0]


def test_a_quoted_and_an_unquoted_etag_are_equal() -> None:
    assert [unquote_etag(etag) for etag in ('"0x8D"', "0x8D", '"X-1X"')] == ["0x8D", "0x8D", "X-1X"]


@pytest.mark.parametrize("now", [1_000_060.0, 999_940.0])
def test_a_small_clock_difference_is_not_logged(caplog: pytest.LogCaptureFixture, now: float) -> None:
    SkewWarning(lambda: now).observe(1_000_000.0)
    assert caplog.records == []


@pytest.mark.parametrize(("now", "says"), [(1_000_061.0, "61 s ahead of"), (999_939.0, "61 s behind")])
def test_a_large_clock_difference_is_logged_once(caplog: pytest.LogCaptureFixture, now: float, says: str) -> None:
    skew = SkewWarning(lambda: now)
    for _ in range(3):
        skew.observe(1_000_000.0)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"the local clock is {says} the storage service's")
