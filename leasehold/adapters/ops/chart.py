"""Draws a curve over time as SVG, which takes its colors and fonts from the page."""

import math
from collections.abc import Sequence
from html import escape

INK, FAINT, CURVE = "var(--ink)", "var(--faint)", "var(--c0)"
"""Colors are variables of the page's style sheet, which makes a chart readable on light and dark backgrounds."""

WIDTH, LETTER_WIDTH = 480.0, 6.2
"""The widths of a chart and of a wide letter, in units of the drawing."""

TOP, HEIGHT = 24.0, 110.0
"""The top and the height of the grid, in units of the drawing."""

POINTS_MAX = 100
"""A curve with more points than this is drawn without dots."""


def curve(times: Sequence[float], values: Sequence[float], y: str, since: str) -> str:
    """Draw a curve over the time in seconds `since` an event.

    Args:
        times: The seconds of the points.
        values: The values of the points.
        y: The name of the vertical axis.
        since: The event, for the name of the horizontal axis.
    """
    last_time = max(times) or 1.0
    scale, unit = next(
        (scale, unit)
        for scale, unit in ((3600, "hours"), (60, "minutes"), (1, "seconds"))
        if last_time >= 3 * scale or scale == 1
    )
    numbers, bottom = _ticks(values, 6), TOP + HEIGHT
    left = LETTER_WIDTH * max(len(f"{number:,.10g}") for number in numbers) + 10
    plot_width = WIDTH - left - 8

    def to_x(seconds: float) -> float:
        return left + plot_width * seconds / last_time

    def to_y(value: float) -> float:
        return bottom - HEIGHT * value / numbers[-1]

    # End the axis at the last point, not at a round number, so that the curve fills the width.
    ticks = [tick for tick in _ticks([last_time / scale], 9) if tick * scale <= last_time]
    elements = [_rule(left, to_y(number), WIDTH - 8, to_y(number)) for number in numbers]
    elements += [_text(left - 6, to_y(number) + 4, f"{number:,.10g}", "end") for number in numbers]
    elements += [_text(2, 10, y, "start"), _text(WIDTH - 8, bottom + 29, f"{unit} since {since}", "end")]
    elements += [_text(to_x(tick * scale), bottom + 14, f"{tick:,.10g}") for tick in ticks]
    points = [(to_x(time), to_y(value)) for time, value in zip(times, values, strict=True)]
    coordinates = " ".join(f"{x_position:.1f},{y_position:.1f}" for x_position, y_position in points)
    elements.append(f'<polyline points="{coordinates}" fill="none" stroke="{CURVE}" stroke-width="1.7"/>')
    dots = points if len(points) <= POINTS_MAX else []
    elements += [
        f'<circle cx="{x_position:.1f}" cy="{y_position:.1f}" r="2" fill="{CURVE}"/>' for x_position, y_position in dots
    ]
    svg_start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {bottom + 34:g}" aria-hidden="true"'
    return f'{svg_start} font-size="11" fill="{INK}">{"".join(elements)}</svg>'


def _ticks(values: Sequence[float], steps_max: int) -> list[float]:
    """Return round numbers from 0 up to at least the largest value, in at most `steps_max` steps.

    If all values are whole numbers, so are the returned ones.
    """
    largest = max(values, default=0) or 1.0
    smallest = 0 if all(value == int(value) for value in values) else -3
    steps = (digit * 10.0**power for power in range(smallest, 300) for digit in (1, 2, 5))
    step = next(step for step in steps if largest <= step * steps_max)
    return [step * number for number in range(math.ceil(largest / step) + 1)]


def _rule(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{FAINT}" stroke-opacity=".6"/>'


def _text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
