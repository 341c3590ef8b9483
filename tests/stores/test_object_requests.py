"""Tests how object stores interpret a service's ETags and clock, and compute the ages of objects."""

import pytest

from leasehold.stores.requests import SkewWarning, is_outcome_unknown, object_age_seconds, unquote_etag


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


def test_a_status_that_a_retry_may_change_is_an_unknown_outcome() -> None:
    """A redirect, a timeout, throttling and every server error may pass. Any other rejection is final."""
    statuses = (301, 307, 399, 400, 403, 404, 407, 408, 409, 412, 428, 429, 430, 499, 500, 503)
    assert [status for status in statuses if is_outcome_unknown(status)] == [301, 307, 399, 408, 429, 500, 503]


def test_a_warning_about_the_clock_is_not_repeated_after_a_good_reading(caplog: pytest.LogCaptureFixture) -> None:
    skew = SkewWarning(lambda: 1000.0)
    for service_now in (2000.0, 1000.0, 2000.0):
        skew.observe(service_now)
    assert len(caplog.records) == 1
