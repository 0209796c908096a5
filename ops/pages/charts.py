"""Charts of reports: data, and the place of each part of the picture. Pure.

Drawn by `line_chart` and `bar_chart` of the console's `svg.html`, in its colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

WIDTH, HEIGHT = 460, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 44
LEGEND_LINE = 18
COLOURS = 8
BAR_LINE, BAR_RIGHT = 24, 90
LEAST_NAME, MOST_NAME = 20, 60
"""Characters of the names of bars; longer ones are cut."""
CHARACTER_WIDTH = 7.2
LEAST_LOGARITHM = 1e-4
"""A logarithmic axis has no zero: what is below is drawn here."""
MAX_TICKS = 6

Point = tuple[float, float]


@dataclass(frozen=True)
class ChartLine:
    """A series of points, in order of x."""

    name: str
    points: Sequence[Point]


@dataclass(frozen=True)
class LineChart:
    kind: ClassVar[str] = "lines"
    title: str
    x_label: str
    y_label: str
    lines: Sequence[ChartLine]
    is_logarithmic: bool = False
    """The x axis."""
    target: float | None = None
    """Of x: a dashed line."""
    y_most: float | None = None
    """Where the y axis ends; None: at the most of the points."""
    has_diagonal: bool = False
    """The line y = x."""


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    words: str
    series: int = 0
    """The number of its colour."""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class BarChart:
    """Figures below each other, on one scale that begins at 0."""

    kind: ClassVar[str] = "bars"
    title: str
    bars: Sequence[Bar]
    ideal: float | None = None
    """A dashed line."""


Chart = LineChart | BarChart


@dataclass(frozen=True)
class Tick:
    at: float
    words: str


@dataclass(frozen=True)
class DrawnLine:
    name: str
    colour: int
    points: str
    legend_y: float


@dataclass(frozen=True)
class DrawnLines:
    """A line chart in the picture's units."""

    chart: LineChart
    height: float
    left: float = field(default=LEFT, init=False)
    right: float = field(default=WIDTH - RIGHT, init=False)
    top: float = field(default=TOP, init=False)
    bottom: float = field(default=HEIGHT - BOTTOM, init=False)
    width: float = field(default=WIDTH, init=False)
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    lines: Sequence[DrawnLine]
    target_x: float | None
    diagonal: str


def drawn_lines(chart: LineChart) -> DrawnLines:
    """Where everything lies. Points that are not finite are left out."""
    kept = [
        ChartLine(line.name, [(x, y) for x, y in line.points if math.isfinite(x) and math.isfinite(y)])
        for line in chart.lines
    ]
    xs = [_x(chart, x) for line in kept for x, _ in line.points] or [0.0, 1.0]
    least_x, most_x = min(xs), max(xs)
    most_x = most_x if most_x > least_x else least_x + 1.0
    ys = [y for line in kept for _, y in line.points]
    most_y = chart.y_most or max([*ys, 0.0]) or 1.0
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def across(x: float) -> float:
        return LEFT + (x - least_x) / (most_x - least_x) * inner_width

    def down(y: float) -> float:
        return TOP + (1 - min(y, most_y) / most_y) * inner_height

    lines = [
        DrawnLine(
            line.name,
            number % COLOURS + 1,
            " ".join(f"{across(_x(chart, x)):.1f},{down(y):.1f}" for x, y in line.points),
            HEIGHT + LEGEND_LINE * number + 4,
        )
        for number, line in enumerate(kept)
    ]
    target = None if chart.target is None else _x(chart, chart.target)
    low, high = max(0.0, least_x), min(most_x, most_y)
    diagonal = f"{across(low):.1f},{down(low):.1f} {across(high):.1f},{down(high):.1f}"
    return DrawnLines(
        chart,
        HEIGHT + LEGEND_LINE * len(lines) + 4,
        [Tick(across(x), words) for x, words in _x_ticks(chart, least_x, most_x)],
        [Tick(down(y), words) for y, words in _ticks(0.0, most_y)],
        lines,
        across(target) if target is not None and least_x <= target <= most_x else None,
        diagonal if chart.has_diagonal else "",
    )


def _x(chart: LineChart, x: float) -> float:
    return math.log10(max(x, LEAST_LOGARITHM)) if chart.is_logarithmic else x


def _x_ticks(chart: LineChart, least: float, most: float) -> Iterator[tuple[float, str]]:
    if not chart.is_logarithmic:
        yield from _ticks(least, most)
        return
    if most - least < 1:  # where no power of ten may lie
        for value, words in _ticks(10**least, 10**most):
            yield math.log10(value), words
        return
    for power in range(math.ceil(least), math.floor(most) + 1):
        yield float(power), _words(10.0**power)


def _ticks(least: float, most: float) -> Iterator[tuple[float, str]]:
    """Round numbers between both, at most `MAX_TICKS`."""
    span = most - least
    step = 10.0 ** math.floor(math.log10(span / 2))
    step *= next(factor for factor in (1, 2, 5, 10, 20) if span / (step * factor) <= MAX_TICKS - 1)
    first = math.ceil(least / step - 1e-9)
    for number in range(first, math.floor(most / step + 1e-9) + 1):
        yield number * step, _words(number * step)


def _words(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


@dataclass(frozen=True)
class DrawnBar:
    bar: Bar
    name: str
    y: float
    colour: int
    end: float
    low: float | None
    high: float | None
    words_x: float


@dataclass(frozen=True)
class DrawnBars:
    chart: BarChart
    height: float
    bars: Sequence[DrawnBar]
    ideal_x: float | None
    start: float
    width: float = field(default=2 * WIDTH, init=False)


def drawn_bars(chart: BarChart) -> DrawnBars:
    names = [
        bar.name if len(bar.name) <= MOST_NAME else f"{bar.name[: MOST_NAME - 1]}…" for bar in chart.bars
    ]
    start = CHARACTER_WIDTH * max([LEAST_NAME, *map(len, names)]) + 12
    room = 2 * WIDTH - start - BAR_RIGHT
    reach = [bar.value if bar.high is None else max(bar.value, bar.high) for bar in chart.bars]
    scale = room / (max([*reach, chart.ideal or 0.0]) or 1.0)

    def across(value: float) -> float:
        return start + value * scale

    bars = []
    for number, (bar, name) in enumerate(zip(chart.bars, names, strict=True)):
        low = None if bar.low is None else across(bar.low)
        high = None if bar.high is None else across(bar.high)
        end = across(bar.value)
        bars.append(
            DrawnBar(
                bar,
                name,
                BAR_LINE * number + 4,
                bar.series % COLOURS + 1,
                end,
                low,
                high,
                max(end, high or 0) + 6,
            )
        )
    ideal_x = None if chart.ideal is None else across(chart.ideal)
    return DrawnBars(chart, BAR_LINE * len(bars) + 8, bars, ideal_x, start)
