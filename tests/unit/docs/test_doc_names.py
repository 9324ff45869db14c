"""Names on the pages exist: commands and their flags, metrics, alerts, variables, files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from leadout.cli.app import app
from support.models import ROOT
from support.ops_files import rules

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN_PAGES = [page for page in PAGES if page.parent.name != "reference"]
SOURCE = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
# These pass unknown flags on to vLLM.
PASS_FLAGS_ON = ("serve", "selftest", "tune")


def commands_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """Every `leadout NAME --flag ...` in inline code and in code blocks."""
    joined = re.sub(r"\\\n\s*", "", text)
    for code in re.findall(r"^```.*?^```|`[^`]+`|^    .*$", joined, re.DOTALL | re.MULTILINE):
        for name, rest in re.findall(r"\bleadout ([a-z]+)\b([^\n`|;&]*)", code):
            words = rest.partition("#")[0].partition(" -- ")[0]
            yield name, re.findall(r"(?<=\s)--[a-z-]+", words)


def unknown(text: str) -> list[str]:
    group: Any = typer.main.get_command(app)
    found = []
    for name, flags in commands_of(text):
        if name not in group.commands:
            found.append(f"leadout {name}")
            continue
        command = group.commands[name]
        params = command.get_params(typer.Context(command))
        known = {flag for each in params for flag in [*each.opts, *each.secondary_opts]}
        if name not in PASS_FLAGS_ON:
            found += [f"leadout {name} {flag}" for flag in flags if flag not in known]
    return found


@pytest.mark.parametrize("page", WRITTEN_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_flags_exist(page: Path) -> None:
    assert unknown(page.read_text()) == []


def test_an_unknown_command_or_flag_is_reported() -> None:
    text = "`leadout check A B --json --fast` and `leadout fly` and `leadout bench A -- --fast`"
    assert unknown(text) == ["leadout check --fast", "leadout fly"]


@pytest.mark.parametrize("page", WRITTEN_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_variables_and_metrics_exist(page: Path) -> None:
    text = page.read_text()
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for variable in re.findall(r"\bLEADOUT_[A-Z_]+", text):
        assert f'"{variable}"' in SOURCE, variable
    for metric in re.findall(r"(?<!\^)\bleadout:[a-z_0-9:]*[a-z0-9]", text):  # no patterns of grep
        name = re.sub(r"_(?:total|bucket|sum|count)$", "", metric)
        assert metric in recorded or f'"{name}"' in SOURCE, metric


def test_the_metrics_page_documents_every_alert_and_gauge() -> None:
    page = (ROOT / "docs" / "howto" / "metrics.md").read_text()
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}
    assert set(re.findall(r"^\| `(Leadout\w+)`", page, re.MULTILINE)) == alerts
    for metric in set(re.findall(r'"(leadout:[a-z_]+)"', SOURCE)):
        assert metric in page


@pytest.mark.parametrize("page", WRITTEN_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_of_the_repository_exist(page: Path) -> None:
    folders = "src|experiments|docs/build|ops|examples|drafters"
    for name in re.findall(rf"`((?:{folders})/[^`\s*]+)`", page.read_text()):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", WRITTEN_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_tests_exist(page: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
        assert f"def {name}" in (ROOT / path).read_text(), f"{path}::{name}"
