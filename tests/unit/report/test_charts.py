"""Charts show their numbers, are deterministic, and escape every label."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from leadout.report import charts
from leadout.report.charts import Chart, Point, Series
from support.pages import HOSTILE, Reader

POINTS = (Point("a", 2.0, 1.5, 2.5), Point("b", 1.0))
KINDS: dict[str, Callable[[list[Series]], Chart]] = {
    "bars": lambda series: charts.bars(series, "t"),
    "intervals": lambda series: charts.intervals(series[0].points, "t"),
    "lines": lambda series: charts.lines(series, "t", "below", "beside"),
    "dots": lambda series: charts.dots(series, "t", "below", "beside"),
    "scatter": lambda series: charts.scatter(
        [(one.name, [(p.label, p.value, p.value + 0.1) for p in one.points]) for one in series],
        "t",
        ("below", "beside"),
        0.15,
    ),
}


@pytest.fixture(params=KINDS)
def draw(request: pytest.FixtureRequest) -> Callable[[list[Series]], Chart]:
    return KINDS[request.param]


def test_the_same_numbers_give_the_same_bytes(draw: Callable[[list[Series]], Chart]) -> None:
    drawn = [charts.picture([draw([Series("x", POINTS)])]) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert not re.search(r"\d{4}-\d\d-\d\d", drawn[0])


def test_every_number_is_in_the_description(draw: Callable[[list[Series]], Chart]) -> None:
    drawn = ElementTree.fromstring(charts.picture([draw([Series("x", POINTS)])]))
    description = drawn.findtext("{http://www.w3.org/2000/svg}desc")
    assert description is not None
    assert "2.000" in description
    assert "1.000" in description


def test_eight_series_have_different_colours() -> None:
    series = [Series(str(number), POINTS) for number in range(8)]
    drawn = charts.picture([charts.dots(series, "t", "below", "beside")])
    legend = set(re.findall(r"fill: (#[0-9a-f]{6}); stroke: \1", drawn))
    assert len(legend) >= 8


def test_hostile_labels_stay_text(draw: Callable[[list[Series]], Chart]) -> None:
    points = [Point(HOSTILE, 1.0), Point("$\\frac{1}{0}$ \x00\x1b", 2.0), Point("漢字", 3.0)]
    drawn = charts.inline(draw([Series(HOSTILE, points), Series("$x", points)]))
    read = Reader(drawn)
    assert not {"script", "img"} & set(read.tags)
    assert "$\\frac{1}{0}$" in read.text  # not typeset as mathematics
    ElementTree.fromstring(charts.picture([draw([Series(HOSTILE, points)])]))


def test_zeros_and_single_points_can_be_drawn(draw: Callable[[list[Series]], Chart]) -> None:
    drawn = charts.inline(draw([Series("x", [Point("1", 0.0, 0.0, 0.0)])]))
    assert "nan" not in drawn.lower().replace("dominant", "")
    Reader(drawn)


def test_bar_lengths_are_proportional() -> None:
    drawn = charts.inline(charts.bars([Series("x", POINTS)], "t"))
    shapes = re.findall(r'<path d="([^"]*)" style="fill: #2563eb"/>', drawn)
    widths = []
    for shape in shapes:
        places = [float(x) for x in re.findall(r"[ML] ([\d.]+) ", shape)]
        widths.append(max(places) - min(places))
    first, second = widths
    assert first == pytest.approx(2 * second, rel=0.01)


def test_a_picture_has_every_chart_under_its_title() -> None:
    one = charts.bars([Series("x", POINTS)], "First title")
    two = charts.lines([Series("x", POINTS), Series("y", POINTS)], "Second title", "below")
    text = Reader(charts.picture([one, two])).text
    assert "First title" in text
    assert "Second title" in text
    assert "First title" not in Reader(charts.inline(one)).text  # a page has its own heading


def test_the_style_of_the_user_does_not_change_a_chart() -> None:
    import matplotlib

    chart = charts.bars([Series("x", POINTS)], "t")
    plain = charts.inline(chart)
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "black"}):
        assert charts.inline(chart) == plain
        assert matplotlib.rcParams["font.size"] == 20
