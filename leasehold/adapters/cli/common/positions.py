"""Positions as users write them: a name in any case, a time, or a sequence number."""

from leasehold.adapters.cli.common.times import MOMENT, moment
from leasehold.balancer.model import SENTINELS, Position, at_timestamp

STARTS = ("TRIM_HORIZON", "LATEST", "AT_TIMESTAMP")

_OTHER_NAMES = {"EARLIEST": "TRIM_HORIZON", "BEGINNING": "TRIM_HORIZON", "END": "LATEST"}


def named(text: str) -> str | None:
    """The sentinel of this name, in any case and with - for _; None where it is none."""
    name = text.strip().upper().replace("-", "_")
    name = _OTHER_NAMES.get(name, name)
    return name if name in SENTINELS else None


def start(text: str, timestamp_ms: int | None, now: float, field: str) -> Position:
    """Where to begin: TRIM_HORIZON, LATEST, or a time, which may stand in `timestamp_ms`.

    now  seconds since 1970
    Raises ValueError, naming the field.
    """
    name = named(text)
    if name == "AT_TIMESTAMP":
        if timestamp_ms is None:
            raise ValueError(f"{field}: AT_TIMESTAMP wants --timestamp-ms; or write the time itself, {MOMENT}")
        return at_timestamp(timestamp_ms)
    if timestamp_ms is not None:
        raise ValueError("--timestamp-ms: it goes with AT_TIMESTAMP, and only with it")
    if name in {"TRIM_HORIZON", "LATEST"}:
        return Position(name)
    try:
        return at_timestamp(moment(text, now))
    except ValueError:
        raise ValueError(f"{field}: {text!r} is neither {', '.join(STARTS)} nor {MOMENT}") from None
