"""Charts as SVG text: bars, intervals, lines, dots and scatter plots, drawn by matplotlib.

Each function returns a `Chart`; `inline` renders one for an HTML page and `picture` several of
them, one below the other, as a file of its own. Colours are written into every element and the
background is white, so that browsers, librsvg and README viewers show the same. The same numbers
give the same bytes (with the same version of matplotlib), and each chart lists its numbers in a
`<desc>` element. matplotlib is imported when something is drawn: it takes a second.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 7.2  # inches, of every chart
_MAX_LABEL = 30  # characters
_LEGEND_WIDTH = 85  # characters in a row
_MAX_LABELLED_DOTS = 12  # more of them and their numbers would overlap
_INK, _SOFT, _GRID = "#1c2330", "#5b6675", "#dfe4ea"
_COLOURS = (
    *("#2563eb", "#d97706", "#0d9488", "#be185d", "#6d28d9"),
    *("#64748b", "#65a30d", "#7c2d12"),  # a bench has up to eight arms
)
_RC: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text: selectable, and small
    "svg.hashsalt": "leadout",  # ids are the same in every run
    "text.parse_math": False,  # a label may contain dollar signs
    "text.color": _INK,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # matplotlib brings it along
    "font.size": 9,
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.12,
    "axes.edgecolor": _SOFT,
    "axes.labelcolor": _SOFT,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "xtick.color": _SOFT,
    "xtick.labelcolor": _INK,
    "ytick.color": _SOFT,
    "ytick.labelcolor": _INK,
}


@dataclass(frozen=True, slots=True)
class Point:
    """A number, optionally with an interval around it."""

    label: str
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        low = self.value if self.low is None else self.low
        return low, self.value if self.high is None else self.high

    @property
    def errors(self) -> tuple[list[float], list[float]]:
        """Distances from the value to both ends, as matplotlib's error bars take them."""
        low, high = self.bounds
        return [max(self.value - low, 0.0)], [max(high - self.value, 0.0)]

    def __str__(self) -> str:
        interval = "" if self.low is None else f" ({self.low:.3f} to {self.high:.3f})"
        return f"{self.label}: {self.value:.3f}{interval}"


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    height: float  # inches
    numbers: Sequence[str]  # one line for each mark
    legend: Sequence[str]
    draw: Callable[[Axes], None]


def bars(series: Sequence[Series], title: str) -> Chart:
    """Horizontal bars from zero with error bars; the series share one group for each label."""
    labels = _labels(series)
    thickness = 0.8 / len(series)

    def draw(axes: Axes) -> None:
        for number, one in enumerate(series):
            for point in one.points:
                y = labels.index(point.label) + (number - (len(series) - 1) / 2) * thickness
                axes.barh(y, point.value, 0.9 * thickness, color=_colour(number))
                if point.low is not None:
                    axes.errorbar(point.value, y, xerr=point.errors, **_ERROR_BAR)
                _note(axes, f"{point.value:.2f}", (point.bounds[1], y), (4, 0))
        axes.set_yticks(range(len(labels)), [_short(label) for label in labels])
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.set_xlim(0, 1.08 * _highest(series))
        axes.grid(axis="x")

    height = 0.45 + len(labels) * (0.17 * len(series) + 0.14)
    return _chart(title, height, series, draw)


def intervals(points: Sequence[Point], title: str, reference: float = 0.0) -> Chart:
    """A dot with its interval for each label, beside a line at the reference value."""

    def draw(axes: Axes) -> None:
        axes.axvline(reference, color=_SOFT, linewidth=1)
        for y, point in enumerate(points):
            _dot(axes, point.value, y, point, _colour(0), horizontal=True)
            _note(axes, f"{point.value:+.2f}", (point.bounds[1], y), (6, 0))
        axes.set_yticks(range(len(points)), [_short(point.label) for point in points])
        axes.set_ylim(len(points) - 0.5, -0.5)
        axes.margins(x=0.08)
        axes.grid(axis="x")

    return _chart(title, 0.45 + 0.26 * len(points), [Series("", points)], draw)


def lines(series: Sequence[Series], title: str, xlabel: str, ylabel: str = "") -> Chart:
    """A line for each series over the labels of the longest one, with a band for its intervals."""
    labels = [point.label for point in max(series, key=lambda one: len(one.points)).points]

    def draw(axes: Axes) -> None:
        for number, one in enumerate(series):
            places = range(len(one.points))
            values = [point.value for point in one.points]
            axes.plot(places, values, "o-", color=_colour(number), markersize=4, linewidth=1.6)
            if any(point.low is not None for point in one.points):
                low, high = zip(*(point.bounds for point in one.points), strict=True)
                axes.fill_between(places, low, high, color=_colour(number), alpha=0.18, linewidth=0)
        axes.set_xticks(range(len(labels)), [_short(label) for label in labels])
        axes.set_ylim(0, 1.08 * _highest(series))
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.grid(axis="y")

    return _chart(title, 2.5, series, draw)


def dots(
    series: Sequence[Series], title: str, xlabel: str, ylabel: str = "", reference: float = 1.0
) -> Chart:
    """Dots with error bars, side by side over each label, and a line at the reference value."""
    labels = _labels(series)
    spacing = 0.8 / len(series)
    has_numbers = len(labels) * len(series) <= _MAX_LABELLED_DOTS

    def draw(axes: Axes) -> None:
        axes.axhline(reference, color=_SOFT, linewidth=1)
        for number, one in enumerate(series):
            for point in one.points:
                x = labels.index(point.label) + (number - (len(series) - 1) / 2) * spacing
                _dot(axes, x, point.value, point, _colour(number), horizontal=False)
                if has_numbers:
                    _note(axes, f"{point.value:.2f}", (x, point.value), (6, 0))
        axes.set_xticks(range(len(labels)), [_short(label) for label in labels])
        axes.set_xlim(-0.5, len(labels) - 0.5)
        axes.margins(y=0.08)
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.grid(axis="y")

    return _chart(title, 2.5, series, draw)


def scatter(
    series: Sequence[tuple[str, Sequence[tuple[str, float, float]]]],
    title: str,
    axis_names: tuple[str, str],
    margin: float,
) -> Chart:
    """Points (label, x, y) on equal axes, with a band of this relative width around x = y."""
    xlabel, ylabel = axis_names
    highest = max(value for _, points in series for _, x, y in points for value in (x, y))
    end = 1.05 * (highest or 1.0)

    def draw(axes: Axes) -> None:
        around = ([0, end * (1 - margin)], [0, end * (1 + margin)])
        axes.fill_between([0, end], *around, color=_SOFT, alpha=0.12, linewidth=0)
        axes.plot([0, end], [0, end], color=_SOFT, linewidth=1)
        for number, (_, points) in enumerate(series):
            at = [x for _, x, _ in points], [y for _, _, y in points]
            axes.plot(*at, "o", color=_colour(number), markersize=5, alpha=0.8)
        axes.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, end), ylim=(0, end * (1 + margin)))
        axes.set_aspect("equal", anchor="W")
        axes.grid()

    numbers = [
        f"{name}, {label}: {xlabel} {x:.3f}, {ylabel} {y:.3f}"
        for name, points in series
        for label, x, y in points
    ]
    return Chart(title, 4.4, numbers, [name for name, _ in series], draw)


def inline(chart: Chart) -> str:
    """One chart for an HTML page, which has its heading."""
    # HTML needs no namespaces, and a page without any address is easily seen to load nothing.
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", _render([chart], with_headings=False))


def picture(charts: Sequence[Chart]) -> str:
    """Charts one below the other, each under its title, as an SVG file."""
    return f"{_render(charts, with_headings=True)}\n"


_ERROR_BAR: dict[str, Any] = {
    "fmt": "none",
    "ecolor": _INK,
    "elinewidth": 1.1,
    "capsize": 2.5,
    "capthick": 1.1,
}


def _chart(
    title: str, height: float, series: Sequence[Series], draw: Callable[[Axes], None]
) -> Chart:
    numbers = [
        f"{one.name}, {point}" if one.name else str(point) for one in series for point in one.points
    ]
    return Chart(title, height, numbers, [one.name for one in series if one.name], draw)


def _render(charts: Sequence[Chart], *, with_headings: bool) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    heights = [chart.height + 0.19 * _legend_rows(chart) + 0.3 * with_headings for chart in charts]
    text = io.StringIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a glyph that the font does not have
        matplotlib.rcdefaults()  # whatever a user's matplotlibrc says
        settings: Any = matplotlib.rcParams
        settings.update(_RC)
        figure = Figure(figsize=(_WIDTH, sum(heights) + 0.1), layout="constrained")
        rows = figure.subplots(len(charts), squeeze=False, height_ratios=heights)[:, 0]
        for chart, axes in zip(charts, rows, strict=True):
            chart.draw(axes)
            _add_legend(axes, chart)
            if with_headings:
                axes.set_title(chart.title, pad=6 + 14 * _legend_rows(chart))
            axes.tick_params(bottom=False, left=False)
            for artist in axes.findobj():
                artist.set_clip_on(False)  # the axes enclose everything
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", metadata=nothing)
    return _cleaned(text.getvalue(), charts)


def _cleaned(text: str, charts: Sequence[Chart]) -> str:
    """Without prolog and generated ids, with an accessible name and the numbers."""
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    # matplotlib's style sheet would apply to the whole page, and says this only:
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    title = escape(_plain("; ".join(chart.title for chart in charts)))
    numbers = escape(_plain("\n".join(line for chart in charts for line in chart.numbers)))
    start = f'<svg class="chart" role="img" aria-label="{title}" stroke-linejoin="round"'
    head, _, body = text.strip().partition(">")
    body = re.sub(r"\n\s*", "\n", body).lstrip("\n")
    return f"{head.replace('<svg', start, 1)}>\n<desc>{numbers}</desc>\n{body}"


def _add_legend(axes: Axes, chart: Chart) -> None:
    from matplotlib.patches import Patch

    rows = _legend_rows(chart)
    if rows:
        patches = [
            Patch(color=_colour(number), label=_short(name))
            for number, name in enumerate(chart.legend)
        ]
        axes.legend(
            handles=patches,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=math.ceil(len(patches) / rows),
            borderaxespad=0,
            borderpad=0.2,
            handlelength=0.9,
            handleheight=0.9,
            handletextpad=0.5,
            columnspacing=1.4,
        )


def _legend_rows(chart: Chart) -> int:
    if len(chart.legend) < 2:
        return 0
    return math.ceil(sum(len(_short(name)) + 5 for name in chart.legend) / _LEGEND_WIDTH)


def _dot(axes: Axes, x: float, y: float, point: Point, colour: str, *, horizontal: bool) -> None:
    if point.low is not None:
        errors: dict[str, Any] = {"xerr" if horizontal else "yerr": point.errors}
        axes.errorbar(x, y, **(_ERROR_BAR | errors | {"ecolor": colour}))
    axes.plot([x], [y], "o", color=colour, markersize=6)


def _note(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float]) -> None:
    axes.annotate(text, at, offset, textcoords="offset points", va="center", fontsize=8)


def _labels(series: Sequence[Series]) -> list[str]:
    return list(dict.fromkeys(point.label for one in series for point in one.points))


def _highest(series: Sequence[Series]) -> float:
    """The end of an axis that starts at zero."""
    return max(point.bounds[1] for one in series for point in one.points) or 1.0


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _short(label: str) -> str:
    label = _plain(label)
    return label if len(label) <= _MAX_LABEL else f"{label[: _MAX_LABEL - 1]}…"


def _plain(text: str) -> str:
    """Without control characters, which XML does not allow."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)
