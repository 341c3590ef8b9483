"""The report as one page of HTML that needs nothing else: no network, no scripts.

The templates of the pages, and the form of numbers, times and names in them.

Charts as SVG that takes its colours and its type from the page it stands in.

Rule 1: colours are drawn as stand-ins that no design would use, and become the page's CSS variables,
so that one chart is readable on light and on dark. Rule 2: names are text, never formulas or markup.
"""

import io
import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import cycle
from typing import Any

from attrs import field, frozen
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from leasehold.adapters.report.distribution import NUMBER, Distribution, GroupShare, Share
from leasehold.adapters.report.report import HOT, CheckpointLag, Moment, Report, SnapshotChange
from leasehold.balancer.rules.shares import Groups, path_of
from leasehold.stores.printable import printable


def group_name(path: tuple[str, ...]) -> str:
    """How a group is called; workers whose names tell none are one group."""
    return " / ".join(name or "(no group)" for name in path)


def count(number: float) -> str:
    """A number with two decimals where it has any."""
    return f"{number:,.0f}" if math.isclose(number, round(number)) else f"{number:,.2f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s"


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _seen(value: object) -> object:
    """Names as the eye sees them; charts have been drawn of such."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else printable(value)


TEMPLATES = Environment(
    loader=PackageLoader("leasehold.adapters.report", "."), autoescape=True, undefined=StrictUndefined, finalize=_seen
)
"""All pages have one look: `style.html.j2`."""

TEMPLATES.filters |= {"name": group_name, "count": count, "seconds": _seconds, "clock": _clock}


INK, FAINT, BAD = "#00fe01", "#00fe02", "#00fe03"
COLOURS = tuple(f"#00fe1{digit}" for digit in range(8))
_VARIABLES = {INK: "ink", FAINT: "faint", BAD: "bad"} | {colour: f"c{n}" for n, colour in enumerate(COLOURS)}

WIDTH, ROW, MARGIN = 6.4, 0.27, 0.75
"""Inches, at 72 units each."""

LABEL_MAX = 26

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "leasehold",
    "text.parse_math": False,  # rule 2: a dollar in a name is a dollar
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


@frozen
class Bar:
    """A bar: its label, length and colour."""

    label: str = field(converter=printable)
    length: float
    colour: str


@frozen
class Line:
    """A line of a chart over time."""

    label: str = field(converter=printable)
    values: tuple[float, ...]
    colour: str


def bars(rows: Sequence[Bar]) -> str:
    """Lying bars of leases, the first on top, each with its number."""
    with rc_context(_STYLE):
        figure, axes = _axes(MARGIN + ROW * len(rows))
        places = range(len(rows))
        drawn = axes.barh(places, [row.length for row in rows], color=[row.colour for row in rows], height=0.7)
        axes.bar_label(drawn, [f"{row.length:,g}" for row in rows], padding=4)
        axes.set_yticks(places, [_short(row.label) for row in rows])
        axes.invert_yaxis()
        axes.margins(x=0.12, y=0.02)
        axes.set_xlabel("leases")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="x", alpha=0.5)
        axes.tick_params(axis="y", length=0)
        return _svg(figure)


def stacks(places: Sequence[int], layers: Sequence[Line], x: str, y: str) -> str:
    """Standing bars, one at each place, made of one layer for each line."""
    with rc_context(_STYLE):
        figure, axes = _axes(3.2)
        below = [0.0] * len(places)
        for layer in layers:
            axes.bar(places, layer.values, bottom=below, color=layer.colour, width=0.8, label=_short(layer.label))
            below = [low + value for low, value in zip(below, layer.values, strict=True)]
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return _finished(figure, axes, x, y)


def lines(times: Sequence[float], rows: Sequence[Line], y: str, since: str = "the first snapshot") -> str:
    """A chart with a line for each row, over seconds `since` something; a line without a label is alone."""
    with rc_context(_STYLE):
        figure, axes = _axes(2.8)
        scale, unit = _scale(max(times))
        for row in rows:
            axes.plot(
                [time / scale for time in times],
                row.values,
                color=row.colour,
                label=row.label or None,
                marker=".",
                linewidth=1.8,
            )
        axes.set_ylim(bottom=0)
        return _finished(figure, axes, f"{unit} since {since}", y)


def _scale(seconds: float) -> tuple[int, str]:
    return next(
        (scale, unit)
        for scale, unit in ((3600, "hours"), (60, "minutes"), (1, "seconds"))
        if seconds >= 3 * scale or scale == 1
    )


def _axes(inches: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, inches), layout="constrained")
    figure.patch.set_visible(False)
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)
    return figure, axes


def _finished(figure: Figure, axes: Axes, x: str, y: str) -> str:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.5)
    if any(axes.get_legend_handles_labels()):
        figure.legend(loc="outside upper left", ncols=4)
    return _svg(figure)


def _short(label: str) -> str:
    """The end of a long name, since names of one fleet differ there; the table has the whole."""
    return label if len(label) <= LABEL_MAX else f"…{label[1 - LABEL_MAX :]}"


def _svg(figure: Figure) -> str:
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    text = drawn.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # several charts on one page would share these
    text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', text, count=1)
    return re.sub("#00fe[01][0-9]", lambda found: f"var(--{_VARIABLES[found[0]]})", text)


BARS_MAX = 40
"""More bars than this are shown by their ends: the fullest and the emptiest half as many each."""

UNEVEN_MAX = 3
"""How many of the groups farthest from an even share are named, on each level."""

_PROGRESS = {NUMBER: "at a sequence number", "SHARD_END": "finished (SHARD_END)"}


def page(said: Report, groups: Groups) -> str:
    """The page; names in it are text, whatever they look like."""
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
    """The findings that need attention, one sentence each; none where all is even."""
    last = said.last
    found = []
    if said.malformed:
        found.append(f"{said.malformed} rows cannot be read as leases; `leasehold leases` names them.")
    if last.unowned:
        have, it = ("has", "it") if last.unowned == 1 else ("have", "them")
        found.append(
            f"{last.unowned} of {last.working} unfinished leases {have} no owner: nobody reads what is in {it}."
        )
    if last.spread.width > 1:
        found.append(
            f"Workers hold between {last.spread.least} and {last.spread.most} leases; even would differ by one."
        )
    for level in last.levels:
        found += _uneven(level)
    if said.least:
        found.append(f"{said.least} {'move' if said.least == 1 else 'moves'} would make it even, and no fewer.")
    if hot := [line.key for line in said.leases if line.hot]:
        found.append(f"Hot: {', '.join(hot[:UNEVEN_MAX])} carry more than {HOT:g} times the mean throughput.")
    return tuple(found)


def _uneven(level: Sequence[GroupShare]) -> list[str]:
    """Groups apart by more than one lease that an even split, by numbers of workers, would not leave."""
    leases, workers = sum(each.leases for each in level), sum(each.workers for each in level)
    shares = {each.path: leases * each.workers / workers for each in level} if workers else {}
    apart = [each for each in level if len(level) > 1 and abs(each.leases - shares[each.path]) > 1]
    farthest = sorted(apart, key=lambda each: -abs(each.leases - shares[each.path]))[:UNEVEN_MAX]
    return [
        f"Group {group_name(each.path)} holds {each.leases} leases; its {each.workers} of {workers} workers"
        f" would evenly hold {count(shares[each.path])}."
        for each in farthest
    ]


def _charts(said: Report, groups: Groups) -> dict[str, Markup]:
    drawn = {"workers": _workers(said.last, groups), "held": _held(said.last, groups), "progress": _progress(said.last)}
    drawn |= {f"level{depth}": _level(said.last, depth) for depth in range(len(said.last.levels))}
    if said.changes:
        times = [moment.at - said.moments[0].at for moment in said.moments]
        drawn |= {"spread": _spreads(times, said.moments), "churn": _churn(times[1:], said.changes)}
    if len(said.lags) > 1:
        drawn["lag"] = _behind(said, said.lags)
    elif said.stood and not said.lags:
        drawn["stood"] = _behind(said, said.stood)
    # The charts escape the names in them.
    return {name: Markup(svg) for name, svg in drawn.items()}  # noqa: S704


def _behind(said: Report, lags: Sequence[CheckpointLag]) -> str:
    since = [lag.at - said.moments[0].at for lag in lags]
    most = Line("longest", tuple(lag.most for lag in lags), COLOURS[1])
    return lines(since, (most, Line("median", tuple(lag.median for lag in lags), COLOURS[0])), "seconds")


def _ends(rows: Sequence[Bar]) -> Sequence[Bar]:
    if len(rows) <= BARS_MAX:
        return rows
    ordered = sorted(rows, key=lambda row: (-row.length, row.label))
    return ordered[: BARS_MAX // 2] + ordered[-BARS_MAX // 2 :]


def _hues(last: Distribution) -> dict[tuple[str, ...], str]:
    """A colour for each outermost group, in turn."""
    outermost = last.levels[0] if last.levels else ()
    return dict(zip((each.path for each in outermost), cycle(COLOURS), strict=False))


def _nobody(last: Distribution) -> list[Bar]:
    return [Bar("nobody", last.unowned, BAD)] if last.unowned else []


def _level(last: Distribution, depth: int) -> str:
    hues = _hues(last)
    rows = [Bar(group_name(each.path), each.leases, hues[each.path[:1]]) for each in last.levels[depth]]
    return bars([*_ends(rows), *_nobody(last)])


def _workers(last: Distribution, groups: Groups) -> str:
    hues = _hues(last)
    rows = [Bar(each.worker, each.leases, _hue(hues, each, groups)) for each in last.workers]
    return bars([*_ends(rows), *_nobody(last)])


def _hue(hues: dict[tuple[str, ...], str], share: Share, groups: Groups) -> str:
    return hues.get(path_of(share.worker, groups)[:1], COLOURS[0])


def _held(last: Distribution, groups: Groups) -> str:
    """How many workers hold how many leases, by outermost group."""
    places = range(last.spread.least, last.spread.most + 1)
    colours = _hues(last) or {(): COLOURS[0]}
    # With more groups than colours, colours would not tell the groups apart.
    named = list(colours) if len(colours) <= len(COLOURS) else []
    counts = {path: dict.fromkeys(places, 0) for path in named or [()]}
    for share in last.workers:
        counts[path_of(share.worker, groups)[:1] if named else ()][share.leases] += 1
    layers = [
        Line(group_name(path) or "workers", tuple(held.values()), colours.get(path, COLOURS[0]))
        for path, held in counts.items()
    ]
    return stacks(places, layers, "leases held", "workers")


def _progress(last: Distribution) -> str:
    colours = {"SHARD_END": COLOURS[2], NUMBER: COLOURS[0]}
    return bars([Bar(_PROGRESS.get(name, name), count, colours.get(name, COLOURS[3])) for name, count in last.progress])


def _spreads(times: Sequence[float], moments: Sequence[Moment]) -> str:
    spreads = [moment.distribution.spread for moment in moments]
    rows = (
        Line("most", tuple(spread.most for spread in spreads), COLOURS[1]),
        Line("mean", tuple(spread.mean for spread in spreads), COLOURS[0]),
        Line("least", tuple(spread.least for spread in spreads), COLOURS[2]),
        Line("without an owner", tuple(moment.distribution.unowned for moment in moments), BAD),
    )
    return lines(times, rows, "leases")


def _churn(times: Sequence[float], changed: Sequence[SnapshotChange]) -> str:
    rows = (
        Line("moved", tuple(change.moved for change in changed), COLOURS[1]),
        Line("claimed", tuple(change.claimed for change in changed), COLOURS[0]),
        Line("freed", tuple(change.freed for change in changed), BAD),
    )
    return lines(times, rows, "leases")
