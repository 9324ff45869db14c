"""Committed figures and tables equal what docs/build generates from the results."""

from pathlib import Path

import draw_figures
import fill_docs
import pytest

from support.models import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


@pytest.mark.parametrize("name", draw_figures.FIGURES)
def test_figures_are_drawn_from_the_results(name: str) -> None:
    committed = (DOCS / "figures" / f"{name}.svg").read_text()
    drawn = draw_figures.FIGURES[name]()
    if "<desc>" in drawn:  # charts: other versions of matplotlib place the same numbers elsewhere
        committed, drawn = (text.partition("</desc>")[0] for text in (committed, drawn))
        committed, drawn = (text.partition("<desc>")[2] for text in (committed, drawn))
        assert committed
    assert committed == drawn, "run docs/build/draw_figures.py"


def test_every_figure_is_drawn_by_the_script_and_used() -> None:
    assert {path.stem for path in (DOCS / "figures").iterdir()} == set(draw_figures.FIGURES)
    text = "".join(page.read_text() for page in PAGES)
    for name in draw_figures.FIGURES:
        assert f"figures/{name}.svg)" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_tables_are_filled_from_the_results(page: Path) -> None:
    assert page.read_text() == fill_docs.filled(page.read_text()), "run docs/build/fill_docs.py"


def test_every_table_is_used() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for name in fill_docs.BLOCKS:
        assert f"<!-- results: {name} -->" in text


def test_another_number_is_noticed() -> None:
    page = (DOCS / "index.md").read_text()
    assert fill_docs.filled(page) == page
    changed = page.replace("| tuned | 1", "| tuned | 9")
    assert changed != page
    assert fill_docs.filled(changed) == page
