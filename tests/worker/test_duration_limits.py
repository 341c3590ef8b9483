"""Durations in the wrong unit: values that are too small are rejected, and unusually large values cause a warning."""

import logging
import math
from typing import Any

import pytest
from attrs import fields

from leasehold.adapters.consuming import check_consumption_options
from leasehold.adapters.inputs import SETTING_LIMITS, check_duration, config_for_source, flag_name
from leasehold.adapters.options import Options, ProduceOptions, options_by_name
from leasehold.balancer.config import RULE_SETS, Config

SETTABLE_DURATIONS = {
    field_info.name
    for kind in (Config, *RULE_SETS)
    for field_info in fields(kind)  # type: ignore[arg-type]  # Each class is an attrs class.
    if field_info.name.endswith("_seconds") and not field_info.name.startswith("_")
}
"""The names of the durations that `--set` can change."""


def consumed(**options: Any) -> None:  # noqa: ANN401  each option has its own type
    """Check these options as `leasehold consume` does, without opening a store or a source."""
    source = "kinesis://orders?region=eu-west-1"
    check_consumption_options(source, "memory://x", lambda _batch: None, options, flag_name)  # type: ignore[arg-type]


LIMITS = SETTING_LIMITS | {
    name: option.limits
    for table in (Options, ProduceOptions)
    for name, option in options_by_name(table).items()
    if option.limits is not None
}


def test_each_duration_of_the_planner_has_limits() -> None:
    """A new setting that is a duration must have an entry in `SETTING_LIMITS`."""
    assert set(SETTING_LIMITS) == SETTABLE_DURATIONS


@pytest.mark.parametrize("name", sorted(SETTABLE_DURATIONS))
@pytest.mark.parametrize("as_text", [True, False])
def test_setting_is_checked_like_its_option(
    name: str,
    as_text: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`--set lease_seconds=10000` and Python's `set={"lease_seconds": 10000}` warn once."""
    limits = SETTING_LIMITS[name]

    def options_with(seconds: float) -> dict[str, Any]:
        return {"set": [f"{name}={seconds}"] if as_text else {name: seconds}}

    with caplog.at_level(logging.WARNING):
        consumed(**options_with(limits.usual))
        assert caplog.messages == []
        consumed(**options_with(limits.usual + 1))
    assert caplog.messages == [check_duration(limits, limits.usual + 1, f"--set {name}")]
    if limits.least:
        with pytest.raises(ValueError, match=f"^--set {name}: .* s is less than {limits.least:g} s"):
            consumed(**options_with(limits.least / 2))


@pytest.mark.parametrize("option", LIMITS)
def test_duration_below_its_minimum_is_rejected_and_unusually_large_ones_warn(option: str) -> None:
    """The limits themselves are accepted without a warning."""
    limits = LIMITS[option]
    assert check_duration(limits, limits.least, option) == ""
    with pytest.raises(ValueError, match=f"^{option}: .* s is less than {limits.least:g} s"):
        check_duration(limits, math.nextafter(limits.least, -1), option)
    assert check_duration(limits, limits.usual, option) == ""
    warning = check_duration(limits, limits.usual * 1.001, f"--{option}")
    assert warning.startswith(f"--{option} is ")
    assert "in seconds" in warning
    assert check_duration(limits, math.inf, option) == ""


def test_lease_seconds_of_ten_thousand_are_taken_for_milliseconds() -> None:
    """The KCL's `failoverTimeMillis = 10000` may have been copied into `lease_seconds`."""
    assert "the KCL's settings are in milliseconds" in check_duration(
        LIMITS["lease_seconds"], 10_000, "--lease-seconds"
    )


@pytest.mark.parametrize(("lease_seconds", "cycle_seconds", "renew_seconds"), [(None, 30.0, 20.0), (12.0, None, None)])
def test_hub_times_never_exceed_those_of_a_short_lease(
    lease_seconds: float | None, cycle_seconds: float | None, renew_seconds: float | None
) -> None:
    fields = {} if lease_seconds is None else {"lease_seconds": lease_seconds}
    config, defaults = config_for_source("eventhubs://n/h", {**fields}), Config(lease_seconds=lease_seconds or 120.0)
    assert config.lease_seconds == defaults.lease_seconds
    assert config.cycle_seconds == (cycle_seconds or defaults.cycle_seconds)
    assert config.renew_seconds == (renew_seconds or defaults.renew_seconds)
