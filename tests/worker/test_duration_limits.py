"""Durations in the wrong unit: too few are refused, and more than is usual is accepted with a warning."""

import math
from typing import get_type_hints

import pytest

from leasehold.adapters.consuming import Options, Seconds
from leasehold.adapters.inputs import DURATION_LIMITS, checked_duration


def test_every_duration_has_limits() -> None:
    """An option that is a duration cannot be added without saying which values are plausible."""
    durations = {name for name, kind in get_type_hints(Options).items() if kind == (Seconds | None)}
    assert durations == set(DURATION_LIMITS)


@pytest.mark.parametrize("option", DURATION_LIMITS)
def test_a_duration_is_refused_below_its_least_and_warned_of_above_what_is_usual(option: str) -> None:
    """Both limits themselves are fine."""
    limits = DURATION_LIMITS[option]
    assert checked_duration(option, limits.least, option) == ""
    with pytest.raises(ValueError, match=f"^{option}: .* s is less than {limits.least:g} s"):
        checked_duration(option, math.nextafter(limits.least, -1), option)
    if limits.usual < math.inf:
        assert checked_duration(option, limits.usual, option) == ""
        warning = checked_duration(option, limits.usual * 1.001, f"--{option}")
        assert warning.startswith(f"--{option} is ")
        assert "in seconds" in warning
    assert checked_duration(option, math.inf, option) == ""


def test_a_lease_of_the_kcls_ten_thousand_is_taken_for_milliseconds() -> None:
    """`failoverTimeMillis = 10000` copied into `lease_seconds` would leave a dead worker's shards unread for hours."""
    assert "the KCL's settings are in milliseconds" in checked_duration("lease_seconds", 10_000, "--lease-seconds")
