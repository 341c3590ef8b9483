"""Parses times, durations, positions and settings as users write them, on the command line or in Python.

A time or duration is `2026-11-22T06:00Z`, `now-2h`, `1h30m` or a bare number. A position is a name in any case, a time
or a sequence number. A setting of the planner is `name=value`.
"""

import json
import math
import re
from collections.abc import Container, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from attrs import evolve, frozen

from leasehold.adapters.json_form import JsonValue, parse_config
from leasehold.balancer.config import Config
from leasehold.balancer.model import SENTINELS, Position, at_timestamp
from leasehold.stores.printable import did_you_mean


def flag_name(option: str) -> str:
    """Return the name of an option as it is written on the command line."""
    return f"--{option.replace('_', '-')}"


UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}

_PARTS = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhdw]))+", re.ASCII)
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])", re.ASCII)
_ISO = re.compile(
    r"P(?=.)(?:(\d+)W)?(?:(\d+)D)?(?:T(?=.)(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?", re.IGNORECASE | re.ASCII
)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_MILLISECONDS = re.compile(r"\d{11,15}", re.ASCII)

DURATION = "a duration such as 90, 1.5s, 5m, 2h, 1d12h or PT2H"
MOMENT = "a time such as 2026-11-22T06:00Z, now, now-2h, or milliseconds since 1970"


def parse_duration(text: str) -> float:
    """Return the seconds of a duration; a bare number is in seconds. Raises ValueError for any other string."""
    normalized, seconds = text.strip().lower(), math.nan
    if _NUMBER.fullmatch(normalized):
        seconds = float(normalized)
    elif _PARTS.fullmatch(normalized):
        seconds = sum(float(number) * UNITS[unit] for number, unit in _PART.findall(normalized))
    elif iso := _ISO.fullmatch(normalized):
        amounts_by_unit = zip(iso.groups(), "wdhms", strict=True)
        seconds = sum(float(number) * UNITS[unit] for number, unit in amounts_by_unit if number is not None)
    if not math.isfinite(seconds):  # also if it has too many digits for a float
        raise ValueError(f"{text!r} is not {DURATION}")
    return seconds


def parse_seconds_option(value: object, option: str) -> float:
    """Return the seconds of an option, which is a number or a duration string. Raises ValueError, naming the option."""
    try:
        seconds = parse_duration(value) if isinstance(value, str) else float(cast("float", value))
        if isinstance(value, bool | bytes | bytearray):  # which Python would convert to numbers
            seconds = math.nan
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{option}: {value!r} is not {DURATION}") from None
    if math.isnan(seconds):
        raise ValueError(f"{option}: {value!r} is not {DURATION}")
    if not seconds >= 0:
        raise ValueError(f"{option}: {value!r} is less than 0 s")
    return seconds


@frozen
class DurationLimits:
    """The limits of a duration, and the value above which the unit was probably mistaken.

    Attributes:
        least: Shorter durations are rejected.
        usual: Longer durations are accepted with a warning; infinite for no limit.
        consequence: The consequence of a longer duration, for the warning.
    """

    least: float
    usual: float = math.inf
    consequence: str = ""


SETTING_LIMITS = {
    "lease_seconds": DurationLimits(1.0, 300.0, "the shards of a worker that dies stay unread for that long"),
    "cycle_seconds": DurationLimits(0.05, 600.0, "the shards of a worker that dies may stay unread for that long"),
    "renew_seconds": DurationLimits(0.05, 200.0, "a lease that is not renewed in time goes to another worker"),
    "grace_seconds": DurationLimits(0.0, 3600.0, "a lease that was given up waits that long for a worker that joins"),
}
"""The limits of the planner's settings that are durations. 0 is allowed if no wait depends on it."""


def check_duration(limits: DurationLimits, seconds: float, named: str) -> str:
    """Check the seconds of an option against its limits.

    Args:
        limits: The limits of the option.
        seconds: Its value.
        named: The option as its user writes it.

    Returns:
        A warning, or "" if the value is usual.

    Raises:
        ValueError: The value is below the option's limit.
    """
    if not seconds >= limits.least:
        raise ValueError(f"{named}: {seconds:g} s is less than {limits.least:g} s; a bare number is in seconds")
    if limits.usual < seconds < math.inf:
        return (
            f"{named} is {seconds:g} s: {limits.consequence}; a bare number is in seconds, where the KCL's settings "
            "are in milliseconds"
        )
    return ""


def parse_time_ms(text: str, now: float) -> int:
    """Parse a time and return it in milliseconds since 1970; a time without a zone is UTC.

    Args:
        text: The time.
        now: The present time in seconds since 1970.

    Raises:
        ValueError: It is not a time, or not in the years 1 to 9999.
    """
    try:
        stripped = text.strip()
        if _MILLISECONDS.fullmatch(stripped):
            milliseconds = int(stripped)
        elif stripped.lower().startswith("now"):
            milliseconds = round((now + (_parse_signed_duration(stripped[3:]) if stripped[3:] else 0.0)) * 1000)
        else:
            time = datetime.fromisoformat(stripped)
            milliseconds = round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
        datetime.fromtimestamp(milliseconds / 1000, UTC)  # raises for years outside 1 to 9999
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not {MOMENT}") from None
    return milliseconds


def _parse_signed_duration(text: str) -> float:
    if not text.startswith(("+", "-")):
        raise ValueError(f"{text!r} has no sign")
    return (1.0 if text[0] == "+" else -1.0) * parse_duration(text[1:])


def parse_shift_seconds(text: str) -> float:
    """Return the seconds of a signed duration, such as -15m. Raises ValueError for any other string."""
    if not text.strip().startswith(("+", "-")):
        raise ValueError(f"--shift-by: {text!r} wants a sign, as in -15m or +1h")
    return _parse_signed_duration(text.strip())


def format_time(milliseconds: float) -> str:
    """Format as ISO 8601, falling back to raw milliseconds outside datetime's range (rows may hold any number)."""
    try:
        time_utc = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError):
        return f"{milliseconds:.0f}ms"
    return time_utc.isoformat(timespec="milliseconds").replace("+00:00", "Z")


# Positions

STARTS = ("TRIM_HORIZON", "LATEST", "AT_TIMESTAMP")

_OTHER_NAMES = {"EARLIEST": "TRIM_HORIZON", "BEGINNING": "TRIM_HORIZON", "END": "LATEST"}


def find_named_position(text: str) -> str | None:
    """Return the named position, such as LATEST, or None if the name is unknown.

    Case is ignored, and `-` is read as `_`.
    """
    position_name = text.strip().upper().replace("-", "_")
    position_name = _OTHER_NAMES.get(position_name, position_name)
    return position_name if position_name in SENTINELS else None


EARLIEST_MS, LATEST_MS, BEYOND_MS = 10**11, 10**13, 253_402_300_800_000
"""The beginnings of the years 1973, 2286 and 10000, in milliseconds. If a number means a time before 1973 or after
2286, its unit was probably mistaken (seconds for milliseconds, say)."""


def check_time_ms(milliseconds: int, option: str, *, in_seconds: bool = False) -> int:
    """Return this time if it is plausible as milliseconds since 1970.

    0 stands for the beginning.

    Args:
        milliseconds: The time.
        option: The option as its user writes it.
        in_seconds: Whether the option is given in seconds. This matters for the message only.

    Raises:
        ValueError: The time is before 1973 or after 2286; the message names the option.
    """
    if milliseconds == 0 or EARLIEST_MS <= milliseconds < LATEST_MS:
        return milliseconds
    formatted_time = format_time(milliseconds) if abs(milliseconds) < BEYOND_MS else "after the year 9999"
    if in_seconds:
        raise ValueError(f"{option}: {milliseconds // 1000} s since 1970 is {formatted_time}; give it in seconds")
    probable_unit = "seconds" if milliseconds < EARLIEST_MS else "microseconds"
    raise ValueError(
        f"{option}: {milliseconds} ms since 1970 is {formatted_time}; is it in {probable_unit}? "
        "give milliseconds, or a time such as 2026-11-22T06:00Z"
    )


def parse_initial_position(text: str, now: float, field: str) -> Position:
    """Return the initial position: TRIM_HORIZON, LATEST or a time.

    Args:
        text: The position as the user writes it.
        now: The present time in seconds since 1970.
        field: The name of the option, for error messages.

    Raises:
        ValueError: An option is wrong; the message names it.
    """
    position_name = find_named_position(text)
    if position_name == "AT_TIMESTAMP":
        raise ValueError(f"{field}: in place of AT_TIMESTAMP write the time itself, {MOMENT}")
    if position_name in {"TRIM_HORIZON", "LATEST"}:
        return Position(position_name)
    try:
        return at_timestamp(parse_time_ms(text, now))
    except ValueError:
        hint = did_you_mean(text.upper(), STARTS)
        raise ValueError(f"{field}: {text!r} is neither {', '.join(STARTS)} nor {MOMENT}{hint}") from None


# Settings


def combine_settings(
    given: dict[str, Any], more: Sequence[str] | Mapping[str, object], option: str = "--set"
) -> dict[str, Any]:
    """Combine settings into one mapping, leaving out those in `given` that are None.

    Args:
        given: Settings by name.
        more: Further settings, by name or each as `name=value`.
        option: The name of the option `more`, for error messages.

    Raises:
        ValueError: A setting has another form.
    """
    fields = {name: value for name, value in given.items() if value is not None}
    if isinstance(more, Mapping):
        return fields | dict(more)
    for setting in more:
        if not isinstance(setting, str):
            raise ValueError(f"{option}: {setting!r} is not of the form name=value")  # noqa: TRY004  bad usage
        name, separator, text = setting.partition("=")
        if not separator:
            raise ValueError(f"{option}: {setting!r} is not of the form name=value")
        try:
            fields[name] = json.loads(text)
        except (ValueError, RecursionError):
            fields[name] = text  # a string, which is checked with the field
    return fields


def config_from_settings(fields: dict[str, Any]) -> Config:
    """Return the configuration with these settings. Raises ValueError, naming a setting that is wrong."""
    return parse_config(JsonValue("input", fields))


HUB_LEASE_SECONDS = 120.0
"""How many seconds without an update most Azure SDKs wait before they take over a partition. The Python SDK waits 180
s."""

HUB_CYCLE_SECONDS = 30.0
"""How often most official workers read the ownerships, in seconds."""

HUB_RENEW_SECONDS = 20.0
"""How often to renew. JavaScript's and Go's workers take over ownerships after 60 s, whatever our settings are."""


def with_event_hub_times(config: Config, given: Container[str]) -> Config:
    """Return the configuration with the Event Hubs defaults for the times that are not in `given`.

    Workers of the Azure SDKs, which are slow by design, may be in the same group. The defaults are chosen to suit them.
    """
    lease_seconds = (
        config.lease_seconds if "lease_seconds" in given else max(HUB_LEASE_SECONDS, config.rules.lease_seconds)
    )
    defaults = Config(rules=config.rules, lease_seconds=lease_seconds)
    hub_times: dict[str, Any] = {
        "lease_seconds": lease_seconds,
        "cycle_seconds": min(HUB_CYCLE_SECONDS, defaults.cycle_seconds),
        "renew_seconds": min(HUB_RENEW_SECONDS, defaults.renew_seconds),
    }
    return evolve(config, **{name: value for name, value in hub_times.items() if name not in given})


def config_for_source(source: str, fields: dict[str, Any]) -> Config:
    """Return the configuration for this source. Event hubs have other default times, which suit Azure's SDK workers."""
    config = config_from_settings(fields)
    return with_event_hub_times(config, fields) if source.startswith("eventhubs:") else config
