"""The HTML page: whole, self-contained, with the numbers in it, and deaf to hostile text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest
from sample_results import finding, interval, offline, table, tried, whole_result

from leadout.check.report import page, write_page
from leadout.check.result import Gravity, Verdict
from leadout.report import charts as svg

VOID = {"meta"}
HOSTILE = "<script>alert('x')</script>\"'&<img src=x onerror=y>"


class Reader(HTMLParser):
    """Collects text and tags, and insists that every tag is closed in its turn."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        self.text += text


def doubtful() -> str:
    findings = [finding(Gravity.NOTE, name="drafter-file"), finding(name="rope")]
    return page(whole_result(verdict=Verdict.DOUBTFUL, findings=findings))


def test_it_holds_what_the_result_says() -> None:
    text = Reader(doubtful()).text
    for words in (
        "tiny-drafter for tiny-target",
        "doubtful",
        "found theta 1, wanted 2",
        "Mend it.",
        "2.400",  # all texts, offline
        "2.30 to 2.50",
        "served greedy",
        "served at temperature 0.8",
        "prompts code",
        "prompt length 256 to 511",
        "35 of 36 drafts in 12 blocks are equal",
        "layer 1 context keys",
        "19 of 20 texts are equal",
        "0.0123",
        "rope-theta: 1 -> 2",
        "+0.300",
        "2.13.0",
    ):
        assert words in text, words
    assert text.index("rope") < text.index("drafter-file")  # the gravest first


def test_it_loads_nothing_and_runs_nothing() -> None:
    content = doubtful()
    read = Reader(content)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(read.tags)
    names = {name for name, _ in read.attributes}
    assert not {"src", "href", "xlink:href", "srcset", "action", "style"} & names
    assert not any(name.startswith("on") for name in names)
    for reference in ("http:", "https:", "url(", "@import", "//"):
        assert reference not in content, reference


def test_hostile_text_stays_text() -> None:
    result = whole_result(
        verdict=Verdict.UNFIT,
        target=HOSTILE,
        drafter=HOSTILE,
        findings=[finding(Gravity.UNFIT, name=HOSTILE, message=HOSTILE, remedy=HOSTILE)],
        offline=offline(2.0, 0.1, {HOSTILE: table(2.0)}),
        tried=[tried(HOSTILE, 2.5)],
        versions={HOSTILE: HOSTILE},
        date=HOSTILE,
    )
    read = Reader(page(result))
    assert not {"script", "img"} & set(read.tags)
    assert "onerror" not in {name for name, _ in read.attributes}
    assert HOSTILE in read.text


@pytest.mark.parametrize("verdict", list(Verdict))
def test_a_static_check_has_a_page_too(verdict: Verdict) -> None:
    findings = [] if verdict is Verdict.FIT else [finding(Gravity(verdict.value))]
    bare = whole_result(
        static_only=True,
        verdict=verdict,
        findings=findings,
        draft_tokens=None,
        offline=None,
        served=[],
        parity=None,
        lossless=None,
        tried=[],
        versions={},
    )
    read = Reader(page(bare))
    assert verdict.value in read.text
    assert "Acceptance" not in read.text
    assert ("was not measured" in read.text) == (verdict is Verdict.FIT)


def test_writing_it(tmp_path: Path) -> None:
    write_page(whole_result(), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == page(whole_result())
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


class TestCharts:
    POINTS = (svg.Point("a", 2.0, 1.5, 2.5), svg.Point("b", 1.0))

    def test_bars_are_as_long_as_their_numbers(self) -> None:
        read = Reader(svg.bars([svg.Series("x", self.POINTS)], "t"))
        widths = [float(str(v)) for name, v in read.attributes if name == "width"]
        legend, first, second = widths
        assert legend == 10
        assert first == pytest.approx(2 * second, rel=0.01)
        assert "a: 2.000 (1.500 to 2.500)" in read.text

    def test_ticks_enclose_the_range(self) -> None:
        for low, high in ((0.0, 0.07), (-1.3, 0.4), (0.0, 6.9), (0.0, 0.0), (0.0, 1234.0)):
            ticks = svg._ticks(low, high)
            assert ticks[0] <= low
            assert ticks[-1] >= high
            assert ticks[-1] > ticks[0]
            assert len(ticks) <= 12

    def test_a_line_stays_in_the_picture(self) -> None:
        read = Reader(svg.lines([svg.Series("x", self.POINTS)], "t", "below"))
        heights = [float(str(v)) for name, v in read.attributes if name == "cy"]
        assert len(heights) == 2
        assert 0 < heights[0] < heights[1]  # the larger number is higher up

    def test_intervals_on_both_sides_of_the_origin(self) -> None:
        points = [svg.Point("up", 0.5, 0.4, 0.6), svg.Point("down", -0.5, -0.6, -0.4)]
        read = Reader(svg.intervals(points, "t"))
        places = [float(str(v)) for name, v in read.attributes if name == "cx"]
        origin = next(float(str(v)) for n, v in read.attributes[::-1] if n == "x1")
        assert places[1] < origin < places[0]
        assert interval(0.5).value == points[0].value

    def test_one_position_and_nothing_but_zeros(self) -> None:
        zero = [svg.Series("x", [svg.Point("1", 0.0, 0.0, 0.0)])]
        for drawn in (svg.bars(zero, "t"), svg.lines(zero, "t", "b")):
            assert "nan" not in drawn.lower()
            Reader(drawn)
