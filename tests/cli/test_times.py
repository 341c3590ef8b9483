"""Tests that times and durations are parsed in the forms in which people write them."""

import time

import pytest
import typer

from leasehold.adapters.cli.common.times import make_seconds_parser
from leasehold.adapters.inputs import (
    PLAUSIBLE_MS_MAX,
    PLAUSIBLE_MS_MIN,
    check_time_ms,
    format_time,
    parse_duration,
    parse_seconds_option,
    parse_shift_seconds,
    parse_time_ms,
)

NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("1.5", 1.5),
        ("1.5s", 1.5),
        ("250ms", 0.25),
        ("5m", 300.0),
        ("2H", 7200.0),
        ("1d12h", 129_600.0),
        ("2w", 1_209_600.0),
        ("PT2H", 7200.0),
        ("P1DT30M", 88_200.0),
        ("pt1.5s", 1.5),
    ],
)
def test_a_duration_is_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "-5", "1y", "2h 5", "P", "PT", "P1DT", "nan", "inf", "1e3", "٣s", "9" * 400]
)
def test_an_invalid_duration_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@pytest.mark.parametrize("value", [True, b"5", bytearray(b"5"), None, "soon", float("nan"), -0.1])
def test_a_value_that_is_no_duration_is_rejected(value: object) -> None:
    with pytest.raises(ValueError, match=r"^--linger: "):
        parse_seconds_option(value, "--linger")


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("2023-11-14T22:13:20Z", 1_700_000_000_000),
        ("2023-11-14T22:13:20.5", 1_700_000_000_500),
        ("2023-11-14T23:13+01:00", 1_699_999_980_000),
        ("2023-11-14", 1_699_920_000_000),
        ("1700000000000", 1_700_000_000_000),
        ("now", 1_700_000_000_000),
        ("NOW-2h", 1_699_992_800_000),
        ("now+250ms", 1_700_000_000_250),
    ],
)
def test_a_time_is_parsed(text: str, milliseconds: int) -> None:
    assert parse_time_ms(text, NOW) == milliseconds


def test_a_time_without_a_zone_is_in_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time zone of the machine does not matter."""
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "EST5")
        time.tzset()
        milliseconds = parse_time_ms("2023-11-14T22:13:20", NOW)
    time.tzset()
    assert milliseconds == 1_700_000_000_000


@pytest.mark.parametrize(
    "text", ["", "yesterday", "now2h", "now-", "2023-13-01", "2h", "22:13", "999999999999999", "now-99999999999h"]
)
def test_an_invalid_time_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a (time|duration)"):
        parse_time_ms(text, NOW)


def test_a_shift_has_a_sign() -> None:
    assert [parse_shift_seconds(text) for text in ("+1h", " -15m ")] == [3600.0, -900.0]
    with pytest.raises(ValueError, match="wants a sign"):
        parse_shift_seconds("1h")


@pytest.mark.parametrize("milliseconds", [0, PLAUSIBLE_MS_MIN, PLAUSIBLE_MS_MAX - 1])
def test_a_plausible_time_is_accepted(milliseconds: int) -> None:
    """The time 0 is the beginning of the stream."""
    assert check_time_ms(milliseconds, "--timestamp-ms") == milliseconds


@pytest.mark.parametrize(
    ("milliseconds", "unit"), [(1, "seconds"), (PLAUSIBLE_MS_MIN - 1, "seconds"), (PLAUSIBLE_MS_MAX, "microseconds")]
)
def test_an_implausible_time_is_rejected(milliseconds: int, unit: str) -> None:
    with pytest.raises(ValueError, match=f"is it in {unit}"):
        check_time_ms(milliseconds, "--timestamp-ms")


def test_a_formatted_time_can_be_parsed() -> None:
    """A time that one command prints can be passed to another command."""
    assert format_time(1_700_000_000_500) == "2023-11-14T22:13:20.500Z"
    assert parse_time_ms(format_time(1_700_000_000_500), NOW) == 1_700_000_000_500


def test_a_time_outside_the_calendar_is_formatted() -> None:
    """A row with a time outside the calendar does not prevent the other rows from being shown."""
    assert format_time(10**18 - 1) == "1000000000000000000ms"


def test_an_option_rejects_invalid_and_too_short_durations() -> None:
    parse = make_seconds_parser(0.1)
    assert (parse("1m"), parse(2.0)) == (60.0, 2.0)
    for text, message in (("soon", "is not a duration"), ("5ms", "less than 0.1 s")):
        with pytest.raises(typer.BadParameter, match=message):
            parse(text)
