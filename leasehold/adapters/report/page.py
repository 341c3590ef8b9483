"""Renders a report as one self-contained page of HTML, without network requests or scripts.

Its charts (`bars`, `stacks`, `lines`) are SVG that inherits colors and fonts from the page.

Rule 1: Colors are variables of the page's style, so that the same chart is readable on light and on dark.
Rule 2: Names are text, never markup.
Rule 3: There are no inline styles, which the page's content security policy would block.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import chain, cycle

from attrs import field, frozen
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from leasehold.adapters.report.distribution import NUMBER, Distribution
from leasehold.adapters.report.report import HOT, Report
from leasehold.balancer.rules.shares import Groups, path_of
from leasehold.stores.printable import printable


def group_name(path: tuple[str, ...]) -> str:
    """Return the display name of a group. Workers whose names contain no group form a group of their own."""
    return " / ".join(name or "(no group)" for name in path)


def count(number: float) -> str:
    """Format a number, with two decimals unless it is whole."""
    return f"{number:,.0f}" if math.isclose(number, round(number)) else f"{number:,.2f}"


def _seen(value: object) -> object:
    """Escape unprintable characters in strings. Markup is left alone, as names in charts are already escaped."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else printable(value)


TEMPLATES = Environment(
    loader=PackageLoader("leasehold.adapters.report", "."), autoescape=True, undefined=StrictUndefined, finalize=_seen
)
"""The templates of all pages. They share `page.css`, also with the page of `serve`."""

TEMPLATES.filters |= {
    "name": group_name,
    "count": count,
    "seconds": "{:,.1f} s".format,
    "clock": lambda at: f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S UTC}",
}


INK, FAINT, BAD = "var(--ink)", "var(--faint)", "var(--bad)"
COLOURS = tuple(f"var(--c{digit})" for digit in range(8))

WIDTH, ROW, LETTER = 480.0, 19.0, 6.2
"""In units of the drawing: the width of a chart, the height of a horizontal bar with its gap, and the width of a wide
letter."""

LABEL_MAX = 26
POINTS_MAX = 100
"""A curve with more points than this is drawn without dots."""


@frozen
class Bar:
    """A bar with its label, length and color."""

    label: str = field(converter=printable)
    length: float
    colour: str


@frozen
class Line:
    """A line of a chart over time, or a layer of stacked bars."""

    label: str = field(converter=printable)
    values: tuple[float, ...]
    colour: str


def bars(rows: Sequence[Bar]) -> str:
    """Draw horizontal bars of leases with their numbers, the first on top."""
    left = LETTER * max((len(_short(row.label)) for row in rows), default=0) + 10
    ticks, low = _ticks([row.length for row in rows], 8), ROW * len(rows) + 6
    right = WIDTH - 45 - left  # leaves room for the number of the longest bar

    def across(value: float) -> float:
        return left + right * value / ticks[-1]

    parts = [_rule(across(tick), 0, across(tick), low) for tick in ticks]
    parts += [_text(across(tick), low + 13, f"{tick:,.10g}") for tick in ticks]
    parts.append(_text(left + right, low + 28, "leases", "end"))
    for place, row in enumerate(rows):
        top = ROW * place + 5
        parts.append(_text(left - 6, top + 11, _short(row.label), "end"))
        parts.append(_box(left, top, across(row.length) - left, 0.75 * ROW, row.colour))
        parts.append(_text(across(row.length) + 5, top + 11, f"{row.length:,g}", "start"))
    return _svg(low + 34, parts)


def stacks(places: Sequence[int], layers: Sequence[Line], x: str, y: str) -> str:
    """Draw vertical bars, one at each place, stacked from one layer per line."""
    totals = [sum(column) for column in zip(*(layer.values for layer in layers), strict=True)]
    frame = _Frame(_ticks(totals, 8), 200.0)
    slot = frame.wide / len(places)
    step = math.ceil(len(places) / 20)
    parts = frame.parts(layers, x, y)
    for index, place in enumerate(places):
        middle = frame.left + slot * (index + 0.5)
        parts += [_text(middle, frame.low + 14, f"{place:,}")] if index % step == 0 else []
        height_below = 0.0
        for layer in layers:
            height = layer.values[index]
            parts.append(
                _box(middle - 0.4 * slot, frame.up(height_below + height), 0.8 * slot, frame.high(height), layer.colour)
            )
            height_below += height
    return _svg(frame.low + 34, parts)


def lines(
    times: Sequence[float], rows: Sequence[Line], y: str, since: str = "the first snapshot", tall: float = 170.0
) -> str:
    """Draw a chart with a curve for each row, over the time in seconds `since` an event.

    A row that is the only one needs no label.
    """
    most = max(times) or 1.0
    scale, unit = next(
        (scale, unit)
        for scale, unit in ((3600, "hours"), (60, "minutes"), (1, "seconds"))
        if most >= 3 * scale or scale == 1
    )
    frame = _Frame(_ticks(list(chain.from_iterable(row.values for row in rows)), 6), tall)

    def across(seconds: float) -> float:
        return frame.left + frame.wide * seconds / most

    # The axis ends with the last point and not at a round number, so that no space stays empty.
    ticks = [tick for tick in _ticks([most / scale], 9) if tick * scale <= most]
    parts = frame.parts(rows, f"{unit} since {since}", y)
    parts += [_text(across(tick * scale), frame.low + 14, f"{tick:,.10g}") for tick in ticks]
    for row in rows:
        points = [(across(time), frame.up(value)) for time, value in zip(times, row.values, strict=True)]
        coordinates = " ".join(f"{right:.1f},{down:.1f}" for right, down in points)
        parts.append(f'<polyline points="{coordinates}" fill="none" stroke="{row.colour}" stroke-width="1.7"/>')
        dots = points if len(points) <= POINTS_MAX else []
        parts += [f'<circle cx="{right:.1f}" cy="{down:.1f}" r="2" fill="{row.colour}"/>' for right, down in dots]
    return _svg(frame.low + 34, parts)


@frozen
class _Frame:
    """The geometry of a chart whose y axis has these ticks, and what is drawn around its values."""

    ticks: Sequence[float]
    tall: float
    top: float = 24.0

    @property
    def left(self) -> float:
        return LETTER * max(len(f"{tick:,.10g}") for tick in self.ticks) + 10

    @property
    def wide(self) -> float:
        return WIDTH - self.left - 8

    @property
    def low(self) -> float:
        return self.top + self.tall

    def high(self, value: float) -> float:
        return self.tall * value / self.ticks[-1]

    def up(self, value: float) -> float:
        return self.low - self.high(value)

    def parts(self, named: Sequence[Line], x: str, y: str) -> list[str]:
        """Draw the grid lines with their numbers, the names of the axes, and the legend."""
        parts = [_rule(self.left, self.up(tick), WIDTH - 8, self.up(tick)) for tick in self.ticks]
        parts += [_text(self.left - 6, self.up(tick) + 4, f"{tick:,.10g}", "end") for tick in self.ticks]
        parts += [_text(2, 10, y, "start"), _text(WIDTH - 8, self.low + 29, x, "end")]
        begins = LETTER * len(y) + 24
        for line in (line for line in named if line.label):
            parts += [_box(begins, 3, 12, 7, line.colour), _text(begins + 16, 10, _short(line.label), "start")]
            begins += LETTER * len(_short(line.label)) + 32
        return parts


def _ticks(values: Sequence[float], most: int) -> list[float]:
    """Return round numbers from 0 to above all values, in at most `most` steps; whole ones if all values are whole."""
    largest = max(values, default=0) or 1.0
    smallest = 0 if all(value == int(value) for value in values) else -3
    steps = (digit * 10.0**power for power in range(smallest, 300) for digit in (1, 2, 5))
    step = next(step for step in steps if largest <= step * most)
    return [step * number for number in range(math.ceil(largest / step) + 1)]


def _short(label: str) -> str:
    """Shorten a long name to its end, where the names of a fleet differ. The table below contains the whole name."""
    return label if len(label) <= LABEL_MAX else f"…{label[1 - LABEL_MAX :]}"


def _rule(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{FAINT}" stroke-opacity=".6"/>'


def _box(x: float, y: float, wide: float, high: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" fill="{colour}"/>'


def _text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(tall: float, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {tall:g}" aria-hidden="true"'
    return f'{head} font-size="11" fill="{INK}">{"".join(parts)}</svg>'


BARS_MAX = 40
"""The most bars in a chart. If there are more, half of these are the fullest, and the other half the emptiest."""

UNEVEN_MAX = 3
"""How many of the groups that are farthest from an even share are named on each level."""

_PROGRESS = {NUMBER: "at a sequence number", "SHARD_END": "finished (SHARD_END)"}


def page(said: Report, groups: Groups) -> str:
    """Return the page of a report. Names are escaped."""
    return TEMPLATES.get_template("page.html.j2").render(
        said=said,
        last=said.last,
        findings=findings(said),
        charts=_charts(said, groups),
        ends=len(said.last.workers) > BARS_MAX,
        half=BARS_MAX // 2,
        owner_changes=sum(change.owner_changes for change in said.changes),
    )


def findings(said: Report) -> tuple[str, ...]:
    """Return the findings that need attention, one sentence each."""
    last = said.last
    sentences = []
    if said.malformed:
        sentences.append(f"{said.malformed} rows cannot be read as leases; `leasehold leases` names them.")
    if last.unowned:
        have, it = ("has", "it") if last.unowned == 1 else ("have", "them")
        sentences.append(
            f"{last.unowned} of {last.working} unfinished leases {have} no owner: nobody reads what is in {it}."
        )
    if last.spread.width > 1:
        sentences.append(
            f"Workers hold between {last.spread.least} and {last.spread.most} leases; even would differ by one."
        )
    for level in last.levels:
        # The groups that are more than one lease away from a split in proportion to their workers.
        leases, workers = sum(group.leases for group in level), sum(group.workers for group in level)
        even = {group.path: leases * group.workers / workers for group in level} if workers else {}
        apart = [group for group in level if len(level) > 1 and abs(group.leases - even[group.path]) > 1]
        sentences += [
            f"Group {group_name(group.path)} holds {group.leases} leases; its {group.workers} of {workers} workers"
            f" would evenly hold {count(even[group.path])}."
            for group in sorted(apart, key=lambda each: -abs(each.leases - even[each.path]))[:UNEVEN_MAX]
        ]
    if said.least:
        sentences.append(f"{said.least} {'move' if said.least == 1 else 'moves'} would make it even, and no fewer.")
    if hot := [line.key for line in said.leases if line.hot]:
        sentences.append(f"Hot: {', '.join(hot[:UNEVEN_MAX])} carry more than {HOT:g} times the mean throughput.")
    return tuple(sentences)


def _charts(said: Report, groups: Groups) -> dict[str, Markup]:
    last = said.last
    nobody = [Bar("nobody", last.unowned, BAD)] if last.unowned else []
    # Outermost groups get colors in turn. The bars of a group's workers and inner groups share its color.
    hues = dict(zip((share.path for share in (last.levels or [()])[0]), cycle(COLOURS), strict=False))
    workers = [
        Bar(share.worker, share.leases, hues.get(path_of(share.worker, groups)[:1], COLOURS[0]))
        for share in last.workers
    ]
    colours = {"SHARD_END": COLOURS[2], NUMBER: COLOURS[0]}
    progress = [Bar(_PROGRESS.get(name, name), leases, colours.get(name, COLOURS[3])) for name, leases in last.progress]
    drawn = {"workers": bars([*_ends(workers), *nobody]), "held": _held(last, groups, hues), "progress": bars(progress)}
    for depth, level in enumerate(last.levels):
        rows = [Bar(group_name(share.path), share.leases, hues[share.path[:1]]) for share in level]
        drawn[f"level{depth}"] = bars([*_ends(rows), *nobody])
    begins = said.moments[0].at
    if said.changes:
        times = [moment.at - begins for moment in said.moments]
        spreads = [moment.distribution.spread for moment in said.moments]
        of_workers = (
            Line("most", tuple(spread.most for spread in spreads), COLOURS[1]),
            Line("mean", tuple(spread.mean for spread in spreads), COLOURS[0]),
            Line("least", tuple(spread.least for spread in spreads), COLOURS[2]),
            Line("without an owner", tuple(moment.distribution.unowned for moment in said.moments), BAD),
        )
        of_owners = (
            Line("moved", tuple(change.moved for change in said.changes), COLOURS[1]),
            Line("claimed", tuple(change.claimed for change in said.changes), COLOURS[0]),
            Line("freed", tuple(change.freed for change in said.changes), BAD),
        )
        drawn |= {"spread": lines(times, of_workers, "leases"), "churn": lines(times[1:], of_owners, "leases")}
    # One value of lag makes no curve. If no row reports its lag, show how long checkpoints have stood still.
    name, curve = ("lag", said.lags) if said.lags else ("stood", said.stood)
    if len(curve) > (name == "lag"):
        longest = Line("longest", tuple(lag.most for lag in curve), COLOURS[1])
        median = Line("median", tuple(lag.median for lag in curve), COLOURS[0])
        drawn[name] = lines([lag.at - begins for lag in curve], (longest, median), "seconds")
    # Safe as markup, because the charts escape their names.
    return {name: Markup(svg) for name, svg in drawn.items()}  # noqa: S704


def _ends(rows: Sequence[Bar]) -> Sequence[Bar]:
    if len(rows) <= BARS_MAX:
        return rows
    ordered = sorted(rows, key=lambda row: (-row.length, row.label))
    return ordered[: BARS_MAX // 2] + ordered[-BARS_MAX // 2 :]


def _held(last: Distribution, groups: Groups, hues: Mapping[tuple[str, ...], str]) -> str:
    """Draw how many workers hold how many leases, by outermost group."""
    places = range(last.spread.least, last.spread.most + 1)
    # If there are more groups than colors, don't distinguish groups.
    named = list(hues) if len(hues) <= len(COLOURS) else []
    counts = {path: dict.fromkeys(places, 0) for path in named or [()]}
    for share in last.workers:
        counts[path_of(share.worker, groups)[:1] if named else ()][share.leases] += 1
    layers = [
        Line(group_name(path) or "workers", tuple(workers.values()), hues.get(path, COLOURS[0]))
        for path, workers in counts.items()
    ]
    return stacks(places, layers, "leases held", "workers")
