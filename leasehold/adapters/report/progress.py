"""The progress of a pipeline's micro-batches, and of its reading between them, as Spark reports it."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from attrs import asdict, frozen

LANDED = "landed"
"""The name under which a batch's progress tells what landed."""


@frozen
class BatchProgress:
    """The report of one batch of a query.

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
        """The fields for a line of JSON, without those that are unknown."""
        return asdict(self, filter=lambda _field, value: value is not None)


@frozen
class ReadingProgress:
    """How far the reading of a query is behind its shards, with a batch or without one.

    at        when it was told, in seconds since 1970
    shards    how many it reads
    behind    seconds behind the tip, of the shard that is furthest
    by_shard  the same of each shard that is behind, of the furthest fifty
    """

    query: str
    at: float
    shards: int
    behind: float
    by_shard: Mapping[str, float]


def reading_of(progress: Mapping[str, Any]) -> ReadingProgress | None:
    """How far reading is behind, from a `StreamingQueryProgress`; None where its source does not tell."""
    text = progress["sources"][0]["latestOffset"] if progress["sources"] else None
    try:
        told = json.loads(text or "{}")
        shards, behind, by_shard = told["shards"], told["behindMs"], told["behindMsByShard"]
    except (ValueError, TypeError, LookupError):
        return None  # another source's own offset
    seconds = {shard: each / 1000 for shard, each in by_shard.items()}
    return ReadingProgress(progress["name"], round(_ended(progress), 3), shards, behind / 1000, seconds)


def told_of(progress: Mapping[str, Any]) -> BatchProgress:
    """The report made of a `StreamingQueryProgress`."""
    ended = _ended(progress)
    rows = progress["numInputRows"]
    if rows is None:  # on Spark Connect
        rows = sum(source["numInputRows"] for source in progress["sources"])
    newest = _seen(progress, "newest")
    watermark = progress["eventTime"].get("watermark")
    late = sum(state["numRowsDroppedByWatermark"] for state in progress["stateOperators"])
    return BatchProgress(
        query=progress["name"],
        batch=progress["batchId"],
        at=round(ended, 3),
        rows=rows,
        seconds=_seconds(progress),
        unparsable=_seen(progress, "unparsable"),
        lag_seconds=None if newest is None else round(ended - newest, 3),
        watermark=watermark,
        late=None if watermark is None else late,
    )


def _seconds(progress: Mapping[str, Any]) -> float:
    return float(progress["durationMs"].get("triggerExecution", 0) / 1000)


def _ended(progress: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(progress["timestamp"]).timestamp() + _seconds(progress)


def _seen(progress: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401  a number, as Spark has it
    """A figure on the landed rows, by the batch's own count; a batch without rows may lack it."""
    seen = progress["observedMetrics"].get(LANDED)
    return seen[name] if seen and name in seen else None
