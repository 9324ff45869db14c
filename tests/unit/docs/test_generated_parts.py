"""Committed figures and tables equal what docs/build generates from the results."""

from pathlib import Path

import draw_figures
import fill_docs
import pytest

from support.models import ROOT

DOCS = ROOT / "docs"
PAGES = fill_docs.pages()


@pytest.mark.parametrize("name", draw_figures.FIGURES)
def test_committed_figures_equal_the_generated_ones(name: str) -> None:
    committed = (DOCS / "figures" / f"{name}.svg").read_text()
    drawn = draw_figures.FIGURES[name]()
    # Layouts of charts differ between versions of matplotlib, so only their numbers are compared.
    if "<desc>" in drawn:
        committed, drawn = (text.partition("</desc>")[0] for text in (committed, drawn))
        committed, drawn = (text.partition("<desc>")[2] for text in (committed, drawn))
        assert committed
    assert committed == drawn, "run docs/build/draw_figures.py"


def test_every_figure_is_generated_and_used() -> None:
    assert {path.stem for path in (DOCS / "figures").iterdir()} == set(draw_figures.FIGURES)
    text = "".join(page.read_text() for page in PAGES)
    for name in draw_figures.FIGURES:
        assert f"figures/{name}.svg)" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_committed_tables_equal_the_generated_ones(page: Path) -> None:
    text = page.read_text()
    assert text == fill_docs.filled(page, text), "run docs/build/fill_docs.py"


def test_every_table_is_used() -> None:
    text = "".join(page.read_text() for page in PAGES)
    for name in fill_docs.BLOCKS:
        assert f"<!-- results: {name} -->" in text


def test_a_changed_number_is_replaced() -> None:
    path = DOCS / "index.md"
    page = path.read_text()
    changed = page.replace("| tuned | 1", "| tuned | 9")
    assert changed != page
    assert fill_docs.filled(path, changed) == page
