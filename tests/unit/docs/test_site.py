"""The site builds without a warning, has no dead link, and loads nothing from other sites."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from leadout.cli.app import app
from support.links import dead_markdown_links, dead_site_links
from support.models import ROOT

SOURCES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "drafters").rglob("*.md")),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", out],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return out


def test_the_built_site_has_no_dead_links(site: Path) -> None:
    assert list(dead_site_links(site)) == []


def test_every_page_is_in_the_site(site: Path) -> None:
    docs = ROOT / "docs"
    for page in docs.rglob("*.md"):
        assert (site / page.relative_to(docs)).with_suffix(".html").exists()


def test_the_reference_has_the_help_of_every_command(site: Path) -> None:
    page = (site / "reference" / "commands.html").read_text()
    for command in app.registered_commands:
        assert f"Usage: leadout {command.name}" in page
    assert "--block-size" in page  # flags from settings models are included


def test_the_reference_documents_fields_and_functions(site: Path) -> None:
    assert "block_size" in (site / "reference" / "files.html").read_text()
    assert "load_drafter" in (site / "reference" / "python.html").read_text()


def test_linked_files_outside_docs_are_copied(site: Path) -> None:
    assert (site / "repository" / "results" / "bench" / "smollm2.json").exists()


@pytest.mark.parametrize("page", SOURCES, ids=lambda page: str(page.relative_to(ROOT)))
def test_markdown_files_have_no_dead_links(page: Path) -> None:
    assert list(dead_markdown_links(page)) == []


def test_dead_links_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#a-heading) [c](other.md#no) [d](gone.md) `[e](f)` [g](#none)\n"
    )
    assert list(dead_markdown_links(page)) == [
        "page.md: other.md#no",
        "page.md: gone.md",
        "page.md: #none",
    ]
    (tmp_path / "one.html").write_text(
        '<p id="here"></p><a href="two.html#there">a</a><a href="#here">b</a><a href="#gone">c</a>'
        '<a href="three.html">d</a><img src="https://example.com/picture.png">'
    )
    (tmp_path / "two.html").write_text('<a href="one.html#here">a</a><a href="one.html#no">b</a>')
    assert sorted(dead_site_links(tmp_path)) == [
        "one.html: #gone",
        "one.html: loads https://example.com/picture.png",
        "one.html: three.html",
        "one.html: two.html#there",
        "two.html: one.html#no",
    ]
