"""How object stores interpret a service's responses: its ETags, its clock, and the ages computed from it."""

import pytest

from leasehold.stores.requests import SkewWarning, age, unquoted_etag


def test_an_age_allows_for_the_seconds_it_is_told_in() -> None:
    """A lease written at the very end of a second does not expire a second early."""
    assert [age(1000.0, 990.0), age(1000.0, 1000.0), age(1000.0, 1003.0)] == [9.0, 0.0, 0.0]


def test_an_etag_is_the_same_bare_and_quoted() -> None:
    """Listings return it bare and other responses quoted; the lease must not look renewed when only that differs."""
    assert [unquoted_etag(etag) for etag in ('"0x8D"', "0x8D", '"X-1X"')] == ["0x8D", "0x8D", "X-1X"]


@pytest.mark.parametrize("now", [1_000_060.0, 999_940.0])
def test_a_clock_nearly_right_is_not_worth_a_word(caplog: pytest.LogCaptureFixture, now: float) -> None:
    """A small difference of clocks is not logged."""
    SkewWarning(lambda: now).observe(1_000_000.0)
    assert caplog.records == []


@pytest.mark.parametrize(("now", "says"), [(1_000_061.0, "61 s ahead of"), (999_939.0, "61 s behind")])
def test_a_clock_far_off_is_said_once(caplog: pytest.LogCaptureFixture, now: float, says: str) -> None:
    """A large difference of clocks is logged once, and not for each page of each listing."""
    skew = SkewWarning(lambda: now)
    for _ in range(3):
        skew.observe(1_000_000.0)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"the local clock is {says} the storage service's")
