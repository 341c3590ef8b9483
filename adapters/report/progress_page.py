"""How a pipeline goes, as one page of HTML that loads itself anew: rows, lag, and how long batches take."""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from attrs import define, field
from markupsafe import Markup

from adapters.report.charts import BAD, COLOURS, Line, lines
from adapters.report.progress import Told
from adapters.report.templates import TEMPLATES

BATCHES_MAX = 500
"""So many of the last batches are drawn."""

PAUSE_SECONDS = 5.0
"""The page is not written more often than this."""


@define
class History:
    """What one query has told so far; the charts show its last batches, the sums all of them."""

    batches: deque[Told] = field(factory=lambda: deque(maxlen=BATCHES_MAX))
    rows: int = 0
    unparsable: int = 0
    late: int = 0

    def add(self, told: Told) -> None:
        """One more batch."""
        self.batches.append(told)
        self.rows += told.rows
        self.unparsable += told.unparsable or 0
        self.late += told.late or 0

    @property
    def last(self) -> Told:
        """The newest batch."""
        return self.batches[-1]

    @property
    def charts(self) -> dict[str, Markup]:
        """What there is to see, by its heading."""
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

    def _rates(self) -> list[tuple[Told, float]]:
        """From the end of each batch's predecessor to its own end; the first has none."""
        pairs = pairwise(self.batches)
        return [(after, after.rows / max(after.at - before.at, 0.001)) for before, after in pairs]

    def _chart(self, values: Sequence[tuple[Told, float]], unit: str, colour: str) -> Markup:
        if not values:
            return Markup()
        times = [told.at - self.batches[0].at for told, _ in values]
        line = Line("", tuple(value for _, value in values), colour)
        return Markup(lines(times, [line], unit, since="the first batch shown"))  # noqa: S704  names in it are escaped


def progress_page(name: str, queries: Mapping[str, History], *, running: bool) -> str:
    """The page; while it is `running`, a browser loads it again and again."""
    template = TEMPLATES.get_template("progress.html.j2")
    return template.render(name=name, queries=queries, running=running, pause=PAUSE_SECONDS)


@define
class ProgressPage:
    """A file that shows how a pipeline of this name goes."""

    name: str
    path: Path
    queries: dict[str, History] = field(factory=dict)
    written: float = 0.0

    def tell(self, told: Told) -> None:
        """One more batch; the file is written now and then."""
        self.queries.setdefault(told.query, History()).add(told)
        if told.at - self.written >= PAUSE_SECONDS:
            self.written = told.at
            self.write(running=True)

    def write(self, *, running: bool) -> None:
        """Write the file, whole or not at all, for somebody may be looking."""
        new = self.path.with_name(f".{self.path.name}.new")
        new.write_text(progress_page(self.name, self.queries, running=running), encoding="utf-8")
        new.replace(self.path)
