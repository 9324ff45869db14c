"""Pages escape everything, load nothing, and close what they open."""

from __future__ import annotations

import subprocess
import sys

from leadout.report import charts, html
from support.pages import HOSTILE, Reader, assert_hostile_text_is_escaped, assert_loads_nothing


def a_page(text: str) -> html.Page:
    chart = charts.bars([charts.Series(text, [charts.Point(text, 1.0)])], text)
    table = html.Table([text, "n"], [[text, "1.5"]], text_columns=1, tones=["bad"])
    return html.Page(
        command="check",
        heading=text,
        facts=[text, text],
        verdict=html.Verdict("warning", [text], word=text),
        cards=[html.Card(text, text, text)],
        sections=[
            html.Section(
                text,
                [
                    html.Text(text, soft=True),
                    html.Command(text, label=text),
                    html.Heading(text),
                    html.Drawing(chart),
                    table,
                    html.Folded(text, [table, html.Folded(text, [html.Text(text)])]),
                ],
            ),
            html.Section("", [html.Text(text)]),
        ],
    )


def test_every_block_escapes_its_text() -> None:
    content = html.render(a_page(HOSTILE))
    assert_hostile_text_is_escaped(content)
    assert Reader(content).text.count(HOSTILE) >= 20


def test_a_page_loads_nothing() -> None:
    assert_loads_nothing(html.render(a_page("plain")))


def test_numbers_and_tones_are_marked() -> None:
    content = html.render(a_page("plain"))
    assert '<td class="number">1.5</td>' in content
    assert '<td class="word bad">plain</td>' in content
    assert '<div class="verdict warning"><span class="word">plain</span>' in content


def test_empty_parts_leave_no_trace() -> None:
    content = html.render(html.Page("tune", "name", ["fact"], [html.Section("", [])]))
    for absent in ("<h2>", 'class="cards"', 'class="verdict'):
        assert absent not in content.partition("</style>")[2]


def test_importing_reports_does_not_import_matplotlib() -> None:
    code = (
        "import sys, leadout.report.html, leadout.bench.report, leadout.tune.report\n"
        "assert 'matplotlib' not in sys.modules and 'jinja2' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
