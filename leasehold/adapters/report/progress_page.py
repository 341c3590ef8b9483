"""The progress of a pipeline, as one page of HTML that reloads itself: rows, lag, and how long batches take."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from attrs import define, field
from markupsafe import Markup

from leasehold.adapters.report.charts import BAD, COLOURS, Line, lines
from leasehold.adapters.report.progress import BatchProgress, ReadingProgress
from leasehold.adapters.report.templates import TEMPLATES

BATCHES_MAX = 500
"""So many of the last batches are drawn."""

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
        """The charts, by their headings."""
        seconds = [(told, told.seconds) for told in self.batches]
        drawn = {
            "Rows a second": self._chart(self._rates(), "rows a second", COLOURS[0]),
            "How long batches took": self._chart(seconds, "seconds", COLOURS[3]),
            "Lag: age of the newest record landed": self._chart(
                [(told, told.lag_seconds) for told in self.batches if told.lag_seconds is not None],
                "seconds",
                COLOURS[1],
            ),
            "Late: after the watermark, and in no window": self._chart(
                [(told, told.late or 0) for told in self.batches if self.late], "rows", BAD
            ),
        }
        return {heading: chart for heading, chart in drawn.items() if chart}

    def _rates(self) -> list[tuple[BatchProgress, float]]:
        """From the end of each batch's predecessor to its own end; the first has none."""
        pairs = pairwise(self.batches)
        return [(after, after.rows / max(after.at - before.at, 0.001)) for before, after in pairs]

    def _chart(self, values: Sequence[tuple[BatchProgress, float]], unit: str, colour: str) -> Markup:
        if not values:
            return Markup()
        times = [told.at - self.batches[0].at for told, _ in values]
        line = Line("", tuple(value for _, value in values), colour)
        return Markup(lines(times, [line], unit, since="the first batch shown"))  # noqa: S704  names in it are escaped


def progress_page(name: str, queries: Mapping[str, QueryProgress], *, running: bool) -> str:
    """The page; while it is `running`, a browser loads it again and again."""
    template = TEMPLATES.get_template("progress.html.j2")
    return template.render(name=name, queries=queries, running=running, pause=PAUSE_SECONDS)


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
        """Write the file, whole or not at all, because a browser may be reading it."""
        new = self.path.with_name(f".{self.path.name}.new")
        new.write_text(progress_page(self.name, self.queries, running=running), encoding="utf-8")
        new.replace(self.path)
