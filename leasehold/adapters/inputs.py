"""Times, durations, positions and settings as users write them, at the command line or in Python.

A time or duration is `2026-11-22T06:00Z`, `now-2h`, `1h30m`, or a bare number; a position a name in any case, a time,
or a sequence number; a setting of the planner `name=value`.
"""

import json
import math
import re
from collections.abc import Container, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from attrs import evolve, frozen

from leasehold.adapters.json_form import JsonValue, config_of
from leasehold.balancer.config import Config
from leasehold.balancer.model import SENTINELS, Position, at_timestamp
from leasehold.stores.printable import did_you_mean


def dashed(option: str) -> str:
    """The name of an option, as the command line writes it."""
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


def duration(text: str) -> float:
    """Seconds of a duration, a bare number being seconds. Raises ValueError where it is none."""
    said, found = text.strip().lower(), math.nan
    if _NUMBER.fullmatch(said):
        found = float(said)
    elif _PARTS.fullmatch(said):
        found = sum(float(number) * UNITS[unit] for number, unit in _PART.findall(said))
    elif iso := _ISO.fullmatch(said):
        parts = zip(iso.groups(), "wdhms", strict=True)
        found = sum(float(number) * UNITS[unit] for number, unit in parts if number is not None)
    if not math.isfinite(found):  # infinite with more digits than a number has
        raise ValueError(f"{text!r} is not {DURATION}")
    return found


def seconds_of(value: object, option: str) -> float:
    """Seconds of an option: a number, or a duration as text. Raises ValueError, naming the option."""
    try:
        found = duration(value) if isinstance(value, str) else float(cast("float", value))
        if isinstance(value, bool | bytes | bytearray):  # Python makes numbers of them
            found = math.nan
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{option}: {value!r} is not {DURATION}") from None
    if math.isnan(found):
        raise ValueError(f"{option}: {value!r} is not {DURATION}")
    if not found >= 0:
        raise ValueError(f"{option}: {value!r} is less than 0 s")
    return found


@frozen
class DurationLimits:
    """The seconds that an option may be, and those beyond which a unit was probably mistaken.

    Attributes:
        least: Fewer are refused.
        usual: More are accepted with a warning; no limit where it is infinite.
        consequence: What more than `usual` means, for the warning.
    """

    least: float
    usual: float = math.inf
    consequence: str = ""


DURATION_LIMITS = {
    "lease_seconds": DurationLimits(1.0, 300.0, "the shards of a worker that dies stay unread for that long"),
    "slow_seconds": DurationLimits(0.0, 86400.0, "a handler that hangs is not logged before that"),
    "handler_seconds": DurationLimits(0.01),
    "checkpoint_seconds": DurationLimits(0.0, 3600.0, "a worker that dies repeats what it handled in that time"),
    "drain_seconds": DurationLimits(0.0, 3600.0, "a worker that is told to end may take that long"),
    "cycle_seconds": DurationLimits(0.05, 600.0, "the shards of a worker that dies may stay unread for that long"),
    "renew_seconds": DurationLimits(0.05, 200.0, "a lease that is not renewed in time goes to another worker"),
    "grace_seconds": DurationLimits(0.0, 3600.0, "a lease that was given up waits that long for a worker that joins"),
    "time_to_live": DurationLimits(0.001, 86400.0, "a record that cannot be written counts as late only after that"),
}
"""Limits of the options that are durations; 0 is fine where nothing waits for it."""


def checked_duration(option: str, seconds: float, named: str) -> str:
    """Check the seconds of an option against `DURATION_LIMITS`.

    Args:
        option: The name of the option.
        seconds: Its value.
        named: The option as its user writes it.

    Returns:
        A warning, or "" if the value is usual.

    Raises:
        ValueError: If it is less than the option's least.
    """
    limits = DURATION_LIMITS[option]
    if not seconds >= limits.least:
        raise ValueError(f"{named}: {seconds:g} s is less than {limits.least:g} s; a bare number is in seconds")
    if limits.usual < seconds < math.inf:
        return (
            f"{named} is {seconds:g} s: {limits.consequence}; a bare number is in seconds, where the KCL's settings "
            "are in milliseconds"
        )
    return ""


def moment(text: str, now: float) -> int:
    """Milliseconds since 1970 of a time; one without a zone is UTC.

    now  seconds since 1970
    Raises ValueError where it is no time, or none of the years 1 to 9999.
    """
    try:
        said = text.strip()
        if _MILLISECONDS.fullmatch(said):
            found = int(said)
        elif said.lower().startswith("now"):
            found = round((now + (_signed(said[3:]) if said[3:] else 0.0)) * 1000)
        else:
            time = datetime.fromisoformat(said)
            found = round((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000)
        datetime.fromtimestamp(found / 1000, UTC)  # refuses what no calendar has
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not {MOMENT}") from None
    return found


def _signed(said: str) -> float:
    if not said.startswith(("+", "-")):
        raise ValueError(f"{said!r} has no sign")
    return (1.0 if said[0] == "+" else -1.0) * duration(said[1:])


def shift(text: str) -> float:
    """Seconds of a signed duration, such as -15m. Raises ValueError where it is none."""
    if not text.strip().startswith(("+", "-")):
        raise ValueError(f"--shift-by: {text!r} wants a sign, as in -15m or +1h")
    return _signed(text.strip())


def said_moment(milliseconds: float) -> str:
    """A time as ISO 8601, to the millisecond; as its milliseconds where no calendar has it, for rows may say any."""
    try:
        found = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError):
        return f"{milliseconds:.0f}ms"
    return found.isoformat(timespec="milliseconds").replace("+00:00", "Z")


# Positions

STARTS = ("TRIM_HORIZON", "LATEST", "AT_TIMESTAMP")

_OTHER_NAMES = {"EARLIEST": "TRIM_HORIZON", "BEGINNING": "TRIM_HORIZON", "END": "LATEST"}


def named(text: str) -> str | None:
    """The sentinel of this name, in any case and with - for _; None where it is none."""
    name = text.strip().upper().replace("-", "_")
    name = _OTHER_NAMES.get(name, name)
    return name if name in SENTINELS else None


EARLIEST_MS, LATEST_MS = 10**11, 10**13
"""The years 1973 and 2286: a number outside them was probably given in another unit."""


def checked_time(milliseconds: int, option: str) -> int:
    """Return a time in milliseconds since 1970, unless it was probably meant in another unit.

    0 stands for the beginning.

    Raises:
        ValueError: If it lies before 1973 or after 2286, naming the option.
    """
    if milliseconds == 0 or EARLIEST_MS <= milliseconds < LATEST_MS:
        return milliseconds
    unit = "seconds" if milliseconds < EARLIEST_MS else "microseconds"
    raise ValueError(
        f"{option}: {milliseconds} ms since 1970 is {said_moment(milliseconds)}; is it in {unit}? "
        "give milliseconds, or a time such as 2026-11-22T06:00Z"
    )


def start(text: str, timestamp_ms: int | None, now: float, field: str, beside: str = "--timestamp-ms") -> Position:
    """Where to begin: TRIM_HORIZON, LATEST, or a time, which may stand in `timestamp_ms`.

    now     seconds since 1970
    field   the option that says `text`, as its user writes it
    beside  the option that says `timestamp_ms`, likewise
    Raises ValueError, naming the field.
    """
    name = named(text)
    if name == "AT_TIMESTAMP":
        if timestamp_ms is None:
            raise ValueError(f"{field}: AT_TIMESTAMP wants {beside}; or write the time itself, {MOMENT}")
        return at_timestamp(checked_time(timestamp_ms, beside))
    if timestamp_ms is not None:
        raise ValueError(f"{beside}: it goes with AT_TIMESTAMP, and only with it")
    if name in {"TRIM_HORIZON", "LATEST"}:
        return Position(name)
    try:
        return at_timestamp(moment(text, now))
    except ValueError:
        hint = did_you_mean(text.upper(), STARTS)
        raise ValueError(f"{field}: {text!r} is neither {', '.join(STARTS)} nor {MOMENT}{hint}") from None


# Settings


def settings(
    given: dict[str, Any], more: Sequence[str] | Mapping[str, object], option: str = "--set"
) -> dict[str, Any]:
    """The named settings that are not None, and those given by name, or as name=value.

    option  the option that says `more`, as its user writes it
    Raises ValueError for another form.
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
            fields[name] = text  # the field that it is for says what it must be
    return fields


def configuration(found: dict[str, Any]) -> Config:
    """The configuration of these settings. Raises ValueError naming one that cannot be."""
    return config_of(JsonValue("input", found))


HUB_LEASE_SECONDS = 120.0
"""Seconds after which most official workers take an ownership; Python's, after the 180 of its own rules."""

HUB_CYCLE_SECONDS = 30.0
"""How often most of them look."""

HUB_RENEW_SECONDS = 20.0
"""JavaScript's and Go's expire after 60 s, whatever this fleet is set to."""


def paced(config: Config, given: Container[str]) -> Config:
    """The configuration of a fleet that reads Event Hubs: the seconds that were not `given` suit official workers.

    Those may be in its group, and are slow by design.
    """
    seconds = config.lease_seconds if "lease_seconds" in given else max(HUB_LEASE_SECONDS, config.rules.lease_seconds)
    usual = Config(rules=config.rules, lease_seconds=seconds)
    suited: dict[str, Any] = {
        "lease_seconds": seconds,
        "cycle_seconds": min(HUB_CYCLE_SECONDS, usual.cycle_seconds),
        "renew_seconds": min(HUB_RENEW_SECONDS, usual.renew_seconds),
    }
    return evolve(config, **{name: value for name, value in suited.items() if name not in given})


def configuration_for(source: str, found: dict[str, Any]) -> Config:
    """The same for this stream: of a hub, with the seconds that suit a group of official workers where none are set."""
    config = configuration(found)
    return paced(config, found) if source.startswith("eventhubs:") else config
