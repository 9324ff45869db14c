"""Committed figures and tables equal what docs/build generates from the results."""

import shlex
from pathlib import Path

import draw_figures
import fill_docs
import pytest
import reliability_tables

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


def test_the_reliability_page_has_each_command_once_whatever_the_classes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long = ["python", "experiments/a.py", "--faults", *["disk full"] * 12, "--out", "a.json"]
    files = {
        "a.json": {"provenance": {"command": shlex.join(long)}},
        "b.json": {"provenance": {"command": "python experiments/b.py --out b.json"}},
    }
    names = {"one": "a.json", "two": "b.json", "three": "a.json"}
    rows = [
        {"name": name, "cases": 1000, "lost": 0, "command": "not shown", "result": file}
        for name, file in names.items()
    ]
    made = {"faults.json": {"classes": rows}, **files}
    monkeypatch.setattr(
        reliability_tables, "result", lambda name: made[name.removeprefix("reliability/")]
    )
    _, _, *lines = reliability_tables.classes().splitlines()
    link = "({root}results/reliability/"
    assert lines == [
        f"| One | 1,000 | 0 | [a.json]{link}a.json) |",
        f"| Two | 1,000 | 0 | [b.json]{link}b.json) |",
        f"| Three | 1,000 | 0 | [a.json]{link}a.json) |",
    ]
    block = reliability_tables.commands()
    assert max(map(len, block.splitlines())) <= reliability_tables.WIDTH
    assert "--out a.json" in block
    first, second = block.replace("\\\n", "").splitlines()[1:-1]
    assert [shlex.split(first), second] == [long, files["b.json"]["provenance"]["command"]]
