"""Every committed chart is drawn from its result and looks right outside a browser."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest

import result_charts
from support.models import ROOT

CHARTS = [
    path
    for folder in ("results", "docs/figures", "drafters")
    for path in sorted((ROOT / folder).rglob("*.svg"))
]
SVG = "{http://www.w3.org/2000/svg}"

# As charts were drawn once: colours through CSS variables, which librsvg does not know, and a
# child that is larger than its parent.
BLACK = """<svg xmlns="http://www.w3.org/2000/svg" width="200" height="100">
<style>.s { --c: light-dark(#2563eb, #7aa2ff); } .mark { fill: var(--c); }</style>
<rect width="200" height="100" fill="#ffffff"/>
<g class="s"><rect class="mark" x="10" y="10" width="180" height="80"/></g></svg>"""
BLANK = """<svg xmlns="http://www.w3.org/2000/svg" width="200" height="100">
<rect width="200" height="100" fill="#ffffff"/></svg>"""
CUT = """<svg xmlns="http://www.w3.org/2000/svg" width="200" height="100">
<rect width="200" height="100" fill="#ffffff"/>
<rect x="120" y="30" width="120" height="40" fill="#2563eb"/></svg>"""


@pytest.fixture(scope="module")
def rsvg() -> str:
    found = shutil.which("rsvg-convert")
    if found is None and "LEADOUT_CI" not in os.environ:
        pytest.skip("rsvg-convert is not installed (Debian: apt install librsvg2-bin)")
    assert found is not None, "CI must have rsvg-convert: see .ci/tools"
    return found


def problems(rsvg: str, chart: Path, folder: Path) -> list[str]:
    """What is wrong with a chart as librsvg shows it on a white page."""
    image = folder / f"{chart.stem}.png"
    subprocess.run([rsvg, "-b", "white", str(chart), "-o", str(image)], check=True)
    pixels = matplotlib.image.imread(image)[:, :, :3]  # [height, width, RGB] in 0..1
    is_drawn = (pixels < 0.97).any(axis=2)
    found = []
    if is_drawn.mean() < 0.01:
        found.append("blank")
    if (pixels < 0.08).all(axis=2).mean() > 0.1:
        found.append("mostly black")
    edges = (is_drawn[0], is_drawn[-1], is_drawn[:, 0], is_drawn[:, -1])
    if any(edge.any() for edge in edges):
        found.append("cut off")
    return found


@pytest.mark.parametrize("chart", CHARTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_committed_chart_is_whole_in_librsvg(rsvg: str, chart: Path, tmp_path: Path) -> None:
    assert problems(rsvg, chart, tmp_path) == []


@pytest.mark.parametrize(
    ("text", "expected"), [(BLACK, "mostly black"), (BLANK, "blank"), (CUT, "cut off")]
)
def test_a_broken_chart_is_noticed(rsvg: str, text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "broken.svg").write_text(text)
    assert problems(rsvg, tmp_path / "broken.svg", tmp_path) == [expected]


def test_all_charts_are_found() -> None:
    assert len(CHARTS) >= 10
    assert np.all([path.stat().st_size > 0 for path in CHARTS])


@pytest.mark.parametrize("name", [name for name in result_charts.FILES if name.endswith(".svg")])
def test_a_chart_shows_the_numbers_of_its_result(name: str) -> None:
    committed = ElementTree.fromstring((ROOT / name).read_text())
    drawn = ElementTree.fromstring(result_charts.FILES[name]())
    assert committed.findtext(f"{SVG}desc") == drawn.findtext(f"{SVG}desc"), (
        "run experiments/result_charts.py"
    )
