"""Charts as SVG that takes its colours and its type from the page it stands in.

Rule 1: colours are drawn as stand-ins that no design would use, and become the page's CSS variables,
so that one chart is readable on light and on dark. Rule 2: names are text, never formulas or markup.
"""

import io
import re
from collections.abc import Sequence
from typing import Any

from attrs import field, frozen
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from leasehold.stores.printable import printable

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
