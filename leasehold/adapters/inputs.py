"""Parses times, durations, positions and settings as users write them, on the command line or in Python.

A time is `2026-11-22T06:00Z`, `now-2h` or a number of milliseconds, and a duration is `1h30m` or a number of seconds. A
position is a name in upper or lower case, a time or a sequence number. A setting of the planner is `name=value`.
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


SECONDS_PER_UNIT = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}

_DURATION_PATTERN = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhdw]))+", re.ASCII)
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])", re.ASCII)
_ISO_DURATION = re.compile(
    r"P(?=.)(?:(\d+)W)?(?:(\d+)D)?(?:T(?=.)(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?", re.IGNORECASE | re.ASCII
)
_NUMBER_PATTERN = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_MILLISECONDS_PATTERN = re.compile(r"\d{11,15}", re.ASCII)

DURATION_FORMATS = "a duration such as 90, 1.5s, 5m, 2h, 1d12h or PT2H"
TIME_FORMATS = "a time such as 2026-11-22T06:00Z, now, now-2h, or milliseconds since 1970"


def parse_duration(text: str) -> float:
    """Parse a duration, and return it in seconds. A bare number is in seconds. Raises ValueError for other strings."""
    normalized, seconds = text.strip().lower(), math.nan
    if _NUMBER_PATTERN.fullmatch(normalized):
        seconds = float(normalized)
    elif _DURATION_PATTERN.fullmatch(normalized):
        seconds = sum(float(number) * SECONDS_PER_UNIT[unit] for number, unit in _DURATION_PART.findall(normalized))
    elif iso_match := _ISO_DURATION.fullmatch(normalized):
        amounts_by_unit = zip(iso_match.groups(), "wdhms", strict=True)
        seconds = sum(float(number) * SECONDS_PER_UNIT[unit] for number, unit in amounts_by_unit if number is not None)
    if not math.isfinite(seconds):  # NaN, or infinite if a number has too many digits for a float
        raise ValueError(f"{text!r} is not {DURATION_FORMATS}")
    return seconds


def parse_seconds_option(value: object, option: str) -> float:
    """Return the seconds of an option's value, a number or a duration string. Raises ValueError, naming the option."""
    try:
        seconds = parse_duration(value) if isinstance(value, str) else float(cast("float", value))
        if isinstance(value, bool | bytes | bytearray):  # Python would convert these to numbers
            seconds = math.nan
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{option}: {value!r} is not {DURATION_FORMATS}") from None
    if math.isnan(seconds):
        raise ValueError(f"{option}: {value!r} is not {DURATION_FORMATS}")
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
"""The limits of the planner's settings that are durations. A setting may be 0 only if no wait depends on it."""


def check_duration(limits: DurationLimits, seconds: float, option_label: str) -> str:
    """Check the seconds of an option against its limits.

    Args:
        limits: The limits of the option.
        seconds: The option's value.
        option_label: The option as the user writes it.

    Returns:
        A warning, or "" if the value is usual.

    Raises:
        ValueError: The value is below the option's limit.
    """
    if not seconds >= limits.least:
        raise ValueError(f"{option_label}: {seconds:g} s is less than {limits.least:g} s; a bare number is in seconds")
    if limits.usual < seconds < math.inf:
        return (
            f"{option_label} is {seconds:g} s: {limits.consequence}; a bare number is in seconds, where the KCL's "
            "settings "
            "are in milliseconds"
        )
    return ""


def parse_time_ms(text: str, now: float) -> int:
    """Parse a time and return it in milliseconds since 1970. A time without a zone is in UTC.

    Args:
        text: The time.
        now: The present time in seconds since 1970.

    Raises:
        ValueError: The text is not a time, or the time is not in the years 1 to 9999.
    """
    try:
        stripped_text = text.strip()
        if _MILLISECONDS_PATTERN.fullmatch(stripped_text):
            milliseconds = int(stripped_text)
        elif stripped_text.lower().startswith("now"):
            milliseconds = round(
                (now + (_parse_signed_duration(stripped_text[3:]) if stripped_text[3:] else 0.0)) * 1000
            )
        else:
            parsed_time = datetime.fromisoformat(stripped_text)
            milliseconds = round(
                (parsed_time if parsed_time.tzinfo else parsed_time.replace(tzinfo=UTC)).timestamp() * 1000
            )
        datetime.fromtimestamp(milliseconds / 1000, UTC)  # raises for years outside 1 to 9999
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not {TIME_FORMATS}") from None
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

INITIAL_POSITIONS = ("TRIM_HORIZON", "LATEST", "AT_TIMESTAMP")

_POSITION_ALIASES = {"EARLIEST": "TRIM_HORIZON", "BEGINNING": "TRIM_HORIZON", "END": "LATEST"}


def find_named_position(text: str) -> str | None:
    """Return the named position, such as LATEST, or None if the name is unknown.

    Case is ignored, and `-` is read as `_`.
    """
    position_name = text.strip().upper().replace("-", "_")
    position_name = _POSITION_ALIASES.get(position_name, position_name)
    return position_name if position_name in SENTINELS else None


PLAUSIBLE_MS_MIN, PLAUSIBLE_MS_MAX, YEAR_10000_MS = 10**11, 10**13, 253_402_300_800_000
"""The beginnings of the years 1973, 2286 and 10000, in milliseconds. If a number stands for a time before 1973 or after
2286, its unit is probably wrong (for example, seconds instead of milliseconds)."""


def check_time_ms(milliseconds: int, option: str, *, in_seconds: bool = False) -> int:
    """Return this time if it is plausible as milliseconds since 1970. The time 0, the beginning, is always accepted.

    Args:
        milliseconds: The time.
        option: The option as the user writes it.
        in_seconds: Whether the user gave the time in seconds. This affects only the error message.

    Raises:
        ValueError: The time is before 1973 or after 2286. The message names the option.
    """
    if milliseconds == 0 or PLAUSIBLE_MS_MIN <= milliseconds < PLAUSIBLE_MS_MAX:
        return milliseconds
    formatted_time = format_time(milliseconds) if abs(milliseconds) < YEAR_10000_MS else "after the year 9999"
    if in_seconds:
        raise ValueError(f"{option}: {milliseconds // 1000} s since 1970 is {formatted_time}; give it in seconds")
    probable_unit = "seconds" if milliseconds < PLAUSIBLE_MS_MIN else "microseconds"
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
        ValueError: The text is not a position. The message names the option.
    """
    position_name = find_named_position(text)
    if position_name == "AT_TIMESTAMP":
        raise ValueError(f"{field}: in place of AT_TIMESTAMP write the time itself, {TIME_FORMATS}")
    if position_name in {"TRIM_HORIZON", "LATEST"}:
        return Position(position_name)
    try:
        return at_timestamp(parse_time_ms(text, now))
    except ValueError:
        hint = did_you_mean(text.upper(), INITIAL_POSITIONS)
        raise ValueError(
            f"{field}: {text!r} is neither {', '.join(INITIAL_POSITIONS)} nor {TIME_FORMATS}{hint}"
        ) from None


# Settings


def combine_settings(
    settings: dict[str, Any], more_settings: Sequence[str] | Mapping[str, object], option: str = "--set"
) -> dict[str, Any]:
    """Combine settings into one mapping, omitting those in `settings` that are None.

    Args:
        settings: Settings by name.
        more_settings: Further settings, either a mapping or strings of the form `name=value`.
        option: The name of the option `more_settings`, for error messages.

    Raises:
        ValueError: A setting is not of the form `name=value`.
    """
    fields = {name: value for name, value in settings.items() if value is not None}
    if isinstance(more_settings, Mapping):
        return fields | dict(more_settings)
    for setting in more_settings:
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
"""Most Azure SDKs take over a partition after this many seconds without an update. The Python SDK waits 180 s."""

HUB_CYCLE_SECONDS = 30.0
"""The interval at which most workers of Azure's SDKs read the ownerships, in seconds."""

HUB_RENEW_SECONDS = 20.0
"""The interval, in seconds, at which to renew leases of event hubs.

Workers in JavaScript and Go take over ownerships after 60 s, whatever we set here.
"""


def with_event_hub_times(config: Config, given_names: Container[str]) -> Config:
    """Return the configuration with the Event Hubs defaults for the times that are not in `given_names`.

    The defaults suit groups that include workers of the Azure SDKs, because those workers renew their leases rarely.
    """
    lease_seconds = (
        config.lease_seconds if "lease_seconds" in given_names else max(HUB_LEASE_SECONDS, config.rules.lease_seconds)
    )
    defaults = Config(rules=config.rules, lease_seconds=lease_seconds)
    hub_times: dict[str, Any] = {
        "lease_seconds": lease_seconds,
        "cycle_seconds": min(HUB_CYCLE_SECONDS, defaults.cycle_seconds),
        "renew_seconds": min(HUB_RENEW_SECONDS, defaults.renew_seconds),
    }
    return evolve(config, **{name: value for name, value in hub_times.items() if name not in given_names})


def config_for_source(source: str, fields: dict[str, Any]) -> Config:
    """Return the configuration for this source. Event hubs have default times that suit Azure's SDK workers."""
    config = config_from_settings(fields)
    return with_event_hub_times(config, fields) if source.startswith("eventhubs:") else config
