"""Collects the progress of a pipeline as Spark reports it, of batches and of reading, and renders it as a page."""

import json
from collections import deque
from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from attrs import asdict, define, field, frozen
from markupsafe import Markup

from leasehold.adapters.report.page import BAD, COLOURS, TEMPLATES, Line, lines

LANDED = "landed"
"""The name of the observed metrics on the landed rows in a batch's progress."""


@frozen
class BatchProgress:
    """The report of one batch of a query, with None for values that the query doesn't report.

    Attributes:
        query: The name of the query.
        batch: The id of the batch.
        at: When the batch was done, in seconds since 1970.
        rows: The number of rows that were read.
        seconds: How long the batch took.
        unparsable: The number of rows that became dead letters.
        lag_seconds: The age of the newest landed record when its batch was done.
        watermark: Records before this time are late.
        late: The number of rows that came after the watermark, and are in no window.
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
        """The known fields, as JSON values."""
        return asdict(self, filter=lambda _field, value: value is not None)


@frozen
class ReadingProgress:
    """How far the reading of a query is behind its shards, whether or not there was a batch.

    Attributes:
        query: The name of the query.
        at: When this was reported, in seconds since 1970.
        shards: The number of shards that it reads.
        behind: How many seconds the shard that is furthest behind is behind the tip.
        by_shard: The same for each shard that is behind, limited to the fifty that are furthest behind.
    """

    query: str
    at: float
    shards: int
    behind: float
    by_shard: Mapping[str, float]


def reading_of(progress: Mapping[str, Any]) -> ReadingProgress | None:
    """Return how far reading is behind, from a `StreamingQueryProgress`, or None if its source does not report it."""
    text = progress["sources"][0]["latestOffset"] if progress["sources"] else None
    try:
        offset = json.loads(text or "{}")
        shards, milliseconds_behind, by_shard = offset["shards"], offset["behindMs"], offset["behindMsByShard"]
    except (ValueError, TypeError, LookupError):
        return None  # the offset of another source
    seconds = {shard: milliseconds / 1000 for shard, milliseconds in by_shard.items()}
    return ReadingProgress(progress["name"], round(_ended(progress), 3), shards, milliseconds_behind / 1000, seconds)


def told_of(progress: Mapping[str, Any]) -> BatchProgress:
    """Return the report of a batch from a `StreamingQueryProgress`."""
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
    """Return an observed metric of the landed rows, or None. A batch without rows may lack it."""
    metrics = progress["observedMetrics"].get(LANDED)
    return metrics[name] if metrics and name in metrics else None


BATCHES_MAX = 500
"""The most batches that are drawn. Older ones are dropped."""

PAUSE_SECONDS = 5.0
"""The minimum time between two writes of the page."""


@define
class QueryProgress:
    """The reports of a query so far. The charts show its last batches, the sums include all of them.

    Attributes:
        reading: The latest report on how far it is behind its shards; None if its source does not report it.
        batches: The reports of the last batches.
        rows: The number of rows that were read.
        unparsable: The number of rows that became dead letters.
        late: The number of late rows.
    """

    reading: ReadingProgress | None = None
    batches: deque[BatchProgress] = field(factory=lambda: deque(maxlen=BATCHES_MAX))
    rows: int = 0
    unparsable: int = 0
    late: int = 0

    def add(self, told: BatchProgress) -> None:
        """Add the report of a batch, and update the sums."""
        self.batches.append(told)
        self.rows += told.rows
        self.unparsable += told.unparsable or 0
        self.late += told.late or 0

    @property
    def last(self) -> BatchProgress | None:
        """The report of the latest batch, if there is one."""
        return self.batches[-1] if self.batches else None

    @property
    def charts(self) -> dict[str, Markup]:
        """The charts by heading, without those that have no values."""
        # A rate is measured from the end of the previous batch, so the first batch has none.
        pairs = pairwise(self.batches)
        rates = [(after, after.rows / max(after.at - before.at, 0.001)) for before, after in pairs]
        lags = [(batch, batch.lag_seconds) for batch in self.batches if batch.lag_seconds is not None]
        late = [(batch, float(batch.late or 0)) for batch in self.batches if self.late]
        drawn: tuple[tuple[str, list[tuple[BatchProgress, float]], str, str], ...] = (
            ("Rows a second", rates, "rows a second", COLOURS[0]),
            ("How long batches took", [(batch, batch.seconds) for batch in self.batches], "seconds", COLOURS[3]),
            ("Lag: age of the newest record landed", lags, "seconds", COLOURS[1]),
            ("Late: after the watermark, and in no window", late, "rows", BAD),
        )
        since = "the first batch shown"
        charts = {}
        for heading, values, unit, colour in drawn:
            if values:
                times = [batch.at - self.batches[0].at for batch, _ in values]
                curve = lines(times, [Line("", tuple(value for _, value in values), colour)], unit, since=since)
                charts[heading] = Markup(curve)  # noqa: S704  its names are escaped
        return charts


@define
class ProgressPage:
    """A file that shows the progress of a pipeline."""

    name: str
    path: Path
    queries: dict[str, QueryProgress] = field(factory=dict)
    written: float = 0.0

    def tell(self, told: BatchProgress | ReadingProgress) -> None:
        """Add a report, and write the file unless it was written less than PAUSE_SECONDS ago."""
        query = self.queries.setdefault(told.query, QueryProgress())
        if isinstance(told, BatchProgress):
            query.add(told)
        else:
            query.reading = told
        if told.at - self.written >= PAUSE_SECONDS:
            self.written = told.at
            self.write(running=True)

    def write(self, *, running: bool) -> None:
        """Write the file atomically, because a browser may be reading it.

        Args:
            running: Whether the pipeline is running. If so, the browser reloads the file periodically.
        """
        new = self.path.with_name(f".{self.path.name}.new")
        page = TEMPLATES.get_template("progress.html.j2")
        text = page.render(name=self.name, queries=self.queries, running=running, pause=PAUSE_SECONDS)
        new.write_text(text, encoding="utf-8")
        new.replace(self.path)
