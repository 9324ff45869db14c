"""Container files are sound, and have the versions that the package asks for."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from support.models import ROOT
from support.ops_files import OPS

FILES = sorted(OPS.glob("Containerfile*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    linted = subprocess.run(["hadolint", path], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_is_copied_and_installed_exists(path: Path) -> None:
    text = path.read_text()
    for sources in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    # What the build backend reads must be copied: the readme and the licence.
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= set(text.split())


def test_the_image_has_the_vllm_that_the_package_asks_for() -> None:
    (wanted,) = PROJECT["optional-dependencies"]["vllm"]
    (tag,) = re.findall(r"vllm-openai:v([0-9.]+)", (OPS / "Containerfile").read_text())
    assert wanted.startswith(f"vllm>={tag.rpartition('.')[0]},")


def test_the_cpu_image_has_the_torch_of_ci_and_not_what_ci_removes() -> None:
    recipe = (ROOT / ".ci" / "environment").read_text()
    lock = (OPS / "lock" / "cpu.txt").read_text()
    (wanted,) = re.findall(r"torch==(\S+)", recipe)
    (locked,) = re.findall(r"^torch==(\S+)\+cpu ", lock, re.MULTILINE)
    assert locked == wanted
    (removed,) = re.findall(r"uninstall --quiet --yes (.+)", recipe)
    assert not re.findall(rf"^(?:{removed.replace(' ', '|')})==", lock, re.MULTILINE)
