"""What a code host reads is valid: the citation, the issue forms; and what they name exists."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from click.testing import CliRunner

from leadout.cli.app import app
from leadout.version import __version__
from support.models import ROOT

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
SCHEMAS = {
    **dict.fromkeys(FORMS, "vendor.github-issue-forms"),
    ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml": "vendor.github-issue-config",
    ROOT / "CITATION.cff": "vendor.citation-file-format",
}
FILES = pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)


def problems(path: Path, schema: str) -> str:
    """What check-jsonschema finds wrong with a file."""
    try:
        from check_jsonschema import main
    except ImportError:
        assert "LEADOUT_CI" not in os.environ, "CI must have it: see the extra `dev`"
        pytest.skip("check-jsonschema is not installed (pip install '.[dev]')")
    ended = CliRunner().invoke(main, ["--builtin-schema", schema, str(path)])
    return "" if ended.exit_code == 0 else ended.output


@FILES
def test_the_file_has_the_format_of_its_reader(path: Path) -> None:
    assert problems(path, SCHEMAS[path]) == ""


@FILES
def test_a_misspelt_key_is_found(path: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    first = next(iter(content))
    content[f"{first}x"] = content.pop(first)
    damaged = tmp_path / path.name
    damaged.write_text(yaml.safe_dump(content))
    assert problems(damaged, SCHEMAS[path]) != ""


def test_a_bug_report_asks_for_what_explains_it() -> None:
    form = next(path for path in FORMS if path.stem == "bug")
    text = form.read_text()
    assert "leadout env --json" in text
    assert "leadout selftest" in text


def test_commands_and_files_that_are_named_exist() -> None:
    group: Any = typer.main.get_command(app)
    named = [*FORMS, ROOT / "SECURITY.md", ROOT / ".github" / "pull_request_template.md"]
    text = "\n".join(path.read_text() for path in named)
    commands = set(re.findall(r"`leadout ([a-z]+)", text))
    assert {"env", "selftest", "inspect", "check"} <= commands <= set(group.commands)
    for name in re.findall(r"`((?:docs/)?[\w-]+\.md)`|\]\((docs/[\w/-]+\.md)", text):
        assert (ROOT / "".join(name)).is_file(), name


def test_the_citation_is_of_this_version_and_of_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["authors"] == [{"name": "The Leadout authors"}]
    (paper,) = citation["references"]
    assert paper["title"].startswith("DFlash: ")
    assert "2602.06036" in paper["url"]
    released = (ROOT / "CHANGELOG.md").read_text()
    assert citation["version"] == __version__
    assert f"## {__version__} - {citation['date-released']}\n" in released
