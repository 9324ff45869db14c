"""What is released: wheel and source distribution, and the wheel in an empty environment."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from leadout.version import __version__
from support.distribution import (
    Distributions,
    Installed,
    build_distributions,
    clean_environment,
    install_wheel,
)
from support.drafters import TINY_DRAFTER, write_random_drafter
from support.models import ROOT

PACKAGE = ROOT / "src" / "leadout"
# The drafter that tests and the quickstart use; others would make the archive larger for nothing.
DRAFTER = "drafters/smollm2-135m-instruct-dflash/"
MAX_SDIST_BYTES = 40e6


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    return build_distributions(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(built: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install_wheel(built.wheel, tmp_path_factory.mktemp("installed") / "venv")


def sdist_files(built: Distributions) -> set[str]:
    with tarfile.open(built.sdist) as archive:
        members = [each for each in archive.getmembers() if not each.isdir()]
    assert all(each.isfile() for each in members), "a link would not survive on every system"
    return {each.name.partition("/")[2] for each in members}


def listed(*options: str) -> set[str]:
    """Files that git lists in the tree; of a source distribution there is no list."""
    if not (ROOT / ".git").exists():
        pytest.skip("the tree is not a checkout")
    command = ["git", "-C", str(ROOT), "ls-files", "-z", *options]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return {name for name in names if name and (ROOT / name).exists()}


def test_twine_accepts_both(built: Distributions) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", built.wheel, built.sdist]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count("PASSED") == 2


def test_the_wheel_is_the_package_and_nothing_else(built: Distributions) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
    information = f"leadout-{__version__}.dist-info/"
    inside = {name for name in names if not name.startswith(information)}
    in_tree = {
        f"leadout/{path.relative_to(PACKAGE)}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == in_tree
    assert "leadout/py.typed" in inside
    assert any(name.startswith("leadout/report/templates/") for name in inside)
    assert any(name.startswith("leadout/evaluate/default_prompts/") for name in inside)
    assert f"{information}licenses/LICENSE" in names


def test_the_source_distribution_has_all_that_the_tests_read(built: Distributions) -> None:
    files = sdist_files(built)
    tracked = {name for name in listed() if not name.startswith("drafters/")}
    tracked |= {name for name in listed() if name.startswith(DRAFTER)}
    assert tracked - files == set()
    not_ignored = listed("--others", "--exclude-standard")
    assert files - tracked - not_ignored == {"PKG-INFO"}


def test_the_source_distribution_is_small_and_has_one_drafter(built: Distributions) -> None:
    weights = [name for name in sdist_files(built) if name.endswith(".safetensors")]
    assert weights == [f"{DRAFTER}model.safetensors"]
    assert built.sdist.stat().st_size < MAX_SDIST_BYTES


def test_the_command_line_works_in_an_empty_environment(
    installed: Installed, tmp_path: Path
) -> None:
    drafter = write_random_drafter(tmp_path / "drafter", replace(TINY_DRAFTER, target_num_layers=4))
    version = installed.run("leadout", "--version", cwd=tmp_path)
    assert version.stdout.split() == ["leadout", __version__], version.stderr
    inspected = installed.run("leadout", "inspect", drafter, "--json", cwd=tmp_path)
    assert inspected.returncode == 0, inspected.stderr
    assert json.loads(inspected.stdout)
    shown = installed.run("leadout", "env", "--json", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    assert report["leadout"] == __version__
    # Without the extras there is no engine, and the report says what to install.
    assert report["commands"]["inspect"]["usable"] is True
    assert report["commands"]["serve"]["usable"] is False
    assert "vllm" in report["commands"]["serve"]["remedy"]


def test_the_environment_has_the_wheel_and_no_way_to_the_tree(
    installed: Installed, tmp_path: Path
) -> None:
    code = "import json, leadout, sys; print(json.dumps([leadout.__file__, sys.path]))"
    ran = installed.run("python", "-c", code, cwd=tmp_path)
    file, path = json.loads(ran.stdout)
    assert Path(file).is_relative_to(installed.folder)
    assert not [entry for entry in path if entry and Path(entry).is_relative_to(ROOT)]


def test_what_the_package_does_not_require_is_missing(installed: Installed, tmp_path: Path) -> None:
    for module in ("vllm", "pytest", "aiohttp.web", "mkdocs"):
        ran = installed.run("python", "-c", f"import {module}", cwd=tmp_path)
        assert "ModuleNotFoundError" in ran.stderr, module


def has_section(changelog: str, version: str) -> bool:
    """Whether a changelog has what a version needs: a dated section, or a place to add to."""
    title = "Unreleased" if ".dev" in version else rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d"
    return re.search(rf"^## {title}$", changelog, re.MULTILINE) is not None


def test_changelog_and_quickstart_are_of_this_version() -> None:
    assert has_section((ROOT / "CHANGELOG.md").read_text(), __version__)
    assert has_section("# Changelog\n\n## 0.2.0 - 2026-11-17\n", "0.2.0")
    assert not has_section("# Changelog\n\n## Unreleased\n", "0.2.0")
    page = (ROOT / "docs" / "quickstart.md").read_text()
    assert re.findall(r"^ leadout  +(\S+)$", page, re.MULTILINE) == [__version__]


@pytest.mark.nightly
def test_tests_of_pages_and_files_pass_in_the_source_distribution(
    built: Distributions, tmp_path: Path
) -> None:
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    command = [sys.executable, "-m", "pytest", "-q", "tests/unit/docs", "tests/unit/ops"]
    environment = {**clean_environment(), "PYTHONPATH": str(tree / "src")}
    ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:]
