"""The progress of a pipeline, as Spark reports it, of batches and of reading, and a page that shows it and reloads."""

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


BATCHES_MAX = 500
"""Most batches that are drawn, the last ones."""

PAUSE_SECONDS = 5.0
"""The page is not written more often than this."""


@define
class QueryProgress:
    """The reports of a query so far; the charts show its last batches, the sums all of them.

    reading  the last word on how far it is behind its shards; None where its source tells nothing of it
    """

    reading: ReadingProgress | None = None
    batches: deque[BatchProgress] = field(factory=lambda: deque(maxlen=BATCHES_MAX))
    rows: int = 0
    unparsable: int = 0
    late: int = 0

    def add(self, told: BatchProgress) -> None:
        """Add the report of a batch."""
        self.batches.append(told)
        self.rows += told.rows
        self.unparsable += told.unparsable or 0
        self.late += told.late or 0

    @property
    def last(self) -> BatchProgress | None:
        """The newest batch, if there was one."""
        return self.batches[-1] if self.batches else None

    @property
    def charts(self) -> dict[str, Markup]:
        """The charts, by their headings; without those of which nothing was told."""
        # A rate is from the end of the batch before to its own end, so that the first batch has none.
        pairs = pairwise(self.batches)
        rates = [(after, after.rows / max(after.at - before.at, 0.001)) for before, after in pairs]
        lags = [(told, told.lag_seconds) for told in self.batches if told.lag_seconds is not None]
        late = [(told, float(told.late or 0)) for told in self.batches if self.late]
        drawn: tuple[tuple[str, list[tuple[BatchProgress, float]], str, str], ...] = (
            ("Rows a second", rates, "rows a second", COLOURS[0]),
            ("How long batches took", [(told, told.seconds) for told in self.batches], "seconds", COLOURS[3]),
            ("Lag: age of the newest record landed", lags, "seconds", COLOURS[1]),
            ("Late: after the watermark, and in no window", late, "rows", BAD),
        )
        since = "the first batch shown"
        charts = {}
        for heading, values, unit, colour in drawn:
            if values:
                times = [told.at - self.batches[0].at for told, _ in values]
                curve = lines(times, [Line("", tuple(value for _, value in values), colour)], unit, since=since)
                charts[heading] = Markup(curve)  # noqa: S704  names in it are escaped
        return charts


@define
class ProgressPage:
    """A file that shows how a pipeline of this name goes."""

    name: str
    path: Path
    queries: dict[str, QueryProgress] = field(factory=dict)
    written: float = 0.0

    def tell(self, told: BatchProgress | ReadingProgress) -> None:
        """Add a report, and write the file if the last time is long enough ago."""
        query = self.queries.setdefault(told.query, QueryProgress())
        if isinstance(told, BatchProgress):
            query.add(told)
        else:
            query.reading = told
        if told.at - self.written >= PAUSE_SECONDS:
            self.written = told.at
            self.write(running=True)

    def write(self, *, running: bool) -> None:
        """Write the file, whole or not at all, because a browser may be reading it.

        While the pipeline is `running`, the browser loads it again and again.
        """
        new = self.path.with_name(f".{self.path.name}.new")
        page = TEMPLATES.get_template("progress.html.j2")
        text = page.render(name=self.name, queries=self.queries, running=running, pause=PAUSE_SECONDS)
        new.write_text(text, encoding="utf-8")
        new.replace(self.path)
