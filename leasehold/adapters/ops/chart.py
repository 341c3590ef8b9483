"""Draws a curve over time as SVG. The colors and fonts come from the page that contains the SVG."""

import math
from collections.abc import Sequence
from html import escape

INK_COLOR, GRID_COLOR, CURVE_COLOR = "var(--ink)", "var(--faint)", "var(--c0)"
"""Colors, as variables of the page's style sheet, so that a chart is readable on light and on dark backgrounds."""

WIDTH, LETTER_WIDTH = 480.0, 6.2
"""The widths of a chart and of a wide letter, in units of the SVG."""

TOP, HEIGHT = 24.0, 110.0
"""The top and the height of the grid, in units of the SVG."""

POINTS_MAX = 100
"""A curve with more points than this is drawn without dots."""


def curve(times: Sequence[float], values: Sequence[float], y_label: str, event: str) -> str:
    """Draw a curve over time.

    Args:
        times: The time of each point, in seconds since an event.
        values: The value of each point.
        y_label: The label of the vertical axis.
        event: The name of the event, for the label of the horizontal axis.
    """
    last_time = max(times) or 1.0
    scale, unit = next(
        (scale, unit)
        for scale, unit in ((3600, "hours"), (60, "minutes"), (1, "seconds"))
        if last_time >= 3 * scale or scale == 1
    )
    y_ticks, bottom_edge = _ticks(values, 6), TOP + HEIGHT
    left_edge = LETTER_WIDTH * max(len(f"{y_tick:,.10g}") for y_tick in y_ticks) + 10
    plot_width = WIDTH - left_edge - 8

    def to_x(seconds: float) -> float:
        return left_edge + plot_width * seconds / last_time

    def to_y(value: float) -> float:
        return bottom_edge - HEIGHT * value / y_ticks[-1]

    # End the axis at the last point, not at a round number, so that the curve fills the width.
    ticks = [tick for tick in _ticks([last_time / scale], 9) if tick * scale <= last_time]
    elements = [_grid_line(left_edge, to_y(y_tick), WIDTH - 8, to_y(y_tick)) for y_tick in y_ticks]
    elements += [_text(left_edge - 6, to_y(y_tick) + 4, f"{y_tick:,.10g}", "end") for y_tick in y_ticks]
    elements += [_text(2, 10, y_label, "start"), _text(WIDTH - 8, bottom_edge + 29, f"{unit} since {event}", "end")]
    elements += [_text(to_x(tick * scale), bottom_edge + 14, f"{tick:,.10g}") for tick in ticks]
    points = [(to_x(time), to_y(value)) for time, value in zip(times, values, strict=True)]
    coordinates = " ".join(f"{x_position:.1f},{y_position:.1f}" for x_position, y_position in points)
    elements.append(f'<polyline points="{coordinates}" fill="none" stroke="{CURVE_COLOR}" stroke-width="1.7"/>')
    dot_positions = points if len(points) <= POINTS_MAX else []
    elements += [
        f'<circle cx="{x_position:.1f}" cy="{y_position:.1f}" r="2" fill="{CURVE_COLOR}"/>'
        for x_position, y_position in dot_positions
    ]
    svg_start = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {bottom_edge + 34:g}" aria-hidden="true"'
    )
    return f'{svg_start} font-size="11" fill="{INK_COLOR}">{"".join(elements)}</svg>'


def _ticks(values: Sequence[float], steps_max: int) -> list[float]:
    """Return round numbers from 0 up to at least the largest value, in at most `steps_max` steps.

    If all values are whole numbers, so are the returned numbers.
    """
    largest = max(values, default=0) or 1.0
    smallest_power = 0 if all(value == int(value) for value in values) else -3
    steps = (digit * 10.0**power for power in range(smallest_power, 300) for digit in (1, 2, 5))
    step = next(step for step in steps if largest <= step * steps_max)
    return [step * number for number in range(math.ceil(largest / step) + 1)]


def _grid_line(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="{GRID_COLOR}" stroke-opacity=".6"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
