"""What one micro-batch of a pipeline did, as Spark told it."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from attrs import asdict, frozen

LANDED = "landed"
"""The name under which a batch's progress tells what landed."""


@frozen
class Told:
    """One batch of one query.

    at           when it was done, in seconds since 1970
    rows         what it read
    seconds      how long it took
    unparsable   rows that are dead letters
    lag_seconds  the age of the newest record that landed, when its batch was done
    watermark    records before this time are late
    late         rows that came after the watermark, and are in no window
    What a query cannot tell is None.
    """

    query: str
    batch: int
    at: float
    rows: int
    seconds: float
    unparsable: int | None = None
    lag_seconds: float | None = None
    watermark: str | None = None
    late: int | None = None

    @property
    def json(self) -> dict[str, Any]:
        """One line of JSON, without what cannot be told."""
        return asdict(self, filter=lambda _field, value: value is not None)


def told_of(progress: Mapping[str, Any]) -> Told:
    """What a `StreamingQueryProgress` says."""
    seconds = progress["durationMs"].get("triggerExecution", 0) / 1000
    ended = datetime.fromisoformat(progress["timestamp"]).timestamp() + seconds
    rows = progress["numInputRows"]
    if rows is None:  # on Spark Connect
        rows = sum(source["numInputRows"] for source in progress["sources"])
    newest = _seen(progress, "newest")
    watermark = progress["eventTime"].get("watermark")
    late = sum(state["numRowsDroppedByWatermark"] for state in progress["stateOperators"])
    return Told(
        query=progress["name"],
        batch=progress["batchId"],
        at=round(ended, 3),
        rows=rows,
        seconds=seconds,
        unparsable=_seen(progress, "unparsable"),
        lag_seconds=None if newest is None else round(ended - newest, 3),
        watermark=watermark,
        late=None if watermark is None else late,
    )


def _seen(progress: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401  a number, as Spark has it
    """What landed, by the batch's own count; a batch without rows may tell nothing, or not of each."""
    seen = progress["observedMetrics"].get(LANDED)
    return seen[name] if seen and name in seen else None
