"""Small charts as SVG text: bars, intervals, lines and dots, for pages that load nothing.

Colours come from the page through `STYLE`, so that a chart follows light and dark. Every mark has
its exact number as a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 680
STYLE = """
svg.chart { width: 100%; max-width: 680px; height: auto; font: 12px system-ui, sans-serif; }
svg.chart text { fill: currentColor; }
svg.chart .axis { stroke: currentColor; stroke-opacity: .18; }
svg.chart .origin { stroke: currentColor; stroke-opacity: .6; }
svg.chart .whisker { stroke: currentColor; stroke-opacity: .75; stroke-width: 1.5; }
svg.chart .s0 { --c: light-dark(#2563eb, #7aa2ff); }
svg.chart .s1 { --c: light-dark(#d97706, #f5b04c); }
svg.chart .s2 { --c: light-dark(#0d9488, #4fd1c5); }
svg.chart .s3 { --c: light-dark(#be185d, #f472b6); }
svg.chart .s4 { --c: light-dark(#6d28d9, #c4b5fd); }
svg.chart .mark { fill: var(--c); }
svg.chart .line { fill: none; stroke: var(--c); stroke-width: 2; }
svg.chart .band { fill: var(--c); fill-opacity: .18; }
svg.chart .near { fill: currentColor; fill-opacity: .07; }
"""
_COLOURS = 5
_RIGHT, _AXIS, _LEGEND = 58, 30, 24
_LONGEST_LABEL = 30
_ROOM_FOR_A_NUMBER = 36


@dataclass(frozen=True, slots=True)
class Point:
    """A number with, perhaps, its interval."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def top(self) -> float:
        return self.value if self.high is None else self.high

    def __str__(self) -> str:
        interval = "" if self.low is None else f" ({self.low:.3f} to {self.high:.3f})"
        return f"{self.label}: {self.value:.3f}{interval}"


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[Point]


def bars(series: Sequence[Series], title: str) -> str:
    """Horizontal bars from zero with whiskers, the series side by side under each label."""
    labels = list(dict.fromkeys(point.label for one in series for point in one.points))
    left, bar, gap = _left_margin(labels), 14, 12
    row = len(series) * bar + gap
    ticks = _ticks(0.0, max(point.top for one in series for point in one.points))
    scale = (WIDTH - left - _RIGHT) / ticks[-1]
    bottom = _LEGEND + len(labels) * row
    marks = _vertical_grid(ticks, left, scale, bottom)
    for number, label in enumerate(labels):
        y = _LEGEND + number * row
        marks.append(_text(left - 8, y + (row - gap) / 2 + 4, _short(label), "end"))
        for place, one in enumerate(series):
            for point in (point for point in one.points if point.label == label):
                inner = y + place * bar
                shape = f'x="{left}" y="{inner + 1:.1f}" width="{point.value * scale:.1f}"'
                marks.append(
                    f'<g class="{_colour(place)}">{_title(one.name, point)}'
                    f'<rect class="mark" {shape} height="{bar - 3}" rx="2"/></g>'
                )
                if point.low is not None:
                    marks.append(_whisker(left, scale, 0.0, point, inner + bar / 2 - 0.5))
                end = left + point.top * scale + 6
                marks.append(_text(end, inner + bar - 3, f"{point.value:.2f}", "start"))
    return _chart(title, bottom + _AXIS, [*_legend(series), *marks])


def intervals(points: Sequence[Point], title: str, origin: float = 0.0) -> str:
    """A dot and its interval for each label, beside a line at the origin."""
    left, row = _left_margin([point.label for point in points]), 22
    lows = [point.value if point.low is None else point.low for point in points]
    ticks = _ticks(min(origin, *lows), max(origin, *(point.top for point in points)))
    scale = (WIDTH - left - _RIGHT) / (ticks[-1] - ticks[0])
    bottom = 8 + len(points) * row
    marks = _vertical_grid(ticks, left, scale, bottom, top=4)
    x = left + (origin - ticks[0]) * scale
    marks.append(f'<line class="origin" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{bottom}"/>')
    for number, point in enumerate(points):
        y = 8 + (number + 0.5) * row
        marks.append(_text(left - 8, y + 4, _short(point.label), "end"))
        if point.low is not None:
            marks.append(_whisker(left, scale, ticks[0], point, y))
        x = left + (point.value - ticks[0]) * scale
        dot = f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
        marks.append(f'<g class="s0">{_title("", point)}{dot}</g>')
        marks.append(_text(WIDTH - 4, y + 4, f"{point.value:+.2f}", "end"))
    return _chart(title, bottom + _AXIS, marks)


def lines(series: Sequence[Series], title: str, below: str) -> str:
    """A line for each series over the labels of the longest, with a band where there is one."""
    labels = [point.label for point in max(series, key=lambda one: len(one.points)).points]
    left, height = 48, 190
    ticks = _ticks(0.0, max(point.top for one in series for point in one.points))
    scale = height / ticks[-1]
    step = (WIDTH - left - _RIGHT) / max(len(labels) - 1, 1)
    bottom = _LEGEND + height
    marks = _level_grid(ticks, left, scale, bottom)
    marks += [
        _text(left + i * step, bottom + 18, _short(x), "middle") for i, x in enumerate(labels)
    ]
    marks.append(_text(left + (WIDTH - left - _RIGHT) / 2, bottom + 38, below, "middle"))
    for place, one in enumerate(series):
        at = [(left + i * step, point) for i, point in enumerate(one.points)]
        band = [f"{x:.1f},{bottom - p.top * scale:.1f}" for x, p in at if p.low is not None]
        band += [f"{x:.1f},{bottom - p.low * scale:.1f}" for x, p in at[::-1] if p.low is not None]
        path = " ".join(f"{x:.1f},{bottom - p.value * scale:.1f}" for x, p in at)
        dots = "".join(
            f'<g>{_title(one.name, p)}<circle class="mark" cx="{x:.1f}" '
            f'cy="{bottom - p.value * scale:.1f}" r="3.5"/></g>'
            for x, p in at
        )
        shade = f'<polygon class="band" points="{" ".join(band)}"/>' if band else ""
        line = f'<polyline class="line" points="{path}"/>'
        marks.append(f'<g class="{_colour(place)}">{shade}{line}{dots}</g>')
    return _chart(title, bottom + 48, [*_legend(series), *marks])


def against(series: Sequence[Series], title: str, below: str, level: float = 1.0) -> str:
    """Dots with upright whiskers over the labels, beside a line at the level to compare with."""
    labels = list(dict.fromkeys(point.label for one in series for point in one.points))
    left, height = 48, 190
    points = [point for one in series for point in one.points]
    lows = [point.value if point.low is None else point.low for point in points]
    ticks = _ticks(min(level, *lows), max(level, *(point.top for point in points)))
    scale = height / (ticks[-1] - ticks[0])
    bottom = _LEGEND + height
    step = (WIDTH - left - _RIGHT) / len(labels)
    marks = [*_level_grid(ticks, left, scale, bottom)]
    y = bottom - (level - ticks[0]) * scale
    end = WIDTH - _RIGHT
    marks.append(f'<line class="origin" x1="{left}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for number, label in enumerate(labels):
        marks.append(_text(left + (number + 0.5) * step, bottom + 18, _short(label), "middle"))
    marks.append(_text(left + (end - left) / 2, bottom + 38, below, "middle"))
    apart = min(46.0, 0.85 * step / len(series))  # whiskers of one label stand side by side
    for place, one in enumerate(series):
        aside = (place - (len(series) - 1) / 2) * apart
        inner = []
        for point in one.points:
            x = left + (labels.index(point.label) + 0.5) * step + aside
            y = bottom - (point.value - ticks[0]) * scale
            if point.low is not None:
                inner.append(_upright_whisker(x, bottom, scale, ticks[0], point))
            dot = f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
            inner.append(f"<g>{_title(one.name, point)}{dot}</g>")
            if apart >= _ROOM_FOR_A_NUMBER:
                inner.append(_text(x + 7, y + 4, f"{point.value:.2f}", "start"))
        marks.append(f'<g class="{_colour(place)}">{"".join(inner)}</g>')
    return _chart(title, bottom + 48, [*_legend(series), *marks])


def scatter(
    series: Sequence[tuple[str, Sequence[tuple[str, float, float]]]],
    title: str,
    names: tuple[str, str],
    margin: float,
) -> str:
    """Points (label, x, y) on equal axes, the diagonal, and a band of this share around it."""
    values = [value for _, points in series for _, x, y in points for value in (x, y)]
    ticks = _ticks(0.0, max(values))
    left, size = 58, 360
    scale = size / ticks[-1]
    bottom = _LEGEND + size

    def at(x: float, y: float) -> str:
        return f"{left + x * scale:.1f},{bottom - y * scale:.1f}"

    most = ticks[-1]
    band = [at(0, 0), at(most / (1 + margin), most), at(most, most), at(most, most * (1 - margin))]
    marks = [f'<polygon class="near" points="{" ".join(band)}"/>']
    for tick in ticks:
        x, y = left + tick * scale, bottom - tick * scale
        marks.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{_LEGEND}" y2="{bottom}"/>')
        marks.append(
            f'<line class="axis" x1="{left}" x2="{left + size}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        marks.append(_text(x, bottom + 18, f"{tick:g}", "middle"))
        marks.append(_text(left - 8, y + 4, f"{tick:g}", "end"))
    marks.append(f'<polyline class="origin" points="{at(0, 0)} {at(most, most)}"/>')
    for place, (_, points) in enumerate(series):
        for label, x, y in points:
            tip = escape(f"{label}: {names[0]} {x:.3f}, {names[1]} {y:.3f}")
            cx, cy = at(x, y).split(",")
            dot = f'<circle class="mark" cx="{cx}" cy="{cy}" r="4" fill-opacity=".8"/>'
            marks.append(f'<g class="{_colour(place)}"><title>{tip}</title>{dot}</g>')
    marks.append(_text(left + size / 2, bottom + 38, names[0], "middle"))
    marks.append(_text(left + size + 10, _LEGEND + 12, f"height: {names[1]}", "start"))
    legend = _legend([Series(name, []) for name, _ in series])
    return _chart(title, bottom + 48, [*legend, *marks])


def _ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers that enclose the range."""
    span = max(high - low, 1e-9)
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = max(size * power for size in (1.0, 2.0, 5.0) if size * power <= span / 4)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def _vertical_grid(
    ticks: Sequence[float], left: float, scale: float, bottom: float, top: float = _LEGEND
) -> list[str]:
    marks = []
    for tick in ticks:
        x = left + (tick - ticks[0]) * scale
        marks.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom:.1f}"/>')
        marks.append(_text(x, bottom + 18, f"{tick:g}", "middle"))
    return marks


def _level_grid(ticks: Sequence[float], left: float, scale: float, bottom: float) -> list[str]:
    marks, end = [], WIDTH - _RIGHT
    for tick in ticks:
        y = bottom - (tick - ticks[0]) * scale
        marks.append(f'<line class="axis" x1="{left}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(_text(left - 8, y + 4, f"{tick:g}", "end"))
    return marks


def _upright_whisker(x: float, bottom: float, scale: float, start: float, point: Point) -> str:
    assert point.low is not None
    low, high = (bottom - (value - start) * scale for value in (point.low, point.top))
    ends = "".join(f"M{x - 3:.1f} {y:.1f}H{x + 3:.1f}" for y in (low, high))
    return f'<path class="whisker" d="M{x:.1f} {low:.1f}V{high:.1f}{ends}"/>'


def _whisker(left: float, scale: float, start: float, point: Point, y: float) -> str:
    assert point.low is not None
    low, high = (left + (value - start) * scale for value in (point.low, point.top))
    ends = "".join(f"M{x:.1f} {y - 3:.1f}V{y + 3:.1f}" for x in (low, high))
    return f'<path class="whisker" d="M{low:.1f} {y:.1f}H{high:.1f}{ends}"/>'


def _legend(series: Sequence[Series]) -> list[str]:
    marks, x = [], 4.0
    for place, one in enumerate(series):
        square = f'<rect class="mark" x="{x:.1f}" y="4" width="10" height="10" rx="2"/>'
        marks.append(
            f'<g class="{_colour(place)}">{square}</g>{_text(x + 15, 13, one.name, "start")}'
        )
        x += 34 + 7 * len(one.name)
    return marks


def _left_margin(labels: Sequence[str]) -> float:
    return 14 + 7 * max(len(_short(label)) for label in labels)


def _short(label: str) -> str:
    return label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…"


def _colour(place: int) -> str:
    return f"s{place % _COLOURS}"


def _title(series: str, point: Point) -> str:
    return f"<title>{escape(f'{series}, {point}' if series else str(point))}</title>"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _chart(title: str, height: float, marks: Sequence[str]) -> str:
    box = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    label = f'role="img" aria-label="{escape(title)}"'
    return f'<svg class="chart" {box} {label}>{"".join(marks)}</svg>'
